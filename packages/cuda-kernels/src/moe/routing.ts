/** What one call leaves behind for its combine, or for later calls with the same choices, and what it reports by rank: native arrays, seen from JS. */
import type { Rank } from '@ep/core';
import { type NativeGpuMoeBuffer, type NativeMoeBuffer, type NativeMoeRouting, native } from '@ep/native';

/** Views of a routing's arrays: see ep_moe_routing in native/include/ep/abi/moe.h. */
export class RoutingArrays {
  readonly native: NativeMoeRouting;
  readonly topk: Int32Array;
  readonly choiceReplica: Int32Array;
  readonly recvCount: Int32Array;
  readonly blockStart: Int32Array;
  readonly layoutRange: BigInt64Array;
  readonly sourceToken: Int32Array;
  readonly sourceChoice: Int32Array;
  /** 0: takes part; otherwise why not. */
  readonly ranks: BigUint64Array;
  readonly waitNs: BigUint64Array;
  /** How often ranks had come back into the buffer when a call wrote this: those ranks know nothing of it. */
  generation = 0;
  /** Whose rows a call with this routing has left out: their counts are 0 from then on. */
  readonly dropped = new Set<Rank>();

  constructor(buffer: NativeMoeBuffer | NativeGpuMoeBuffer) {
    this.native = new (native().binding.MoeRouting)(buffer);
    const window = this.native.window();
    const layout = this.native.layout();
    const at = (array: number): readonly [ArrayBuffer, number, number] => [
      window,
      layout[2 * array]!,
      layout[2 * array + 1]!,
    ];
    this.topk = new Int32Array(...at(0));
    this.choiceReplica = new Int32Array(...at(1));
    this.recvCount = new Int32Array(...at(6));
    this.blockStart = new Int32Array(...at(7));
    this.layoutRange = new BigInt64Array(...at(8));
    this.sourceToken = new Int32Array(...at(9));
    this.sourceChoice = new Int32Array(...at(10));
    this.ranks = new BigUint64Array(...at(11));
    this.waitNs = new BigUint64Array(...at(12));
  }

  /** What a dispatch says of its rows. HAZARD: copies: the slot's next call writes over the originals, and kernels follow them: whoever could change those would make combine write anywhere. */
  said(rows: number, localExperts: number) {
    return {
      counts: this.recvCount.slice(),
      blockStart: this.blockStart.slice(0, localExperts),
      layoutRange: this.layoutRange.slice(),
      sourceToken: this.sourceToken.slice(0, rows),
      sourceChoice: this.sourceChoice.slice(0, rows),
    };
  }
}
