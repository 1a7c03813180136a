import { describe, expect, it } from 'vitest';
import {
  byCapability,
  type ComposedMemory,
  commonCapabilities,
  compose,
  EpError,
  formatRoutes,
  type Need,
  offers,
  type Rank,
  type Transport,
} from '../src/index.js';
import { type FakeOptions, fakeTransport, fakeWorld } from './fake-transport.js';

const WORLD = 4;
const near = (peer: Rank) => peer < 2;

/** One composed transport for each rank: `shm` between ranks of one pair, `nic` across pairs. */
function cluster(
  options: { shm?: Partial<FakeOptions>; nic?: Partial<FakeOptions>; memory?: 'shared' | 'split' } = {},
) {
  const [shmWorld, nicWorld] = [fakeWorld(), fakeWorld()];
  const shm = Array.from({ length: WORLD }, (_, rank) =>
    fakeTransport(shmWorld, rank, WORLD, {
      name: 'shm',
      needs: ['bundled', 'prior', 'add', 'load-store'],
      ...options.shm,
    } as FakeOptions & {
      needs: ('bundled' | 'prior' | 'add')[];
    }),
  );
  const nic = Array.from({ length: WORLD }, (_, rank) =>
    fakeTransport(nicWorld, rank, WORLD, {
      name: 'nic',
      needs: ['bundled', 'add'],
      maxMessageBytes: 100,
      registers: true,
      ...options.nic,
    } as FakeOptions & { needs: ('bundled' | 'add')[] }),
  );
  const ranks = shm.map((transport, rank) =>
    compose([transport, nic[rank]!], (peer) => (near(peer) === near(rank) ? transport : nic[rank]!), {
      memory: options.memory ?? 'shared',
    }),
  );
  return { ranks, shm, nic };
}

const SIZE = { byteLength: 64, signalSlots: 4 };
const allocate = (ranks: ReturnType<typeof cluster>['ranks']) => Promise.all(ranks.map((t) => t.allocate(SIZE)));

describe('compose', () => {
  it('has the capabilities that all members have', () => {
    const { ranks } = cluster();
    const [first] = ranks;
    expect([...first!.capabilities.needs].sort()).toEqual(['add', 'bundled']);
    expect(first!.capabilities.maxMessageBytes).toBe(100);
    expect([first!.rank, first!.worldSize, first!.name]).toEqual([0, 4, 'compose(shm, nic)']);
    expect([offers(first!, 'bundled'), offers(first!, 'prior')]).toEqual([true, false]);
  });

  it('splits bytes as the member wants it for which requests cost most', () => {
    const all = { maxMessageBytes: 1, maxSignalSlots: 1, needs: new Set<never>(), initiators: new Set<never>() };
    expect(commonCapabilities([all, { ...all, chunkBytes: 4096 }, { ...all, chunkBytes: 64 }]).chunkBytes).toBe(4096);
    expect(commonCapabilities([all, all])).not.toHaveProperty('chunkBytes');
  });

  it('prints its routes', () => {
    const { ranks } = cluster();
    expect(formatRoutes(ranks[2]!.routes())).toBe('nic  ranks 0-1\nshm  ranks 2-3');
    expect(formatRoutes([])).toBe('');
  });

  it('delivers into one memory, whichever transport carries', async () => {
    const { ranks, shm, nic } = cluster();
    const memories = await allocate(ranks);
    for (const [rank, transport] of ranks.entries()) {
      const source = memories[rank]!;
      source.view('u8', 32 + rank, 1)[0] = 10 + rank;
      for (let peer = 0; peer < WORLD; peer++) {
        const endpoint = await transport.connect(peer);
        await endpoint.put(source.local(32 + rank, 1), source.remote(peer, rank, 1), {
          signal: { slot: 1, op: 'add', value: 5n },
        });
        await endpoint.flush();
      }
    }
    for (const memory of memories) {
      expect([...memory.view('u8', 0, 4)]).toEqual([10, 11, 12, 13]);
      expect(memory.signals.peek(1)).toBe(20n);
      expect(memory.part(0)).toBe(memory.part(3));
      expect(memory.split).toBe(false);
    }
    expect([shm[0]!.log, nic[0]!.log]).toEqual([
      ['put 0', 'put 1'],
      ['put 2', 'put 3'],
    ]);
  });

  it('translates every operation, batches and adopted memory', async () => {
    const needs = ['bundled', 'add', 'get'] as const;
    const { ranks } = cluster({ shm: { registers: true, needs }, nic: { needs } });
    const memories = await allocate(ranks);
    const [mine, theirs] = [memories[0]!, memories[3]!];
    const endpoint = await ranks[0]!.connect(3);
    await endpoint.putValue(mine.remote(3, 0, 1), 7n);
    await endpoint.signal(mine, { slot: 0, op: 'add', value: 2n });
    await endpoint.get(mine.remote(3, 0, 1), mine.local(9, 1));
    expect([mine.view('u8', 9, 1)[0], theirs.signals.peek(0)]).toEqual([7, 2n]);
    const adopted = await ranks[0]!.adopt({ address: mine.addresses!.bytes, byteLength: 64 });
    const works = endpoint.submit([
      { kind: 'put', from: { memory: adopted, byteOffset: 9, byteLength: 1 }, to: mine.remote(3, 1, 1) },
      {
        kind: 'put-value',
        to: { memory: mine, peer: 3, byteOffset: 2, byteLength: 1 },
        value: 8n,
        signal: { slot: 0, op: 'add' },
      },
      { kind: 'signal', memory: mine, signal: { slot: 0, op: 'add', value: 10n } },
    ]);
    await Promise.all(works);
    expect([...theirs.view('u8', 0, 3), theirs.signals.peek(0)]).toEqual([7, 7, 8, 13n]);
    await mine.write(Uint8Array.of(1, 2), mine.local(20, 2));
    const into = new Uint8Array(2);
    await mine.read(mine.local(20, 2), into);
    expect([...into]).toEqual([1, 2]);
    await adopted.close();
    const late = endpoint.put({ memory: adopted, byteOffset: 0, byteLength: 1 }, mine.remote(3, 1, 1));
    await expect(late).rejects.toMatchObject({ code: 'EP_CLOSED' });
  });

  it('refuses what is out of bounds or meant for another peer', async () => {
    const { ranks } = cluster();
    const [memory] = await allocate(ranks);
    const endpoint = await ranks[0]!.connect(1);
    expect(() => memory!.remote(3, 60, 5)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
    expect(() => memory!.remote(4, 0, 1)).toThrow(/peer must be an integer from 0 to 3, found 4/);
    expect(() => memory!.local(60, 5)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
    await expect(endpoint.put(memory!.local(0, 1), memory!.remote(2, 0, 1))).rejects.toThrow(
      /put to rank 1: remote region must be one of rank 1, found "one of rank 2"/,
    );
    await expect(ranks[0]!.connect(4)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });

  it('carries what is wrong with a call by its Work', async () => {
    const { ranks } = cluster();
    const [memory] = await allocate(ranks);
    const endpoint = await ranks[0]!.connect(3);
    const [from, to] = [memory!.local(0, 1), memory!.remote(3, 0, 1)];
    const signal = { slot: 0, op: 'add', value: 1n } as const;
    const fewer = compose([fakeTransport(fakeWorld(), 0, WORLD, { name: 'alone', needs: ['bundled', 'add'] })]);
    const foreign = await fewer.allocate(SIZE);
    for (const odd of [undefined, null, 5, 'x', {}, []] as never[]) {
      const calls = [
        ...[() => [endpoint.put(odd, to)], () => [endpoint.put(from, odd)], () => [endpoint.putValue(odd, 1n)]],
        () => endpoint.submit([odd, { kind: 'put', from: odd, to }, { kind: 'put-value', to: odd, value: 1n }]),
      ];
      for (const call of calls)
        for (const work of call()) await expect(work).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
      if (!Array.isArray(odd)) expect(() => endpoint.submit(odd)).toThrow(/batch must be a list of requests/);
    }
    await expect(endpoint.put(foreign.local(0, 1), to)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await expect(endpoint.signal(foreign, signal)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await fewer.close();
  });

  it('gives each request of a batch its own status', async () => {
    const { ranks } = cluster();
    const memories = await allocate(ranks);
    const memory = memories[0]!;
    const endpoint = await ranks[0]!.connect(3);
    memory.view('u8', 0, 1)[0] = 9;
    const from = memory.local(0, 1);
    const works = endpoint.submit([
      { kind: 'put', from, to: memory.remote(2, 5, 1) },
      { kind: 'put', from, to: memory.remote(3, 6, 1) },
      undefined as never,
      { kind: 'put-value', to: memory.remote(3, 7, 1), value: 4n },
    ]);
    const ends = await Promise.allSettled(works);
    expect(ends.map(({ status }) => status)).toEqual(['rejected', 'fulfilled', 'rejected', 'fulfilled']);
    expect(works.map(({ op }) => op)).toEqual(['put', 'put', 'submit', 'put-value']);
    expect([...memories[3]!.view('u8', 5, 3)]).toEqual([0, 9, 4]);
    // What nobody looked at is told once, by the next call or by the close.
    const wrong = () => void endpoint.putValue(memory.remote(2, 0, 1), 1n);
    wrong();
    expect(wrong).toThrow(/putValue \d+ failed earlier and nobody waited for it/);
    wrong();
    await expect(endpoint.flush()).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await endpoint.flush();
    wrong();
    await expect(endpoint.close()).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });

  it('rejects instead of splitting in silence where memory cannot be shared, and leaves nothing behind', async () => {
    const noRegister = cluster({ nic: { registers: false } });
    await expect(noRegister.ranks[0]!.allocate(SIZE)).rejects.toMatchObject({
      code: 'EP_UNSUPPORTED',
      message: /nic: cannot register/,
    });
    await expect(noRegister.ranks[0]!.allocate(SIZE)).rejects.toMatchObject({
      message: /put another transport first, or compose with memory 'split'/,
    });
    expect(noRegister.shm[0]!.log).toEqual([]);
    await expect(noRegister.ranks[0]!.adopt({ address: 1n, byteLength: 1 })).rejects.toMatchObject({
      code: 'EP_UNSUPPORTED',
    });
  });

  it('splits when asked: what a peer sends lands in its part, and nothing pretends to be whole', async () => {
    const { ranks } = cluster({ memory: 'split', shm: {}, nic: { registers: false } });
    const memories = await allocate(ranks);
    const receiver = memories[0]!;
    for (const rank of [1, 2]) {
      const from = memories[rank]!.part(0);
      from.view('u8', 5, 1)[0] = 50 + rank;
      const endpoint = await ranks[rank]!.connect(0);
      await endpoint.put(from.local(5, 1), memories[rank]!.remote(0, 5, 1), { signal: { slot: 0, op: 'add' } });
    }
    expect([1, 2].map((peer) => receiver.part(peer).view('u8', 5, 1)[0])).toEqual([51, 52]);
    expect([1, 2].map((peer) => receiver.part(peer).signals.peek(0))).toEqual([1n, 1n]);
    const uses: ((memory: ComposedMemory) => unknown)[] = [
      (m) => m.view('u8', 0, 1),
      (m) => m.local(0, 1),
      (m) => m.signals.peek(0),
    ];
    for (const use of uses) {
      expect(() => use(receiver)).toThrow(
        expect.objectContaining({ code: 'EP_UNSUPPORTED', message: expect.stringMatching(/use part\(peer\)/) }),
      );
    }
    await expect(receiver.signals.until(0, { cmp: 'ge', value: 1n })).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
    await expect(
      receiver.read({ memory: receiver, byteOffset: 0, byteLength: 1 }, new Uint8Array(1)),
    ).rejects.toMatchObject({
      code: 'EP_UNSUPPORTED',
    });
    expect([receiver.split, receiver.addresses]).toEqual([true, undefined]);
  });

  it('gives kernels one handle for each transport in use, and one in all only if that is the truth', async () => {
    const { ranks, shm, nic } = cluster();
    const [memory] = await allocate(ranks);
    expect(ranks[0]!.devices(memory!).map(({ via, peers, handle }) => [via, peers, handle.kind])).toEqual([
      ['shm', [0, 1], 'shm'],
      ['nic', [2, 3], 'nic over 0,1'],
    ]);
    // The handle of the one that knows whom the other's memory maps.
    expect(ranks[0]!.device(memory!).kind).toBe('nic over 0,1');
    expect(() => ranks[0]!.device({} as never)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
    const unmapped = cluster({ shm: { needs: ['bundled', 'add'] } });
    const [apart] = await allocate(unmapped.ranks);
    expect(() => unmapped.ranks[0]!.device(apart!)).toThrow(expect.objectContaining({ code: 'EP_UNSUPPORTED' }));
    const split = cluster({ memory: 'split' });
    const [pieces] = await allocate(split.ranks);
    expect(() => split.ranks[0]!.device(pieces!)).toThrow(expect.objectContaining({ code: 'EP_UNSUPPORTED' }));
    const single = compose([shm[0]!, nic[0]!], () => nic[0]!);
    expect(single.device(await nic[0]!.allocate(SIZE)).kind).toBe('nic');
  });

  it('fails when a member fails, and ends waits on signals with its reason', async () => {
    const { ranks, nic } = cluster();
    const memories = await allocate(ranks);
    const wait = memories[0]!.signals.until(0, { cmp: 'ge', value: 1n });
    const reason = new Error('port down');
    nic[0]!.breakdown.abort(reason);
    await expect(wait).rejects.toBe(reason);
    expect(ranks[0]!.failed.reason).toBe(reason);
    expect(ranks[1]!.failed.aborted).toBe(false);
  });

  it('goes on waiting for peers of whom a failure says nothing', async () => {
    const { ranks, nic } = cluster();
    const memories = await allocate(ranks);
    const test = { cmp: 'ge', value: 1n } as const;
    const others = memories[0]!.signals.until(0, test, { peers: [0, 1] });
    const named = memories[0]!.signals.until(0, test, { peers: [1, 2] });
    const reason = new EpError('EP_PEER_LOST', 'rank 2 died', { context: { lost: [2] } });
    nic[0]!.breakdown.abort(reason);
    await expect(named).rejects.toBe(reason);
    await expect(memories[0]!.signals.until(0, test)).rejects.toBe(reason);
    const controller = new AbortController();
    const later = memories[0]!.signals.until(0, test, { peers: [3], signal: controller.signal });
    controller.abort('enough');
    await expect(later).rejects.toBe('enough');
    const state = await Promise.race([others, new Promise((resolve) => setImmediate(() => resolve('waiting')))]);
    expect(state).toBe('waiting');
  });

  it('has another signal, and waits for those that were lost, once they have come back in all members', async () => {
    const { ranks, shm, nic } = cluster();
    const memories = await allocate(ranks);
    const test = { cmp: 'ge', value: 1n } as const;
    const reason = new EpError('EP_PEER_LOST', 'rank 2 died', { context: { lost: [2] } });
    for (const member of [shm[0]!, nic[0]!]) member.breakdown.abort(reason);
    const lost = ranks[0]!.failed;
    expect(lost.reason).toBe(reason);
    await expect(memories[0]!.signals.until(0, test, { peers: [2] })).rejects.toBe(reason);
    const again = new AbortController();
    Object.assign(shm[0]!, { failed: again.signal });
    expect(ranks[0]!.failed.reason).toBe(reason);
    Object.assign(nic[0]!, { failed: new AbortController().signal });
    expect(ranks[0]!.failed.aborted).toBe(false);
    expect(ranks[0]!.failed).toBe(ranks[0]!.failed);
    const wait = memories[0]!.signals.until(0, test, { peers: [2] });
    const next = new EpError('EP_PEER_LOST', 'rank 2 died again', { context: { lost: [2] } });
    again.abort(next);
    await expect(wait).rejects.toBe(next);
    expect(ranks[0]!.failed.reason).toBe(next);
    expect(lost.reason).toBe(reason);
  });

  it('refuses what not all members offer, also where the one that is used does', async () => {
    const { ranks } = cluster({ nic: { needs: ['bundled', 'add'] } });
    const [memory] = await allocate(ranks);
    const endpoint = await ranks[0]!.connect(1);
    const refused = { code: 'EP_UNSUPPORTED', message: expect.stringMatching(/'prior'/) };
    const update = { slot: 0, op: 'add', value: 1n, order: 'prior' } as never;
    const put = () => endpoint.put(memory!.local(0, 1), memory!.remote(1, 0, 1), { signal: update });
    await expect(endpoint.signal(memory!, update)).rejects.toMatchObject(refused);
    await expect(put()).rejects.toMatchObject(refused);
    await expect(endpoint.submit([{ kind: 'signal', memory: memory!, signal: update }])[0]).rejects.toMatchObject(
      refused,
    );
    await expect(endpoint.get(memory!.remote(1, 0, 1), memory!.local(0, 1))).rejects.toThrow(/'get'/);
    expect(memory!.signals.peek(0)).toBe(0n);
  });

  it('has no atomics of several, which are not atomic against each other, and those of one', async () => {
    const needs = ['bundled', 'add', 'atomics'] as const;
    const { ranks } = cluster({ shm: { registers: true, needs }, nic: { needs } });
    expect(offers(ranks[0]! as Transport<Need>, 'atomics')).toBe(false);
    const [memory] = await allocate(ranks);
    for (const peer of [1, 3]) {
      const endpoint = await ranks[0]!.connect(peer);
      const word = memory!.remote(peer, 0, 8);
      await expect(endpoint.fetchAdd!(word, 1n)).rejects.toThrow(/'atomics'/);
      await expect(endpoint.compareSwap!(word, 0n, 1n)).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
    }
    const alone = compose([fakeTransport(fakeWorld(), 0, 1, { name: 'alone', needs })]);
    expect(offers(alone as Transport<Need>, 'atomics')).toBe(true);
    const own = await alone.allocate(SIZE);
    const endpoint = await alone.connect(0);
    expect(await endpoint.fetchAdd!(own.remote(0, 8, 8), 5n)).toBe(0n);
    expect(await endpoint.compareSwap!(own.remote(0, 8, 8), 5n, 9n)).toBe(5n);
    expect(own.view('u8', 8, 1)[0]).toBe(9);
    await alone.close();
  });

  it('closes memories and endpoints, then the transports, newest first', async () => {
    const { ranks, shm, nic } = cluster();
    const [memory] = await allocate(ranks);
    const endpoint = await ranks[0]!.connect(1);
    await ranks[0]!.close();
    await ranks[0]!.close();
    expect([memory!.closed, endpoint.closed, shm[0]!.closed, nic[0]!.closed]).toEqual([true, true, true, true]);
    expect(shm[0]!.log).toEqual(['close endpoint 1', 'close']);
    expect(() => endpoint.signal(memory!, { slot: 0, op: 'add' })).toThrow(
      expect.objectContaining({ code: 'EP_CLOSED' }),
    );
    await expect(ranks[0]!.allocate(SIZE)).rejects.toMatchObject({ code: 'EP_CLOSED' });
  });

  it('refuses members that do not belong together, and policies that answer with something else', () => {
    const one = fakeTransport(fakeWorld(), 0, 2, { name: 'one', needs: ['bundled'] });
    const other = fakeTransport(fakeWorld(), 1, 2, { name: 'other', needs: ['bundled'] });
    expect(() => compose([], () => one as never)).toThrow(/transports must be at least one/);
    expect(() => compose([one, other], () => one)).toThrow(/other must be rank 0 of 2, as one, found "rank 1 of 2"/);
    expect(() => compose([one], () => other)).toThrow(/policy\(0\) must be one of the transports/);
    expect(() => compose([one], () => undefined as never)).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }),
    );
  });
});

describe('byCapability', () => {
  const STORES = ['bundled', 'prior', 'add', 'load-store'] as const;
  const ORDERED = ['bundled', 'prior', 'add'] as const;
  const UNORDERED = ['bundled', 'add'] as const;
  /** Rank 1 of four. */
  const one = <C extends Need>(name: string, needs: readonly C[], hosts?: readonly Rank[]) =>
    fakeTransport(fakeWorld(), 1, WORLD, { name, needs, ...(hosts ? { hosts } : {}) });
  const routesOf = (transport: { routes(): Parameters<typeof formatRoutes>[0] }) => formatRoutes(transport.routes());

  it('stores to all ranks where nobody knows of several hosts, and to its own host where they are known', () => {
    const nic = one('nic', ORDERED);
    expect(routesOf(compose([nic, one('shm', STORES)]))).toBe('shm  ranks 0-3');
    expect(routesOf(compose([nic, one('shm', STORES)], byCapability([7, 7, 4, 4])))).toBe(
      'shm  ranks 0-1\nnic  ranks 2-3',
    );
    // As the transport that maps memory says of itself; what the caller says goes first.
    const knows = one('shm', STORES, [0, 1, 0, 1]);
    expect(routesOf(compose([nic, knows]))).toBe('nic  ranks 0, 2\nshm  ranks 1, 3');
    expect(routesOf(compose([nic, knows], byCapability([0, 0, 0, 1])))).toBe('shm  ranks 0-2\nnic  rank 3');
  });

  it('reaches other hosts by a NIC that keeps order before one that does not, wherever it stands in the list', () => {
    const [shm, ordered, unordered] = [one('shm', STORES), one('ordered', ORDERED), one('unordered', UNORDERED)];
    const apart = byCapability([0, 0, 1, 1]);
    expect(routesOf(compose([shm, unordered, ordered], apart))).toBe('shm      ranks 0-1\nordered  ranks 2-3');
    expect(routesOf(compose([shm, unordered, one('later', UNORDERED)], apart))).toBe(
      'shm        ranks 0-1\nunordered  ranks 2-3',
    );
    expect(routesOf(compose([unordered, ordered], apart))).toBe('ordered  ranks 0-3');
    const chosen = compose([shm, unordered, ordered], (peer, all) => (peer === 3 ? unordered : apart(peer, all)));
    expect(routesOf(chosen)).toBe('shm        ranks 0-1\nordered    rank 2\nunordered  rank 3');
  });

  it('chooses alike on both ends of every pair', () => {
    const hosts = [0, 1, 0, 2];
    const of = (rank: Rank) =>
      compose(
        [
          fakeTransport(fakeWorld(), rank, WORLD, { name: 'shm', needs: STORES }),
          fakeTransport(fakeWorld(), rank, WORLD, { name: 'nic', needs: UNORDERED }),
        ],
        byCapability(hosts),
      ).routes();
    const all = Array.from({ length: WORLD }, (_, rank) => of(rank).map(({ via }) => via));
    expect(all).toEqual([
      ['shm', 'nic', 'shm', 'nic'],
      ['nic', 'shm', 'nic', 'nic'],
      ['shm', 'nic', 'shm', 'nic'],
      ['nic', 'nic', 'nic', 'shm'],
    ]);
  });

  it('refuses hosts that are no list of them, and ranks that nothing reaches', () => {
    const refused = (message: RegExp) =>
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) });
    expect(() => byCapability({} as never)).toThrow(refused(/hosts must be a list of numbers/));
    expect(() => byCapability([0, -1])).toThrow(refused(/hosts\[1\] must be a safe integer/));
    const shm = one('shm', STORES);
    expect(() => compose([shm], byCapability([0, 0]))).toThrow(refused(/hosts must be a list of 4 numbers/));
    expect(() => compose([shm], byCapability([0, 0, 0, 1]))).toThrow(
      refused(/one that reaches rank 3, on another host, found "shm"/),
    );
  });
});
