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
  if (!(value instanceof Int32Array)) {
    throw invalidArgument(`${name} must be an Int32Array, found ${describe(value)}`, { name, found: describe(value) });
  }
  if (length !== undefined && value.length !== length) {
    throw invalidArgument(
      `${name} must have ${length} elements, found ${value.length} (a detached or shrunk buffer reads as shorter)`,
      { name, expected: length, found: value.length },
    );
  }
  return value;
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
