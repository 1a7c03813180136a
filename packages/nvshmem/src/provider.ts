/** Opens the shared-memory backing: ranks on one host, as processes or as worker threads. */
import { EpError, exchange, type Member, type Need, rendezvous, type TransportProvider } from '@ep/core';
import { native } from '@ep/native';
import { resolveConfig, type ShmConfig } from './config.js';
import { probeShm } from './probe.js';
import { SEGMENT_HANDLE_BYTES, ShmTeam } from './team.js';
import { ShmTransport } from './transport.js';

const VERSION = '0.0.0';

async function openShm(
  member: Member,
  options: { readonly signal: AbortSignal; readonly config?: ShmConfig; readonly timeoutMs?: number },
): Promise<ShmTransport> {
  const { rank, worldSize, store } = member;
  const config = resolveConfig(options.config, worldSize);
  const timeoutMs = options.timeoutMs ?? config.timeoutMs;
  const limits = { signal: options.signal, timeoutMs };
  const { binding } = native();
  await rendezvous(
    store,
    {
      rank,
      worldSize,
      facts: {
        agree: { transport: 'nvshmem:shm', version: VERSION, abi: binding.abi, ranksOnHost: config.ranksOnHost },
      },
      key: 'nvshmem:shm/rendezvous',
    },
    limits,
  );
  const context = new binding.RankContext(rank, worldSize, config.ranksOnHost);
  try {
    const blob = new Uint8Array(2 * SEGMENT_HANDLE_BYTES);
    blob.set(context.handle());
    if (rank === 0) blob.set(context.createTeamSegment(worldSize), SEGMENT_HANDLE_BYTES);
    const blobs = await exchange(store, { rank, worldSize, key: 'nvshmem:shm/control', bytes: blob }, limits);
    const handles = new Uint8Array(worldSize * SEGMENT_HANDLE_BYTES);
    for (const [peer, bytes] of blobs.entries()) {
      if (bytes.byteLength !== blob.byteLength) {
        throw new EpError(
          'EP_RENDEZVOUS',
          `rank ${peer} published ${bytes.byteLength} bytes of handles, expected ${blob.byteLength}`,
        );
      }
      handles.set(bytes.subarray(0, SEGMENT_HANDLE_BYTES), peer * SEGMENT_HANDLE_BYTES);
    }
    context.connect(handles);
    const everyone = Int32Array.from({ length: worldSize }, (_, peer) => peer);
    const world = new ShmTeam(context, rank, blobs[0]!.subarray(SEGMENT_HANDLE_BYTES), everyone, config.timeoutMs);
    // From here on nobody needs the store: all ranks have mapped each other.
    await world.barrier(limits);
    return new ShmTransport({ rank, worldSize, context, world, config });
  } catch (error) {
    context.close();
    throw error;
  }
}

/** The providers of this package, by backing. */
export const nvshmem = {
  /** Ranks of one Linux host over shared segments. Offers every capability. */
  shm: { name: 'nvshmem:shm', probe: probeShm, open: openShm } satisfies TransportProvider<Need, ShmConfig> & {
    open: typeof openShm;
  },
} as const;
