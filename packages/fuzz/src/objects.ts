/** Edits of objects that parsers never make: a caller may hand over anything in place of a field. */

/** Reads an input as choices; past its end all choices are the first. */
function chooser(bytes: Buffer): (below: number) => number {
  let at = 0;
  return (below) => {
    const value = (bytes[at] ?? 0) | ((bytes[at + 1] ?? 0) << 8);
    at += 2;
    return value % below;
  };
}

const oddValues: readonly (() => unknown)[] = [
  () => undefined,
  () => null,
  () => ({}),
  () => Object.create(null),
  () => [],
  () => 0,
  () => -1,
  () => 0.5,
  () => Number.NaN,
  () => 2 ** 31,
  () => 2 ** 53,
  () => Number.POSITIVE_INFINITY,
  () => 1n,
  () => '',
  () => '1',
  () => true,
  () => Symbol('odd'),
  () => () => 1,
  () => new Int32Array(0),
  () => new Int32Array(3),
  () => new Float64Array(3),
  () => new Map(),
];
const oddNumbers = [0, 1, -1, 2, 2 ** 31 - 1, -(2 ** 31), 2 ** 31, 2 ** 32, 0.5, Number.NaN];

type Fields = Record<string, unknown>;

/** Deep, with the classes of arrays kept, so that edits reach nobody else's object. */
function copyOf(value: unknown): unknown {
  if (ArrayBuffer.isView(value)) return (value as Int32Array).slice();
  if (Array.isArray(value)) return value.map(copyOf);
  if (typeof value !== 'object' || value === null || Object.getPrototypeOf(value) !== Object.prototype) return value;
  return Object.fromEntries(Object.entries(value).map(([key, field]) => [key, copyOf(field)]));
}

const isNumbers = (value: unknown): value is Int32Array => ArrayBuffer.isView(value) && !(value instanceof DataView);

/** Another array in the place of this one, or the same with one element changed. */
function spoilNumbers(value: Int32Array, pick: (below: number) => number): unknown {
  const kind = pick(8);
  if (kind < 4 && value.length > 0) {
    const at = pick(value.length);
    const nudged = Number(value[at]) + pick(5) - 2;
    value[at] = kind < 2 ? nudged : oddNumbers[pick(oddNumbers.length)]!;
    return value;
  }
  if (kind === 4) return value.slice(0, pick(value.length + 1));
  if (kind === 5) return Int32Array.from([...value.map(Number), ...Array.from({ length: 1 + pick(3) }, () => pick(4))]);
  if (kind === 6) return Float64Array.from(value, Number);
  return Array.from(value, Number);
}

function spoilField(holder: Fields, pick: (below: number) => number, depth: number): void {
  const keys = Object.keys(holder);
  if (keys.length === 0) return;
  const key = keys[pick(keys.length)]!;
  const value = holder[key];
  const kind = pick(8);
  if (kind === 0) holder[key] = oddValues[pick(oddValues.length)]!();
  else if (kind === 1) delete holder[key];
  else if (isNumbers(value)) holder[key] = spoilNumbers(value, pick);
  else if (typeof value === 'number')
    holder[key] = kind < 5 ? value + pick(5) - 2 : oddNumbers[pick(oddNumbers.length)];
  else if (typeof value === 'object' && value !== null && depth < 8) spoilField(value as Fields, pick, depth + 1);
  else holder[key] = oddValues[pick(oddValues.length)]!();
}

/**
 * A copy of `value`, with as many edits as the input asks for (0 to 3): fields replaced by values of other kinds, removed, or nudged; arrays of numbers
 * cut, lengthened, or of another class. The same input gives the same edits; an empty one gives none.
 */
export function spoilObject<T extends object>(value: T, input: Buffer): T {
  const pick = chooser(input);
  const copy = copyOf(value) as Fields;
  for (let edits = pick(4); edits > 0; edits--) spoilField(copy, pick, 0);
  return copy as T;
}
