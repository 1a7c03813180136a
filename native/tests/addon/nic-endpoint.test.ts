// Who hears of the end of a request: whoever awaits it, by looking himself, or else a thread that watches, once the loop has turned. The NIC is one that ends what the test says.
import { setImmediate } from 'node:timers/promises';
import { EpError, type SignalUpdate } from '@ep/core';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import type { Outcome } from '../../js/binding.js';
import { native } from '../../js/native.js';
import { Liveness, NicEndpoint, type NicRequests, RankMemory } from '../../js/ranks/index.js';

const { binding, operations } = native();
const add: SignalUpdate<'add'> = { slot: 0, op: 'add', value: 1n };
const done: Outcome = { status: 0, rank: -1, stage: 0, expected: 0n, found: 0n };
const broken = { ...done, found: 1n };

/** Requests are under way until they are among `ended`. */
function scriptedNic() {
  const said = {
    ended: new Map<number, 0 | 1>(),
    looks: [] as [request: number, patiently: boolean][],
    last: 0,
    closed: false,
  };
  const nic = {
    signal: () => ++said.last,
    accepted: () => said.last,
    requestTry: (_: number, request: number, patiently: boolean) => {
      said.looks.push([request, patiently]);
      return said.ended.get(request) ?? -1;
    },
    watch: (_: number, request: number) => request + 1e9,
    failure: () => {
      if (said.closed) throw new EpError('EP_CLOSED', 'the NIC is closed');
      return [...said.ended.values()].includes(1) ? {} : undefined;
    },
  };
  return { nic: nic as unknown as NicRequests, said };
}

function setUp() {
  const context = new binding.RankContext(0, 1, 1);
  const liveness = new Liveness(context, 0, 1);
  const shared = { rank: 0, worldSize: 1, context, liveness, byteLength: 64, signalSlots: 1, timeoutMs: 20_000 };
  const onRelease = () => {};
  const memory = new RankMemory({ ...shared, memory: new binding.SymmetricMemory(context, 64, 1), onRelease });
  const { nic, said } = scriptedNic();
  const why = () => {
    nic.failure(0);
    return new EpError('EP_REMOTE_ACCESS', 'it broke');
  };
  const endpoint = new NicEndpoint<'add'>({ peer: 0, nic, context, liveness, timeoutMs: 20_000, broken: why });
  return { context, memory, endpoint, said, signal: () => endpoint.signal(memory, add) };
}

let made: ReturnType<typeof setUp>;
const watched = vi.spyOn(operations, 'track');
/** What a thread that watches would say of the request. */
const tell = (request: number, end: Outcome): void => {
  const call = watched.mock.calls.find(([id]) => id === request + 1e9);
  call![1](end);
};
const watchedRequests = (): number[] => watched.mock.calls.map(([id]) => id - 1e9);

/** On a busy machine the loop would be due at any moment. */
const clock = vi.spyOn(performance, 'now');

beforeEach(() => {
  clock.mockReturnValue(1);
  watched.mockReset();
  watched.mockImplementation(() => {});
  made = setUp();
});
afterEach(async () => {
  for (let request = 1; request <= made.said.last; request++) made.said.ended.set(request, 0);
  await made.endpoint.close();
  await made.memory.close();
  made.context.close();
});

it('looks himself when he awaits a request, and nobody watches', async () => {
  const { signal, said } = made;
  const work = signal();
  expect(said.looks).toEqual([]);
  said.ended.set(1, 0);
  await work;
  expect(said.looks).toEqual([[1, true]]);
  await setImmediate();
  expect([work.status, watchedRequests()]).toEqual(['done', []]);
  expect(said.looks, 'it was over').toHaveLength(1);
});

it('waits for one that is late, not for each of many, until the loop has turned', async () => {
  const { signal, said } = made;
  const works = [signal(), signal(), signal()];
  const all = Promise.all(works);
  await Promise.resolve().then(() => Promise.resolve());
  expect(said.looks).toEqual([
    [1, true],
    [2, false],
    [3, false],
  ]);
  said.ended.set(1, 0);
  await setImmediate();
  // Another look at each that may have ended, and a thread that watches for the first that has not.
  expect(said.looks.slice(3)).toEqual([
    [1, false],
    [2, false],
  ]);
  expect(watchedRequests()).toEqual([2]);
  expect(works.map(({ status }) => status)).toEqual(['done', 'pending', 'pending']);
  said.ended.set(3, 0);
  tell(2, done);
  await all;
  await setImmediate();
  said.ended.set(4, 0);
  await signal();
  expect(said.looks.at(-1), 'patient again').toEqual([4, true]);
});

it('has a thread watch for what nobody awaits, and leaves it to that thread from then on', async () => {
  const { signal, said } = made;
  const quiet = signal();
  await setImmediate();
  expect([quiet.status, watchedRequests()]).toEqual(['pending', [1]]);
  const looks = said.looks.length;
  const waiting = quiet.wait();
  expect(said.looks).toHaveLength(looks);
  tell(1, done);
  await waiting;
});

it('has the oldest watched alone, and looks for the others when that has ended', async () => {
  const { signal, said } = made;
  const works = [signal(), signal(), signal()];
  await setImmediate();
  works.push(signal());
  await setImmediate();
  expect(watchedRequests()).toEqual([1]);
  for (const request of [1, 2]) said.ended.set(request, 0);
  tell(1, done);
  expect(works.map(({ status }) => status)).toEqual(['done', 'done', 'pending', 'pending']);
  expect(watchedRequests()).toEqual([1, 3]);
  for (const request of [3, 4]) said.ended.set(request, 0);
  tell(3, done);
  await Promise.all(works);
  expect(watchedRequests(), 'nothing is left to watch').toEqual([1, 3]);
});

it('leaves those younger than a request whose end was seen out of turn', async () => {
  const { signal, said } = made;
  const older = signal();
  await setImmediate();
  const [awaited, younger] = [signal(), signal()];
  for (const request of [1, 2]) said.ended.set(request, 0);
  await awaited;
  expect([older.status, younger.status]).toEqual(['pending', 'pending']);
  tell(1, done);
  await setImmediate();
  expect([older.status, younger.status, watchedRequests()]).toEqual(['done', 'pending', [1, 3]]);
  tell(3, done);
  await younger;
});

it('ends all that it was asked for when nobody watches any more', async () => {
  const { signal } = made;
  const works = [signal(), signal()];
  await setImmediate();
  const fresh = signal();
  const closed: Outcome = { ...done, status: 5 };
  tell(1, closed);
  for (const work of works) await expect(work).rejects.toMatchObject({ code: 'EP_CLOSED' });
  await setImmediate();
  tell(3, closed);
  await expect(fresh).rejects.toMatchObject({ code: 'EP_CLOSED' });
});

it('says how a request failed, whoever found out', async () => {
  const { signal, said, endpoint, memory } = made;
  const awaited = signal();
  said.ended.set(1, 1);
  await expect(awaited).rejects.toMatchObject({ code: 'EP_REMOTE_ACCESS', message: 'it broke' });
  said.ended.clear();
  const late = signal();
  await setImmediate();
  tell(2, broken);
  expect(late.status).toBe('failed');
  expect(() => endpoint.signal(memory, add)).toThrow(/signal 1 failed earlier and nobody waited for it: it broke/);
});

it('says that the NIC is closed, and throws nothing, where a request broke and that is heard of afterwards', async () => {
  const { signal, said } = made;
  const [first, second] = [signal(), signal()];
  await setImmediate();
  said.closed = true;
  said.ended.set(2, 1);
  expect(() => tell(1, broken)).not.toThrow();
  for (const work of [first, second])
    await expect(work).rejects.toMatchObject({ code: 'EP_CLOSED', message: 'the NIC is closed' });
});

it('flushes by looking, and waits only for what is late', async () => {
  const { signal, said, endpoint } = made;
  const work = signal();
  said.ended.set(1, 0);
  await endpoint.flush();
  expect([said.looks, watchedRequests()]).toEqual([[[1, true]], []]);
  await work;
  signal();
  const flushed = endpoint.flush();
  await setImmediate();
  expect(watchedRequests()).toEqual([2, 2]);
  for (const [, settle] of watched.mock.calls) settle(done);
  await flushed;
});

it('leaves a chain of awaits that end at once to the loop now and then', async () => {
  const { signal, said } = made;
  clock.mockRestore();
  let turns = 0;
  const timer = setInterval(() => turns++, 1);
  const began = performance.now();
  while (performance.now() - began < 100) {
    said.ended.set(said.last + 1, 0);
    await signal();
  }
  clearInterval(timer);
  expect(turns).toBeGreaterThan(0);
  expect(watchedRequests()).toEqual([]);
});
