/** Calls whose arrays travel with what ranks tell each other of them: what they give, what they cost, and how they end when who told some of it is gone. */
import { type DType, doneWork, EpError, type Transport, type Work } from '@ep/core';
import { type FabricTransport, nvshmem } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';
import type { EngineCall } from '../../src/engine.js';
import { MOST_GIVEN_BYTES } from '../../src/portable/given.js';
import { decodeRecord, encodeRecord, RECORD_BYTES } from '../../src/portable/records.js';
import { callRecords } from '../../src/portable/signature.js';
import { check, filled, fold, KINDS, make } from './calls.js';
import { type Call, complete, LOOPBACK, pause, rejection, SMALL_STAGING, World, withMembers } from './world.js';

type Bundled = Transport<'bundled' | 'add'>;

const probe = await nvshmem.fabric.probe(LOOPBACK);
const unavailable = probe.available ? '' : ` (skipped: ${probe.reason})`;

const sumOf = (value: number): Omit<Call, 'outputs'> & { readonly outputs: readonly Uint32Array[] } => ({
  kind: 'all-reduce',
  dtype: 'u32',
  reduceOp: 'sum',
  inputs: [Uint32Array.of(value, value)],
  outputs: [new Uint32Array(2)],
});

const givenIn = ({ inputs = [] }: Call): number => inputs.reduce((sum, { byteLength }) => sum + byteLength, 0);

describe.each([
  ['hostile', 2],
  ['hostile', 4],
  ['shm', 3],
] as const)('over %s, %i ranks', (kind, size) => {
  it.each(KINDS)('%s is right, and one record to each peer with all that is given', async (op) => {
    await using world = await World.open({ kind, size, stagingBytes: SMALL_STAGING });
    let calls = 0;
    const given = world.engines.map(() => 0);
    for (const dtype of ['f64', 'f32', 'bf16', 'u8'] as const satisfies DType[]) {
      for (const length of [0, 1, 3]) {
        const made = make(op, dtype, size, length, length % size, 7 + length);
        await check(world, made);
        calls++;
        for (const rank of given.keys()) given[rank]! += givenIn(made.call(rank));
      }
    }
    for (const [rank, engine] of world.engines.entries()) {
      const trace = engine.trace()[op]!;
      const [signals, bytes] = [calls * (size - 1), given[rank]! * (size - 1)];
      expect(trace, `rank ${rank}`).toMatchObject({ calls, signals, bytes });
    }
  });
});

describe('the border', () => {
  it.each([
    [MOST_GIVEN_BYTES, 1],
    [MOST_GIVEN_BYTES + 1, 2],
  ])('of %i bytes takes %i words to each peer', async (length, words) => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING });
    await check(world, make('all-gather', 'u8', 3, length, 0, 1));
    for (const engine of world.engines) expect(engine.trace()['all-gather']!.signals).toBe(2 * words);
  });

  it('is that of the rank which gives most', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING });
    // Rank 2 gives its peers too much for one record, the others hardly anything.
    const lengths = (from: number, to: number): number => (from === 2 ? 200 + to : 1 + from);
    const inputs = [0, 1, 2].map((from) => [0, 1, 2].map((to) => filled('u8', lengths(from, to), 3 * from + to)));
    const outputs = [0, 1, 2].map((to) => [0, 1, 2].map((from) => new Uint8Array(lengths(from, to))));
    await world.all((rank) => ({ kind: 'all-to-all', inputs: inputs[rank]!, outputs: outputs[rank]! }));
    for (const [to, rows] of outputs.entries()) expect(rows).toEqual(inputs.map((row) => row[to]));
    for (const engine of world.engines) expect(engine.trace()['all-to-all']!.signals).toBe(4);
    await check(world, make('scatter', 'u8', 3, 200, 1, 4));
    for (const engine of world.engines) expect(engine.trace().scatter!.signals).toBe(4);
  });

  it('is that of a record, which says of each rank what it gets in an all-to-all', () => {
    const call = (size: number): EngineCall => {
      const none = Array.from({ length: size }, () => new Uint8Array(0));
      return complete({ kind: 'all-to-all', inputs: none, outputs: none }, 1);
    };
    expect(callRecords(call(8))(3)).toMatchObject({ gives: Array(8).fill(0), given: new Uint8Array(0) });
    const long = callRecords(call(300))(3);
    expect(long).toMatchObject({ gives: 0, takes: 0 });
    expect(long).not.toHaveProperty('given');
    expect(encodeRecord(long).byteLength).toBeLessThan(RECORD_BYTES);
  });
});

it('records come as they went, and one that is too long does not go', () => {
  const given = Uint8Array.of(1, 2, 3);
  const record = { kind: 'call', sequence: 9, call: 'barrier', given } as const;
  const slot = new Uint8Array(RECORD_BYTES).fill(7);
  slot.set(encodeRecord(record));
  const read = decodeRecord(slot);
  slot.fill(0);
  expect(read).toEqual(record);
  expect(decodeRecord(encodeRecord({ kind: 'bye', completed: 7 }))).toEqual({ kind: 'bye', completed: 7 });
  expect(() => encodeRecord({ ...record, given: new Uint8Array(RECORD_BYTES) })).toThrow(
    expect.objectContaining({ code: 'EP_CAPACITY' }),
  );
});

it('gives all the same bits in the order of the ranks, in place too', async () => {
  await using world = await World.open({ size: 4, hosts: [0, 1, 0, 1] });
  const inputs = [1, 2 ** 24, 1, -(2 ** 24)].map((value) => Float32Array.of(value));
  // Of each host in rank order, then of the hosts.
  const byHost = [fold('f32', 'sum', [inputs[0]!, inputs[2]!]), fold('f32', 'sum', [inputs[1]!, inputs[3]!])];
  const expected = fold('f32', 'sum', byHost);
  expect(expected, 'the inputs do not show the order').not.toEqual(fold('f32', 'sum', inputs));
  await world.all((rank) => {
    const array = [inputs[rank]!];
    return { kind: 'all-reduce', dtype: 'f32', reduceOp: 'sum', inputs: array, outputs: array };
  });
  for (const input of inputs) expect(input).toEqual(expected);
});

it('goes on over those who are left, with a part for each that there was', async () => {
  await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING });
  await world.all(() => ({ kind: 'barrier' }));
  await world.lose(1);
  const left = [0, 2];
  for (const end of await world.settled(() => ({ kind: 'barrier' }), left))
    expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [1] }));
  const parts = (rank: number): Uint8Array[] => [0, 1, 2].map((to) => Uint8Array.of(10 * rank + to));
  const scattered = [0, 1, 2].map(() => new Uint8Array(1));
  await world.all(
    (rank) => ({
      kind: 'scatter',
      root: 2,
      ...(rank === 2 && { inputs: parts(rank) }),
      outputs: [scattered[rank]!],
    }),
    left,
  );
  expect(left.map((rank) => scattered[rank]![0])).toEqual([20, 22]);
  const sums = [0, 1, 2].map(() => new Uint8Array(1));
  await world.all(
    (rank) => ({ kind: 'reduce-scatter', reduceOp: 'sum', inputs: parts(rank), outputs: [sums[rank]!] }),
    left,
  );
  expect(left.map((rank) => sums[rank]![0])).toEqual([20, 24]);
  const rows = [0, 1, 2].map(() => [0, 1, 2].map(() => Uint8Array.of(99)));
  await world.all((rank) => ({ kind: 'all-to-all', inputs: parts(rank), outputs: rows[rank]! }), left);
  expect(rows[0]!.map(([value]) => value)).toEqual([0, 99, 20]);
  expect(rows[2]!.map(([value]) => value)).toEqual([2, 99, 22]);
});

it('takes nothing into an array that was transferred meanwhile, and holds up nobody', async () => {
  await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING });
  const call = sumOf(1);
  const early = world.run(0, call);
  const [output] = call.outputs;
  structuredClone(output!.buffer, { transfer: [output!.buffer as ArrayBuffer] });
  const other = sumOf(2);
  await Promise.all([early, world.run(1, other)]);
  expect([...other.outputs[0]!]).toEqual([3, 3]);
  await world.all(() => ({ kind: 'barrier' }));
});

it('ends on no rank before that has told the others', async () => {
  let reach = (): void => {};
  const reached = new Promise<void>((resolve) => {
    reach = resolve;
  });
  // Rank 0 hears of rank 1 long before it can speak to it.
  const wrap = (transport: Bundled, rank: number): Bundled => {
    const connect: typeof transport.connect = async (peer, options) => {
      if (rank === 0) await reached;
      return transport.connect(peer, options);
    };
    return withMembers(transport, { connect });
  };
  await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING, wrap });
  const ended: number[] = [];
  const calls = [0, 1].map((rank) => world.run(rank, { kind: 'barrier' }).then(() => ended.push(rank)));
  try {
    await pause(50);
    expect(ended).toEqual([]);
    expect(world.engines[0]!.connections()[1]).toMatchObject({ state: 'connecting' });
  } finally {
    reach();
  }
  await Promise.all(calls);
  expect(world.engines[0]!.connections()[1]).toMatchObject({ state: 'connected' });
});

describe('a survivor that lacks what a lost rank told', () => {
  const VICTIM = 0;
  const CUT_OFF = 1;

  /** What the victim tells CUT_OFF from some moment on goes nowhere. */
  function cutting() {
    let silent = false;
    const wrap = (transport: Bundled, rank: number): Bundled => {
      if (rank !== VICTIM) return transport;
      const connect: typeof transport.connect = async (peer, options) => {
        const endpoint = await transport.connect(peer, options);
        if (peer !== CUT_OFF) return endpoint;
        const drop =
          <A extends readonly unknown[]>(post: (...args: A) => Work) =>
          (...args: A): Work =>
            silent ? doneWork('put', 0) : post(...args);
        return withMembers(endpoint, { put: drop(endpoint.put), signal: drop(endpoint.signal) });
      };
      return withMembers(transport, { connect });
    };
    return {
      wrap,
      cut: (): void => {
        silent = true;
      },
    };
  }

  it.each([3, 4])('gets it from those who have it, of %i ranks, and ends the call as they do', async (size) => {
    const { wrap, cut } = cutting();
    await using world = await World.open({ size, stagingBytes: SMALL_STAGING, wrap });
    const ranks = [...Array(size).keys()];
    const others = ranks.filter((rank) => rank !== VICTIM);
    await world.all(() => ({ kind: 'barrier' }));
    cut();
    const calls = ranks.map((rank) => sumOf(2 ** rank));
    const works = calls.map((call, rank) => world.run(rank, call));
    works[VICTIM]!.catch(() => {});
    const informed = others.filter((rank) => rank !== CUT_OFF);
    // They wait for nobody who waits.
    const ends = await Promise.all(informed.map((rank) => works[rank]!));
    for (const end of ends) expect(end.contributors).toEqual(ranks);
    await world.lose(VICTIM);
    expect((await works[CUT_OFF]!).contributors).toEqual(ranks);
    for (const rank of others) expect([...calls[rank]!.outputs[0]!]).toEqual(Array(2).fill(2 ** size - 1));
    for (const end of await world.settled(() => ({ kind: 'barrier' }), others))
      expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [VICTIM] }));
    for (const end of await world.all(() => ({ kind: 'barrier' }), others)) expect(end.contributors).toEqual(others);
  });

  it('loses the call where nobody who is left has it', async () => {
    const { wrap, cut } = cutting();
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, wrap });
    await world.all(() => ({ kind: 'barrier' }));
    cut();
    const works = [0, 1, 2].map((rank) => world.run(rank, sumOf(2 ** rank)));
    works[VICTIM]!.catch(() => {});
    await works[2];
    await Promise.all([world.lose(2), world.lose(VICTIM)]);
    const error = await works[CUT_OFF]!.then(
      () => undefined,
      (reason: unknown) => reason,
    );
    expect(error).toBeInstanceOf(EpError);
    expect(error).toMatchObject({ code: 'EP_PEER_LOST' });
    expect((error as EpError).context.lost).toContain(VICTIM);
  });
});

describe('a rank that goes while others lack nothing', () => {
  it('is given what it lacks, where it is taken out alive', async () => {
    let silent = false;
    // What rank 1 tells rank 2 goes nowhere.
    const wrap = (transport: Bundled, rank: number): Bundled => {
      if (rank !== 1) return transport;
      const connect: typeof transport.connect = async (peer, options) => {
        const endpoint = await transport.connect(peer, options);
        const put: typeof endpoint.put = (...args) =>
          silent && peer === 2 ? doneWork('put', 0) : endpoint.put(...args);
        return withMembers(endpoint, { put });
      };
      return withMembers(transport, { connect });
    };
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, wrap });
    await world.all(() => ({ kind: 'barrier' }));
    silent = true;
    const calls = [0, 1, 2].map((rank) => sumOf(2 ** rank));
    const works = calls.map((call, rank) => world.run(rank, call));
    await Promise.all([works[0], works[1]]);
    await Promise.all([0, 1].map((rank) => world.repair(rank, [2])));
    expect((await works[2]!).contributors).toEqual([0, 1, 2]);
    expect([...calls[2]!.outputs[0]!]).toEqual([7, 7]);
    await expect(world.run(2, { kind: 'barrier' })).rejects.toMatchObject({ code: 'EP_EVICTED' });
  });

  it('by giving up may have given enough: who ends its call well hears of it in the next one', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING });
    await world.all(() => ({ kind: 'barrier' }));
    const abort = new AbortController();
    const early = world.settled((rank) => ({ kind: 'barrier', ...(rank === 0 && { signal: abort.signal }) }), [0, 1]);
    await pause(5);
    abort.abort('enough');
    // Before rank 2 comes: with what it gives, rank 1 would lack nothing either.
    expect((await early).map(({ status }) => status)).toEqual(['rejected', 'rejected']);
    const late = world.run(2, { kind: 'barrier' }).then(
      () => 'done',
      ({ code }: EpError) => code,
    );
    expect(['done', 'EP_ABORTED']).toContain(await late);
    for (const end of await world.settled(() => ({ kind: 'barrier' }))) expect(end.status).toBe('rejected');
  });
});

describe('cost at the transport', () => {
  const SIZE = 4;
  const CALLS = 40;
  const PEERS = SIZE - 1;

  /** Requests of each rank to its peers: with a Work that is watched, or of whose end nobody hears. */
  function counting() {
    const counts = Array.from({ length: SIZE }, () => ({ puts: 0, signals: 0, posts: 0 }));
    const wrap = (transport: Bundled, rank: number): Bundled => {
      const connect: typeof transport.connect = async (peer, options) => {
        const endpoint = await transport.connect(peer, options);
        const count =
          <A extends readonly unknown[], R>(what: keyof (typeof counts)[0], send: (...args: A) => R) =>
          (...args: A): R => {
            counts[rank]![what]++;
            return send(...args);
          };
        return withMembers(endpoint, {
          put: count('puts', endpoint.put),
          signal: count('signals', endpoint.signal),
          ...(endpoint.post && { post: count('posts', endpoint.post) }),
        });
      };
      return withMembers(transport, { connect });
    };
    const reset = (): void => {
      for (const count of counts) Object.assign(count, { puts: 0, signals: 0, posts: 0 });
    };
    return { counts, wrap, reset };
  }

  it('is one put to each peer, and less than one word that says that records were read', async () => {
    const { counts, wrap, reset } = counting();
    await using world = await World.open({ size: SIZE, stagingBytes: SMALL_STAGING, wrap });
    await world.all(() => ({ kind: 'barrier' }));
    reset();
    for (let i = 0; i < CALLS; i++) await world.all((rank) => sumOf(rank));
    for (const { puts, signals, posts } of counts) {
      expect({ puts, posts }).toEqual({ puts: CALLS * PEERS, posts: 0 });
      expect(signals).toBeLessThan(CALLS * PEERS);
    }
  });

  it.skipIf(unavailable)(`is the same over libfabric, without a Work to watch${unavailable}`, async () => {
    const { counts, wrap, reset } = counting();
    await using world = await World.open({ kind: 'fabric', size: SIZE, wrap });
    await world.all(() => ({ kind: 'barrier' }));
    const fabrics = world.transports as readonly unknown[] as readonly FabricTransport[];
    const requests = (): readonly number[] => fabrics.map((one) => one.counts().requests);
    const before = requests();
    reset();
    for (let i = 0; i < CALLS; i++) await world.all((rank) => sumOf(rank));
    const after = requests();
    for (const [rank, { puts, signals, posts }] of counts.entries()) {
      expect({ puts, signals }).toEqual({ puts: 0, signals: 0 });
      expect(posts).toBeGreaterThanOrEqual(CALLS * PEERS);
      expect(posts).toBeLessThan(2 * CALLS * PEERS);
      // Nothing goes that the group did not send, but for what was posted and not taken yet.
      expect(Math.abs(after[rank]! - before[rank]! - posts)).toBeLessThanOrEqual(2 * PEERS);
    }
  });
});
