/**
 * Mode, payload, transport, executor, hook, cached layout and alignment against the oracle: each value of each at least once by default, the whole product by
 * EP_TEST_FULL=1. Placement is deterministic in every case: rows are compared one by one.
 */
import { spreadExperts } from '@ep/plan/moe';
import { describe, expect, it } from 'vitest';
import type { MoeBufferOptions } from '../../src/index.js';
import { check, inputsOf, type MoeCase, openFor, type RankResult, rowsOfCall, runCall } from './case.js';
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
const transports: readonly WorldTransport[] = ['shm', 'hostile', 'ibgda'];
const executors: readonly Pick<MoeBufferOptions, 'blocks' | 'executor'>[] = [
  {},
  { blocks: 3 },
  { blocks: 2, executor: { lanes: 8, warpLanes: 4, seed: 3 } },
];
const repeats = ['plain', 'hook', 'cached'] as const;

interface Cell {
  readonly form: Form;
  readonly payload: (typeof payloads)[number];
  readonly transport: WorldTransport;
  readonly executor: (typeof executors)[number];
  readonly repeat: (typeof repeats)[number];
}

function* product(): Generator<Cell> {
  for (const form of forms)
    for (const payload of payloads)
      for (const transport of transports)
        for (const executor of executors)
          for (const repeat of repeats) yield { form, payload, transport, executor, repeat };
}

/** Every pair of (form, payload), and of (form, transport, repeat); the other values in turn. */
function* small(): Generator<Cell> {
  let turn = 0;
  const next = <T>(of: readonly T[]): T => of[turn++ % of.length]!;
  for (const form of forms) {
    for (const payload of payloads) {
      yield { form, payload, transport: 'shm', executor: next(executors), repeat: 'plain' };
    }
    for (const transport of transports)
      for (const repeat of repeats) yield { form, payload: next(payloads), transport, executor: {}, repeat };
  }
}

const possible = ({ form, repeat }: Cell): boolean => !(form[0] === 'low-latency' && repeat === 'cached');

function nameOf({ form, payload, transport, executor, repeat }: Cell): string {
  const travels = [
    payload.payload ?? payload.dtype,
    payload.roundScales ? 'powers of two' : '',
    payload.combinePayload ?? '',
  ];
  const runs = executor.executor === undefined ? `fast x ${executor.blocks ?? 1}` : 'simt';
  return [form.join(' '), travels.filter(Boolean).join(', '), transport, runs, repeat].join(' | ');
}

const worldSize = 3;

async function run(cell: Cell): Promise<void> {
  const { form, payload, transport, executor, repeat } = cell;
  const one: MoeCase = {
    worldSize,
    mode: form[0],
    seed: 11,
    map: spreadExperts(7, worldSize),
    experts: 7,
    topK: 3,
    hidden: 200,
    tokens: [6, 0, 11],
    dtype: payload.dtype!,
    emptyShare: 0.1,
    biases: 1,
    hook: repeat === 'hook',
    ...(form[0] === 'high-throughput' ? { alignment: form[1] } : {}),
    options: { ...payload, ...executor },
  };
  const inputs = inputsOf(one);
  const calls = 4;
  /** The last call has the rows of the first one, and another call slot. */
  const rowsOf = (call: number) => rowsOfCall(inputs, call % 3);
  const results = await onRanks(worldSize, transport, async (of) => {
    const buffer = await openFor(of, one, inputs);
    const all: RankResult[] = [];
    const first = await runCall(buffer, one, inputs, { keepLayout: repeat === 'cached' });
    all.push(first);
    while (all.length < calls) {
      const rows = rowsOf(all.length);
      all.push(await runCall(buffer, one, rows, first.layout === undefined ? {} : { layout: first.layout }));
    }
    await buffer.close();
    return all;
  });
  for (let call = 0; call < calls; call++) {
    const of = results.map((all) => all[call]!);
    check(one, rowsOf(call), of);
  }
  // The same rows give the same bits, also where payloads round.
  expect(results.map((all) => all[3]!.combined)).toEqual(results.map((all) => all[0]!.combined));
  expect(results.map((all) => all[1]!.combined)).not.toEqual(results.map((all) => all[0]!.combined));
}

describe(`the ${full ? 'whole product' : 'small grid'}`, () => {
  for (const cell of full ? product() : small()) {
    if (possible(cell)) it(nameOf(cell), { timeout: 60_000 }, () => run(cell));
  }
});
