/** Point to point: order, tags, sizes, failures of one message, and independence from collectives. */
import { describe, expect, it } from 'vitest';
import type { RecvCall, SendCall } from '../../src/engine.js';
import { type Call, numbers, pause, rejection, SMALL_STAGING, World } from './world.js';

type Options = { readonly tag?: number; readonly timeoutMs?: number; readonly signal?: AbortSignal };
const send = (peer: number, data: SendCall['data'], options: Options = {}): SendCall => ({
  peer,
  data,
  tag: 0,
  timeoutMs: 20_000,
  ...options,
});
const recv = (peer: number, data: RecvCall['data'], options: Options = {}): RecvCall => send(peer, data, options);
const ANY = -1;

function random(length: number, seed: number): Uint8Array {
  const below = numbers(seed);
  return Uint8Array.from({ length }, () => below(256));
}

describe.each(['hostile', 'shm'] as const)('over %s', (kind) => {
  it('messages of every size arrive as they are, in a ring', async () => {
    const size = 3;
    await using world = await World.open({ kind, size, stagingBytes: SMALL_STAGING });
    for (const length of [0, 1, 799, 800, 801, 3200, 3201, 40_000]) {
      const sent = world.engines.map((_, rank) => random(length, rank + length));
      const got = sent.map(() => new Uint8Array(length));
      const ends = await Promise.all(
        world.engines.flatMap((engine, rank) => [
          engine.send(send((rank + 1) % size, sent[rank]!)),
          engine.recv(recv((rank + 2) % size, got[rank]!)),
        ]),
      );
      for (let rank = 0; rank < size; rank++) {
        expect(got[rank]).toEqual(sent[(rank + 2) % size]);
        expect(ends[2 * rank + 1]).toEqual({ source: (rank + 2) % size, byteLength: length });
      }
    }
  });

  it('of a pair keep their order, whoever comes first', async () => {
    await using world = await World.open({ kind, size: 2 });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const got = Array.from({ length: 40 }, () => new Int32Array(1));
    const half = got.slice(0, 20).map((data) => b.recv(recv(0, data)));
    const sends = got.map((_, i) => a.send(send(1, Int32Array.of(i))));
    await Promise.all(half);
    await pause(10);
    await Promise.all([...sends, ...got.slice(20).map((data) => b.recv(recv(0, data)))]);
    expect(got.map(([value]) => value)).toEqual([...Array(40).keys()]);
  });

  it('fails alone where its array is transferred, on either side, and the peer hears of it', async () => {
    await using world = await World.open({ kind, size: 2, stagingBytes: SMALL_STAGING });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const gone = (array: Uint8Array): Uint8Array => structuredClone(array, { transfer: [array.buffer as ArrayBuffer] });
    const target = new Uint8Array(500_000);
    const taken = b.recv(recv(0, target, { tag: 1 }));
    gone(target);
    const sent = a.send(send(1, random(500_000, 2), { tag: 1 }));
    const own = new Uint8Array(500_000);
    const self = [a.send(send(0, own, { tag: 3 })), a.recv(recv(0, new Uint8Array(500_000), { tag: 3 }))];
    gone(own);
    const ends = await Promise.allSettled([taken, sent, ...self]);
    expect(ends[0]).toMatchObject(rejection('EP_DETACHED'));
    expect(ends[1]).toMatchObject({ reason: { code: 'EP_ABORTED', context: { reason: 'EP_DETACHED' } } });
    const source = random(500_000, 3);
    const given = a.send(send(1, source, { tag: 2 }));
    const awaited = b.recv(recv(0, new Uint8Array(500_000), { tag: 2 }));
    gone(source);
    const [gave, got1] = await Promise.allSettled([given, awaited]);
    expect(gave).toMatchObject(rejection('EP_DETACHED'));
    expect(got1).toMatchObject({ reason: { code: 'EP_ABORTED', context: { reason: 'EP_DETACHED' } } });
    const got = new Uint8Array(40_000);
    const last = random(40_000, 4);
    await Promise.all([a.send(send(1, last)), b.recv(recv(0, got))]);
    expect(got).toEqual(last);
    await Promise.all(world.engines.map((_, rank) => world.run(rank, { kind: 'barrier' })));
  });

  it('are matched by tag, the oldest first, and one that is not taken holds up nobody', async () => {
    await using world = await World.open({ kind, size: 2, stagingBytes: SMALL_STAGING });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const large = random(30_000, 1);
    const untaken = a.send(send(1, large, { tag: 1 }));
    const others = [2, 3, 2].map((tag, i) => a.send(send(1, Uint8Array.of(i), { tag })));
    const got = [new Uint8Array(1), new Uint8Array(1), new Uint8Array(1)];
    await b.recv(recv(0, got[0]!, { tag: 3 }));
    await b.recv(recv(0, got[1]!, { tag: 2 }));
    await b.recv(recv(0, got[2]!, { tag: 2 }));
    expect(got.map(([value]) => value)).toEqual([1, 0, 2]);
    await Promise.all(others);
    const last = new Uint8Array(30_000);
    await Promise.all([untaken, b.recv(recv(0, last, { tag: 1 }))]);
    expect(last).toEqual(large);
  });
});

describe('over the hostile transport', () => {
  it('many senders reach one receiver that takes any', async () => {
    const size = 5;
    await using world = await World.open({ size, stagingBytes: 2 * SMALL_STAGING });
    const perSender = 6;
    const sends = world.engines.flatMap((engine, rank) =>
      rank === 0
        ? []
        : Array.from({ length: perSender }, (_, i) => engine.send(send(0, random(1000 * i, rank * 100 + i)))),
    );
    const next = Array(size).fill(0);
    for (let i = 0; i < perSender * (size - 1); i++) {
      const data = new Uint8Array(1000 * perSender);
      const { source, byteLength } = await world.engines[0]!.recv(recv(ANY, data));
      const nth = next[source]++;
      expect(byteLength).toBe(1000 * nth);
      expect(data.subarray(0, byteLength)).toEqual(random(byteLength, source * 100 + nth));
    }
    expect(next).toEqual([0, ...Array(size - 1).fill(perSender)]);
    await Promise.all(sends);
  });

  it('a rank can send to itself, from any source too', async () => {
    await using world = await World.open({ size: 2 });
    const engine = world.engines[0]!;
    const got = [new Uint16Array(2), new Uint16Array(0), new Uint16Array(1)];
    const first = engine.recv(recv(0, got[0]!));
    await Promise.all([first, engine.send(send(0, Uint16Array.of(4, 5)))]);
    const early = engine.send(send(0, new Uint16Array(0)));
    expect(await engine.recv(recv(0, got[1]!))).toEqual({ source: 0, byteLength: 0 });
    const late = engine.send(send(0, Uint16Array.of(6)));
    expect(await engine.recv(recv(ANY, got[2]!))).toEqual({ source: 0, byteLength: 2 });
    await Promise.all([early, late]);
    expect(got[0]).toEqual(Uint16Array.of(4, 5));
    expect(got[2]).toEqual(Uint16Array.of(6));
  });

  it('messages and collectives do not wait for each other', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const reduce = (rank: number): Call => ({
      kind: 'all-reduce',
      dtype: 'f32',
      reduceOp: 'sum',
      inputs: [new Float32Array(4000).fill(rank)],
      outputs: [new Float32Array(4000)],
    });
    // Rank 2 does not come to the collective: messages pass.
    const waiting = [world.run(0, reduce(0)), world.run(1, reduce(1))];
    const data = random(9000, 4);
    const got = new Uint8Array(9000);
    await Promise.all([a.send(send(1, data)), b.recv(recv(0, got))]);
    expect(got).toEqual(data);
    // Nobody takes this message: the collective goes on.
    const untaken = a.send(send(1, data));
    await Promise.all([...waiting, world.run(2, reduce(2))]);
    await Promise.all([untaken, b.recv(recv(0, got))]);
    // Both at once, many times.
    await Promise.all(
      Array.from({ length: 10 }, async (_, i) => {
        const mine = random(2000 + i, i);
        const theirs = new Uint8Array(mine.length);
        const ends = await Promise.all([
          world.all(reduce),
          a.send(send(1, mine, { tag: i })),
          b.recv(recv(0, theirs, { tag: i })),
        ]);
        expect(theirs).toEqual(mine);
        expect(ends[0]).toHaveLength(3);
      }),
    );
  });

  it('a message that does not fit is refused on both sides, and the next one arrives', async () => {
    await using world = await World.open({ size: 2 });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const small = new Uint8Array(3);
    const ends = await Promise.allSettled([a.send(send(1, new Uint8Array(4))), b.recv(recv(0, small))]);
    for (const end of ends) expect(end).toMatchObject(rejection('EP_MISMATCH', { ranks: [0, 1] }));
    const typed = await Promise.allSettled([a.send(send(1, new Float32Array(1))), b.recv(recv(0, new Int32Array(1)))]);
    for (const end of typed) {
      expect(end).toMatchObject(rejection('EP_MISMATCH', { expected: 'Int32Array of at most 4 bytes' }));
    }
    const [, end] = await Promise.all([a.send(send(1, Uint8Array.of(7))), b.recv(recv(0, small))]);
    expect(end).toEqual({ source: 0, byteLength: 1 });
    expect(small).toEqual(Uint8Array.of(7, 0, 0));
    await world.all(() => ({ kind: 'barrier' }));
  });

  it('a deadline ends one message, on both sides if it was under way, and poisons nothing', async () => {
    await using world = await World.open({ size: 2 });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    await expect(b.recv(recv(0, new Uint8Array(1), { timeoutMs: 30, tag: 5 }))).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      context: { awaited: [0], tag: 5 },
    });
    await expect(a.send(send(1, Uint8Array.of(1), { timeoutMs: 30 }))).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      context: { awaited: [1] },
    });
    await pause(20);
    // What was offered in vain is not taken for the next one.
    const got = new Uint8Array(1);
    await Promise.all([a.send(send(1, Uint8Array.of(2))), b.recv(recv(0, got))]);
    expect(got[0]).toBe(2);
    await world.all(() => ({ kind: 'barrier' }));
  });

  it('the time of a message begins when those before it have ended', async () => {
    await using world = await World.open({ size: 2 });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const got = [new Uint8Array(1), new Uint8Array(1)];
    const receives = [b.recv(recv(0, got[0]!)), b.recv(recv(0, got[1]!, { timeoutMs: 2000 }))];
    const sends = [a.send(send(1, Uint8Array.of(1)))];
    await Promise.all([receives[0], ...sends]);
    const second = b.recv(recv(0, new Uint8Array(1), { timeoutMs: 60 }));
    await a.send(send(1, Uint8Array.of(2)));
    await receives[1];
    await expect(second).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
    // The first may wait for 20 s: the second must not run out of its time meanwhile.
    const first = a.send(send(1, Uint8Array.of(3)));
    const behind = a.send(send(1, Uint8Array.of(4), { timeoutMs: 400 }));
    await pause(800);
    const last = [new Uint8Array(1), new Uint8Array(1)];
    const both = last.map((data) => b.recv(recv(0, data)));
    await Promise.all([first, behind, ...both]);
    expect(last.map(([value]) => value)).toEqual([3, 4]);
  });

  it('an abort in the middle of a large message ends both sides, and leaves the lane usable', async () => {
    for (const who of ['sender', 'receiver'] as const) {
      await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING, hostile: { maxDelayUs: 500 } });
      const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
      const controller = new AbortController();
      const { signal } = controller;
      const got = new Uint8Array(60_000);
      const ends = Promise.allSettled([
        a.send(send(1, new Uint8Array(60_000).fill(1), who === 'sender' ? { signal } : {})),
        b.recv(recv(0, got, who === 'receiver' ? { signal } : {})),
      ]);
      while (got[1000] === 0) await pause(1);
      controller.abort('stop');
      const [sent, received] = await ends;
      expect(who === 'sender' ? sent : received).toEqual({ status: 'rejected', reason: 'stop' });
      const [other, rank] = who === 'sender' ? [received, 0] : [sent, 1];
      expect(other).toMatchObject(rejection('EP_ABORTED', { ranks: [rank] }));
      // Nothing is written to the array of a receive that has ended, whatever is still on its way.
      const before = got.slice();
      const next = new Uint8Array(5000);
      await Promise.all([a.send(send(1, new Uint8Array(5000).fill(9))), b.recv(recv(0, next))]);
      expect(next).toEqual(new Uint8Array(5000).fill(9));
      expect(got).toEqual(before);
      expect(got.at(-1)).toBe(0);
    }
  });

  it('the death of a peer ends messages with it, and no others', async () => {
    await using world = await World.open({ size: 3 });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    const pending = Promise.allSettled([
      a.send(send(2, new Uint8Array(9))),
      a.recv(recv(2, new Uint8Array(9))),
      b.recv(recv(2, new Uint8Array(9))),
    ]);
    const any = a.recv(recv(ANY, new Uint8Array(1), { tag: 8 }));
    await pause(20);
    await world.lose(2);
    for (const end of await pending) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [2] }));
    await expect(a.send(send(2, new Uint8Array(1)))).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
    await Promise.all([b.send(send(0, Uint8Array.of(1), { tag: 8 })), any]);
    const hopeless = a.recv(recv(ANY, new Uint8Array(1)));
    await world.lose(1);
    await expect(hopeless).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [1, 2] } });
  });

  it('a poisoned group still carries messages', async () => {
    await using world = await World.open({ size: 2 });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    await expect(world.run(0, { kind: 'barrier', timeoutMs: 20 })).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
    const got = new Uint8Array(1);
    await Promise.all([a.send(send(1, Uint8Array.of(3))), b.recv(recv(0, got))]);
    expect(got[0]).toBe(3);
  });

  it('counts what it writes: bytes of payload at the sender, a record each way', async () => {
    await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING });
    const [a, b] = world.engines as [World['engines'][0], World['engines'][0]];
    await Promise.all([a.send(send(1, new Uint8Array(5000))), b.recv(recv(0, new Uint8Array(5000)))]);
    expect(a.trace().send).toMatchObject({ calls: 1, bytes: 5000, signals: 1 });
    expect(b.trace().recv).toEqual({ calls: 1, bytes: 0, writes: 0, signals: 1 });
  });
});
