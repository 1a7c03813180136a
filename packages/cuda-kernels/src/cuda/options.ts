/** What a dispatcher over device memory can be opened with. */
import { checkInteger, checkTimeout, defaultTimeoutMs, invalid } from '@ep/core';
import { checkObject } from '../check-spec.js';
import { type Layout, roundToPage } from '../layout.js';
import { CudaStream } from './stream.js';

export interface DeviceDispatcherOptions {
  /** The stream that calls are put on. The caller's, which outlives the dispatcher. */
  readonly stream: CudaStream;
  /** Bytes of received tensors that one call may have at one rank; see `leaseBytesFor`. The same on all ranks. */
  readonly leaseBytes: number;
  /** Calls whose results may be held or in flight at one time. 2 unless given. */
  readonly leases?: number;
  /** A shard travels in chunks of this many bytes, each copied and signalled by one thread block. 256 KiB unless given. */
  readonly chunkBytes?: number;
  /**
   * Thread blocks of a call. Kernels of ranks that share a GPU as streams of one process wait for each other, so all their blocks must run at once: more than
   * fit are refused here. Half of this rank's share of the GPU unless given; beside computing kernels fewer will do.
   */
  readonly blocks?: number;
  /** Threads of a block, whole warps of 32. 512 unless given. */
  readonly lanes?: number;
  /** As in `DispatcherOptions`. */
  readonly timeoutMs?: number;
  readonly signal?: AbortSignal;
}

export interface ResolvedDeviceOptions {
  readonly stream: CudaStream;
  readonly layout: Layout;
  readonly chunkBytes: number;
  /** 0: as many as are right for the device. */
  readonly blocks: number;
  readonly lanes: number;
  readonly timeoutMs: number;
}

const DEFAULT_CHUNK_BYTES = 256 * 1024;
const DEFAULT_LANES = 512;

/** Throws `EP_INVALID_ARGUMENT`. */
export function checkStream(stream: unknown, where: string): CudaStream {
  if (stream instanceof CudaStream) return stream;
  throw invalid('stream', { where, expected: 'a stream of a CudaDevice', found: stream });
}

/** 0: as many as are right for the device. Throws `EP_INVALID_ARGUMENT`. */
export const checkBlocks = (blocks: number | undefined, where: string): number =>
  blocks === undefined ? 0 : checkInteger(blocks, 'blocks', where, 1, 65_535);

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveDeviceOptions(
  options: DeviceDispatcherOptions,
  worldSize: number,
  where: string,
): ResolvedDeviceOptions {
  checkObject(options, 'options', 'an object with stream and leaseBytes', where);
  const stream = checkStream(options.stream, where);
  const lanes = checkInteger(options.lanes ?? DEFAULT_LANES, 'lanes', where, 32, 1024);
  if (lanes % 32 !== 0) throw invalid('lanes', { where, expected: 'a multiple of 32', found: lanes });
  return {
    stream,
    layout: {
      worldSize,
      leases: checkInteger(options.leases ?? 2, 'leases', where, 1, 1024),
      leaseBytes: roundToPage(checkInteger(options.leaseBytes, 'leaseBytes', where)),
      stagingBytes: 0,
    },
    chunkBytes: checkInteger(options.chunkBytes ?? DEFAULT_CHUNK_BYTES, 'chunkBytes', where, 1),
    blocks: checkBlocks(options.blocks, where),
    lanes,
    timeoutMs: checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), where),
  };
}
