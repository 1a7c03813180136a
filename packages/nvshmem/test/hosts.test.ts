/** Shared memory of ranks on several hosts, each of which reaches its own; as the world is told, for all of these are threads of one. What joins the hosts is composed with it: @ep/cuda-kernels, test/mixed. */
import { byCapability, CloseScope, memoryStore, type Rank } from '@ep/core';
import { nvshmem, type ShmConfig, type ShmTransport } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';

const { signal } = new AbortController();
const SIZE = { byteLength: 64, signalSlots: 1 };

/** One rank for each of the configurations. */
async function openAll(scope: CloseScope, configs: readonly ShmConfig[]) {
  const root = scope.add(memoryStore());
  const worldSize = configs.length;
  const ended = await Promise.allSettled(
    configs.map((config, rank) => {
      const member = { rank, worldSize, store: scope.add(root.handle()) };
      return nvshmem.shm.open(member, { signal, config, timeoutMs: 10_000 });
    }),
  );
  for (const end of ended) if (end.status === 'fulfilled') scope.add(end.value);
  return ended;
}

async function opened(scope: CloseScope, configs: readonly ShmConfig[]): Promise<readonly ShmTransport[]> {
  return (await openAll(scope, configs)).map((end) => {
    if (end.status === 'rejected') throw end.reason;
    return end.value;
  });
}

const onHosts = (...hosts: readonly Rank[]): ShmConfig[] => hosts.map(() => ({ hosts }));

describe('shared memory of several hosts', () => {
  it('joins the ranks of each, and is refused towards the others', async () => {
    await using scope = new CloseScope();
    const ranks = await opened(scope, onHosts(0, 1, 0, 1));
    expect(ranks.map(({ world }) => [...world.ranks])).toEqual([
      [0, 2],
      [1, 3],
      [0, 2],
      [1, 3],
    ]);
    for (const one of ranks) expect(one.hosts).toEqual([0, 1, 0, 1]);
    const memories = await Promise.all(ranks.map((one) => one.allocate(SIZE)));
    memories[2]!.view('u8', 0, 8).fill(5);
    const endpoint = await ranks[2]!.connect(0);
    const signalled = { signal: { slot: 0, op: 'inc' } } as const;
    await endpoint.put(memories[2]!.local(0, 8), memories[2]!.remote(0, 0, 8), signalled);
    await memories[0]!.signals.until(0, { cmp: 'ge', value: 1n });
    expect([memories[0]!.view('u8', 7, 1)[0], memories[1]!.view('u8', 7, 1)[0]]).toEqual([5, 0]);
    const elsewhere = (message: RegExp) => ({ code: 'EP_UNSUPPORTED', message: expect.stringMatching(message) });
    await expect(ranks[0]!.connect(1)).rejects.toMatchObject(
      elsewhere(/rank 1 is on another host than rank 0, and nvshmem:shm reaches ranks 0, 2: compose it/),
    );
    expect(() => ranks[0]!.device(memories[0]!)).toThrow(expect.objectContaining(elsewhere(/whose handle is for all/)));
    expect(() => memories[0]!.peerView(1, 'u8', 0, 1)).toThrow();
    const nobody = { store: scope.add(memoryStore()), joining: [1] };
    await expect(ranks[0]!.readmit(nobody)).rejects.toMatchObject(elsewhere(/readmit: .* on several hosts/));
    expect(ranks[0]!.succession).toBeUndefined();
    // A rank of which nothing is heard cannot be waited for.
    await expect(memories[0]!.signals.until(0, { cmp: 'ge', value: 9n }, { peers: [1] })).rejects.toMatchObject({
      code: 'EP_PEER_LOST',
    });
    await Promise.all(ranks.map((one) => one.barrier()));
  });

  it('is routed to by what it knows of hosts', async () => {
    await using scope = new CloseScope();
    const [first] = await opened(scope, onHosts(0, 0, 2));
    const nic = {
      ...first!,
      name: 'nic',
      capabilities: { ...first!.capabilities, needs: new Set(['bundled'] as const) },
    };
    const choose = byCapability();
    const chosen = [0, 1, 2].map((peer) => choose(peer, [first! as never, nic as never]).name);
    expect(chosen).toEqual(['nvshmem:shm', 'nvshmem:shm', 'nic']);
  });

  it('finds which ranks share one; where all do, it is as if nobody had asked', async () => {
    await using scope = new CloseScope();
    const ranks = await opened(scope, [{ hosts: 'found' }, { hosts: 'found' }]);
    expect(ranks.map(({ hosts, world }) => [hosts, world.size])).toEqual([
      [[0, 0], 2],
      [[0, 0], 2],
    ]);
    const memories = await Promise.all(ranks.map((one) => one.allocate(SIZE)));
    expect(ranks[0]!.device(memories[0]!).kind).toBe('memory:load-store');
    expect(ranks[0]!.succession).toBeDefined();
  });

  it('opens on no rank where ranks see hosts otherwise', async () => {
    await using scope = new CloseScope();
    const odd = [...onHosts(0, 0, 2).slice(0, 2), { hosts: [0, 1, 2] }];
    for (const end of await openAll(scope, odd)) {
      const message = expect.stringMatching(/rank 2 of 3 differ: hosts is "0 1 2" on rank 2, "0 0 2" on the other 2/);
      expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_RENDEZVOUS', message } });
    }
  });

  it('refuses what is no placement, at once', async () => {
    await using scope = new CloseScope();
    const refused = async (config: object, message: RegExp) => {
      const member = { rank: 0, worldSize: 3, store: scope.add(memoryStore()) };
      await expect(nvshmem.shm.open(member, { signal, config })).rejects.toMatchObject({
        code: 'EP_INVALID_ARGUMENT',
        message: expect.stringMatching(message),
      });
    };
    await refused({ hosts: [0, 0] }, /hosts must be 'found', or a list of 3 ranks/);
    await refused({ hosts: 'all' }, /hosts must be 'found', or a list of 3 ranks/);
    await refused({ hosts: [0, 2, 2] }, /hosts\[1\] must be the lowest rank of its host/);
    await refused({ hosts: [0, 0, 3] }, /hosts\[2\]/);
    await refused({ hosts: 'found', activeRanks: [0, 1] }, /activeRanks must be absent beside hosts/);
    const member = { rank: 0, worldSize: 3, store: scope.add(memoryStore()) };
    await expect(nvshmem.shm.rejoin(member, { signal, config: { hosts: 'found' } })).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/hosts must be absent/),
    });
  });
});
