/** Arguments of requests that endpoints check alike. */
import { invalid, type Need, type Rank, type RemoteRegion, type SignalUpdate } from '@ep/core';

/** Op 0: none, 1: add, 2: set. */
export interface SignalWords {
  readonly op: number;
  readonly slot: number;
  readonly value: bigint;
}

const NO_SIGNAL: SignalWords = { op: 0, slot: 0, value: 0n };

/** The bits of a number of 64 bits, with or without a sign. Throws `EP_INVALID_ARGUMENT`: of a longer one BigInt.asUintN would take a part. */
export function wordOf(where: string, name: string, value: bigint | undefined): bigint {
  if (typeof value !== 'bigint') throw invalid(name, { where, expected: 'a bigint', found: value });
  const word = BigInt.asUintN(64, value);
  if (word === value || BigInt.asIntN(64, value) === value) return word;
  throw invalid(name, { where, expected: 'at most 64 bits', found: value });
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function signalWords(update: SignalUpdate<Need> | undefined): SignalWords {
  if (update === undefined) return NO_SIGNAL;
  if (update === null) throw invalid('signal', { where: 'endpoint', expected: '{slot, op, value}', found: update });
  const { op, slot, value } = update;
  const { order }: { readonly order?: unknown } = update;
  if (order !== undefined && order !== 'bundled' && order !== 'prior') {
    throw invalid('order', { where: `signal ${op}`, expected: 'bundled or prior', found: order });
  }
  // Native code takes any value and makes a number of it: "5" would be taken for 5.
  if (typeof slot !== 'number')
    throw invalid('slot', { where: `signal ${op}`, expected: 'a slot number', found: slot });
  if (op === 'inc') return { op: 1, slot, value: 1n };
  if (op !== 'add' && op !== 'set') throw invalid('op', { where: 'signal', expected: 'inc, add or set', found: op });
  // As it was given: native code takes either sign.
  wordOf(`signal ${op}`, 'value', value);
  return { op: op === 'add' ? 1 : 2, slot, value: value as bigint };
}

/** Of `putValue`: refuses a value of more bits than its bytes have, with a sign or without. Widths that there are not are refused by native code. */
export function checkValue(value: bigint, { byteLength }: { readonly byteLength: number }): void {
  if (typeof value !== 'bigint' || byteLength < 1 || byteLength > 8) return;
  const bits = 8 * byteLength;
  if (BigInt.asUintN(bits, value) === value || BigInt.asIntN(bits, value) === value) return;
  throw invalid('value', { where: 'putValue', expected: `at most ${bits} bits, as its target has`, found: value });
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function checkSameSize(
  where: string,
  from: { readonly byteLength: number },
  to: { readonly byteLength: number },
): void {
  if (from.byteLength === to.byteLength) return;
  throw invalid('to', { where, expected: `${from.byteLength} bytes, as the source has`, found: to.byteLength });
}

/** Throws `EP_INVALID_ARGUMENT` unless the region is of the endpoint's peer. */
export function checkRemote(region: RemoteRegion, peer: Rank): void {
  if (region?.peer === peer) return;
  throw invalid('region', {
    where: `endpoint to rank ${peer}`,
    expected: `one of rank ${peer}, which memory.remote() makes`,
    found: region?.peer ?? region,
  });
}
