/** Methods of what is opened on a transport, called with arguments of wrong kinds: EpErrors, and the object goes on. */
import { tensor } from '@ep/core';
import { allocateHost } from '@ep/native';
import { planAttention } from '@ep/plan';
import { expect, it } from 'vitest';
import { openCompatDispatcher, openDispatcher, openMoeBuffer } from '../src/index.js';
import { onRanks } from './moe/world.js';
import { type Call, odd, otherErrorOf, spoiled } from './odd.js';

const documents = {
  worldSize: 1,
  shardOffsets: Int32Array.of(0, 2),
  lengths: Int32Array.of(4, 2),
  documents: 1,
  document: new Int32Array(2),
  position: Int32Array.of(0, 1),
};
const plan = planAttention(documents, new Int32Array(2));
const part = { name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [2, 8] } as const;
const q = tensor('f32', [6, 2, 8]);
const into = tensor('f32', [6, 2, 8], new Float32Array(allocateHost(4 * 96)));
const limits = { timeoutMs: 60_000, signal: new AbortController().signal };

/** What went otherwise than by an EpError, or not at all; `what` ends with the way in which it was called. */
async function walk(name: string, call: Call, args: () => readonly unknown[] | Promise<readonly unknown[]>) {
  const wrong: string[] = [];
  const note = async (what: string, given: readonly unknown[]) => {
    const other = await otherErrorOf(call, given);
    if (other !== undefined) wrong.push(`${name}, ${what}: ${other}`);
  };
  for (const [label, value] of odd)
    for (const count of [1, 2, 3]) await note(`${count} of ${label}`, Array<unknown>(count).fill(value));
  const ways = [...spoiled(await args())].length;
  for (let way = 0; way < ways; way++) {
    // Made again for each: a handle may be used up.
    const [what, given] = [...spoiled(await args())][way]!;
    await note(what, given);
  }
  // Or the calls above proved nothing.
  try {
    await call(...(await args()));
  } catch (error) {
    wrong.push(`${name}, rightly: ${String(error)}`);
  }
  return wrong;
}

it('dispatchers', { timeout: 60_000 }, async () => {
  await onRanks(1, 'shm', async (transport) => {
    const dispatcher = await openDispatcher(transport, { leaseBytes: 4096, leases: 1 });
    try {
      const bind: Call = (specs, options) => dispatcher.bind(specs as never, options as never);
      const { forward } = await dispatcher.bind({ forward: [part] });
      const run: Call = async (sources, options) => {
        const lease = await forward.run(sources as never, options as never);
        lease.release();
      };
      expect([
        ...(await walk('bind', bind, () => [{ forward: [part] }, limits])),
        ...(await walk('run', run, () => [{ q }, limits])),
        ...(await walk(
          'run of a tensor',
          (x) => run({ q: x }),
          () => [q],
        )),
        ...(await walk(
          'resync',
          (options) => dispatcher.resync(options as never),
          () => [limits],
        )),
      ]).toEqual([]);
    } finally {
      await dispatcher.close();
    }
  });
});

it('compat dispatchers', { timeout: 60_000 }, async () => {
  await onRanks(1, 'shm', async (transport) => {
    const dispatcher = await openCompatDispatcher(transport, { queryBytes: 4096, keyValueBytes: 0 });
    try {
      const bind: Call = (specs, options) => dispatcher.bind(specs as never, options as never);
      const { forward } = await dispatcher.bind({ forward: [part] });
      const run: Call = (sources, options) => forward.run(sources as never, options as never);
      expect([
        ...(await walk('bind', bind, () => [{ forward: [part] }, limits])),
        ...(await walk('run', run, () => [{ q }, { ...limits, into: { q: into } }])),
        ...(await walk(
          'run of a tensor',
          (x) => run({ q: x }),
          () => [q],
        )),
        ...(await walk(
          'run into a tensor',
          (x) => run({ q }, { into: { q: x } }),
          () => [into],
        )),
      ]).toEqual([]);
    } finally {
      await dispatcher.close();
    }
  });
});

it.each(['low-latency', 'high-throughput'] as const)('buffers for experts: %s', { timeout: 60_000 }, async (mode) => {
  await onRanks(1, 'shm', async (transport) => {
    const shape = { experts: 2, maxTokens: 3, topK: 2, hidden: 64, dtype: 'f32' } as const;
    const buffer = await openMoeBuffer(transport, { mode, ...shape, calls: 1 });
    try {
      const x = tensor('f32', [3, 64]);
      const choices = Int32Array.of(0, 1, 1, 0, 0, 1);
      const weights = new Float32Array(6).fill(0.5);
      const dispatch: Call = async (...args) => {
        const received = await buffer.dispatch(...(args as Parameters<typeof buffer.dispatch>));
        await received.handle.release();
      };
      const sent: Call = async (...args) => {
        const hook = await buffer.dispatchSend(...(args as Parameters<typeof buffer.dispatch>));
        const received = await hook.receive();
        await received.handle.release();
      };
      const combine: Call = async (...args) => {
        await buffer.combine(...(args as Parameters<typeof buffer.combine>));
      };
      let taken: Awaited<ReturnType<typeof buffer.dispatch>> | undefined;
      const held = async () => {
        if (taken === undefined || taken.handle.released) taken = await buffer.dispatch(x, choices);
        return [taken.x, taken.handle, { weights, bias: [x], out: x, ...limits }];
      };
      expect([
        ...(await walk('dispatch', dispatch, () => [x, choices, { ...limits, keepLayout: false, activeRanks: [1] }])),
        ...(await walk('dispatchSend', sent, () => [x, choices, limits])),
        ...(await walk('combine', combine, held)),
        ...(await walk(
          'updateMembers',
          (options) => buffer.updateMembers(options as never),
          () => [limits],
        )),
      ]).toEqual([]);
    } finally {
      await buffer.close();
    }
  });
});
