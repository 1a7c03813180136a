/** How calls end badly: mismatches, deadlines, aborts, ranks that go. In one thread; ranks that are killed are in death.test.ts. */
import { doneWork, type Transport, type Work } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { type Call, pause, rejection, SMALL_STAGING, World, withMembers } from './world.js';

const CODES = (ends: readonly PromiseSettledResult<unknown>[]): readonly string[] =>
  ends.map((end) => (end.status === 'fulfilled' ? 'done' : ((end.reason as { code?: string }).code ?? 'no code')));

const reduceOf = (length: number, value: number): Call => ({
  kind: 'all-reduce',
  dtype: 'f32',
  reduceOp: 'sum',
  inputs: [new Float32Array(length).fill(value)],
  outputs: [new Float32Array(length)],
});

const barrier = (timeoutMs = 20_000): Call => ({ kind: 'barrier', timeoutMs });

describe('a mismatch', () => {
  const floats = (length: number): Call => reduceOf(length, 1);
  const broadcastFrom = (root: number, rank: number): Call => ({
    kind: 'broadcast',
    dtype: 'u8',
    root,
    inputs: rank === root ? [new Uint8Array(4)] : [],
    outputs: rank === root ? [] : [new Uint8Array(4)],
  });
  const odd: { readonly [what: string]: readonly [right: (rank: number) => Call, wrong: (rank: number) => Call] } = {
    kind: [() => floats(4), () => barrier()],
    length: [() => floats(4), () => floats(5)],
    dtype: [
      () => floats(4),
      () => ({ ...floats(4), dtype: 'i32', inputs: [new Int32Array(4)], outputs: [new Int32Array(4)] }),
    ],
    reduction: [() => floats(4), () => ({ ...floats(4), reduceOp: 'max' })],
    factor: [
      () => ({ ...floats(4), reduceOp: { op: 'premul-sum', factor: 2 } }),
      () => ({ ...floats(4), reduceOp: { op: 'premul-sum', factor: 3 } }),
    ],
    root: [(rank) => broadcastFrom(0, rank), (rank) => broadcastFrom(1, rank)],
  };

  it.each(Object.keys(odd))('of the %s names the odd rank on every rank', async (what) => {
    await using world = await World.open({ size: 3 });
    const [right, wrong] = odd[what]!;
    await world.all(() => barrier());
    const ends = await world.settled((rank) => (rank === 1 ? wrong(rank) : right(rank)));
    for (const end of ends) {
      expect(end).toMatchObject(rejection('EP_MISMATCH', { ranks: [1], sequence: 2 }));
      const { message, context } = (end as PromiseRejectedResult).reason;
      expect(message).toContain(context.expected);
      expect(message).toContain(context.found);
      expect(context.expected).not.toBe(context.found);
    }
    const after = await world.settled(() => barrier());
    expect(CODES(after)).toEqual(['EP_POISONED', 'EP_POISONED', 'EP_POISONED']);
  });

  it('of what two ranks give and take in an all-to-all names both, on the third too', async () => {
    await using world = await World.open({ size: 3 });
    const ends = await world.settled((rank) => ({
      kind: 'all-to-all',
      dtype: 'u8',
      inputs: [0, 1, 2].map((peer) => new Uint8Array(rank === 0 && peer === 2 ? 7 : 3)),
      outputs: [0, 1, 2].map(() => new Uint8Array(3)),
    }));
    for (const end of ends) expect(end).toMatchObject(rejection('EP_MISMATCH', { ranks: [0, 2], sequence: 1 }));
  });

  it('is told soon, although a rank does not come, and to that rank when it does', async () => {
    await using world = await World.open({ size: 3 });
    const began = performance.now();
    const ends = await world.settled((rank) => (rank === 0 ? barrier() : reduceOf(4, 1)), [0, 1]);
    expect(performance.now() - began).toBeLessThan(10_000);
    for (const end of ends) expect(end).toMatchObject(rejection('EP_MISMATCH', { ranks: [1], sequence: 1 }));
    expect(CODES(await world.settled(() => barrier(), [2]))).toEqual(['EP_MISMATCH']);
  });
});

describe('a deadline', () => {
  it('names who came and who did not; the others hear of it at once', async () => {
    await using world = await World.open({ size: 4 });
    await world.all(() => barrier());
    // Of a call that all have told too much to end it with that.
    const large = (timeoutMs: number): Call => ({ ...reduceOf(900, 1), timeoutMs });
    const [first, ...others] = await world.settled((rank) => large(rank === 0 ? 500 : 60_000), [0, 2, 3]);
    expect(first).toMatchObject(
      rejection('EP_TIMEOUT', { arrived: [0, 2, 3], awaited: [1], sequence: 2, timeoutMs: 500 }),
    );
    for (const end of others) expect(end).toMatchObject(rejection('EP_ABORTED', { ranks: [0], awaited: [1] }));
    // The one that comes too late.
    expect(await world.settled(() => large(60_000), [1])).toMatchObject([rejection('EP_ABORTED', { ranks: [0] })]);
    expect(CODES(await world.settled(() => barrier()))).toEqual(Array(4).fill('EP_POISONED'));
  });

  it('counts from the turn of a call, not from its making', async () => {
    await using world = await World.open({ size: 2 });
    const early = [world.run(0, barrier()), world.run(0, barrier(800))];
    await pause(1200);
    await Promise.all([...early, world.run(1, barrier()), world.run(1, barrier())]);
  });

  it('leaves calls before it alone and poisons those after it', async () => {
    await using world = await World.open({ size: 2 });
    const first = world.run(0, barrier());
    const second = world.run(0, barrier(50));
    const third = world.run(0, barrier());
    const ends = Promise.allSettled([first, second, third]);
    await pause(10);
    await world.run(1, barrier());
    await pause(1);
    expect(CODES(await ends)).toEqual(['done', 'EP_TIMEOUT', 'EP_POISONED']);
  });
});

describe('an abort', () => {
  it('gives the caller its reason and the others the rank', async () => {
    await using world = await World.open({ size: 3 });
    const controller = new AbortController();
    const reason = new Error('enough');
    const ends = world.settled((rank) => ({ ...barrier(), ...(rank === 1 && { signal: controller.signal }) }), [1, 2]);
    await pause(20);
    controller.abort(reason);
    const [mine, theirs] = await ends;
    expect(mine).toEqual({ status: 'rejected', reason });
    expect(theirs).toMatchObject(rejection('EP_ABORTED', { ranks: [1] }));
    expect((theirs as PromiseRejectedResult).reason.message).toContain('enough');
  });

  it('of a call that waits for its turn ends it at once, and only from it on', async () => {
    await using world = await World.open({ size: 2 });
    const controller = new AbortController();
    const first = world.run(0, barrier());
    const second = world.run(0, { ...barrier(), signal: controller.signal });
    controller.abort('no');
    await expect(second).rejects.toBe('no');
    await Promise.all([first, world.run(1, barrier())]);
    await expect(world.run(1, barrier())).rejects.toMatchObject({ code: 'EP_ABORTED', context: { ranks: [0] } });
  });

  it('before the call counts as well', async () => {
    await using world = await World.open({ size: 2 });
    await expect(world.run(0, { ...barrier(), signal: AbortSignal.abort('never') })).rejects.toBe('never');
    await expect(world.run(1, barrier())).rejects.toMatchObject({ code: 'EP_ABORTED' });
  });

  it('of a rank that has closed everything since is told to one whose put, finding nobody, is the first to notice', async () => {
    let hear: () => void = () => {};
    let deaf: Promise<void> | undefined;
    // Waits of rank 1 end late, so that it has seen nothing of what rank 0 did when its own put finds nobody.
    const wrap = (transport: Transport<'bundled' | 'add'>, rank: number): Transport<'bundled' | 'add'> => {
      if (rank !== 1) return transport;
      const allocate: typeof transport.allocate = async (options) => {
        const memory = await transport.allocate(options);
        const { signals } = memory;
        const until: typeof signals.until = async (...args) => {
          try {
            return await signals.until(...args);
          } finally {
            if (args[2]?.signal?.aborted !== true) await deaf;
          }
        };
        // The engine hands the memory back to the transport: it stays that one.
        Object.defineProperty(memory, 'signals', { value: withMembers(signals, { until }) });
        return memory;
      };
      return withMembers(transport, { allocate });
    };
    await using world = await World.open({ kind: 'efa', size: 2, wrap });
    await world.all(() => barrier());
    deaf = new Promise((resolve) => {
      hear = resolve;
    });
    await pause(20); // until it looks no more by itself
    try {
      const abort = new AbortController();
      const reason = new Error('enough');
      const ended = world.run(0, { ...reduceOf(900, 1), signal: abort.signal });
      abort.abort(reason);
      await expect(ended).rejects.toBe(reason);
      await world.engines[0]!.close();
      await world.lose(0);
      await expect(world.run(1, reduceOf(900, 1))).rejects.toMatchObject({
        code: 'EP_ABORTED',
        context: { ranks: [0], reason: 'EP_ABORTED' },
      });
    } finally {
      hear();
    }
  });

  it('does not make Node warn of a leak when a thousand calls share the signal', async () => {
    await using world = await World.open({ kind: 'shm', size: 1 });
    const { signal } = new AbortController();
    const warnings: Error[] = [];
    const listen = (warning: Error): number => warnings.push(warning);
    process.on('warning', listen);
    for (let i = 0; i < 1000; i++) void world.run(0, { ...barrier(), signal });
    await pause(5);
    process.off('warning', listen);
    expect(warnings).toEqual([]);
  });
});

/** Survivors' calls until each has had one that works, and how each ended. */
async function untilItWorks(world: World, survivors: readonly number[]): Promise<readonly (readonly string[])[]> {
  return Promise.all(
    survivors.map(async (rank) => {
      const ends: string[] = [];
      for (let i = 0; i < 20; i++) {
        const [end] = await Promise.allSettled([world.run(rank, barrier())]);
        if (end.status === 'fulfilled') return [...ends, end.value.contributors.join()];
        ends.push(`${end.reason.code} ${end.reason.context.lost}`);
      }
      return ends;
    }),
  );
}

describe('a rank that goes', () => {
  it.each([0, 1, 2])('between calls (rank %i) is told by the next one, and the one after works', async (victim) => {
    await using world = await World.open({ size: 3 });
    const survivors = [0, 1, 2].filter((rank) => rank !== victim);
    await world.all(() => barrier());
    await world.lose(victim);
    for (const ends of await untilItWorks(world, survivors)) {
      expect(ends).toEqual([`EP_PEER_LOST ${victim}`, survivors.join()]);
    }
    for (const rank of survivors) {
      expect(world.engines[rank]!.view()).toEqual({ epoch: 1, active: survivors });
      expect(world.engines[rank]!.connections()[victim]).toMatchObject({ state: 'lost' });
    }
    // Over who is left.
    const outputs = survivors.map(() => new Float32Array(900));
    const ends = await world.all(
      (rank) => ({ ...reduceOf(900, rank + 1), outputs: [outputs[survivors.indexOf(rank)]!] }),
      survivors,
    );
    for (const end of ends) expect(end).toEqual({ contributors: survivors });
    for (const output of outputs) expect(output).toEqual(new Float32Array(900).fill(6 - victim - 1));
  });

  it('and is found by one survivor only when it calls costs the other its next call, made later', async () => {
    await using world = await World.open({ size: 3 });
    await world.lose(2);
    await expect(world.run(0, barrier())).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [2] } });
    await pause(20);
    await expect(world.run(1, barrier())).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [2] } });
    expect(await world.all(() => barrier(), [0, 1])).toEqual([{ contributors: [0, 1] }, { contributors: [0, 1] }]);
  });

  it.each(Array.from({ length: 16 }, (_, i) => i))(
    'inside of a large call ends it alike everywhere (%i)',
    async (moment) => {
      await using world = await World.open({ size: 4, stagingBytes: SMALL_STAGING, hostile: { seed: moment + 1 } });
      const victim = moment % 4;
      const survivors = [0, 1, 2, 3].filter((rank) => rank !== victim);
      const inputs = [0, 1, 2, 3].map((rank) => new Float32Array(2000).fill(rank + 1));
      const outputs = inputs.map(() => new Float32Array(2000));
      const ends = world.settled((rank) => ({ ...reduceOf(0, 0), inputs: [inputs[rank]!], outputs: [outputs[rank]!] }));
      await pause(moment * 4);
      await world.lose(victim);
      const settled = await ends;
      const codes = survivors.map((rank) => CODES(settled)[rank]);
      expect(new Set(codes).size, codes.join()).toBe(1);
      if (codes[0] === 'done') {
        for (const rank of survivors) expect(outputs[rank]).toEqual(new Float32Array(2000).fill(10));
      } else {
        for (const rank of survivors)
          expect(settled[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
      }
      const rest = await untilItWorks(world, survivors);
      for (const one of rest) expect(one).toEqual(rest[0]);
      // One loss is told once.
      const told = (codes[0] === 'done' ? 0 : 1) + rest[0]!.length - 1;
      expect(told).toBe(1);
      expect(rest[0]!.at(-1)).toBe(survivors.join());
    },
  );

  it.each([1, 2, 3, 5, 8])(
    'after its first %i puts to one survivor, and all to the other, ends the call alike',
    async (count) => {
      // Mooncake's parity skew: one survivor misses what the other has, and goes on with another count of chunks.
      const [victim, cutOff] = [0, 1];
      let puts = 0;
      let silent = false;
      let silenced = (): void => {};
      const cut = new Promise<void>((resolve) => {
        silenced = resolve;
      });
      const wrap = (transport: Transport<'bundled' | 'add'>, rank: number): Transport<'bundled' | 'add'> => {
        if (rank !== victim) return transport;
        const connect: typeof transport.connect = async (peer, options) => {
          const endpoint = await transport.connect(peer, options);
          if (peer !== cutOff) return endpoint;
          const drop = <A extends readonly unknown[]>(post: (...args: A) => Work, counts: boolean) => {
            return (...args: A): Work => {
              if (counts && ++puts > count && !silent) {
                silent = true;
                silenced();
              }
              return silent ? doneWork('put', 0) : post(...args);
            };
          };
          return withMembers(endpoint, { put: drop(endpoint.put, true), signal: drop(endpoint.signal, false) });
        };
        return withMembers(transport, { connect });
      };
      await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, wrap });
      const ends = world.settled((rank) => reduceOf(3000, rank + 1));
      await cut;
      await pause(30);
      await world.lose(victim);
      const settled = await ends;
      for (const rank of [1, 2]) expect(settled[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
      for (const one of await untilItWorks(world, [1, 2])) expect(one).toEqual(['1,2']);
      const outputs = [1, 2].map(() => new Float32Array(3000));
      await world.all((rank) => ({ ...reduceOf(3000, rank), outputs: [outputs[rank - 1]!] }), [1, 2]);
      for (const output of outputs) expect(output).toEqual(new Float32Array(3000).fill(3));
    },
  );

  it('with another one leaves the same view on all', async () => {
    for (let seed = 1; seed <= 4; seed++) {
      await using world = await World.open({ size: 5, hostile: { seed } });
      await world.all(() => barrier());
      const survivors = [1, 2, 4];
      const ends = untilItWorks(world, survivors);
      await Promise.all([world.lose(0), pause(seed).then(() => world.lose(3))]);
      const told = await ends;
      for (const one of told) expect(one).toEqual(told[0]);
      // Barriers went on until the view had settled: its last word may still miss one of the two.
      const rest = await untilItWorks(world, survivors);
      for (const one of rest) expect(one).toEqual(rest[0]);
      for (const rank of survivors) expect(world.engines[rank]!.view()).toEqual(world.engines[1]!.view());
      expect(world.engines[1]!.view().active).toEqual(survivors);
    }
  });

  it('leaves the last one able to go on alone', async () => {
    await using world = await World.open({ size: 3 });
    await Promise.all([world.lose(0), world.lose(1)]);
    await pause(50);
    const [ends] = await untilItWorks(world, [2]);
    expect(ends!.at(-1)).toBe('2');
  });

  it('takes calls that it is the root of with it', async () => {
    await using world = await World.open({ size: 3 });
    await world.lose(0);
    await untilItWorks(world, [1, 2]);
    const broadcast = (): Call => ({ kind: 'broadcast', root: 0, outputs: [new Uint8Array(3)] });
    for (const end of await world.settled(broadcast, [1, 2])) {
      expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [0] }));
    }
    await world.all(() => barrier(), [1, 2]);
  });

  it('leaves what it would have written as it was', async () => {
    await using world = await World.open({ size: 3 });
    await world.lose(1);
    await untilItWorks(world, [0, 2]);
    const outputs = [0, 1, 2].map(() => [0, 1, 2].map(() => Uint8Array.of(99)));
    await world.all((rank) => ({ kind: 'all-gather', inputs: [Uint8Array.of(rank)], outputs: outputs[rank]! }), [0, 2]);
    expect(outputs[0]).toEqual([Uint8Array.of(0), Uint8Array.of(99), Uint8Array.of(2)]);
  });

  it('after its last call, in order, disturbs nobody', async () => {
    for (let seed = 1; seed <= 5; seed++) {
      await using world = await World.open({ size: 3, hostile: { seed } });
      const ends = await Promise.all(
        world.engines.map(async (engine, rank) => {
          for (let i = 0; i < 5; i++) await world.run(rank, barrier());
          await engine.close();
          return engine.view().epoch;
        }),
      );
      expect(ends).toEqual([0, 0, 0]);
    }
  });

  it('by closing its group in the middle is lost to the others', async () => {
    await using world = await World.open({ size: 3 });
    const pending = Promise.allSettled([world.run(0, barrier())]);
    await pause(20);
    await world.engines[0]!.close();
    expect(await pending).toMatchObject([rejection('EP_ABORTED')]);
    for (const ends of await untilItWorks(world, [1, 2])) expect(ends).toEqual(['EP_PEER_LOST 0', '1,2']);
    expect(world.engines[1]!.connections()[0]).toEqual({ rank: 0, state: 'lost', detail: 'it closed the group' });
  });

  it('is awaited until the deadline if it only stands still', async () => {
    await using world = await World.open({ size: 2 });
    await expect(world.run(0, barrier(100))).rejects.toMatchObject({ code: 'EP_TIMEOUT', context: { awaited: [1] } });
    expect(world.engines[0]!.view().active).toEqual([0, 1]);
  });
});

it('ends everything when the transport is closed under it', async () => {
  await using world = await World.open({ size: 2 });
  const pending = Promise.allSettled([
    world.run(0, barrier()),
    world.run(0, barrier()),
    world.engines[0]!.recv({ peer: 1, tag: 0, data: new Uint8Array(1), timeoutMs: 20_000 }),
  ]);
  await pause(10);
  await world.transports[0]!.close();
  for (const end of await pending) expect(end.status).toBe('rejected');
  await expect(world.run(0, barrier())).rejects.toBeDefined();
});

describe('an array that is transferred while its call is under way', () => {
  const LENGTH = 200_000;

  it('in place: ends that call on both ranks', async () => {
    await using world = await World.open({ kind: 'hostile', size: 2, stagingBytes: SMALL_STAGING });
    await world.all(() => barrier());
    const arrays = [0, 1].map((rank) => new Float32Array(LENGTH).fill(rank));
    const ends = arrays.map((data, rank) =>
      world.run(rank, { kind: 'all-reduce', dtype: 'f32', reduceOp: 'sum', inputs: [data], outputs: [data] }),
    );
    await pause(1);
    structuredClone(arrays[1], { transfer: [arrays[1]!.buffer as ArrayBuffer] });
    const settled = await Promise.allSettled(ends);
    expect(settled[1]).toMatchObject(rejection('EP_DETACHED'));
    expect(settled[0]!.status).toBe('rejected');
  });
  const move = (kind: 'all-gather' | 'all-reduce' | 'broadcast', rank: number): Call => {
    const own = new Float32Array(LENGTH).fill(rank);
    const outputs = kind === 'all-gather' ? [0, 1].map(() => new Float32Array(LENGTH)) : [new Float32Array(LENGTH)];
    if (kind === 'broadcast') {
      const atRoot = rank === 0;
      return { kind, dtype: 'f32', root: 0, inputs: atRoot ? [own] : [], outputs: atRoot ? [] : outputs };
    }
    return { kind, dtype: 'f32', inputs: [own], outputs, ...(kind === 'all-reduce' && { reduceOp: 'sum' }) };
  };

  it.each([
    ['all-gather', 'inputs', 0],
    ['all-gather', 'outputs', 1],
    ['all-reduce', 'outputs', 1],
    ['all-reduce', 'inputs', 0],
    ['broadcast', 'inputs', 0],
    ['broadcast', 'outputs', 1],
  ] as const)(
    '%s, one of the %s of rank %i: ends that call on all ranks, and the group agrees anew',
    async (kind, which, odd) => {
      await using world = await World.open({ kind: 'hostile', size: 2, stagingBytes: SMALL_STAGING });
      await world.all(() => barrier());
      const calls = [0, 1].map((rank) => move(kind, rank));
      const ends = calls.map((call, rank) => world.run(rank, call));
      await pause(1);
      const array = calls[odd]![which]!.at(-1)!;
      structuredClone(array, { transfer: [array.buffer as ArrayBuffer] });
      const settled = await Promise.allSettled(ends);
      // What had moved before is not lacked; but whoever lost an array is told.
      if (settled[odd]!.status === 'rejected') {
        expect(settled[odd]).toMatchObject(rejection('EP_DETACHED'));
        expect(CODES(settled)[1 - odd]).toMatch(/EP_ABORTED|done/);
      }
      expect(world.engines.map((engine) => engine.view().active)).toEqual([
        [0, 1],
        [0, 1],
      ]);
      await Promise.all(world.engines.map((_, rank) => world.change(rank, { repairs: true })));
      await world.all(() => barrier());
    },
  );
});
