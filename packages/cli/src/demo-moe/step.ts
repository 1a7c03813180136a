/**
 * What one rank does in `ep demo moe`: two steps are under way at any time; while the tokens of one travel, its experts compute those of the other. At the
 * end it computes its own tokens' mixtures once more, with all experts at hand and no dispatch, and compares.
 */
import { isMainThread } from 'node:worker_threads';
import { decode, encode, isEpError, type Member, type Store } from '@ep/core';
import { routingLayout } from '@ep/plan/moe';
import type { TurnTimes } from '../demo/ping-pong-machine.js';
import type { Compared } from '../demo/results.js';
import {
  type DemoDevice,
  type DemoTransport,
  isElastic,
  openCudaDemoTransport,
  openDemoTransport,
  rejoinDemoTransport,
} from '../demo/transports.js';
import { CudaExchange } from './cuda-exchange.js';
import type { Arrived, Batch, Exchange, HostRows } from './exchange.js';
import { HostExchange } from './host-exchange.js';
import { type MoeJob, repeatsStep, replacedFrom, stepsOf } from './job.js';
import { MoeModel } from './model.js';

export const MOE_PHASES = ['set-up', 'generate', 'steps', 'verify'] as const;
export type MoePhase = (typeof MOE_PHASES)[number];

export interface MoeRankResult {
  readonly rank: number;
  readonly pid: number;
  /** Ordinal of its GPU; absent on the host. */
  readonly gpu?: number;
  readonly milliseconds: Readonly<Record<MoePhase, number>>;
  /** Within `steps`. */
  readonly expertMs: number;
  readonly compared: Compared;
  /** Rows that its experts have computed, by where. */
  readonly expertRows: Readonly<Record<DemoDevice, number>>;
  /** Choices of its tokens whose expert was gone: their weights went to the others. */
  readonly droppedChoices: number;
  readonly stagedBytes: number;
  readonly losses: readonly { readonly rank: number; readonly why: string; readonly step: number }[];
  readonly routes: readonly string[];
  /** Of two batches in turns, where that was asked for; and how many numbers of their results were not those of the steps. */
  readonly turns?: TurnTimes;
  readonly turnsDiffer?: number;
}

/** A step whose tokens are on their way. */
interface Begun {
  readonly work: PromiseLike<Arrived>;
  readonly activeRanks: Uint8Array;
}

/** What became of a step's choices: which ranks it counted on when it began, and which of them it lost on the way. */
interface Outcome {
  readonly y: Float32Array;
  readonly activeRanks: Uint8Array;
  readonly lostRanks: Uint8Array;
}

export async function runMoeRank(
  started: Member,
  job: MoeJob,
  onPhase: (phase: MoePhase) => void,
): Promise<MoeRankResult> {
  const worldSize = job.tokens.length;
  const { kill, replace } = job;
  // One more than there are ranks was started: it stands by to take the place of the killed one.
  const comesLater = replace === true && started.rank === worldSize;
  const member = { ...started, rank: comesLater ? kill!.rank : started.rank, worldSize };
  const firstStep = comesLater ? replacedFrom(job) : 0;
  const { rank } = member;
  const begin = performance.now();
  const model = new MoeModel(job.seed);
  const { transport, exchange } = await openExchange(member, job, model, comesLater);
  try {
    const milliseconds = { 'set-up': performance.now() - begin, generate: 0, steps: 0, verify: 0 };
    const phase = async <T>(name: MoePhase, body: () => T | Promise<T>): Promise<T> => {
      onPhase(name);
      const from = performance.now();
      const value = await body();
      milliseconds[name] = performance.now() - from;
      return value;
    };
    const batches = await phase('generate', () => makeBatches(job, rank, model).slice(firstStep));
    if (!comesLater) await transport.barrier();
    const { kill: _, replace: __, ...calm } = job;
    const run = new Steps(comesLater ? calm : job, member, model, exchange);
    await phase('steps', () => run.all(batches, firstStep));
    const losses = run.losses;
    const routes = exchange.routes();
    const turns = job.turns && (await goInTurns(exchange, batches, run.outcomes, job.turns.rounds));
    await exchange.close();
    const { compared, droppedChoices } = await phase('verify', () => verify(job, rank, model, batches, run.outcomes));
    const { expertMs, expertRows, stagedBytes } = run;
    return {
      ...{
        rank,
        pid: process.pid,
        milliseconds,
        expertMs,
        compared,
        expertRows,
        droppedChoices,
        stagedBytes,
        losses,
        routes,
      },
      ...(exchange.gpu !== undefined && { gpu: exchange.gpu }),
      ...turns,
    };
  } finally {
    await transport.close();
  }
}

async function openExchange(
  member: Member,
  job: MoeJob,
  model: MoeModel,
  comesLater: boolean,
): Promise<{ readonly transport: DemoTransport; readonly exchange: Exchange }> {
  const { hidden, topK } = model.shape;
  const options = {
    mode: job.mode,
    experts: job.map,
    maxTokens: job.batch,
    topK,
    hidden,
    ...(job.dtype === 'fp8' ? { payload: 'f8e4m3+f32' as const } : {}),
    ...(job.mode === 'high-throughput' ? { alignment: 8 } : {}),
    timeoutMs: 10_000,
  };
  const open = async <T extends DemoTransport>(transport: T, exchange: (over: T) => Promise<Exchange>) => {
    try {
      return { transport, exchange: await exchange(transport) };
    } catch (error) {
      await transport.close();
      throw error;
    }
  };
  if (comesLater && isElastic(job.transport)) {
    return open(await rejoinDemoTransport(job.transport, member), (transport) => HostExchange.join(transport, options));
  }
  return job.device === 'cuda'
    ? open(await openCudaDemoTransport(member, job.gpus), (transport) =>
        CudaExchange.open(transport, options, { model, gpus: job.gpus, inTurns: job.turns !== undefined }),
      )
    : open(await openDemoTransport(job.transport, member), (transport) => HostExchange.open(transport, options));
}

/** The first two batches once more, in turns. Sums have one order, so that each number must be the very one of its step. */
async function goInTurns(
  exchange: Exchange,
  [first, second]: readonly Batch[],
  outcomes: readonly Outcome[],
  rounds: number,
): Promise<Pick<MoeRankResult, 'turns' | 'turnsDiffer'>> {
  const { times, results } = await exchange.turns!([first!, second!], rounds);
  let differ = 0;
  for (const [i, result] of results.entries()) {
    const wanted = encode('bf16', outcomes[i]!.y);
    differ += Math.abs(result.length - wanted.length);
    for (const [at, bits] of wanted.entries()) if (result[at] !== bits) differ++;
  }
  return { turns: times, turnsDiffer: differ };
}

function makeBatches(job: MoeJob, rank: number, model: MoeModel): Batch[] {
  const mine = job.tokens[rank]!;
  // Places count on over ranks, as if the text were read by one.
  const before = job.tokens.slice(0, rank).reduce((sum, of) => sum + of.length, 0);
  return Array.from({ length: stepsOf(job) }, (_, step) => {
    const tokens = mine.subarray(step * job.batch, (step + 1) * job.batch);
    const rows = model.rows(tokens, before + step * job.batch);
    const { topkIdx, topkWeights } = model.route(rows);
    return { rows, topkIdx, weights: topkWeights };
  });
}

/** In the store: this rank has ended all steps before. */
const isAt = (step: number, rank: number): string => `demo/step/${step}/rank/${rank}`;

class Steps {
  readonly outcomes: Outcome[] = [];
  readonly losses: { readonly rank: number; readonly why: string; readonly step: number }[] = [];
  expertMs = 0;
  readonly expertRows = { host: 0, cuda: 0 };
  stagedBytes = 0;
  readonly #job: MoeJob;
  readonly #rank: number;
  readonly #store: Store;
  readonly #model: MoeModel;
  readonly #exchange: Exchange;

  constructor(job: MoeJob, { rank, store }: Member, model: MoeModel, exchange: Exchange) {
    this.#job = job;
    this.#rank = rank;
    this.#store = store;
    this.#model = model;
    this.#exchange = exchange;
  }

  /** Those of steps `first` and on. */
  async all(batches: readonly Batch[], first: number): Promise<void> {
    const { kill, replace } = this.#job;
    let next: Begun | undefined = this.#dispatch(batches[0]!);
    for (const [index, batch] of batches.entries()) {
      const step = first + index;
      const dies = kill?.step === step;
      if (dies && kill.rank === this.#rank) await this.#die(step);
      const takesIn = dies && replace === true;
      const repeats = dies && repeatsStep(this.#job);
      if (repeats) {
        await this.#store.set(isAt(step, this.#rank), new Uint8Array(1));
        await this.#loseStep(kill.rank, next!, batch, step);
        if (takesIn) await this.#exchange.takeIn!(this.#store, kill.rank);
        else await this.#exchange.goOnWithout!(this.#store, kill.rank);
        next = this.#dispatch(batch);
      }
      const following = batches[index + 1];
      const waits = takesIn && !repeats;
      next = await this.#complete(next!, batch, step, waits ? undefined : following);
      if (!waits) continue;
      // Nothing is under way here, on any rank.
      await this.#exchange.takeIn!(this.#store, kill.rank);
      if (following !== undefined) next = this.#dispatch(following);
    }
  }

  /** Resolves with the next step, whose tokens are on their way while the experts compute this one's. */
  async #complete(
    { work, activeRanks }: Begun,
    batch: Batch,
    step: number,
    following: Batch | undefined,
  ): Promise<Begun | undefined> {
    const received = await work;
    this.#noteLosses(step);
    const next = following && this.#dispatch(following);
    await this.#experts(received);
    const combined = await this.#exchange.combine(received, batch.weights);
    this.#noteLosses(step);
    this.stagedBytes += received.stagedBytes + combined.stagedBytes;
    this.outcomes.push({ y: decode('bf16', combined.y), activeRanks, lostRanks: combined.lostRanks });
    return next;
  }

  /** A step that fails with the rank that dies in it: sooner or later, on each of the others. */
  async #loseStep(rank: number, { work }: Begun, batch: Batch, step: number): Promise<void> {
    try {
      await this.#exchange.combine(await work, batch.weights);
    } catch (error) {
      if (!isEpError(error)) throw error;
      this.losses.push({ rank, why: error.code, step });
    }
  }

  #dispatch(batch: Batch): Begun {
    const { activeRanks } = this.#exchange;
    const work = this.#exchange.dispatch(batch.rows, batch.topkIdx);
    // Awaited a step later: a failure must not count as unhandled until then.
    work.catch(() => {});
    return { work, activeRanks };
  }

  async #experts(received: Arrived): Promise<void> {
    const from = performance.now();
    const { host, counts } = received;
    if (host === undefined) await this.#exchange.experts!(received);
    else this.#expertsOnHost(received, host);
    const rows = counts.reduce((sum, count) => sum + count, 0);
    this.expertRows[host === undefined ? 'cuda' : 'host'] += rows;
    this.expertMs += performance.now() - from;
  }

  #expertsOnHost({ counts, blockStart }: Arrived, { read, results }: HostRows): void {
    const { hidden } = this.#model.shape;
    const { map } = this.#job;
    const x = new Float32Array(hidden);
    const out = new Float32Array(hidden);
    for (let e = 0; e < counts.length; e++) {
      const expert = map.expert[map.rankOffsets[this.#rank]! + e]!;
      const first = blockStart[e]!;
      for (let row = first; row < first + counts[e]!; row++) {
        read(row, x);
        this.#model.apply(expert, x, out, 1);
        results.set(encode('bf16', out), row * hidden);
      }
    }
  }

  /** Its tokens are out; their results will never be fetched, nor those that it owes. HAZARD: where the death ends calls, one that is not through with the step before would do another step again than the rest. */
  async #die(step: number): Promise<never> {
    if (repeatsStep(this.#job)) {
      const others = this.#job.tokens.map((_, rank) => rank).filter((rank) => rank !== this.#rank);
      await this.#store.wait(others.map((rank) => isAt(step, rank)));
    }
    await new Promise((resolve) => setTimeout(resolve, 20));
    // A thread goes alone: others of its process are ranks, too.
    if (isMainThread) process.kill(process.pid, 'SIGKILL');
    process.exit(9);
  }

  #noteLosses(step: number): void {
    for (const [rank, why] of this.#exchange.losses) {
      if (!this.losses.some((known) => known.rank === rank)) this.losses.push({ rank, why, step });
    }
  }
}

/** The dense layer over this rank's tokens, without the choices that were lost with a rank. */
function verify(job: MoeJob, rank: number, model: MoeModel, batches: readonly Batch[], outcomes: readonly Outcome[]) {
  const { hidden, topK } = model.shape;
  const { map } = job;
  let [squaredError, squaredReference, largest, elements, droppedChoices] = [0, 0, 0, 0, 0];
  const row = new Float32Array(hidden);
  const sum = new Float64Array(hidden);
  for (const [step, { rows, topkIdx, weights }] of batches.entries()) {
    const { y, activeRanks, lostRanks } = outcomes[step]!;
    const { replica } = routingLayout({ map, rank, topK, topkIdx, activeRanks });
    const x = decode('bf16', rows);
    for (let t = 0; t * topK < topkIdx.length; t++) {
      const isLeft = (k: number): boolean => {
        const p = replica[t * topK + k]!;
        return p >= 0 && lostRanks[map.rank[p]!] === 0;
      };
      let [all, left] = [0, 0];
      for (let k = 0; k < topK; k++) {
        all += weights[t * topK + k]!;
        if (isLeft(k)) left += weights[t * topK + k]!;
        else droppedChoices++;
      }
      sum.fill(0);
      for (let k = 0; k < topK; k++) {
        if (!isLeft(k)) continue;
        model.apply(topkIdx[t * topK + k]!, x.subarray(t * hidden, (t + 1) * hidden), row, 1);
        const weight = (weights[t * topK + k]! * all) / left;
        for (let h = 0; h < hidden; h++) sum[h]! += weight * row[h]!;
      }
      for (let h = 0; h < hidden; h++) {
        const error = Math.abs(y[t * hidden + h]! - sum[h]!);
        // A NaN fails every comparison: it must end up in the sums, not vanish in the maximum.
        if (!(error <= largest)) largest = error;
        squaredError += error * error;
        squaredReference += sum[h]! * sum[h]!;
      }
      elements += hidden;
    }
  }
  return { compared: { elements, squaredError, squaredReference, largest }, droppedChoices };
}
