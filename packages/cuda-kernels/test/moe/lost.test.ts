/** Ranks that do not come, die, are left out or come late; calls that overlap. */
import { setTimeout as sleep } from 'node:timers/promises';
import { decode, type Storage } from '@ep/core';
import { mapExperts, planMoe, rankTopk } from '@ep/plan/moe';
import { describe, expect, it } from 'vitest';
import type { DispatchTransport, MoeBuffer } from '../../src/index.js';
import {
  check,
  inputsOf,
  type MoeCase,
  maskOf,
  openFor,
  planWithout,
  type RankResult,
  rowsOfCall,
  runCall,
  tensorOf,
} from './case.js';
import { onRanks, type WorldTransport } from './world.js';

const modes = ['low-latency', 'high-throughput'] as const;
const worldSize = 4;

const caseOf = (mode: MoeCase['mode'], more: Partial<MoeCase> = {}): MoeCase => ({
  worldSize,
  mode,
  seed: 21,
  experts: 8,
  topK: 3,
  hidden: 64,
  tokens: [5, 4, 7, 3],
  renormalise: true,
  ...(mode === 'high-throughput' ? { alignment: 4 } : {}),
  ...more,
});

async function opened<T>(
  one: MoeCase,
  transport: WorldTransport,
  body: (buffer: MoeBuffer, transport: DispatchTransport) => Promise<T>,
): Promise<T[]> {
  const inputs = inputsOf(one);
  return onRanks(one.worldSize, transport, async (of) => {
    const buffer = await openFor(of, one, inputs);
    try {
      return await body(buffer, of);
    } finally {
      await buffer.close();
    }
  });
}

function event(): { readonly reached: Promise<void>; readonly reach: () => void } {
  let reach = (): void => {};
  const reached = new Promise<void>((resolve) => {
    reach = resolve;
  });
  return { reached, reach };
}

describe.each(modes)('%s', (mode) => {
  it.each(['shm', 'ibgda', 'shm+ibgda'] as const)(
    'goes on without a rank that does not come, over %s',
    { timeout: 60_000 },
    async (transport) => {
      const one = caseOf(mode);
      const inputs = inputsOf(one);
      const results = await opened(one, transport, async (buffer) => {
        const first = await runCall(buffer, one, inputs);
        if (buffer.rank === 2) return [first];
        const second = await runCall(buffer, one, rowsOfCall(inputs, 1), { timeoutMs: 400 });
        const third = await runCall(buffer, one, rowsOfCall(inputs, 2));
        expect([...buffer.losses.keys()]).toEqual([2]);
        return [first, second, third];
      });
      const call = (n: number): (RankResult | undefined)[] => results.map((all) => all[n]);
      check(one, inputs, call(0));
      check(one, rowsOfCall(inputs, 1), call(1), planWithout(inputs, { absent: [2] }));
      check(one, rowsOfCall(inputs, 2), call(2), planWithout(inputs, { leftOut: [2] }));
    },
  );

  it.each(['efa', 'shm+efa'] as const)(
    'ends, over %s, with a rank that does not come: a new transport goes on',
    { timeout: 60_000 },
    async (transport) => {
      const one = caseOf(mode);
      const inputs = inputsOf(one);
      const { reached: ended, reach: end } = event();
      let waiting = worldSize - 1;
      await opened(one, transport, async (buffer) => {
        await runCall(buffer, one, inputs);
        if (buffer.rank === 2) return ended;
        try {
          const late = runCall(buffer, one, rowsOfCall(inputs, 1), { timeoutMs: 400 });
          await expect(late).rejects.toMatchObject({ code: 'EP_TIMEOUT', context: { rank: 2 } });
          expect(buffer.losses.size).toBe(0);
          await expect(runCall(buffer, one, inputs)).rejects.toMatchObject({ code: 'EP_POISONED' });
        } finally {
          if (--waiting === 0) end();
        }
      });
      check(one, inputs, await opened(one, transport, (buffer) => runCall(buffer, one, inputs)));
    },
  );

  it('goes on without a rank that closes its transport', { timeout: 60_000 }, async () => {
    const one = caseOf(mode);
    const inputs = inputsOf(one);
    const results = await opened(one, 'shm', async (buffer, transport) => {
      const first = await runCall(buffer, one, inputs);
      if (buffer.rank === 1) {
        await transport.close();
        return [first];
      }
      return [first, await runCall(buffer, one, inputs, { timeoutMs: 2000 })];
    });
    check(
      one,
      inputs,
      results.map((all) => all[1]),
      planWithout(inputs, { absent: [1] }),
    );
  });

  it.each(mode === 'low-latency' ? ['dispatch', 'combine'] : ['combine'])(
    'has all rows of a rank that dies behind them, and names it from the next half on: %s',
    { timeout: 60_000 },
    async (half) => {
      const one = caseOf(mode, { worldSize: 2, tokens: [5, 4], options: { calls: 1 } });
      const inputs = inputsOf(one);
      const { reached: gone, reach: go } = event();
      await onRanks(2, 'ibgda', async (of) => {
        const { rank } = of;
        const buffer = await openFor(of, one, inputs);
        const x = tensorOf(inputs.dtype, one.tokens[rank]!, one.hidden, inputs.x[rank]!);
        const choices = rankTopk(inputs.routing, rank);
        const dies = async () => {
          await of.close();
          go();
          await buffer.close();
        };
        if (half === 'dispatch') {
          if (rank === 1) {
            await buffer.dispatchSend(x, choices);
            return dies();
          }
          await gone;
        }
        const received = await buffer.dispatch(x, choices);
        expect([...received.lostRanks]).toEqual([0, 0]);
        const rowsOfOne = Array.from(received.layoutRange, (range) => Number(range & 0xffff_ffffn)).filter(
          (_, i) => i % 2 === 1,
        );
        expect(rowsOfOne).not.toEqual(rowsOfOne.map(() => 0));
        if (half === 'combine') {
          if (rank === 1) {
            await buffer.combineSend(received.x, received.handle);
            return dies();
          }
          await gone;
        }
        const lostAfterDispatch = [...buffer.losses];
        const combined = await buffer.combine(received.x, received.handle);
        expect([...buffer.losses]).toEqual([[1, 'EP_PEER_LOST']]);
        expect(lostAfterDispatch).toEqual(half === 'dispatch' ? [[1, 'EP_PEER_LOST']] : []);
        expect([...combined.lostRanks]).toEqual(half === 'dispatch' ? [0, 1] : [0, 0]);
        await buffer.close();
      });
    },
  );

  it.each(['shm', 'hostile', 'ibgda', 'shm+ibgda'] as const)(
    'takes nothing from a rank that comes too late, over %s',
    { timeout: 60_000 },
    async (transport) => {
      const one = caseOf(mode);
      const inputs = inputsOf(one);
      const late = 2;
      const results = await opened(one, transport, async (buffer) => {
        const all = [await runCall(buffer, one, inputs)];
        if (buffer.rank === late) {
          await sleep(500);
          // What it sends now, with other rows, is for calls that the others have ended without it.
          const tokens = one.tokens[late]!;
          const other = inputs.x[late]!.map((value) => value + 1);
          const x = tensorOf(inputs.dtype, tokens, one.hidden, other);
          for (let call = 0; call < 2; call++) {
            const { handle } = await buffer.dispatch(x, rankTopk(inputs.routing, late), { timeoutMs: 300 });
            await handle.release();
          }
          return all;
        }
        all.push(await runCall(buffer, one, inputs, { timeoutMs: 250 }));
        for (let call = 0; call < 30; call++) {
          await sleep(40);
          all.push(await runCall(buffer, one, rowsOfCall(inputs, all.length), { timeoutMs: 5000 }));
        }
        return all;
      });
      check(
        one,
        inputs,
        results.map((all) => all[1]),
        planWithout(inputs, { absent: [late] }),
      );
      const plan = planWithout(inputs, { leftOut: [late] });
      for (let call = 2; call < 32; call++)
        check(
          one,
          rowsOfCall(inputs, call),
          results.map((all) => all[call]),
          plan,
        );
    },
  );

  it('goes on in the slot of a call whose results a slow rank still owes, and takes nothing of them', {
    timeout: 60_000,
  }, async () => {
    const one = caseOf(mode, { options: { calls: 1 } });
    const inputs = inputsOf(one);
    const late = 2;
    const { reached: gone, reach: go } = event();
    const { reached: written, reach: write } = event();
    let left = worldSize - 1;
    const results = await opened(one, 'shm', async (buffer) => {
      const { rank } = buffer;
      const x = tensorOf(inputs.dtype, one.tokens[rank]!, one.hidden, inputs.x[rank]!);
      const { x: y, handle } = await buffer.dispatch(x, rankTopk(inputs.routing, rank));
      if (rank === late) {
        await gone;
        const hook = await buffer.combineSend(y, handle);
        write();
        await hook.receive({ timeoutMs: 100 });
        return [];
      }
      const { lostRanks } = await buffer.combine(y, handle, { timeoutMs: 1000 });
      expect([...lostRanks]).toEqual([...maskOf(worldSize, [late])]);
      const all: RankResult[] = [await runCall(buffer, one, inputs, { timeoutMs: 5000 })];
      if (--left === 0) go();
      await written;
      for (let call = 1; call < 4; call++)
        all.push(await runCall(buffer, one, rowsOfCall(inputs, call), { timeoutMs: 5000 }));
      return all;
    });
    const plan = planWithout(inputs, { leftOut: [late] });
    for (let call = 0; call < 4; call++)
      check(
        one,
        rowsOfCall(inputs, call),
        results.map((all) => all[call]),
        plan,
      );
  });

  it('leaves out whom the caller names, by option or for good', { timeout: 60_000 }, async () => {
    const one = caseOf(mode);
    const inputs = inputsOf(one);
    const active = Uint8Array.of(1, 0, 1, 1);
    const results = await opened(one, 'shm', async (buffer) => {
      if (buffer.rank === 1) return [];
      const tokens = one.tokens[buffer.rank]!;
      const x = tensorOf(inputs.dtype, tokens, one.hidden, inputs.x[buffer.rank]!);
      const received = await buffer.dispatch(x, rankTopk(inputs.routing, buffer.rank), { activeRanks: active });
      expect([...received.lostRanks]).toEqual([0, 1, 0, 0]);
      await received.handle.release();
      expect(buffer.losses.size).toBe(0);
      buffer.leaveOut([1]);
      return [await runCall(buffer, one, inputs)];
    });
    const plan = planMoe(inputs.routing, inputs.map, inputs.form, { activeRanks: active });
    check(
      one,
      inputs,
      results.map((all) => all[0]),
      plan,
    );
  });

  it('takes up to four calls, refuses a fifth, and combines them in any order', { timeout: 60_000 }, async () => {
    const one = caseOf(mode, { options: { calls: 4 } });
    const inputs = inputsOf(one);
    await opened(one, 'shm', async (buffer) => {
      const tokens = one.tokens[buffer.rank]!;
      const choices = rankTopk(inputs.routing, buffer.rank);
      const send = (factor: number) => {
        const scaled = inputs.x[buffer.rank]!.map((value) => value * factor);
        return buffer.dispatch(tensorOf(inputs.dtype, tokens, one.hidden, scaled), choices);
      };
      for (let round = 0; round < 3; round++) {
        const works = [1, 2, 4, 8].map(send);
        expect(() => send(16)).toThrowError(expect.objectContaining({ code: 'EP_BUSY' }));
        const received = await Promise.all(works);
        const order = round === 1 ? [2, 0, 3, 1] : [0, 1, 2, 3];
        const sums = new Map<number, PromiseLike<Float32Array>>();
        for (const i of order) {
          const back = buffer.combine(received[i]!.x, received[i]!.handle);
          sums.set(
            i,
            back.then(({ y }) => decode(inputs.dtype, y.data as Storage['bf16']) as Float32Array),
          );
        }
        const one1 = await sums.get(0)!;
        // Everything here is a power of two apart: exactly so.
        for (const [i, sum] of sums) expect(await sum).toEqual(one1.map((value) => value * 2 ** i));
      }
    });
  });

  it('refuses what is not a call of it', { timeout: 60_000 }, async () => {
    const one = caseOf(mode);
    const inputs = inputsOf(one);
    await opened(one, 'shm', async (buffer) => {
      const tokens = one.tokens[buffer.rank]!;
      const x = tensorOf(inputs.dtype, tokens, one.hidden, inputs.x[buffer.rank]!);
      const choices = rankTopk(inputs.routing, buffer.rank);
      const bad = { code: 'EP_INVALID_ARGUMENT' };
      expect(() => buffer.dispatch(x, choices.slice(1))).toThrowError(expect.objectContaining(bad));
      expect(() =>
        buffer.dispatch(
          x,
          choices.map(() => 8),
        ),
      ).toThrowError(expect.objectContaining(bad));
      expect(() =>
        buffer.dispatch(
          x,
          choices.map(() => -2),
        ),
      ).toThrowError(expect.objectContaining(bad));
      expect(() => buffer.dispatch(x, choices, { activeRanks: [1, 1] })).toThrowError(expect.objectContaining(bad));
      expect(() => buffer.dispatch(tensorOf('f16', tokens, 64, inputs.x[buffer.rank]!), choices)).toThrowError(
        expect.objectContaining(bad),
      );
      const received = await buffer.dispatch(x, choices);
      expect(() => buffer.combine(x, received.handle, { weights: new Float32Array(1) })).toThrowError(
        expect.objectContaining(bad),
      );
      await buffer.combine(received.x, received.handle);
      expect(() => buffer.combine(received.x, received.handle)).toThrowError(expect.objectContaining(bad));
      expect(received.handle.released).toBe(true);
    });
  });
});

/** Rank 1 holds none: in low-latency form it hears from nobody before it combines. */
const withoutOne = mapExperts({
  worldSize,
  experts: 8,
  rankOffsets: Int32Array.of(0, 3, 3, 6, 8),
  expert: Int32Array.of(0, 1, 2, 3, 4, 5, 6, 7),
});

it.each([
  ['high-throughput', 'all with experts', undefined],
  ['low-latency', 'all with experts', undefined],
  ['low-latency', 'one without', withoutOne],
] as const)(
  'refuses calls of a slot that two slow ranks owe results, on all ranks, until they have written them: %s, %s',
  {
    timeout: 60_000,
  },
  async (mode, _, map) => {
    const one = caseOf(mode, { options: { calls: 1 }, ...(map && { map }) });
    const inputs = inputsOf(one);
    const { reached: gone, reach: go } = event();
    const { reached: written, reach: write } = event();
    let refusing = 2;
    let owing = 2;
    const results = await opened(one, 'shm', async (buffer) => {
      const { rank } = buffer;
      const x = tensorOf(inputs.dtype, one.tokens[rank]!, one.hidden, inputs.x[rank]!);
      // Rank 3 is late in the first call, rank 2 in the second.
      for (const late of [3, 2]) {
        const { x: y, handle } = await buffer.dispatch(x, rankTopk(inputs.routing, rank));
        if (rank === late) {
          await gone;
          const hook = await buffer.combineSend(y, handle);
          if (--owing === 0) write();
          await hook.receive({ timeoutMs: 100 });
          return [];
        }
        const { lostRanks } = await buffer.combine(y, handle, { timeoutMs: 1000 });
        expect(lostRanks[late]).toBe(1);
      }
      const call = async () => {
        const { x: y, handle } = await buffer.dispatch(x, rankTopk(inputs.routing, rank), { timeoutMs: 2000 });
        expect(buffer.localExperts).toBe(0);
        await buffer.combine(y, handle);
      };
      for (let i = 0; i < 2; i++) {
        await expect(call()).rejects.toMatchObject({
          code: 'EP_BUSY',
          message: expect.stringMatching(/call slot.*: refused on all ranks/),
        });
      }
      if (--refusing === 0) go();
      await written;
      return [await runCall(buffer, one, rowsOfCall(inputs, 1), { timeoutMs: 5000 })];
    });
    const plan = planMoe(inputs.routing, inputs.map, inputs.form, { activeRanks: Uint8Array.of(1, 1, 0, 0) });
    check(
      one,
      rowsOfCall(inputs, 1),
      results.map((all) => all[0]),
      plan,
    );
  },
);

it('refuses a call on a rank, too, that does without the one in debt and sends nothing to those that were refused', {
  timeout: 60_000,
}, async () => {
  // Two experts each. Ranks 3 and 4 are late with what they owe rank 0; rank 2 does without rank 0, and only rank 1 hears of both.
  const all = [
    [6, 8, 0, 2],
    [2, 3, 3, 2],
    [4, 5, 5, 4],
    [6, 7, 7, 6],
    [8, 9, 9, 8],
  ].map((choices) => Int32Array.from(choices));
  const later = [Int32Array.of(0, 2, 3, 1), Int32Array.of(0, 4, 5, 1), Int32Array.of(4, 2, 3, 5)];
  const tokens = all.map(() => 2);
  const one = caseOf('low-latency', { worldSize: 5, experts: 10, topK: 2, tokens, options: { calls: 1 } });
  const inputs = inputsOf(one);
  const { reached: gone, reach: go } = event();
  const { reached: written, reach: write } = event();
  let refusing = 3;
  let owing = 2;
  await opened(one, 'shm', async (buffer) => {
    const { rank } = buffer;
    const x = tensorOf(inputs.dtype, 2, one.hidden, inputs.x[rank]!);
    for (const late of [3, 4]) {
      const { x: y, handle } = await buffer.dispatch(x, all[rank]!);
      if (rank === late) {
        await gone;
        const hook = await buffer.combineSend(y, handle);
        if (--owing === 0) write();
        await hook.receive({ timeoutMs: 100 });
        return;
      }
      const { lostRanks } = await buffer.combine(y, handle, { timeoutMs: 1000 });
      expect(lostRanks[late]).toBe(1);
    }
    if (rank !== 1) buffer.leaveOut([2 - rank]);
    const dispatch = buffer.dispatch(x, all[rank]!, { timeoutMs: 2000 });
    if (rank !== 2) await expect(dispatch).rejects.toMatchObject({ code: 'EP_BUSY' });
    else {
      const { x: y, handle } = await dispatch;
      const message = expect.stringMatching(/rank 0 cannot use this call slot.*: refused on all ranks/);
      await expect(buffer.combine(y, handle)).rejects.toMatchObject({ code: 'EP_BUSY', message });
    }
    if (--refusing === 0) go();
    await written;
    const { x: y, handle } = await buffer.dispatch(x, later[rank]!);
    const { y: sums } = await buffer.combine(y, handle);
    const twice = tensorOf(
      inputs.dtype,
      2,
      one.hidden,
      inputs.x[rank]!.map((value) => 2 * value),
    );
    expect(sums.data).toEqual(twice.data);
  });
});

it('with default timeouts, a rank without experts does not give up those who still await a silent one', {
  timeout: 60_000,
}, async () => {
  const map = mapExperts({
    worldSize: 3,
    experts: 4,
    rankOffsets: Int32Array.of(0, 0, 2, 4),
    expert: Int32Array.of(0, 1, 2, 3),
  });
  const one = caseOf('low-latency', {
    worldSize: 3,
    map,
    experts: 4,
    tokens: [6, 5, 4],
    options: { calls: 1, timeoutMs: 1000 },
  });
  const inputs = inputsOf(one);
  const { reached: ended, reach: end } = event();
  let left = 2;
  await opened(one, 'shm', async (buffer) => {
    await runCall(buffer, one, inputs);
    if (buffer.rank === 2) return ended;
    // It awaits the silent one that much longer.
    if (buffer.rank === 1) await sleep(300);
    try {
      await runCall(buffer, one, inputs);
      expect([...buffer.losses]).toEqual([[2, 'EP_TIMEOUT']]);
    } finally {
      if (--left === 0) end();
    }
  });
});
