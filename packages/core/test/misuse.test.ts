import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import * as api from '../src/index.js';
import { fakeTransport, fakeWorld } from './fake-transport.js';

const odd = [undefined, null, {}, 5, 'x'];

/** What those who write transports call with what they made themselves, and errors: no input of users comes here. */
const parts = [
  'createWork',
  'doneWork',
  'interruptible',
  'interruptibleOn',
  'linkSignals',
  'listen',
  'publish',
  'invalid',
];

type Call = (...args: unknown[]) => unknown;
const isClass = (value: object): boolean => Function.prototype.toString.call(value).startsWith('class');
const functions = Object.entries(api).filter(
  (entry): entry is [string, Call] => typeof entry[1] === 'function' && !isClass(entry[1]) && !parts.includes(entry[0]),
);

const matrix = api.tensor('f32', [2, 3]);
const member = { key: 'k', rank: 0, worldSize: 1 };
const store = api.memoryStore();
let keys = 0;
const transport = () => fakeTransport(fakeWorld(), 0 as api.Rank, 1, { name: 'fake', needs: ['bundled'] });
/** Right arguments of functions that read into what they are given: one after the other is replaced. */
const right: Readonly<Record<string, () => readonly unknown[]>> = {
  barrier: () => [store, { ...member, key: `${keys++}` }, {}],
  byteRange: () => [matrix],
  checkAttached: () => [matrix.data, 'here'],
  checkFixed: () => [matrix.data, 'here'],
  compose: () => [[transport()], (_peer: number, [first]: readonly unknown[]) => first, { memory: 'shared' }],
  elementCount: () => [[2, 3]],
  exchange: () => [store, { ...member, key: `${keys++}`, bytes: Uint8Array.of(1) }, {}],
  isContiguous: () => [matrix],
  jobKey: () => [Uint8Array.of(1), 'purpose', Uint8Array.of(2)],
  pinBuffer: () => [matrix.data, 'here'],
  rendezvous: () => [store, { ...member, key: `${keys++}`, facts: { agree: { a: 1 } } }, {}],
  rowLayout: () => [matrix],
  rowsOf: () => [matrix, { columns: 2 }],
  toContiguous: () => [matrix],
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
    for (const value of odd)
      for (const count of [1, 2, 3]) await note(`${count} of ${String(value)}`, Array(count).fill(value));
    const make = right[name];
    for (const [at] of make?.().entries() ?? [])
      for (const value of odd) await note(`argument ${at}: ${String(value)}`, make!().with(at, value));
    expect(wrong).toEqual([]);
    if (make !== undefined) expect(await otherErrorOf(call, make())).toBeUndefined();
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
