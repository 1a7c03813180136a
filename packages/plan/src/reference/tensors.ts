import { checkAttached, checkInteger, maxRows, wrongKind } from '../check.js';
import { invalidArgument } from '../error.js';

/** A tensor of rows for each rank: `ranks[r]` holds `rows * rowElements` numbers. */
export type RankTensors<T extends RowStorage = RowStorage> = readonly T[];
export type RowStorage = Float32Array | Float64Array | Int32Array | Uint32Array | Uint16Array | Uint8Array;

const storages = [Float32Array, Float64Array, Int32Array, Uint32Array, Uint16Array, Uint8Array] as const;

/** One tensor for each rank, of so many elements; what belongs to a rank for which `elements` gives undefined is not looked at. */
export function checkTensors(
  tensors: RankTensors,
  name: string,
  worldSize: number,
  elements: (rank: number) => number | undefined,
): void {
  checkTensorList(tensors, name, worldSize);
  for (let r = 0; r < worldSize; r++) {
    const expected = elements(r);
    if (expected === undefined) continue;
    const tensor = checkTensor(tensors[r], `${name}[${r}]`);
    if (tensor.length !== expected) {
      throw invalidArgument(`${name}[${r}] must hold ${expected} elements, found ${tensor.length}`, {
        name,
        rank: r,
        expected,
        found: tensor.length,
      });
    }
  }
}

/** One entry for each rank. */
export function checkTensorList(tensors: RankTensors, name: string, worldSize: number): void {
  if (!Array.isArray(tensors)) throw wrongKind(name, 'an array of tensors, one for each rank', tensors);
  if (tensors.length === worldSize) return;
  throw invalidArgument(`${name} must hold ${worldSize} tensors, one for each rank, found ${tensors.length}`, {
    name,
    expected: worldSize,
    found: tensors.length,
  });
}

export function checkTensor(tensor: unknown, name: string): RowStorage {
  checkAttached(tensor, name);
  for (const Storage of storages) if (tensor instanceof Storage) return tensor;
  throw wrongKind(name, 'a typed array of numbers', tensor);
}

/** HAZARD: what is about to be allocated; negative or beyond any array it would be a bare RangeError. */
export function elementsOf(rows: number, rowElements: number, name: string): number {
  return checkInteger(rows * rowElements, `elements of ${name}`, 0, maxRows);
}
