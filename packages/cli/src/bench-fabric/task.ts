/** What a rank of `ep bench fabric` measures, and what it tells back. Two ranks, in turns: libfabric alone, then what is built on it. */

export interface FabricTask {
  readonly store: string;
  readonly rank: number;
  /** Of the interface that this rank binds to. */
  readonly address: string;
  /** Of this rank's host. */
  readonly ranksOnHost: number;
  /** Of a ping-pong, in each turn. */
  readonly rounds: number;
  /** That count, after one that does not. */
  readonly turns: number;
  readonly messageBytes: number;
  readonly messages: number;
  /** Messages under way. */
  readonly window: number;
  readonly rowBytes: number;
}

/** One entry a turn. */
export interface FabricTimes {
  /** libfabric's name of what was chosen, and its version. */
  readonly provider: string;
  readonly version: string;
  /** In microseconds, [p50, p99]: half a round ('raw', 'put'), and a whole put of rank 0 that its JS awaits ('awaited'; of rank 1: nothing). */
  readonly latency: Readonly<Record<'raw' | 'put' | 'awaited', readonly (readonly [number, number])[]>>;
  /** Seconds of `messages` of `messageBytes`: from rank 0 to rank 1 ('raw', 'put' by a kernel, 'awaited' by JS), and from each to the other ('raw both ways', 'dispatch'). */
  readonly seconds: Readonly<Record<'raw' | 'put' | 'awaited' | 'raw both ways' | 'dispatch', readonly number[]>>;
}

export const libraryName = 'libfabric.so.1';
