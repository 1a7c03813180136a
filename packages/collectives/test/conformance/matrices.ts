/** Engines, worlds and modes under test. Threads over shared memory run in the default lane, all else in CI: each declares its part of one matrix. */
import { describeRanks, type RankMatrix } from '@ep/conformance';
import type { Mode } from '@ep/conformance/cases';
import type { SoftEfaConfig } from '@ep/efa-gda';
import type { SoftIbgdaConfig } from '@ep/ibgda';
import type { FabricConfig } from '@ep/nvshmem';
import { bundleProgram } from '../bundle.js';
import { processGroupCases } from './cases/index.js';
import { mandatoryGroupCases } from './mandatory.js';

type Matrix = Omit<RankMatrix, 'provider'> & Partial<Pick<RankMatrix, 'provider'>>;

const module = await bundleProgram('conformance');
const modes: readonly Mode[] = ['threads', 'processes'];

function describeGroups(title: string, matrix: Matrix): void {
  describeRanks(
    title,
    {
      suite: 'group',
      cases: processGroupCases.map((one) => ({ ...one, ranks: one.ranks ?? 1 })),
      found: { module, name: 'cases' },
      mandatory: mandatoryGroupCases,
      keepSentences: true,
    },
    { provider: { module, name: 'shm' }, ...matrix },
  );
}

export const describeShm = (part: Mode): void =>
  describeGroups(`process groups over shared memory, ${part}`, {
    part: [part],
    worlds: [1, 2, 3, 4, 5],
    modes,
    sample: [
      ['threads', 4],
      ['processes', 3],
    ],
    expected: new URL('../group-shm.expected.json', import.meta.url),
  });

/** The portable engine over a transport that is hostile on purpose. */
export const describeHostile = (): void =>
  describeGroups('process groups over the hostile transport', {
    provider: { module: '@ep/conformance/hostile', name: 'hostile' },
    // Its delays are there to part what belongs together, not to make large messages last.
    config: { maxDelayUs: 100 },
    worlds: [1, 2, 3, 4],
    modes,
    sample: [['threads', 3]],
    expected: new URL('../group-hostile.expected.json', import.meta.url),
  });

/** In two levels: shared memory on each of two hosts, the hostile transport between them. */
export const describeTwoHosts = (): void =>
  describeGroups('process groups on two hosts', {
    provider: { module, name: 'twoHosts' },
    config: { maxDelayUs: 100 },
    worlds: [4],
    modes,
    sample: [['processes', 4]],
    expected: new URL('../group-hosts.expected.json', import.meta.url),
  });

/** The portable engine over a transport that keeps order. */
export const describeNvshmem = (): void =>
  describeGroups('process groups over nvshmem (shm)', {
    provider: { module: '@ep/nvshmem', name: 'nvshmem.shm' },
    worlds: [1, 2, 3, 4, 5],
    modes,
    sample: [['processes', 4]],
    expected: new URL('../group-nvshmem.expected.json', import.meta.url),
  });

/** Calls on device tensors, by the kernels of GPUs on host threads. */
export const describeDevice = (): void =>
  describeGroups('process groups on the device of nvshmem (cuda)', {
    provider: { module: '@ep/nvshmem', name: 'nvshmem.cuda' },
    worlds: [4],
    modes: ['threads'],
    sample: [['threads', 4]],
    expected: new URL('../group-device.expected.json', import.meta.url),
  });

/** The portable engine over libfabric's TCP: a rank that dies is found in shared memory, long before its silence says so. */
export const describeFabric = (): void =>
  describeGroups('process groups over nvshmem (fabric over TCP)', {
    provider: { module: '@ep/nvshmem', name: 'nvshmem.fabric' },
    config: { provider: 'tcp;ofi_rxm', address: '127.0.0.1', heartbeatMs: 250, silenceMs: 3000 } satisfies FabricConfig,
    worlds: [3],
    modes: ['processes'],
    sample: [['processes', 3]],
    expected: new URL('../group-fabric.expected.json', import.meta.url),
  });

/** The portable engine over queue pairs that a software NIC executes: half of the cases, of which `describeEfa` has the others. */
export const describeIbgda = (): void =>
  describeGroups('process groups over ibgda (soft)', {
    provider: { module: '@ep/ibgda', name: 'ibgda.soft' },
    // JS posts to a queue pair of its own; kernels post nothing here.
    config: { qpsPerPeer: 1 } satisfies SoftIbgdaConfig,
    worlds: [1, 2, 3, 4, 5],
    modes,
    sample: [['processes', 3]],
    share: [0, 2],
    expected: new URL('../group-ibgda.expected.json', import.meta.url),
  });

/** The portable engine over endpoints of a software EFA, which delivers in no order. */
export const describeEfa = (): void =>
  describeGroups('process groups over efa-gda (soft)', {
    provider: { module: '@ep/efa-gda', name: 'efaGda.soft' },
    // JS posts to queue pairs of its own; kernels post nothing here.
    config: { queuePairs: 1 } satisfies SoftEfaConfig,
    worlds: [1, 2, 3, 4, 5],
    modes,
    sample: [['processes', 3]],
    share: [1, 2],
    expected: new URL('../group-efa.expected.json', import.meta.url),
  });
