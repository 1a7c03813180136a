/** What a dispatcher can be opened with, and what a call can be given. */
import { checkInteger, checkSignal, checkTimeout, defaultTimeoutMs, invalid } from '@ep/core';
import type { DispatchDescription } from '@ep/native';
import { checkObject } from './check-spec.js';
import type { DispatchTransport } from './dispatcher-base.js';
import type { HostStream } from './host-stream.js';
import { type Layout, roundToPage } from './layout.js';

export interface DispatcherOptions {
  /** Bytes of received tensors that one call may have at one rank; see `leaseBytesFor`. The same on all ranks. */
  readonly leaseBytes: number;
  /** Calls whose results may be held or in flight at one time. 2 unless given. */
  readonly leases?: number;
  /** A shard travels in chunks of this many bytes, one put and one signal each. What the transport's capabilities say unless given, or 256 KiB. The same on all ranks. */
  readonly chunkBytes?: number;
  /** Thread blocks: on the `fast` executor each is one thread that copies, the stream's own among them. 1 unless given. */
  readonly blocks?: number;
  /**
   * Where the kernel runs. `fast` (default): one lane per block, bulk copies. `simt`: every lane a fiber under a seeded interleaver, for tests of the
   * paths that GPUs take.
   */
  readonly executor?: 'fast' | { readonly lanes: number; readonly warpLanes: number; readonly seed: number };
  /**
   * Bytes of a send and of a receive buffer for the staged variant (three copies of every byte): the baseline that the direct one is measured against.
   * Needs a load/store transport and `leases: 1`. 0 unless given: direct.
   */
  readonly stagingBytes?: number;
  /** Ends a call that waits for peers, and the opening, in milliseconds. 0 looks once; Infinity: no limit. EP_TIMEOUT_MS (of which 0 is no limit) unless given. */
  readonly timeoutMs?: number;
  /** One of the caller's, which then outlives the dispatcher; one of its own unless given. */
  readonly stream?: HostStream;
  readonly signal?: AbortSignal;
}

export interface RunOptions {
  /** Ends the call: it rejects with `signal.reason`, and the dispatcher needs a `resync()`. */
  readonly signal?: AbortSignal;
  /** Ends the call with `EP_TIMEOUT`, in milliseconds: 0 looks once, Infinity is no limit. That of the dispatcher unless given. */
  readonly timeoutMs?: number;
}

/** `EP_INVALID_ARGUMENT` for limits that are none. HAZARD: before a call counts, or a slip of one rank leaves the others waiting, and the object poisoned. */
export function checkRunOptions(options: RunOptions | undefined, where: string): void {
  if (options === undefined) return;
  checkObject(options, 'options', 'an object with timeoutMs and signal', where);
  const { signal, timeoutMs }: RunOptions = options;
  checkSignal(signal, where);
  checkTimeout(timeoutMs, where);
}

export interface ResolvedOptions {
  readonly layout: Layout;
  readonly chunkBytes: number;
  readonly blocks: number;
  readonly simt: DispatchDescription['simt'];
  readonly timeoutMs: number;
}

const DEFAULT_CHUNK_BYTES = 256 * 1024;

/** Throws `EP_INVALID_ARGUMENT`. */
export function checkExecutor(executor: DispatcherOptions['executor'], where: string): DispatchDescription['simt'] {
  if (executor === undefined || executor === 'fast') return undefined;
  if (typeof executor !== 'object' || executor === null) {
    throw invalid('executor', { where, expected: "'fast' or {lanes, warpLanes, seed}", found: executor });
  }
  const warpLanes = checkInteger(executor.warpLanes, 'executor.warpLanes', where, 1, 32);
  const lanes = checkInteger(executor.lanes, 'executor.lanes', where, 1, 1024);
  if (lanes % warpLanes !== 0) {
    throw invalid('executor.lanes', { where, expected: `a multiple of warpLanes, ${warpLanes}`, found: lanes });
  }
  return { lanes, warpLanes, seed: checkInteger(executor.seed, 'executor.seed', where) };
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveOptions(
  options: DispatcherOptions,
  { worldSize, capabilities }: Pick<DispatchTransport, 'worldSize' | 'capabilities'>,
  where: string,
): ResolvedOptions {
  checkObject(options, 'options', 'an object with leaseBytes', where);
  const leases = checkInteger(options.leases ?? 2, 'leases', where, 1, 1024);
  const stagingBytes = roundToPage(checkInteger(options.stagingBytes ?? 0, 'stagingBytes', where));
  // One staging buffer serves all calls: the credit of the only lease is what keeps the next call out of it.
  if (stagingBytes > 0) checkInteger(leases, 'leases of a staged dispatcher', where, 1, 1);
  return {
    layout: {
      worldSize,
      leases,
      leaseBytes: roundToPage(checkInteger(options.leaseBytes, 'leaseBytes', where)),
      stagingBytes,
    },
    chunkBytes: checkInteger(
      options.chunkBytes ?? capabilities.chunkBytes ?? DEFAULT_CHUNK_BYTES,
      'chunkBytes',
      where,
      1,
    ),
    blocks: checkInteger(options.blocks ?? 1, 'blocks', where, 1, 1024),
    simt: checkExecutor(options.executor, where),
    timeoutMs: checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), where),
  };
}
