/** Reads and writes bit fields of hardware's formats by the tables that are generated from the C headers. */
import { EpError } from '@ep/core';
import type { BitField, BitLayout } from '../abi.gen.js';

/** A field of 64 bits is a bigint, any other a number. */
type BitValue<F extends BitField> = F[1] extends 63 ? (F[2] extends 0 ? bigint : number) : number;

export type BitValues<L extends BitLayout> = { readonly [K in keyof L['fields']]: BitValue<L['fields'][K]> };

const isQword = ([, high]: BitField): boolean => high > 31;

function readField({ littleEndian }: BitLayout, view: DataView, at: number, field: BitField): bigint {
  const [offset, high, low] = field;
  const byte = at + offset;
  const word = isQword(field) ? view.getBigUint64(byte, littleEndian) : BigInt(view.getUint32(byte, littleEndian));
  return (word >> BigInt(low)) & ((1n << BigInt(high - low + 1)) - 1n);
}

function writeField({ littleEndian }: BitLayout, view: DataView, at: number, field: BitField, value: bigint): void {
  const [offset, high, low] = field;
  const byte = at + offset;
  const mask = ((1n << BigInt(high - low + 1)) - 1n) << BigInt(low);
  const merged = (word: bigint): bigint => (word & ~mask) | (value << BigInt(low));
  if (isQword(field)) view.setBigUint64(byte, merged(view.getBigUint64(byte, littleEndian)), littleEndian);
  else view.setUint32(byte, Number(merged(BigInt(view.getUint32(byte, littleEndian)))), littleEndian);
}

export function readBits<L extends BitLayout>(layout: L, view: DataView, at = 0): BitValues<L> {
  const entries = Object.entries(layout.fields).map(([name, field]) => {
    const value = readField(layout, view, at, field);
    return [name, field[1] === 63 && field[2] === 0 ? value : Number(value)] as const;
  });
  return Object.fromEntries(entries) as BitValues<L>;
}

/** Leaves the fields alone that are not given. Throws `EP_INVALID_ARGUMENT` for a value that its field cannot hold, before anything is written. */
export function writeBits<L extends BitLayout>(
  layout: L,
  view: DataView,
  at: number,
  values: Partial<BitValues<L>>,
): void {
  const writes = Object.entries(values).flatMap(([name, value]) => {
    const field = layout.fields[name];
    if (field === undefined) throw new EpError('EP_INVALID_ARGUMENT', `${name} is no field of this layout`);
    return value === undefined ? [] : [{ field, bits: checkedBits(name, field, value) }];
  });
  for (const { field, bits } of writes) writeField(layout, view, at, field, bits);
}

function checkedBits(name: string, [, high, low]: BitField, value: unknown): bigint {
  const bits = typeof value === 'bigint' ? value : Number.isSafeInteger(value) ? BigInt(value as number) : -1n;
  const width = high - low + 1;
  if (bits >= 0n && bits >> BigInt(width) === 0n) return bits;
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `${name}: expected an integer of at most ${width} bits, found ${String(value)}`,
  );
}

/** A layout and the byte that it begins at. */
export type PlacedLayout = readonly [layout: BitLayout, at: number];

/** Set bits that no field names, as byte offsets of the dwords they are in; in the byte order of the first layout. */
export function strayBits(view: DataView, placed: readonly PlacedLayout[]): { offset: number; bits: number }[] {
  const rest = new DataView(new ArrayBuffer(Math.ceil(view.byteLength / 4) * 4));
  new Uint8Array(rest.buffer).set(new Uint8Array(view.buffer, view.byteOffset, view.byteLength));
  for (const [layout, at] of placed) {
    for (const field of Object.values(layout.fields)) writeField(layout, rest, at, field, 0n);
  }
  const littleEndian = placed[0]?.[0].littleEndian;
  const strays: { offset: number; bits: number }[] = [];
  for (let offset = 0; offset < rest.byteLength; offset += 4) {
    const bits = rest.getUint32(offset, littleEndian);
    if (bits !== 0) strays.push({ offset, bits });
  }
  return strays;
}
