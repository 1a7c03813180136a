/** Numbers in [0, 1), the same for a seed on every machine: sfc32 (Doty-Humphrey, public domain). */
export function randomNumbers(seed: number): () => number {
  let a = 0x9e3779b9;
  let b = 0x243f6a88;
  let c = seed | 0;
  let counter = 1;
  const next = () => {
    const t = (((a + b) | 0) + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + t) | 0;
    return (t >>> 0) / 2 ** 32;
  };
  // The first outputs of neighbouring seeds are alike.
  for (let i = 0; i < 12; i++) next();
  return next;
}

/** Fisher-Yates, in place. */
export function shuffle(values: Int32Array, random: () => number): Int32Array {
  for (let i = values.length - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    const v = values[i]!;
    values[i] = values[j]!;
    values[j] = v;
  }
  return values;
}
