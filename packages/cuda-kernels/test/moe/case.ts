/** One dispatch and combine of all ranks, compared with the oracle of @ep/plan/reference. */
import { decode, encode, type Storage, type Tensor, tensor } from '@ep/core';
import {
  type ExpertMap,
  generateRouting,
  generateWeights,
  type MoeForm,
  type MoePlan,
  planMoe,
  rankReceives,
  rankSends,
  rankTopk,
  routingOfRanks,
  spreadExperts,
  type TokenRouting,
  withLostRanks,
} from '@ep/plan/moe';
import { type CastOptions, type CastPayload, castRow, moeCombine, moeDispatch, uncastRow } from '@ep/plan/reference';
import { expect } from 'vitest';
import {
  type DispatchTransport,
  type MoeBuffer,
  type MoeBufferOptions,
  type MoeCombined,
  type MoeDType,
  type MoeLayout,
  type MoeReceived,
  openMoeBuffer,
} from '../../src/index.js';

export interface MoeCase {
  readonly worldSize: number;
  readonly mode: MoeForm['mode'];
  readonly seed: number;
  readonly map?: ExpertMap;
  readonly experts: number;
  readonly topK: number;
  readonly hidden: number;
  /** By rank. */
  readonly tokens: readonly number[];
  readonly dtype?: MoeDType;
  readonly emptyShare?: number;
  readonly alignment?: number;
  readonly weighted?: boolean;
  readonly biases?: 0 | 1 | 2;
  readonly renormalise?: boolean;
  readonly hook?: boolean;
  readonly options?: Partial<MoeBufferOptions>;
}

/** Numbers of any kind, exact in bf16 and f16: what is summed of them depends on the order. */
export function values(seed: number, count: number): Float32Array {
  let state = (Math.imul(seed, 0x9e3779b1) ^ 0x85ebca6b) >>> 0 || 1;
  return Float32Array.from({ length: count }, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return ((state >>> 24) - 127.5) / 2 ** ((state >>> 8) & 7);
  });
}

export interface Inputs {
  readonly map: ExpertMap;
  readonly routing: TokenRouting;
  readonly form: MoeForm;
  readonly weights: Float32Array;
  /** By rank, as numbers that the dtype holds. */
  readonly x: readonly Float32Array[];
  readonly dtype: MoeDType;
  readonly maxTokens: number;
}

export function inputsOf(one: MoeCase): Inputs {
  const { worldSize, experts, topK, hidden, seed, dtype = 'bf16' } = one;
  const map = one.map ?? spreadExperts(experts, worldSize);
  const routing = generateRouting({
    worldSize,
    experts,
    topK,
    tokens: one.tokens,
    popularity: { kind: 'zipf', exponent: 0.8 },
    emptyShare: one.emptyShare ?? 0,
    seed,
  });
  const maxTokens = Math.max(1, ...one.tokens);
  const form: MoeForm =
    one.mode === 'low-latency' ? { mode: one.mode, maxTokens } : { mode: one.mode, alignment: one.alignment ?? 1 };
  const x = one.tokens.map((tokens, rank) => decode(dtype, encode(dtype, values(seed + 31 * rank, tokens * hidden))));
  return { map, routing, form, weights: generateWeights(routing, seed), x, dtype, maxTokens };
}

const factors = [1, -2, 4, -0.5];

/** The same call with other rows, unlike those of the three calls before it: what stays of one call must not pass for another's. Powers of two: exact in every dtype. */
export function rowsOfCall(inputs: Inputs, call: number): Inputs {
  const factor = factors[call % factors.length]!;
  return { ...inputs, x: inputs.x.map((rows) => rows.map((value) => value * factor)) };
}

/**
 * What a call comes to for the ranks that are there. `leftOut`: all know of them before it. `absent`: they do not come, so nobody knows their counts, and what they would
 * have served was sent there.
 */
export function planWithout(
  { routing, map, form }: Inputs,
  { leftOut = [], absent = [] }: { readonly leftOut?: readonly number[]; readonly absent?: readonly number[] },
): MoePlan {
  const { worldSize } = map;
  const choices = Array.from({ length: worldSize }, (_, rank) => {
    const all = rankTopk(routing, rank);
    return absent.includes(rank) ? all.map(() => -1) : all;
  });
  const activeRanks = maskOf(worldSize, leftOut).map((out) => 1 - out);
  const plan = planMoe(routingOfRanks(routing.experts, routing.topK, choices), map, form, { activeRanks });
  return withLostRanks(plan, maskOf(worldSize, absent));
}

/** 1 for each of `ranks`. */
export const maskOf = (worldSize: number, ranks: readonly number[]): Uint8Array =>
  Uint8Array.from({ length: worldSize }, (_, rank) => (ranks.includes(rank) ? 1 : 0));

export const optionsOf = (one: MoeCase, { map, maxTokens, dtype }: Inputs): MoeBufferOptions => ({
  mode: one.mode,
  experts: map,
  maxTokens,
  topK: one.topK,
  hidden: one.hidden,
  dtype,
  ...(one.mode === 'high-throughput' ? { alignment: one.alignment ?? 1 } : {}),
  timeoutMs: 60_000,
  ...one.options,
});

export const openFor = (transport: DispatchTransport, one: MoeCase, inputs: Inputs): Promise<MoeBuffer> =>
  openMoeBuffer(transport, optionsOf(one, inputs));

export const tensorOf = (dtype: MoeDType, rows: number, hidden: number, numbers: Float32Array): Tensor<MoeDType> =>
  tensor(dtype, [rows, hidden], encode(dtype, numbers) as Storage[MoeDType]);

/** The rows of a receive tensor as numbers, packed, scales applied. */
export function rowsOf({ x, scales }: MoeReceived, hidden: number): Float32Array {
  const rows = x.shape.length === 3 ? x.shape[0]! * x.shape[1]! : x.shape[0]!;
  const stride = x.strides === undefined ? hidden : x.strides[x.strides.length - 2]!;
  const all = decode(x.dtype as MoeDType, x.data.subarray(0) as Storage[MoeDType]);
  const out = new Float32Array(rows * hidden);
  for (let row = 0; row < rows; row++) out.set(all.subarray(row * stride, row * stride + hidden), row * hidden);
  if (scales === undefined) return out;
  const factor = decode(scales.dtype as 'f32', scales.data as Float32Array);
  const strides = scales.strides!;
  const perBlock = x.shape.length === 3 ? x.shape[1]! : rows;
  for (let row = 0; row < rows; row++) {
    const at =
      scales.shape.length === 3
        ? Math.floor(row / perBlock) * strides[0]! + (row % perBlock) * strides[1]!
        : row * strides[0]!;
    for (let h = 0; h < hidden; h++) out[row * hidden + h]! *= factor[at + Math.floor(h / 128) * strides.at(-1)!]!;
  }
  return out;
}

/** What experts make of rows here: something that tells experts and channels apart, in the dtype's precision. */
export function expertRows(received: Float32Array, hidden: number, seed: number, dtype: MoeDType): Float32Array {
  const made = received.map((value, i) => (value + 1) * (((i + seed) % 13) - 6.25));
  return decode(dtype, encode(dtype, hidden === 0 ? new Float32Array(0) : made));
}

/** As an expert would: rows to a tensor of as many, which may lie apart. */
function writeRows(to: Tensor<MoeDType>, rows: Tensor<MoeDType>): Tensor<MoeDType> {
  const hidden = to.shape.at(-1)!;
  const stride = to.strides?.at(-2) ?? hidden;
  for (let row = 0; row < rows.shape[0]!; row++) {
    to.data.set(rows.data.subarray(row * hidden, (row + 1) * hidden) as never, row * stride);
  }
  return to;
}

export interface RankResult {
  readonly received: {
    readonly rows: Float32Array;
    readonly counts: Int32Array;
    readonly blockStart: Int32Array;
    readonly layoutRange: BigInt64Array;
    readonly sourceToken: Int32Array;
    readonly sourceChoice: Int32Array;
    readonly lostRanks: Uint8Array;
  };
  readonly y: Float32Array;
  readonly combined: Float32Array;
  readonly combinedLost: Uint8Array;
}

/** One call of one rank. `layout`: that of an earlier call with the same choices. */
export async function runCall(
  buffer: MoeBuffer,
  one: MoeCase,
  inputs: Inputs,
  options: {
    readonly layout?: MoeLayout;
    readonly timeoutMs?: number;
    /** Of the dispatch alone: who does not come to it is not awaited in the combine. */
    readonly dispatchTimeoutMs?: number;
    readonly keepLayout?: boolean;
    /** Runs when the dispatch has ended. */
    readonly between?: () => void;
  } = {},
): Promise<RankResult & { readonly layout?: MoeLayout }> {
  const { rank } = buffer;
  const { hidden, seed } = one;
  const { dtype } = inputs;
  const tokens = one.tokens[rank]!;
  const x = tensorOf(dtype, tokens, hidden, inputs.x[rank]!);
  const choices = options.layout ?? rankTopk(inputs.routing, rank);
  const limits = {
    ...(options.timeoutMs === undefined ? {} : { timeoutMs: options.timeoutMs }),
    ...(options.keepLayout === undefined ? {} : { keepLayout: options.keepLayout }),
  };
  const { dispatchTimeoutMs } = options;
  const first = dispatchTimeoutMs === undefined ? limits : { ...limits, timeoutMs: dispatchTimeoutMs };
  const received: MoeReceived = one.hook
    ? await (await buffer.dispatchSend(x, choices, first)).receive(first)
    : await buffer.dispatch(x, choices, first);
  options.between?.();
  const rows = rowsOf(received, hidden);
  const y = expertRows(rows, hidden, seed + rank, dtype);
  const kept = {
    rows,
    counts: received.counts.slice(),
    blockStart: received.blockStart.slice(),
    layoutRange: received.layoutRange.slice(),
    sourceToken: received.sourceToken.slice(),
    sourceChoice: received.sourceChoice.slice(),
    lostRanks: received.lostRanks,
  };
  const sent = tensorOf(dtype, y.length / hidden, hidden, y);
  // Where results may be read as they lie, two of three ranks leave them there.
  const results =
    received.combineBuffer === undefined || (rank + seed) % 3 === 0 ? sent : writeRows(received.combineBuffer, sent);
  const { topK } = one;
  const choice = inputs.routing.tokenOffsets[rank]! * topK;
  const combine = {
    ...limits,
    ...(one.weighted === false ? {} : { weights: inputs.weights.slice(choice, choice + tokens * topK) }),
    ...(one.renormalise === undefined ? {} : { renormalise: one.renormalise }),
    bias: biasesOf(one, rank).map((bias) => tensorOf(dtype, tokens, hidden, bias)),
  };
  const combined: MoeCombined = one.hook
    ? await (await buffer.combineSend(results, received.handle, combine)).receive(limits)
    : await buffer.combine(results, received.handle, combine);
  return {
    received: kept,
    y,
    combined: decode(dtype, combined.y.data as Storage[MoeDType]) as Float32Array,
    combinedLost: combined.lostRanks,
    ...(received.layout === undefined ? {} : { layout: received.layout }),
  };
}

export const biasesOf = (one: MoeCase, rank: number): Float32Array[] =>
  Array.from({ length: one.biases ?? 0 }, (_, i) => {
    const dtype = one.dtype ?? 'bf16';
    return decode(dtype, encode(dtype, values(one.seed + 1000 * (i + 1) + rank, one.tokens[rank]! * one.hidden)));
  });

const same = (found: ArrayLike<number>, expected: ArrayLike<number>, what: string): void => {
  expect(found.length, `${what}: length`).toBe(expected.length);
  for (let i = 0; i < expected.length; i++) {
    if (!Object.is(found[i], expected[i])) expect.fail(`${what}: element ${i} is ${found[i]}, expected ${expected[i]}`);
  }
};

/** Rows as they are at the other end of a payload that rounds. */
export function travelled(rows: Float32Array, hidden: number, payload: CastPayload, options?: CastOptions) {
  const out = new Float32Array(rows.length);
  for (let at = 0; at < rows.length; at += hidden) {
    out.set(uncastRow(payload, hidden, castRow(payload, rows.subarray(at, at + hidden), options)), at);
  }
  return out;
}

/** Bit by bit, casts included. Results of ranks that took no part, or did not end it, are undefined; `died`: those of them that were lost after their dispatch. */
export function check(
  one: MoeCase,
  inputs: Inputs,
  results: readonly (RankResult | undefined)[],
  plan: MoePlan = planMoe(inputs.routing, inputs.map, inputs.form),
  died: readonly number[] = [],
): void {
  const { hidden, worldSize } = one;
  const { payload, combinePayload, roundScales } = one.options ?? {};
  const cast = payload === 'f8e4m3+f32' || payload === 'f8e4m3+ue8m0' ? payload : undefined;
  const options = roundScales === undefined ? {} : { roundScales };
  const sent = cast === undefined ? inputs.x : inputs.x.map((rows) => travelled(rows, hidden, cast, options));
  const oracle = moeDispatch(plan, sent, hidden);
  const lost = lostOf(results, worldSize);
  const lostBefore = lost.map((gone, rank) => (died.includes(rank) ? 0 : gone));
  for (let rank = 0; rank < worldSize; rank++) {
    const found = results[rank]?.received;
    if (found === undefined) continue;
    const expected = rankReceives(plan, rank);
    const who = `rank ${rank}`;
    same(found.counts, expected.recvCount, `${who}: counts`);
    same(found.blockStart, expected.blockStart, `${who}: block starts`);
    same(found.lostRanks, lostBefore, `${who}: lost ranks of dispatch`);
    same(results[rank]!.combinedLost, lost, `${who}: lost ranks of combine`);
    same(Array.from(found.layoutRange, Number), Array.from(expected.layoutRange, Number), `${who}: layout ranges`);
    const rows = expected.recvRows;
    expect(found.rows.length, `${who}: rows`).toBe(rows * hidden);
    for (let row = 0; row < rows; row++) {
      const written = expected.sourceRank[row]! >= 0;
      if (written) {
        expect(found.sourceToken[row], `${who}: token of row ${row}`).toBe(expected.sourceToken[row]);
        expect(found.sourceChoice[row], `${who}: choice of row ${row}`).toBe(expected.sourceChoice[row]);
      } else if (one.mode === 'low-latency') continue;
      const want = oracle[rank]!.subarray(row * hidden, (row + 1) * hidden);
      same(found.rows.subarray(row * hidden, (row + 1) * hidden), want, `${who}: row ${row}`);
    }
  }
  const y = results.map((result, rank) => {
    const rows = result?.y ?? new Float32Array(rankReceives(plan, rank).recvRows * hidden);
    return combinePayload === 'logfmt10' ? travelled(rows, hidden, combinePayload) : rows;
  });
  const weights = Array.from({ length: worldSize }, (_, rank) => {
    const { tokenOffsets, topK } = inputs.routing;
    return inputs.weights.subarray(tokenOffsets[rank]! * topK, tokenOffsets[rank + 1]! * topK);
  });
  const mixed = moeCombine(plan, y, {
    hidden,
    precision: 'f32',
    lostRanks: lost,
    ...(one.weighted === false ? {} : { weights }),
    ...(one.renormalise === undefined ? {} : { renormalise: one.renormalise }),
    bias: Array.from({ length: one.biases ?? 0 }, (_, i) =>
      Array.from({ length: worldSize }, (__, rank) => biasesOf(one, rank)[i]!),
    ),
  });
  for (let rank = 0; rank < worldSize; rank++) {
    const found = results[rank];
    if (found === undefined) continue;
    const want = decode(inputs.dtype, encode(inputs.dtype, mixed[rank]!));
    expect(found.combined.length).toBe(rankSends(plan, rank).tokens * hidden);
    same(found.combined, want, `rank ${rank}: result`);
  }
}

/** Every rank has experts here, so each of those that take part misses each of the others. */
function lostOf(results: readonly (RankResult | undefined)[], worldSize: number): Uint8Array {
  return Uint8Array.from({ length: worldSize }, (_, rank) => (results[rank] === undefined ? 1 : 0));
}

/** All ranks run a case once and are compared. */
export async function runCase(
  one: MoeCase,
  onRanks: <T>(body: (transport: DispatchTransport) => Promise<T>) => Promise<T[]>,
  calls = 1,
): Promise<void> {
  const inputs = inputsOf(one);
  const results = await onRanks(async (transport) => {
    const buffer = await openFor(transport, one, inputs);
    const all: RankResult[] = [];
    for (let call = 0; call < calls; call++) all.push(await runCall(buffer, one, rowsOfCall(inputs, call)));
    const came = Array.from({ length: buffer.localExperts }, (_, expert) =>
      all.reduce((sum, { received }) => sum + received.counts[expert]!, 0),
    );
    expect([...buffer.totals()].map(Number), `rank ${buffer.rank}: totals`).toEqual(came);
    await buffer.close();
    return all;
  });
  for (let call = 0; call < calls; call++) {
    check(
      one,
      rowsOfCall(inputs, call),
      results.map((all) => all[call]!),
    );
  }
}
