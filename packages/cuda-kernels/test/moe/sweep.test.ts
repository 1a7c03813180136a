/**
 * Mode, payload, transport, executor, hook, cached layout, alignment, results that are sent or offered, and a failed rank against the oracle, bit by bit: each value of each at least once by default, the
 * whole product by EP_TEST_FULL=1. Placement is deterministic in every case: rows are compared one by one.
 */
import { type MoePlan, mapExperts, planMoe, withLostRanks } from '@ep/plan/moe';
import { describe, expect, it } from 'vitest';
import type { DispatchTransport, MoeBuffer, MoeBufferOptions } from '../../src/index.js';
import {
  check,
  type Inputs,
  inputsOf,
  type MoeCase,
  maskOf,
  openFor,
  planWithout,
  type RankResult,
  rowsOfCall,
  runCall,
} from './case.js';
import { onRanks, type WorldTransport } from './world.js';

const full = process.env.EP_TEST_FULL === '1';

type Form = readonly ['low-latency'] | readonly ['high-throughput', number];
const forms: readonly Form[] = [['low-latency'], ['high-throughput', 1], ['high-throughput', 8]];
const payloads: readonly Pick<MoeBufferOptions, 'dtype' | 'payload' | 'combinePayload' | 'roundScales'>[] = [
  { dtype: 'bf16' },
  { dtype: 'f32' },
  { dtype: 'f16' },
  { dtype: 'bf16', payload: 'f8e4m3+f32' },
  { dtype: 'bf16', payload: 'f8e4m3+f32', roundScales: true },
  { dtype: 'f32', payload: 'f8e4m3+ue8m0' },
  { dtype: 'bf16', combinePayload: 'logfmt10' },
];
/** Over which a rank that closes its transport is missed at once. */
const mourning: readonly WorldTransport[] = ['shm', 'ibgda', 'shm+ibgda'];
const transports: readonly WorldTransport[] = ['shm', 'hostile', 'ibgda', 'efa', 'shm+ibgda', 'shm+efa'];
const executors: readonly Pick<MoeBufferOptions, 'blocks' | 'executor'>[] = [
  {},
  { blocks: 3 },
  { blocks: 2, executor: { lanes: 8, warpLanes: 4, seed: 3 } },
];
const repeats = ['plain', 'hook', 'cached', 'cached hook'] as const;
/** From the second call on: all take part; all others leave one out; one does not come any more, or closes its transport, and is given up. */
const failures = ['none', 'left out', 'absent', 'dead'] as const;
/** `offered`: by two of the three ranks, and read where their experts have written them (`zeroCopyCombine`). */
const ways = ['sent', 'offered'] as const;

interface Cell {
  readonly form: Form;
  readonly payload: (typeof payloads)[number];
  readonly transport: WorldTransport;
  readonly executor: (typeof executors)[number];
  readonly repeat: (typeof repeats)[number];
  readonly failure: (typeof failures)[number];
  readonly results: (typeof ways)[number];
}

function* product(): Generator<Cell> {
  for (const form of forms)
    for (const payload of payloads)
      for (const transport of transports)
        for (const executor of executors)
          for (const repeat of repeats)
            for (const failure of failures)
              for (const results of ways) yield { form, payload, transport, executor, repeat, failure, results };
}

/** Every pair of (form, payload), of (form, transport, repeat) but for composed transports, of (form, failure), and of (form, failure, repeat) for results that are offered; the other values in turn. */
function* small(): Generator<Cell> {
  const turns = new Map<unknown, number>();
  const next = <T>(of: readonly T[]): T => {
    const turn = turns.get(of) ?? 0;
    turns.set(of, turn + 1);
    return of[turn % of.length]!;
  };
  const results = 'sent';
  const travelling = payloads.filter(({ combinePayload }) => combinePayload === undefined);
  for (const form of forms) {
    for (const payload of payloads) {
      yield { form, payload, transport: 'shm', executor: next(executors), repeat: 'plain', failure: 'none', results };
    }
    for (const transport of transports)
      for (const repeat of transport.includes('+') ? [next(repeats)] : repeats)
        yield { form, payload: next(payloads), transport, executor: {}, repeat, failure: 'none', results };
    for (const failure of failures.slice(1)) {
      for (const repeat of repeats) {
        const transport = next(failure === 'dead' ? mourning : transports);
        yield { form, payload: next(payloads), transport, executor: next(executors), repeat, failure, results };
      }
    }
    for (const failure of failures) {
      for (const repeat of repeats) {
        const others = { payload: next(travelling), transport: 'shm', executor: next(executors) } as const;
        yield { form, ...others, repeat, failure, results: 'offered' };
      }
    }
  }
}

/** Low latency has no layouts. Results are offered where all ranks share memory, in the dtype that experts make. Over EFA nobody is given up, and a hostile engine reports no death: dead.test.ts has ranks that are killed, over EFA too. */
const possible = ({ form, payload, repeat, transport, failure, results }: Cell): boolean =>
  !(results === 'offered' && (transport !== 'shm' || payload.combinePayload !== undefined)) &&
  !(form[0] === 'low-latency' && repeat.startsWith('cached')) &&
  !(failure === 'dead' && transport === 'hostile') &&
  !((failure === 'absent' || failure === 'dead') && transport.endsWith('efa'));

function nameOf({ form, payload, transport, executor, repeat, failure, results }: Cell): string {
  const travels = [
    payload.payload ?? payload.dtype,
    payload.roundScales ? 'powers of two' : '',
    payload.combinePayload ?? '',
  ];
  const runs = executor.executor === undefined ? `fast x ${executor.blocks ?? 1}` : 'simt';
  const offers = results === 'offered' ? ['results offered'] : [];
  return [form.join(' '), travels.filter(Boolean).join(', '), transport, runs, repeat, failure, ...offers].join(' | ');
}

const worldSize = 3;
const failed = 2;
/** Experts 0 and 6 have two replicas, one of them on the rank that fails. */
const map = mapExperts({
  worldSize,
  experts: 7,
  rankOffsets: Int32Array.of(0, 3, 6, 9),
  expert: Int32Array.of(0, 1, 2, 3, 4, 6, 5, 6, 0),
});
/** Of calls that give a rank up. */
const GIVE_UP_MS = 1500;

/** What the calls after the first come to. */
function planAfter({ failure, repeat }: Cell, inputs: Inputs): MoePlan {
  const whole = planMoe(inputs.routing, inputs.map, inputs.form);
  if (failure === 'none') return whole;
  // A layout keeps the places of who is gone.
  if (repeat.startsWith('cached')) return withLostRanks(whole, maskOf(worldSize, [failed]));
  return planWithout(inputs, failure === 'left out' ? { leftOut: [failed] } : { absent: [failed] });
}

async function run(cell: Cell): Promise<void> {
  const { form, payload, transport, executor, repeat, failure, results: way } = cell;
  const one: MoeCase = {
    worldSize,
    mode: form[0],
    seed: 11,
    map,
    experts: 7,
    topK: 3,
    hidden: 200,
    tokens: [6, 0, 11],
    dtype: payload.dtype!,
    emptyShare: 0.1,
    biases: 1,
    hook: repeat.endsWith('hook'),
    ...(form[0] === 'high-throughput' ? { alignment: form[1] } : {}),
    options: { ...payload, ...executor, zeroCopyCombine: way === 'offered' },
  };
  const inputs = inputsOf(one);
  const calls = 4;
  /** The last call has the rows of the first one, and another call slot. */
  const rowsOf = (call: number) => rowsOfCall(inputs, call % 3);
  let left = worldSize - 1;
  let inFirst = worldSize;
  let leaveFirst = (): void => {};
  const firstLeft = new Promise<void>((resolve) => {
    leaveFirst = resolve;
  });
  let giveUp = (): void => {};
  const givenUp = new Promise<void>((resolve) => {
    giveUp = resolve;
  });
  const allCalls = async (buffer: MoeBuffer, of: DispatchTransport): Promise<RankResult[]> => {
    const all: RankResult[] = [];
    const first = await runCall(buffer, one, inputs, { keepLayout: repeat.startsWith('cached') });
    all.push(first);
    if (--inFirst === 0) leaveFirst();
    // Who is slower would find the dead gone at the end of the first call, and choose no replica there in the second; and, left out, would find that others have taken offered results back.
    if (failure === 'dead' || failure === 'left out') await firstLeft;
    if (failure !== 'none' && buffer.rank === failed) {
      // While it lives, it may still write into the slot of the call that gave it up, which takes no other until then.
      if (failure === 'absent') await givenUp;
      if (failure !== 'left out') await of.close();
      return all;
    }
    if (failure === 'left out') buffer.leaveOut([failed]);
    while (all.length < calls) {
      const rows = rowsOf(all.length);
      const gives = all.length === 1 && failure === 'absent';
      const options = {
        ...(first.layout === undefined ? {} : { layout: first.layout }),
        ...(gives ? { dispatchTimeoutMs: GIVE_UP_MS } : {}),
      };
      all.push(await runCall(buffer, one, rows, options));
      if (gives && --left === 0) giveUp();
    }
    return all;
  };
  const results = await onRanks(worldSize, transport, async (of) => {
    const buffer = await openFor(of, one, inputs);
    try {
      return await allCalls(buffer, of);
    } finally {
      leaveFirst();
      giveUp();
      await buffer.close();
    }
  });
  const after = planAfter(cell, inputs);
  // Later calls know who is gone before they choose replicas, as if it had been left out.
  const settled = failure === 'none' ? after : planAfter({ ...cell, failure: 'left out' }, inputs);
  for (let call = 0; call < calls; call++) {
    const of = results.map((all) => all[call]);
    check(one, rowsOf(call), of, call === 0 ? undefined : call === 1 ? after : settled);
  }
  // The same rows give the same bits, also where payloads round.
  const combined = (call: number) => results.map((all) => all[call]?.combined);
  if (failure === 'none') expect(combined(3)).toEqual(combined(0));
  expect(combined(1)).not.toEqual(combined(0));
}

describe(`the ${full ? 'whole product' : 'small grid'}`, () => {
  for (const cell of full ? product() : small()) {
    if (possible(cell)) it(nameOf(cell), { timeout: 60_000 }, () => run(cell));
  }
});
