import { invalidArgument, PlanError, shown } from './error.js';

/** Token rows, offsets and indices are int32: a tensor of a plan has at most this many rows. */
export const maxRows = 2 ** 31 - 1;

export function checkInteger(value: unknown, name: string, min: number, max: number): number {
  if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < min || value > max) {
    throw invalidArgument(`${name} must be an integer in [${min}, ${max}], found ${shown(value)}`, {
      name,
      min,
      max,
      found: value,
    });
  }
  return value;
}

export function checkObject(value: unknown, name: string): void {
  if (typeof value !== 'object' || value === null) {
    throw invalidArgument(`${name} must be an object, found ${describe(value)}`, { name, found: describe(value) });
  }
}

export function checkInt32Array(value: unknown, name: string, length?: number): Int32Array {
  if (!(value instanceof Int32Array)) throw wrongKind(name, 'an Int32Array', value);
  checkAttached(value, name);
  checkLength(value.length, name, length);
  return value;
}

export function checkUint8Array(value: unknown, name: string, length?: number): Uint8Array {
  if (!(value instanceof Uint8Array)) throw wrongKind(name, 'a Uint8Array', value);
  checkAttached(value, name);
  checkLength(value.length, name, length);
  return value;
}

export function checkFloat64Array(value: unknown, name: string, length?: number): Float64Array {
  if (!(value instanceof Float64Array)) throw wrongKind(name, 'a Float64Array', value);
  checkAttached(value, name);
  checkLength(value.length, name, length);
  return value;
}

/**
 * EP_DETACHED for a typed array whose buffer was detached, or shrunk below it; anything else is let through. HAZARD: such an array says that it is
 * empty, and methods like `subarray` and `slice` throw a bare TypeError.
 */
export function checkAttached(value: unknown, name: string): void {
  if (!ArrayBuffer.isView(value) || value instanceof DataView || value.byteLength > 0) return;
  try {
    // The one question that a dead array answers otherwise than an empty one.
    Uint8Array.prototype.at.call(value as Uint8Array, 0);
  } catch {
    throw new PlanError('EP_DETACHED', `the buffer of ${name} was detached, transferred or shrunk`, { name });
  }
}

function checkLength(found: number, name: string, expected: number | undefined): void {
  if (expected === undefined || found === expected) return;
  throw invalidArgument(`${name} must have ${expected} elements, found ${found} (a shrunk buffer reads as shorter)`, {
    name,
    expected,
    found,
  });
}

/** `expected` as a person says it: 'an array'. */
export function wrongKind(name: string, expected: string, value: unknown): PlanError {
  const found = describe(value);
  return invalidArgument(`${name} must be ${expected}, found ${found}`, { name, expected, found });
}

export function checkBoolean(value: unknown, name: string): boolean {
  if (typeof value !== 'boolean') throw wrongKind(name, 'true or false', value);
  return value;
}

/** A number in [min, max]; NaN is in no range. */
export function checkNumber(value: unknown, name: string, min: number, max: number): number {
  if (typeof value === 'number' && value >= min && value <= max) return value;
  throw invalidArgument(`${name} must be in [${min}, ${max}], found ${describe(value)}`, {
    name,
    min,
    max,
    found: value,
  });
}

/** An array, of any kind, of numbers. Which ones they are, NaN included, is not looked at. */
export function checkNumbers(value: unknown, name: string, length?: number): ArrayLike<number> {
  checkObject(value, name);
  checkAttached(value, name);
  const values = value as ArrayLike<unknown>;
  if (length === undefined) checkInteger(values.length, `${name}.length`, 0, maxRows);
  else if (values.length !== length) {
    throw invalidArgument(`${name} must have ${length} elements, found ${shown(values.length)}`, {
      name,
      expected: length,
      found: values.length,
    });
  }
  for (let i = 0; i < values.length; i++) {
    if (typeof values[i] !== 'number') throw wrongKind(`${name}[${i}]`, 'a number', values[i]);
  }
  return values as ArrayLike<number>;
}

const kinds = {
  'a number': (value: unknown) => typeof value === 'number',
  'a text': (value: unknown) => typeof value === 'string',
  'an array of objects': (value: unknown) =>
    Array.isArray(value) && value.every((item) => typeof item === 'object' && item !== null),
} as const;

/** An object whose fields are of these kinds: for what is read once more, as reports are. */
export function checkFields(value: unknown, name: string, fields: Readonly<Record<string, keyof typeof kinds>>): void {
  checkObject(value, name);
  for (const [field, kind] of Object.entries(fields)) {
    const found = (value as Readonly<Record<string, unknown>>)[field];
    if (!kinds[kind](found)) throw wrongKind(`${name}.${field}`, kind, found);
  }
}

/** CSR offsets: start at 0, never fall, end at `total` when it is known. */
export function checkOffsets(offsets: Int32Array, name: string, total?: number): void {
  if (offsets[0] !== 0)
    throw invalidArgument(`${name}[0] must be 0, found ${offsets[0]}`, {
      name,
      index: 0,
      expected: 0,
      found: offsets[0],
    });
  for (let i = 1; i < offsets.length; i++) {
    if (offsets[i]! < offsets[i - 1]!) {
      throw invalidArgument(
        `${name}[${i}] must be at least ${name}[${i - 1}] = ${offsets[i - 1]}, found ${offsets[i]}`,
        {
          name,
          index: i,
          expected: offsets[i - 1],
          found: offsets[i],
        },
      );
    }
  }
  const last = offsets[offsets.length - 1]!;
  if (total !== undefined && last !== total) {
    throw invalidArgument(`${name} must end at ${total}, the number of elements it divides, found ${last}`, {
      name,
      index: offsets.length - 1,
      expected: total,
      found: last,
    });
  }
}

/** Where part `i` of CSR offsets begins and ends. HAZARD: `subarray` takes offsets that fall or reach too far, and gives other elements or none. */
export function partOf(offsets: Int32Array, name: string, i: number, total: number): readonly [number, number] {
  const [from, to] = [offsets[i]!, offsets[i + 1]!];
  if (from >= 0 && from <= to && to <= total) return [from, to];
  throw invalidArgument(
    `${name}[${i}] and ${name}[${i + 1}] must ascend within [0, ${total}], found ${from} and ${to}`,
    { name, index: i, max: total, found: [from, to] },
  );
}

/** Every element of `values` in [min, max]; the first that is not is named. */
export function checkRange(values: Int32Array, name: string, min: number, max: number): void {
  for (let i = 0; i < values.length; i++) {
    const v = values[i]!;
    if (v < min || v > max) {
      throw invalidArgument(`${name}[${i}] must be in [${min}, ${max}], found ${v}`, {
        name,
        index: i,
        min,
        max,
        found: v,
      });
    }
  }
}

/** A row count that must fit int32. HAZARD: written unchecked into an Int32Array it would wrap to a negative offset. */
export function checkRows(rows: number, what: string, context: Readonly<Record<string, unknown>>): number {
  if (rows > maxRows) {
    throw new PlanError('EP_CAPACITY', `${what} needs ${rows} rows, a plan addresses at most ${maxRows} (int32)`, {
      ...context,
      needed: rows,
      limit: maxRows,
    });
  }
  return rows;
}

export function describe(value: unknown): string {
  const kind = typeof value;
  return value === null || kind === 'object' || kind === 'function' ? shown(value) : `${kind} ${shown(value)}`;
}
