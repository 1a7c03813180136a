/** Opens the shared-memory backing: ranks on one host, as processes or as worker threads. */
import type { Member, Need, TransportProvider } from '@ep/core';
import { joinRanks } from '@ep/native/ranks';
import { resolveConfig, type ShmConfig } from './config.js';
import { cuda } from './cuda/provider.js';
import { fabric } from './fabric/provider.js';
import { probeShm } from './probe.js';
import { ShmTransport } from './transport.js';
import { VERSION } from './version.js';

/**
 * Collective. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
async function openShm(
  member: Member,
  options: { readonly signal: AbortSignal; readonly config?: ShmConfig; readonly timeoutMs?: number },
): Promise<ShmTransport> {
  const { rank, worldSize } = member;
  const config = resolveConfig(options.config, worldSize);
  const timeoutMs = options.timeoutMs ?? config.timeoutMs;
  const limits = { signal: options.signal, timeoutMs };
  const { ranksOnHost } = config;
  const joined = await joinRanks(
    { ...member, transport: 'nvshmem:shm', version: VERSION, ranksOnHost, timeoutMs: config.timeoutMs },
    limits,
  );
  return new ShmTransport({ rank, worldSize, ...joined, config });
}

/** The providers of this package, by backing. */
export const nvshmem = {
  /** Ranks of one Linux host over shared segments. Offers every capability. */
  shm: { name: 'nvshmem:shm', probe: probeShm, open: openShm } satisfies TransportProvider<Need, ShmConfig> & {
    open: typeof openShm;
  },
  /** Ranks of one Linux host whose kernels run on GPUs; device memory beside all that `shm` has. */
  cuda,
  fabric,
} as const;
