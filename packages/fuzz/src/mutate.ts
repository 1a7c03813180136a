/** Seeded 32-bit generator (xorshift): a finding is reproduced by its seed. */
export function generator(seed: number): (below: number) => number {
  let x = seed | 0 || 1;
  return (below) => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return (x >>> 0) % below;
  };
}

const interestingText = [
  '-1',
  '0',
  '1',
  '2147483647',
  '2147483648',
  '-2147483648',
  '4294967296',
  '1e999',
  '0.5',
  'null',
  '[]',
  '{}',
  '""',
  'true',
  '[[]]',
];
const number = /-?\d+(?:\.\d+)?/g;

/** One to four edits of an input: numbers replaced or nudged, elements doubled or dropped, spans of two inputs joined, characters broken. */
export function mutateText(text: string, other: string, pick: (below: number) => number): string {
  let result = text;
  for (let edits = 1 + pick(4); edits > 0; edits--) result = edit(result, other, pick);
  return result;
}

function edit(text: string, other: string, pick: (below: number) => number): string {
  const at = pick(text.length + 1);
  const kind = pick(8);
  if (kind < 4) {
    const numbers = [...text.matchAll(number)];
    if (numbers.length === 0) return text + interestingText[pick(interestingText.length)]!;
    const match = numbers[pick(numbers.length)]!;
    const put =
      kind === 0
        ? interestingText[pick(interestingText.length)]!
        : kind === 1
          ? String(pick(5))
          : String(Number(match[0]) + pick(3) - 1);
    return text.slice(0, match.index) + put + text.slice(match.index + match[0].length);
  }
  if (kind === 4) return text.slice(0, at) + text.slice(at + 1 + pick(8));
  if (kind === 5) {
    const comma = text.indexOf(',', at);
    const next = text.indexOf(',', comma + 1);
    return comma < 0 || next < 0 ? text : text.slice(0, next) + text.slice(comma, next) + text.slice(next);
  }
  if (kind === 6)
    return text.slice(0, at) + other.slice(pick(other.length + 1)).slice(0, 1 + pick(64)) + text.slice(at);
  return text.slice(0, at) + String.fromCharCode(pick(128)) + text.slice(at + 1);
}

const interestingNumbers = [
  0n,
  1n,
  2n,
  127n,
  128n,
  255n,
  256n,
  65535n,
  2n ** 31n - 1n,
  2n ** 31n,
  2n ** 32n - 1n,
  2n ** 53n,
  2n ** 63n,
  2n ** 64n - 1n,
];

/** One to four edits of bytes: bits and little-endian words changed, spans dropped, doubled, taken from another input, the end cut off. */
export function mutateBytes(bytes: Buffer, other: Buffer, pick: (below: number) => number): Buffer {
  let result: Buffer = Buffer.from(bytes);
  for (let edits = 1 + pick(4); edits > 0; edits--) result = editBytes(result, other, pick);
  return result;
}

function editBytes(bytes: Buffer, other: Buffer, pick: (below: number) => number): Buffer {
  const at = pick(bytes.length + 1);
  const span = 1 + pick(16);
  switch (pick(7)) {
    case 0:
      if (at < bytes.length) bytes[at] = bytes[at]! ^ (1 << pick(8));
      return bytes;
    case 1:
      if (at < bytes.length) bytes[at] = pick(256);
      return bytes;
    case 2: {
      const word = Buffer.alloc(8);
      word.writeBigUInt64LE(interestingNumbers[pick(interestingNumbers.length)]!);
      word.copy(bytes, at, 0, [1, 2, 4, 8][pick(4)]!);
      return bytes;
    }
    case 3:
      return Buffer.concat([bytes.subarray(0, at), bytes.subarray(at + span)]);
    case 4:
      return Buffer.concat([bytes.subarray(0, at + span), bytes.subarray(at)]);
    case 5: {
      const from = pick(other.length + 1);
      return Buffer.concat([bytes.subarray(0, at), other.subarray(from, from + span), bytes.subarray(at)]);
    }
    default:
      return bytes.subarray(0, at);
  }
}
