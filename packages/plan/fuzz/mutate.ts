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

const interesting = [
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
export function mutate(text: string, other: string, pick: (below: number) => number): string {
  let result = text;
  for (let edits = 1 + pick(4); edits > 0; edits--) result = edit(result, other, pick);
  return result;
}

function edit(text: string, other: string, pick: (below: number) => number): string {
  const at = pick(text.length + 1);
  const kind = pick(8);
  if (kind < 4) {
    const numbers = [...text.matchAll(number)];
    if (numbers.length === 0) return text + interesting[pick(interesting.length)]!;
    const match = numbers[pick(numbers.length)]!;
    const put =
      kind === 0
        ? interesting[pick(interesting.length)]!
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
