/** Opens the shared-memory backing: ranks on one host, as processes or as worker threads. */
import { createRequire } from 'node:module';
import { EpError, exchange, type Member, type Need, rendezvous, type TransportProvider } from '@ep/core';
import { native, segmentHandleLayout } from '@ep/native';
import { resolveConfig, type ShmConfig } from './config.js';
import { Liveness } from './liveness.js';
import { probeShm } from './probe.js';
import { ShmTeam } from './team.js';
import { ShmTransport } from './transport.js';

const { version: VERSION } = createRequire(import.meta.url)('@ep/nvshmem/package.json') as { readonly version: string };
const HANDLE_BYTES = segmentHandleLayout.byteLength;

/**
 * Collective. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
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
    const blob = new Uint8Array(2 * HANDLE_BYTES);
    blob.set(context.handle());
    if (rank === 0) blob.set(context.createTeamSegment(worldSize), HANDLE_BYTES);
    const blobs = await exchange(store, { rank, worldSize, key: 'nvshmem:shm/control', bytes: blob }, limits);
    const handles = new Uint8Array(worldSize * HANDLE_BYTES);
    for (const [peer, bytes] of blobs.entries()) {
      if (bytes.byteLength !== blob.byteLength) {
        throw new EpError(
          'EP_RENDEZVOUS',
          `rank ${peer} published ${bytes.byteLength} bytes of handles, expected ${blob.byteLength}`,
        );
      }
      handles.set(bytes.subarray(0, HANDLE_BYTES), peer * HANDLE_BYTES);
    }
    context.connect(handles);
    const everyone = Int32Array.from({ length: worldSize }, (_, peer) => peer);
    const liveness = new Liveness(context, rank, worldSize);
    const handle = blobs[0]!.subarray(HANDLE_BYTES);
    const world = new ShmTeam({
      context,
      liveness,
      worldRank: rank,
      handle,
      ranks: everyone,
      timeoutMs: config.timeoutMs,
    });
    try {
      // From here on nobody needs the store: all ranks have mapped each other.
      await world.barrier(limits);
    } catch (error) {
      await world.close();
      throw error;
    }
    return new ShmTransport({ rank, worldSize, context, liveness, world, config });
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
