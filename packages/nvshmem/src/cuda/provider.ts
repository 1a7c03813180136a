/** Opens the backing of GPUs: ranks on one host, several on one GPU as worker threads of a process, or one or more processes for each GPU. */
import { checkOpening, EpError, type Member, type Need, type OpenOptions, type TransportProvider } from '@ep/core';
import { openGpus } from '@ep/native';
import { joinRanks, throughStore } from '@ep/native/ranks';
import { VERSION } from '../version.js';
import { type CudaConfig, resolveCudaConfig } from './config.js';
import { probeCuda } from './probe.js';
import { CudaTransport } from './transport.js';

/** Collective, as `nvshmem.shm.open`. Rejects with `EP_UNAVAILABLE` where there is no GPU, or none of that ordinal. */
async function openCuda(member: Member, options: OpenOptions<CudaConfig>): Promise<CudaTransport> {
  const transport = 'nvshmem:cuda';
  checkOpening(member, options, transport);
  const { rank, worldSize } = member;
  const config = resolveCudaConfig(options.config, worldSize);
  const { library, devices } = openGpus();
  const facts = devices[config.device];
  if (facts === undefined || facts.unusable !== undefined) {
    const why = facts?.unusable ?? `GPU ${config.device} is not one of ${devices.length}`;
    throw new EpError('EP_UNAVAILABLE', `${transport}: ${why}`);
  }
  const timeoutMs = options.timeoutMs ?? config.timeoutMs;
  const { ranksOnHost } = config;
  const joined = await joinRanks(
    { rank, worldSize, transport, version: VERSION, ranksOnHost, timeoutMs: config.timeoutMs },
    throughStore(member, transport),
    { signal: options.signal, timeoutMs },
  );
  try {
    return new CudaTransport({ rank, worldSize, ...joined, library, config });
  } catch (error) {
    await joined.world.close();
    joined.context.close();
    throw error;
  }
}

export const cuda = { name: 'nvshmem:cuda', probe: probeCuda, open: openCuda } satisfies TransportProvider<
  Need,
  CudaConfig
> & {
  open: typeof openCuda;
};
