/** What ranks load to run the cases of process groups: the cases, and `shm` in the place of a transport. */
import type { CaseRank } from '@ep/conformance/cases';
import { hostile } from '@ep/conformance/hostile';
import { CloseScope, type Need, type Probe, type Transport } from '@ep/core';
import { initProcessGroup, type ProcessGroup } from '../../src/index.js';
import type { GroupCase, GroupRank } from '../conformance/cases/case.js';
import { processGroupCases } from '../conformance/cases/index.js';
import { manyCases } from '../conformance/cases/many.js';
import { foldByHost } from '../conformance/cases/oracle.js';
import { stagedOnDevice } from '../device/staged-engine.js';

const HERE: Probe = {
  available: true,
  capabilities: {
    needs: new Set(),
    maxMessageBytes: Number.MAX_SAFE_INTEGER,
    maxSignalSlots: 0,
    initiators: new Set(),
  },
  devices: [],
};

/** Named and probed like the provider of a transport; groups over shared memory open none. */
export const shm = {
  name: 'shm',
  probe: (): Promise<Probe> => Promise.resolve(HERE),
};

/** The hostile transport as the network between two hosts of two ranks each. */
export const twoHosts: typeof hostile = { ...hostile, name: 'hostile:two hosts' };
const HOSTS = [0, 0, 1, 1];

async function runCase({ body }: GroupCase, rank: CaseRank): Promise<void> {
  const scope = new CloseScope();
  const hosts = rank.provider.name === twoHosts.name ? HOSTS : undefined;
  if (hosts !== undefined) foldByHost(hosts);
  const transports = new Map<ProcessGroup, Transport<Need>>();
  const open: GroupRank['open'] = async (options = {}) => {
    const transport = rank.provider.name === shm.name ? undefined : await rank.open();
    // Over device memory, calls are made on the device.
    const onDevice = transport?.capabilities.spaces?.has('device') === true;
    const group = await initProcessGroup({
      backend: onDevice ? stagedOnDevice(transport) : (transport ?? 'shm'),
      store: rank.store,
      rank: rank.rank,
      worldSize: rank.worldSize,
      ...(hosts && { hosts }),
      ...options,
    });
    if (transport !== undefined) transports.set(group, transport);
    return scope.add(group);
  };
  const release: GroupRank['release'] = async (group) => {
    await group.destroy();
    await transports.get(group)?.close();
    transports.delete(group);
    scope.remove(group);
  };
  const run: GroupRank = {
    rank: rank.rank,
    worldSize: rank.worldSize,
    mode: rank.mode,
    backend: rank.provider.name,
    ...(hosts && { hosts }),
    sizes: process.env.EP_TEST_FULL === '1' ? 'full' : 'usual',
    store: rank.store,
    open,
    release,
    meet: (ranks) => rank.meet(ranks),
    share: (value) => rank.share(value),
    report: (text) => rank.report(text),
    random: () => rank.random(),
    die: () => rank.die(),
    resources: () => rank.resources(),
  };
  try {
    await body(run);
  } finally {
    await scope.close();
  }
}

const runnable = (all: readonly GroupCase[]) =>
  all.map((one) => ({ ...one, body: (rank: CaseRank): Promise<void> => runCase(one, rank) }));

export const cases = runnable(processGroupCases);
/** For worlds in which starting the ranks takes longest. */
export const many = runnable(manyCases);
