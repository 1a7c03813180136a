import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import * as api from '../src/index.js';
import { deadBytes } from './dead-bytes.js';
import { fakeTransport, fakeWorld } from './fake-transport.js';

const odd: readonly (readonly [string, unknown])[] = [undefined, null, {}, 5, 'x'].map((value) => [
  String(value),
  value,
]);
const { detached, shrunk } = deadBytes();
/** One at a time: where a text belongs, callers of their own say where they are. */
const oddAlone = [...odd, ['detached', detached], ['shrunk', shrunk], ['a dead buffer', detached.buffer]] as const;

/** What those who write transports call with what they made themselves, and errors: no input of users comes here. */
const parts = [
  'commonCapabilities',
  'createWork',
  'doneWork',
  'interruptible',
  'interruptibleOn',
  'linkSignals',
  'listen',
  'onAbortOf',
  'publish',
  'invalid',
  'secretMissing',
];

type Call = (...args: unknown[]) => unknown;
const isClass = (value: object): boolean => Function.prototype.toString.call(value).startsWith('class');
const functions = Object.entries(api).filter(
  (entry): entry is [string, Call] => typeof entry[1] === 'function' && !isClass(entry[1]) && !parts.includes(entry[0]),
);

const matrix = { ...api.tensor('f32', [2, 3], new Float32Array(6), [3, 1]) };
const limits = () => ({ timeoutMs: 100, signal: new AbortController().signal });
const member = { key: 'k', rank: 0, worldSize: 1 };
const store = api.memoryStore();
let keys = 0;
const transport = () => fakeTransport(fakeWorld(), 0 as api.Rank, 1, { name: 'fake', needs: ['bundled'] });
/** Right arguments of functions that read into what they are given: one after the other is replaced. */
const right: Readonly<Record<string, () => readonly unknown[]>> = {
  barrier: () => [store, { ...member, key: `${keys++}` }, limits()],
  byteRange: () => [matrix],
  checkAttached: () => [matrix.data, 'here'],
  checkFixed: () => [matrix.data, 'here'],
  checkOpening: () => [{ rank: 0, worldSize: 1, store }, { signal: new AbortController().signal }, 'here'],
  checkOpeningOf: () => [{ rank: 0, worldSize: 1 }, { signal: new AbortController().signal }, 'here'],
  createStorage: () => ['f32', 2],
  compose: () => [[transport()], (_peer: number, [first]: readonly unknown[]) => first, { memory: 'shared' }],
  decode: () => ['bf16', new Uint16Array(2)],
  dlpackTensor: () => [
    {
      data: 64,
      device: { type: 1, id: 0 },
      dtype: { code: 2, bits: 32, lanes: 1 },
      shape: [2],
      strides: [1],
      version: { major: 1, minor: 1 },
    },
  ],
  elementCount: () => [[2, 3]],
  encode: () => ['bf16', new Float32Array(2)],
  exchange: () => [store, { ...member, key: `${keys++}`, bytes: Uint8Array.of(1) }, limits()],
  isContiguous: () => [matrix],
  jobKey: () => [Uint8Array.of(1), 'purpose', Uint8Array.of(2)],
  pinBuffer: () => [matrix.data, 'here'],
  rendezvous: () => [store, { ...member, key: `${keys++}`, facts: { agree: { a: 1 } } }, limits()],
  rowLayout: () => [matrix],
  rowsOf: () => [matrix, { columns: 2 }],
  tensor: () => ['f32', [2, 3], matrix.data, [3, 1]],
  toContiguous: () => [matrix],
  viewStorage: () => ['f32', matrix.data.buffer, 8, 2],
};

async function otherErrorOf(call: Call, args: readonly unknown[]): Promise<string | undefined> {
  try {
    const made = await call(...args);
    if (made instanceof api.Resource) await made.close();
    return undefined;
  } catch (error) {
    return api.isEpError(error) ? undefined : String(error);
  }
}

describe('a world of more ranks than there can be', () => {
  // HAZARD: a list of so many does not fit V8, which then ends the process: nothing is to catch.
  const worldSize = 1e9;
  const of = { ...member, worldSize };

  it.each([
    ['checkOpening', async () => api.checkOpening({ ...of, store }, { signal: AbortSignal.timeout(1) }, 'here')],
    ['checkOpeningOf', async () => api.checkOpeningOf(of, { signal: AbortSignal.timeout(1) }, 'here')],
    ['exchange', async () => api.exchange(store, { ...of, bytes: Uint8Array.of(1) }, limits())],
    ['barrier', async () => api.barrier(store, of, limits())],
    ['rendezvous', async () => api.rendezvous(store, { ...of, facts: { agree: {} } }, limits())],
  ])('is refused by %s', async (_, call) => {
    await expect(call()).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      context: { what: 'worldSize', expected: `an integer from 1 to ${api.MOST_WORLD_SIZE}` },
    });
  });

  it('is one of more than a transport says that it takes', () => {
    const options = { signal: AbortSignal.timeout(1) };
    api.checkOpening({ rank: 0, worldSize: 4096, store }, options, 'here', 4096);
    expect(() => api.checkOpening({ rank: 0, worldSize: 4097, store }, options, 'here', 4096)).toThrow(
      /from 1 to 4096/,
    );
  });
});

describe('wrong kinds of arguments', () => {
  const started = process.cwd();
  let folder: string;
  // A path of one letter is a right one: the files that these calls make belong into a folder of their own.
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), 'ep-misuse-'));
    process.chdir(folder);
  });
  afterAll(async () => {
    process.chdir(started);
    await rm(folder, { recursive: true });
  });

  it.each(functions)('%s throws an EpError or nothing', async (name, call) => {
    const wrong: string[] = [];
    const note = async (what: string, args: readonly unknown[]) => {
      const other = await otherErrorOf(call, args);
      if (other !== undefined) wrong.push(`${what}: ${other}`);
    };
    for (const [label, value] of oddAlone) await note(label, [value]);
    for (const [label, value] of odd)
      for (const count of [2, 3]) await note(`${count} of ${label}`, Array(count).fill(value));
    const make = right[name];
    for (const [at, arg] of make?.().entries() ?? [])
      for (const [label, value] of oddAlone) {
        await note(`argument ${at}: ${label}`, make!().with(at, value));
        // Records: objects of a class, such as stores, have methods of their own.
        for (const key of arg?.constructor === Object ? Object.keys(arg) : [])
          await note(`argument ${at}, ${key}: ${label}`, make!().with(at, { ...(arg as object), [key]: value }));
      }
    expect(wrong).toEqual([]);
    if (make !== undefined) expect(await otherErrorOf(call, make())).toBeUndefined();
  });

  const dead = (call: (bytes: Uint8Array) => unknown) => [detached, shrunk].map((bytes) => async () => call(bytes));
  it.each<readonly [string, (bytes: Uint8Array) => unknown]>([
    ['the bytes of an exchange', (bytes) => api.exchange(store, { ...member, key: `${keys++}`, bytes })],
    ['a secret', (bytes) => api.jobKey(bytes, 'purpose')],
    ['a salt', (bytes) => api.jobKey(Uint8Array.of(1), 'purpose', bytes)],
    ['what is decoded', (bytes) => api.decode('f8e4m3', bytes)],
    ...(['f64', 'f32', 'bf16'] as const).map(
      (dtype) => [`what is encoded as ${dtype}`, (bytes: Uint8Array) => api.encode(dtype, bytes)] as const,
    ),
    ['the data of a tensor', (bytes) => api.tensor('u8', [0], bytes)],
    ['the data of a tensor written by hand', (data) => api.toContiguous({ dtype: 'u8', shape: [0], data })],
    ['ranks of a message', (bytes) => api.formatRanks(bytes)],
  ])('%s of a dead buffer are refused', async (_, call) => {
    for (const refused of dead(call)) await expect(refused()).rejects.toMatchObject({ code: 'EP_DETACHED' });
  });

  it.each(['byteRange', 'rowLayout', 'toContiguous', 'pinBuffer', 'compose', 'exchange', 'rendezvous'])(
    '%s says where, what, expected and found',
    async (name) => {
      const named = functions.find(([of]) => of === name)![1];
      const call = async () => named(null, null, null);
      await expect(call()).rejects.toMatchObject({
        code: 'EP_INVALID_ARGUMENT',
        message: expect.stringMatching(/^\S.*: .+ must be .+, found null$/),
      });
    },
  );
});
