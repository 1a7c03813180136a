/** Launches the dispatch kernel of the host on a stream of its own. */
import { EpError, type SymmetricMemory } from '@ep/core';
import { codeOfStatus, native, nativePlaceOf } from '@ep/native';
import type { CaseRank } from './case.js';

const CHUNK_ROWS = 5;

export interface DispatchRun {
  readonly rank: CaseRank;
  readonly handle: Uint8Array;
  readonly memory: SymmetricMemory;
  readonly rowBytes?: number;
  /** Where the receive tensor begins in every rank's memory. The source begins at 0. */
  readonly targetOffset?: number;
  /** Counts from 1: arrivals are running counts, never reset. */
  readonly call?: number;
  readonly signal?: AbortSignal;
  readonly chunks: readonly {
    readonly peer: number;
    readonly fromRow: number;
    readonly toRow: number;
    readonly rows: number;
  }[];
}

/** Slots 0..worldSize-1 count arrivals by source; every rank is taken to send what this one sends. Throws what the kernel reports. */
export async function runDispatch(run: DispatchRun): Promise<void> {
  const { rank, memory, chunks, rowBytes = 8, targetOffset = 0, call = 1 } = run;
  const { binding, operations } = native();
  const place = nativePlaceOf(memory.view('u8', 0, memory.byteLength));
  if (place === undefined) throw new EpError('EP_UNSUPPORTED', 'the memory has no native place');
  const words = (values: readonly number[]): BigUint64Array => BigUint64Array.from(values, BigInt);
  const program = new binding.DispatchProgram(
    words(chunks.map((one) => one.fromRow)),
    words(chunks.map((one) => one.toRow)),
    words(chunks.map((one) => one.rows)),
    Int32Array.from(chunks, (one) => one.peer),
    CHUNK_ROWS,
  );
  const expected = chunks.length === 0 ? 0 : call * Math.ceil(chunks[0]!.rows / CHUNK_ROWS);
  const dispatch = new binding.Dispatch({
    handle: run.handle,
    parts: [
      {
        rowBytes,
        dstOffset: targetOffset,
        dstRows: Math.floor((memory.byteLength - targetOffset) / rowBytes),
        program,
      },
    ],
    sums: [],
    arrivalSlot: 0,
    creditSlot: rank.worldSize,
    nonTemporal: false,
    blocks: 2,
  });
  const counters = new Float64Array(2 * rank.worldSize).fill(expected, 0, rank.worldSize);
  const stream = new binding.HostStream(0);
  try {
    const end = await operations.run(
      () => stream.dispatch(dispatch, counters, 20_000, false, place.operand, place.byteOffset, rowBytes),
      run.signal,
    );
    if (end.status !== 0) {
      throw new EpError(codeOfStatus(end.status), `kernel: rank ${end.rank}, stage ${end.stage}, found ${end.found}`);
    }
  } finally {
    stream.close();
  }
}
