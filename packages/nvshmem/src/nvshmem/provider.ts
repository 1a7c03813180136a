/** Opens the backing of NVIDIA's NVSHMEM: ranks on one host, each a process with a GPU, or several processes on one. */
import { checkOpening, EpError, type Member, type OpenOptions, type TransportProvider } from '@ep/core';
import { openGpus, openNvshmem } from '@ep/native';
import { joinRanks, throughStore } from '@ep/native/ranks';
import { VERSION } from '../version.js';
import { type NvshmemConfig, resolveNvshmemConfig } from './config.js';
import { meetInNvshmem } from './meeting.js';
import { type NvshmemNeeds, probeNvshmem } from './probe.js';
import { NvshmemTransport } from './transport.js';

/**
 * Collective, as `nvshmem.shm.open`. `EP_UNAVAILABLE` where there is no GPU, or no NVSHMEM; `EP_UNSUPPORTED` where ranks share a process. The process stays a PE of this world until it ends: later opens of
 * the same ranks are in the same world of NVSHMEM, others are refused.
 */
async function openNvshmemTransport(member: Member, options: OpenOptions<NvshmemConfig>): Promise<NvshmemTransport> {
  const transport = 'nvshmem:nvshmem';
  checkOpening(member, options, transport);
  const { rank, worldSize } = member;
  const config = resolveNvshmemConfig(options.config, worldSize);
  const { library, devices } = openGpus();
  const facts = devices[config.device];
  if (facts === undefined || facts.unusable !== undefined) {
    const why = facts?.unusable ?? `GPU ${config.device} is not one of ${devices.length}`;
    throw new EpError('EP_UNAVAILABLE', `${transport}: ${why}`);
  }
  const nvshmem = openNvshmem(config.path);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  const { ranksOnHost, timeoutMs, heapBytes } = config;
  const agree = { heapBytes, nvshmem: nvshmem.version };
  const own = { rank, worldSize, transport, version: VERSION, ranksOnHost, timeoutMs, agree };
  const joined = await joinRanks(own, throughStore(member, transport), limits);
  try {
    const met = await meetInNvshmem({ rank, worldSize, joined, nvshmem, library, config }, limits);
    return new NvshmemTransport({ rank, worldSize, ...joined, library, nvshmem: met, config });
  } catch (error) {
    await joined.world.close();
    joined.context.close();
    throw error;
  }
}

export const byNvshmem = {
  name: 'nvshmem:nvshmem',
  probe: probeNvshmem,
  open: openNvshmemTransport,
} satisfies TransportProvider<NvshmemNeeds, NvshmemConfig> & { open: typeof openNvshmemTransport };
