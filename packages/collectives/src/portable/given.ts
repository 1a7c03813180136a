/**
 * Small calls: each rank tells all others what it calls together with all that it gives, and takes its part from what they told. One round, and no other: who has heard
 * all of them has all data, and who has ended such a call can pass on to survivors what they have not heard of a rank that is gone.
 *
 * Everyone gets what everyone gives, also what it does not need: at most `MOST_GIVEN_BYTES` for each pair of ranks.
 */
import { elementBytes, viewStorage } from '@ep/core';
import type { Elements, EngineCall } from '../engine.js';
import { bytesOf } from './chunks.js';
import type { FoldOrder } from './fold-order.js';
import type { CallRecord } from './records.js';

/** Of all inputs of a rank together. Beside them, a record has room for what is called. */
export const MOST_GIVEN_BYTES = 512;

/** Bytes that a rank gives in all; where the root alone gives, what that does, on all of the group's `size` ranks. */
export function bytesOfCall(
  { kind, inputs, outputs }: Pick<EngineCall, 'kind' | 'inputs' | 'outputs'>,
  size: number,
): number {
  if (kind === 'scatter') return size * outputs[0]!.byteLength;
  let sum = 0;
  for (const array of kind === 'broadcast' && inputs.length === 0 ? outputs : inputs) sum += array.byteLength;
  return sum;
}

/** All inputs, one after the other, if that is short enough. HAZARD: a copy, because the call may end, and its arrays change, before all peers have read it. */
export function givenBy({ inputs }: Pick<EngineCall, 'inputs'>): Uint8Array | undefined {
  const byteLength = inputs.reduce((sum, input) => sum + input.byteLength, 0);
  if (byteLength > MOST_GIVEN_BYTES) return undefined;
  const given = new Uint8Array(byteLength);
  let at = 0;
  for (const input of inputs) {
    if (input.byteLength > 0) given.set(bytesOf(input), at);
    at += input.byteLength;
  }
  return given;
}

interface SmallCall {
  readonly call: EngineCall;
  readonly rank: number;
  /** Ascending; this rank is among them, and the root if there is one. */
  readonly contributors: readonly number[];
  readonly order: FoldOrder;
}

/** Fills the outputs of this rank. `records`: of all contributors, this rank's own too, each with what it gives. */
export function takeGiven(
  { call, rank, contributors, order }: SmallCall,
  records: ReadonlyMap<number, CallRecord>,
): void {
  const { kind, dtype, root, outputs } = call;
  const [output] = outputs;
  const width = elementBytes(dtype);
  const from = (peer: number, begin: number, length: number): Elements => {
    const { buffer, byteOffset } = records.get(peer)!.given!;
    return viewStorage(dtype, buffer, byteOffset + begin * width, length);
  };
  const take = (target: Elements, peer: number, begin: number): void => {
    if (target.length > 0) bytesOf(target).set(bytesOf(from(peer, begin, target.length)));
  };
  const fold = (begin: number): void => {
    if (output === undefined || output.length === 0) return;
    const sources = contributors.map((peer) => from(peer, begin, output.length));
    order(dtype, call.reduceOp!, output, sources);
  };
  switch (kind) {
    case 'barrier':
      return;
    case 'broadcast':
      if (rank !== root) take(output!, root, 0);
      return;
    case 'scatter':
      take(output!, root, rank * output!.length);
      return;
    case 'all-reduce':
    case 'reduce':
      // Of a reduce, only the root has an output.
      fold(0);
      return;
    case 'reduce-scatter':
      fold(rank * output!.length);
      return;
    case 'all-gather':
    case 'gather':
      if (output !== undefined) for (const peer of contributors) take(outputs[peer]!, peer, 0);
      return;
    case 'all-to-all':
      for (const peer of contributors) {
        const lengths = records.get(peer)!.gives as readonly number[];
        take(
          outputs[peer]!,
          peer,
          lengths.slice(0, rank).reduce((sum, length) => sum + length, 0),
        );
      }
  }
}
