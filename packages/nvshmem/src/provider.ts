/** Opens the shared-memory backing: ranks on one host, as processes or as worker threads. */
import {
  checkOpening,
  invalid,
  type Member,
  type Need,
  type OpenOptions,
  type TransportProvider,
  type WaitOptions,
} from '@ep/core';
import {
  agreedFacts,
  checkAmong,
  type JoinedRanks,
  type JoinOptions,
  joinRanks,
  rejoinRanks,
  throughStore,
} from '@ep/native/ranks';
import { resolveConfig, type ShmConfig } from './config.js';
import { cuda } from './cuda/provider.js';
import { fabric } from './fabric/provider.js';
import { byNvshmem } from './nvshmem/provider.js';
import { probeShm } from './probe.js';
import { ShmTransport } from './transport.js';
import { VERSION } from './version.js';

/**
 * Collective over the ranks of `config.activeRanks`, all unless given; over several hosts (`config.hosts`) over all, of which it reaches those of its own. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
async function openShm(member: Member, options: OpenOptions<ShmConfig>): Promise<ShmTransport> {
  const join = (own: JoinOptions & Member, limits: WaitOptions) =>
    joinRanks(own, throughStore(own, own.transport), limits);
  return openBy(join, false, member, options);
}

/**
 * Into a place in which nobody has been yet (`config.activeRanks`), or that of a rank that died, with the store of the world, while those that are here call `ShmTransport.readmit`. Rejects with `EP_TIMEOUT` where they do not, and with
 * `EP_RENDEZVOUS` where they refuse this rank.
 */
function rejoinShm(member: Member, options: OpenOptions<ShmConfig>): Promise<ShmTransport> {
  return openBy(rejoinRanks, true, member, options);
}

async function openBy(
  join: (options: JoinOptions & Member, limits: WaitOptions) => Promise<JoinedRanks>,
  isNew: boolean,
  member: Member,
  options: OpenOptions<ShmConfig>,
): Promise<ShmTransport> {
  checkOpening(member, options, 'nvshmem:shm');
  const { rank, worldSize } = member;
  const config = resolveConfig(options.config, worldSize);
  const { ranksOnHost, timeoutMs, activeRanks, hosts } = config;
  if (isNew && hosts !== undefined) {
    const expected = 'absent: who comes later comes into a world of one host';
    throw invalid('hosts', { where: 'nvshmem:shm configuration', expected, found: hosts });
  }
  if (!isNew) checkAmong(activeRanks, rank, 'nvshmem:shm configuration');
  const own = { ...member, transport: 'nvshmem:shm', version: VERSION, ranksOnHost, timeoutMs, activeRanks, hosts };
  const joined = await join(own, { signal: options.signal, timeoutMs: options.timeoutMs ?? timeoutMs });
  return new ShmTransport({ rank, worldSize, ...joined, facts: agreedFacts(own), isNew, config });
}

/** The providers of this package, by backing. */
export const nvshmem = {
  /** Ranks of one Linux host over shared segments. Offers every capability. */
  shm: { name: 'nvshmem:shm', probe: probeShm, open: openShm, rejoin: rejoinShm } satisfies TransportProvider<
    Need,
    ShmConfig
  > & { open: typeof openShm; rejoin: typeof rejoinShm },
  /** Ranks of one Linux host whose kernels run on GPUs; device memory beside all that `shm` has. */
  cuda,
  fabric,
  /** Ranks of one Linux host as PEs of NVIDIA's NVSHMEM: device memory on its symmetric heap. */
  nvshmem: byNvshmem,
} as const;
