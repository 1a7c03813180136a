/** Works: many in flight, dropped ones, cut ones, and what a failure leaves behind. */
import { getEventListeners } from 'node:events';
import { listen, memoryStore } from '@ep/core';
import { describe, expect, onTestFinished, test, vi } from 'vitest';
import type { EngineCall, EngineEnd, GroupEngine, ProcessGroup } from '../../src/index.js';
import { initProcessGroup } from '../../src/index.js';
import { failure, openWorld, turn } from './world.js';

const f = (...values: number[]): Float32Array => Float32Array.from(values);

function pick<T>(list: readonly T[], at: number): T {
  return list[at]!;
}

describe('queue', () => {
  test('1 000 asynchronous all-reduces are in flight at once, and end in order', async () => {
    const { each } = await openWorld(3);
    await each(async (group, rank) => {
      const data = Array.from({ length: 1000 }, (_, i) => f(i + rank));
      const ended: number[] = [];
      const works = data.map((one) => group.allReduce(one));
      for (const work of works) void work.then(() => ended.push(work.sequence));
      await Promise.all(works);
      await turn();
      expect(ended).toEqual(Array.from({ length: 1000 }, (_, i) => i + 1));
      expect(data.every((one, i) => one[0] === 3 * i + 3)).toBe(true);
    });
  });

  test('a call that ends at once makes no promise until somebody waits', async () => {
    const { groups } = await openWorld(1);
    const group = pick(groups, 0);
    const work = group.allReduce(f(1));
    expect(work.status).toBe('done');
    const spy = vi.spyOn(globalThis, 'Promise');
    try {
      group.allReduce(f(1));
      group.barrier();
      expect(spy).not.toHaveBeenCalled();
    } finally {
      spy.mockRestore();
    }
    await expect(work).resolves.toBeUndefined();
    await expect(work.wait({ timeoutMs: 0 })).resolves.toBeUndefined();
  });
});

describe('an ended Work', () => {
  test('can be awaited again and again', async () => {
    const { groups } = await openWorld(2);
    const works = groups.map((group) => group.allReduce(f(1)));
    await Promise.all(works);
    const finished = vi.fn();
    for (const work of works) {
      await work;
      await work.finally(finished);
      await expect(work.wait()).resolves.toBeUndefined();
      expect(work.status).toBe('done');
    }
    expect(finished).toHaveBeenCalledTimes(2);
  });

  test('wait has limits of its own, which do not touch the operation', async () => {
    const { groups } = await openWorld(2);
    const work = pick(groups, 0).allReduce(f(1));
    await failure('EP_TIMEOUT', () => work.wait({ timeoutMs: 5 }));
    const reason = new Error('enough');
    await expect(work.wait({ signal: AbortSignal.abort(reason) })).rejects.toBe(reason);
    expect(work.status).toBe('pending');
    await pick(groups, 1).allReduce(f(1));
    await work;
    expect(work).toMatchObject({ status: 'done', contributors: [0, 1], failedRanks: [] });
  });
});

describe('a failure', () => {
  test('that somebody waits for is told to him alone', async () => {
    const { groups } = await openWorld(2);
    const error = await failure('EP_TIMEOUT', () => pick(groups, 0).allReduce(f(1), { timeoutMs: 10 }));
    expect(error.context).toMatchObject({ arrived: [0], awaited: [1] });
    // The next call is told that the group is poisoned, not of the timeout again.
    await failure('EP_POISONED', () => pick(groups, 0).barrier());
  });

  test('that nobody waits for is thrown once, by the next call', async () => {
    const { groups } = await openWorld(2);
    const unobserved = vi.fn();
    onTestFinished(listen('ep:work:unobserved', unobserved));
    const rejections = vi.fn();
    process.on('unhandledRejection', rejections);
    onTestFinished(() => void process.off('unhandledRejection', rejections));
    const group = pick(groups, 0);
    const work = group.allReduce(f(1), { timeoutMs: 5 });
    await vi.waitFor(() => expect(work.status).toBe('failed'));
    await turn();
    expect(rejections).not.toHaveBeenCalled();
    expect(unobserved).toHaveBeenCalledOnce();
    expect(unobserved.mock.calls[0]?.[0]).toMatchObject({ owner: 'group world', op: 'allReduce', sequence: 1 });
    expect(() => group.barrier()).toThrow('group world: allReduce 1 failed earlier and nobody waited for it');
    await failure('EP_POISONED', () => group.barrier());
  });

  test('that nobody waits for is thrown by destroy, if no call comes before', async () => {
    const { groups } = await openWorld(2);
    const group = pick(groups, 0);
    const work = group.broadcast(f(1), { root: 1, timeoutMs: 5 });
    await vi.waitFor(() => expect(work.status).toBe('failed'));
    const error = await failure('EP_TIMEOUT', () => group.destroy());
    expect(error.message).toContain('broadcast 1 failed earlier and nobody waited for it');
    expect(group.closed).toBe(true);
  });

  test('of a receive that nobody waits for is thrown by the next call too', async () => {
    const { groups } = await openWorld(2);
    const group = pick(groups, 0);
    const work = group.recv(f(1), 1, { timeoutMs: 5 });
    await vi.waitFor(() => expect(work.status).toBe('failed'));
    expect(() => group.send(f(1), 1)).toThrow('recv 1 failed earlier and nobody waited for it');
  });

  test('fires `failed` once with the first error, and tells diagnostics of each', async () => {
    const { groups } = await openWorld(2);
    const group = pick(groups, 0);
    const told: unknown[] = [];
    onTestFinished(listen('ep:collectives:failed', (message) => told.push(message)));
    expect(group.failed.aborted).toBe(false);
    const first = await failure('EP_TIMEOUT', () => group.barrier({ timeoutMs: 5 }));
    expect(group.failed.aborted).toBe(true);
    const second = await failure('EP_POISONED', () => group.allReduce(f(1)));
    expect(group.failed.reason).toBe(first);
    expect(told).toEqual([
      { group: 'world', rank: 0, op: 'barrier', sequence: 1, error: first },
      { group: 'world', rank: 0, op: 'allReduce', sequence: 2, error: second },
    ]);
  });

  test('of several calls that ends badly ends when none of them writes any more', async () => {
    const lost = new Error('lost in the first');
    const ends: { readonly resolve: (end: EngineEnd) => void; readonly reject: (error: unknown) => void }[] = [];
    const engine = {
      name: 'by hand',
      rank: 0,
      size: 1,
      view: () => ({ epoch: 1, active: [0] }),
      run: () => new Promise<EngineEnd>((resolve, reject) => ends.push({ resolve, reject })),
      close: () => Promise.resolve(),
    } as unknown as GroupEngine;
    const group = await initProcessGroup({ backend: () => engine, store: memoryStore(), rank: 0, worldSize: 1 });
    // Each too large to be packed with the other.
    const work = group.allReduceCoalesced([new Float32Array(8000), new Float32Array(8000)]);
    const ended = vi.fn();
    work.then(ended, ended);
    pick(ends, 0).reject(lost);
    await turn();
    expect(ended).not.toHaveBeenCalled();
    pick(ends, 1).resolve({ contributors: [0] });
    await turn();
    expect(ended).toHaveBeenCalledWith(lost);
    await group.close();
  });

  test('that the engine throws out of run is a failed Work all the same', async () => {
    const broken = new Error('out of order');
    const engine = {
      name: 'broken',
      rank: 0,
      size: 1,
      run: (): EngineEnd => {
        throw broken;
      },
      view: () => ({ epoch: 0, active: [0] }),
      close: async () => {},
    } as unknown as GroupEngine;
    const group = await initProcessGroup({ backend: () => engine, store: memoryStore(), rank: 0, worldSize: 1 });
    const work = group.barrier();
    await expect(work).rejects.toBe(broken);
    expect(work.status).toBe('failed');
    await group.close();
  });

  test('of a lost rank names it on all survivors alike, and the next call is right', async () => {
    const { memory, groups } = await openWorld(4);
    const survivors = [0, 1, 3].map((rank) => pick(groups, rank));
    const works = survivors.map((group) => group.allReduce(f(1)));
    memory.kill(2);
    for (const work of works) {
      const error = await failure('EP_PEER_LOST', () => work);
      expect(error.context.lost).toEqual([2]);
      expect(work).toMatchObject({ status: 'failed', contributors: [], failedRanks: [2] });
    }
    const data = survivors.map(() => f(1));
    const next = survivors.map((group, i) => group.allReduce(data[i]!));
    await Promise.all(next);
    expect(data).toEqual(survivors.map(() => f(3)));
    for (const [i, work] of next.entries()) {
      expect(work).toMatchObject({ contributors: [0, 1, 3], failedRanks: [2], status: 'done' });
      expect(survivors[i]).toMatchObject({ activeRanks: [0, 1, 3], epoch: 1 });
      expect(survivors[i]!.connections()[2]).toMatchObject({ rank: 2, state: 'lost' });
    }
    // As a rank that died: it has nothing to close.
    await Promise.all(survivors.map((group) => group.close()));
  });

  test('ranks that call different things are named, and the group is poisoned', async () => {
    const { groups } = await openWorld(3);
    const works = groups.map((group, rank) => (rank === 1 ? group.allReduce(f(1, 2)) : group.allReduce(f(1))));
    for (const work of works) {
      const error = await failure('EP_MISMATCH', () => work);
      expect(error.context).toMatchObject({ ranks: [1], sequence: 1 });
    }
    for (const group of groups) await failure('EP_POISONED', () => group.barrier());
  });
});

describe('limits', () => {
  test('a signal cuts the call off with its reason; the others learn who gave up', async () => {
    const { groups } = await openWorld(2);
    const [mine, other] = [pick(groups, 0), pick(groups, 1)];
    const controller = new AbortController();
    const reason = new Error('changed my mind');
    const work = mine.allReduce(f(1), { signal: controller.signal });
    controller.abort(reason);
    await expect(work).rejects.toBe(reason);
    expect(work.status).toBe('aborted');
    expect(mine.failed.aborted).toBe(false);
    await failure('EP_POISONED', () => other.allReduce(f(1)));
    expect(getEventListeners(controller.signal, 'abort')).toEqual([]);
  });

  test('a peer that waits is told at once who gave up', async () => {
    const { groups } = await openWorld(3);
    const waiting = pick(groups, 1).allReduce(f(1));
    const controller = new AbortController();
    const cut = pick(groups, 2).allReduce(f(1), { signal: controller.signal });
    controller.abort();
    await expect(cut).rejects.toBe(controller.signal.reason);
    const error = await failure('EP_ABORTED', () => waiting);
    expect(error.context.ranks).toEqual([2]);
  });

  test('a call that was cut off and not awaited is nobody’s failure', async () => {
    const { groups } = await openWorld(2);
    const group = pick(groups, 0);
    const controller = new AbortController();
    const work = group.barrier({ signal: controller.signal });
    controller.abort();
    await turn();
    expect(work.status).toBe('aborted');
    await group.destroy();
  });

  test('a signal that has fired is thrown by the call, and nothing has begun', async () => {
    const { groups } = await openWorld(2);
    const reason = new Error('too late');
    const signal = AbortSignal.abort(reason);
    const [first] = groups;
    for (const call of [
      () => first!.allReduce(f(1), { signal }),
      () => first!.send(f(1), 1, { signal }),
      () => first!.allGatherObject(1, { signal }),
      () => first!.batchIsendIrecv([{ op: 'send', tensor: f(1), peer: 1 }], { signal }),
    ])
      expect(call).toThrow(reason);
    await Promise.all(groups.map((group) => group.barrier()));
  });

  test('timeouts come from the call, else from the group', async () => {
    const seen: number[] = [];
    const engine = {
      name: 'fake',
      rank: 0,
      size: 1,
      run: (call: EngineCall): EngineEnd => {
        seen.push(call.timeoutMs);
        return { contributors: [0] };
      },
      view: () => ({ epoch: 0, active: [0] }),
      close: async () => {},
    } as unknown as GroupEngine;
    const open = (options: object): Promise<ProcessGroup> =>
      initProcessGroup({ backend: () => engine, store: memoryStore(), rank: 0, worldSize: 1, ...options });
    for (const options of [{}, { env: { EP_TIMEOUT_MS: '0' } }, { timeoutMs: 50 }]) {
      const group = await open(options);
      group.barrier();
      group.barrier({ timeoutMs: 7 });
      group.allReduce(f(1), { timeoutMs: Number.POSITIVE_INFINITY });
      await group.close();
    }
    const none = Number.POSITIVE_INFINITY;
    expect(seen).toEqual([300_000, 7, none, none, 7, none, 50, 7, none]);
  });

  test('monitoredBarrier names all ranks that did not come', async () => {
    const { groups } = await openWorld(5);
    const works = [0, 2].map((rank) => pick(groups, rank).monitoredBarrier({ timeoutMs: 20 }));
    for (const work of works) {
      const error = await failure('EP_TIMEOUT', () => work);
      expect(error.message).toMatch(/^monitoredBarrier: ranks 1, 3-4 of 5 did not come/);
      expect(error.context).toMatchObject({ arrived: [0, 2], awaited: [1, 3, 4] });
      expect(work.failedRanks).toEqual([1, 3, 4]);
    }
  });
});

describe('close', () => {
  test('waits for what is under way, and refuses what comes after', async () => {
    const { groups } = await openWorld(2);
    const data = f(1);
    const work = pick(groups, 0).allReduce(data);
    const closing = pick(groups, 0).destroy();
    expect(() => pick(groups, 0).barrier()).toThrow('group world: barrier was called after close()');
    await pick(groups, 1).allReduce(f(2));
    await closing;
    expect(work.status).toBe('done');
    expect(data).toEqual(f(3));
    await pick(groups, 0).destroy();
  });

  test('does not wait for receives, which end as aborted', async () => {
    const { groups } = await openWorld(2);
    const work = pick(groups, 0).recvAnySource(f(1));
    await pick(groups, 0).close();
    await failure('EP_ABORTED', () => work);
    expect(work.status).toBe('aborted');
    expect(pick(groups, 0).failed.aborted).toBe(false);
    await turn();
    expect(pick(groups, 0).flightRecorder().entries()).toMatchObject([{ kind: 'recv', state: 'aborted' }]);
  });

  test('its signal cuts off what would hold it up', async () => {
    const { groups } = await openWorld(2);
    const work = pick(groups, 0).allReduce(f(1), { timeoutMs: Number.POSITIVE_INFINITY });
    const controller = new AbortController();
    const closing = pick(groups, 0).close({ signal: controller.signal });
    await turn();
    expect(work.status).toBe('pending');
    const reason = new Error('no time');
    controller.abort(reason);
    await expect(closing).rejects.toBe(reason);
    await work.catch(() => {});
    expect(work.status).toBe('aborted');
    await pick(groups, 0).close();
    expect(getEventListeners(controller.signal, 'abort')).toEqual([]);
  });
});

describe('the flight recorder', () => {
  test('is told of every call and message, and how it ended', async () => {
    const { groups } = await openWorld(2);
    const [mine, other] = [pick(groups, 0), pick(groups, 1)];
    await Promise.all(groups.map((group) => group.allReduce(f(1, 2), { op: 'max' })));
    const sent = mine.send(f(1, 2, 3), 1, { tag: 4 });
    await other.recv(new Float32Array(8), 0, { tag: 4 });
    await sent;
    await failure('EP_TIMEOUT', () => mine.reduce(f(1), { root: 1, timeoutMs: 5 }));
    const entries = mine.flightRecorder().entries();
    expect(entries).toMatchObject([
      {
        kind: 'all-reduce',
        op: 'allReduce',
        sequence: 1,
        dtype: 'f32',
        elements: 2,
        bytes: 8,
        reduceOp: 'max',
        state: 'done',
      },
      { kind: 'send', op: 'send', elements: 3, bytes: 12, peer: 1, tag: 4, state: 'done' },
      { kind: 'reduce', op: 'reduce', sequence: 2, elements: 1, root: 1, reduceOp: 'sum', state: 'failed' },
    ]);
  });
});
