/** `ep demo moe`: tokens of real documents to their experts and back. */
import { invalid } from '@ep/core';
import {
  balanceExperts,
  expertLoad,
  gini,
  loadOfRanks,
  type MoeForm,
  moeTraffic,
  type Payload,
  planMoe,
  routingOfRanks,
  spreadExperts,
} from '@ep/plan/moe';
import { sharesOf } from '../demo/devices.js';
import { collectDocuments, findRoot, type Selection, selectDocuments } from '../demo/documents.js';
import { type RankMode, ranksText, runRanks } from '../demo/ranks.js';
import { turnsOf } from '../demo/report.js';
import type { DemoDevice, DemoTransportName } from '../demo/transports.js';
import { describeMachine } from '../doctor/machine.js';
import { writePicture } from '../plan/command.js';
import { type MoeDemoDType, type MoeJob, replacedFrom, stepsOf, writeMoeJob } from './job.js';
import { MoeModel, moeShape } from './model.js';
import { drawMoe } from './picture.js';
import { type MoeDemoReport, moePasses, moePhaseTimes, moeTolerances } from './report.js';
import type { MoePhase, MoeRankResult } from './step.js';

export interface MoeDemoOptions {
  readonly ranks: number;
  readonly rankMode: RankMode;
  readonly small: boolean;
  readonly dtype: MoeDemoDType;
  readonly mode: MoeForm['mode'];
  readonly seed: number;
  readonly device: DemoDevice;
  /** Those that ranks take in turn; none on the host. */
  readonly gpus: readonly number[];
  readonly transport: DemoTransportName;
  readonly from?: string;
  readonly svg?: string;
  readonly kill?: number;
  readonly replace?: boolean;
  /** On a GPU: times the first two steps in turns. */
  readonly pingPong?: boolean;
}

/** Built beside the entry point; see tsup.config.ts. */
const rankProgram = new URL('./demo-moe-rank.js', import.meta.url);

const fullSelection: Selection = { documents: 16, tokens: 14_000, longest: 4000, longestCut: 5000, cut: 1200 };
const smallSelection: Selection = { documents: 6, tokens: 900, longest: 200, longestCut: 300, cut: 160 };
const fullBatch = 256;
const smallBatch = 48;
const timedRounds = 5;
const timedRoundsSmall = 2;
/** Places for replicas on each rank, besides those of its share of the experts. */
const sparePlaces = 2;

/** Consecutive tokens of all documents, shared out evenly. */
function shareOut(documents: readonly Int32Array[], ranks: number): Int32Array[] {
  const all = Int32Array.from(documents.flatMap((tokens) => [...tokens]));
  const border = (rank: number): number => Math.floor((all.length * rank) / ranks);
  return Array.from({ length: ranks }, (_, rank) => all.slice(border(rank), border(rank + 1)));
}

/** The choices of all ranks, step by step. */
function routeAll(model: MoeModel, tokens: readonly Int32Array[], batch: number) {
  const { experts, topK } = model.shape;
  let place = 0;
  const chosen = tokens.map((mine) => {
    const { topkIdx } = model.route(model.rows(mine, place));
    place += mine.length;
    return topkIdx;
  });
  return {
    whole: routingOfRanks(experts, topK, chosen),
    step: (step: number) =>
      routingOfRanks(
        experts,
        topK,
        chosen.map((of) => of.slice(step * batch * topK, (step + 1) * batch * topK)),
      ),
  };
}

export async function runMoeDemo(
  options: MoeDemoOptions,
  tell: (text: string) => void,
  signal: AbortSignal,
): Promise<MoeDemoReport> {
  const { ranks, seed, dtype, mode, device, transport, kill, replace = false } = options;
  const { hidden, topK, experts } = moeShape;
  tell('collect and tokenise documents');
  const files = collectDocuments(options.from ?? findRoot(process.cwd()));
  const { encode } = await import('gpt-tokenizer/encoding/o200k_base');
  // Text that happens to spell a control token is text.
  const encoder = { disallowedSpecial: new Set<string>() };
  const wanted = options.small ? smallSelection : fullSelection;
  const documents = selectDocuments(files, wanted, (text) => encode(text, encoder));
  const tokens = shareOut(
    documents.map((document) => document.tokens),
    ranks,
  );
  tell('route and place experts');
  const batch = options.small ? smallBatch : fullBatch;
  const routing = routeAll(new MoeModel(seed), tokens, batch);
  const load = expertLoad(routing.whole);
  const spread = spreadExperts(experts, ranks);
  const places = Math.ceil(experts / ranks) + (ranks > 1 ? sparePlaces : 0);
  const balanced = balanceExperts(load, { worldSize: ranks, places });
  const replicas = new Array<number>(experts).fill(0);
  for (const expert of balanced.map.expert) if (expert >= 0) replicas[expert]!++;
  const loads = {
    experts: Array.from(load, (choices, expert) => ({ expert, choices, replicas: replicas[expert]! })).sort(
      (a, b) => b.choices - a.choices,
    ),
    spread: [...loadOfRanks(spread, load)],
    balanced: [...balanced.rankLoad],
  };
  const steps = stepsOf({ tokens, batch });
  // Whoever comes in its place has a step to do.
  const killStep = Math.min(Math.floor(steps / 2), replace ? steps - 2 : steps);
  if (options.pingPong === true && steps < 2) {
    throw invalid('--ping-pong', {
      where: 'demo moe',
      expected: 'with documents that make two steps at least',
      found: steps,
    });
  }
  if (killStep < 0) throw invalid('--replace', { where: 'demo moe', expected: 'two steps at least', found: steps });
  const job: MoeJob = {
    seed,
    mode,
    dtype,
    device,
    gpus: options.gpus,
    transport,
    map: balanced.map,
    batch,
    tokens,
    ...(kill === undefined ? {} : { kill: { rank: kill, step: killStep } }),
    ...(replace ? { replace } : {}),
    ...(options.pingPong === true ? { turns: { rounds: options.small ? timedRoundsSmall : timedRounds } } : {}),
  };
  const payload: Payload = dtype === 'fp8' ? 'f8e4m3+f32' : 'bf16';
  const bytes = { logical: 0, ownRank: 0, wire: 0 };
  for (let step = 0; step < steps; step++) {
    const form: MoeForm = mode === 'low-latency' ? { mode, maxTokens: batch } : { mode, alignment: 8 };
    const traffic = moeTraffic(planMoe(routing.step(step), balanced.map, form), {
      hidden,
      dispatch: payload,
      combine: 'bf16',
    });
    for (const direction of [traffic.dispatch, traffic.combine]) {
      bytes.logical += total(direction.logicalBytes);
      bytes.ownRank += total(direction.ownRankBytes);
      bytes.wire += total(direction.wireBytes);
    }
  }
  tell(`run ${ranksText(ranks, options.rankMode)}`);
  const results = await runRanks<MoePhase, MoeRankResult>(
    replace ? ranks + 1 : ranks,
    {
      program: rankProgram,
      write: (path) => writeMoeJob(path, job),
      gpus: options.gpus.length,
      ...(kill === undefined ? {} : { dies: new Set([kill]) }),
    },
    options.rankMode,
    tell,
    signal,
  );
  if (options.svg !== undefined) {
    const title = `ep demo moe: ${documents.length} documents, ${routing.whole.topkIdx.length / topK} tokens, ${experts} experts on ${ranks} ranks`;
    writePicture(options.svg, await drawMoe({ title, load: loads }));
  }
  const sum = (of: (result: MoeRankResult) => number): number => results.reduce((all, one) => all + of(one), 0);
  const turns = turnsOf(results);
  const squaredError = sum(({ compared }) => compared.squaredError);
  const report: Omit<MoeDemoReport, 'pass'> = {
    date: new Date().toISOString(),
    machine: describeMachine(),
    ranks,
    rankMode: options.rankMode,
    mode,
    dtype,
    device,
    gpus: sharesOf(options.gpus, ranks, results),
    transport: device === 'cuda' ? 'cuda' : transport,
    documents: documents.length,
    tokens: routing.whole.topkIdx.length / topK,
    steps,
    experts,
    topK,
    replicas: balanced.map.expert.length,
    gini: gini(load),
    imbalance: { spread: balanced.imbalanceBefore, balanced: balanced.imbalanceAfter },
    load: loads,
    bytes,
    phases: moePhaseTimes(results),
    expertMilliseconds: Math.max(...results.map(({ expertMs }) => expertMs)),
    expertRows: { host: sum(({ expertRows }) => expertRows.host), cuda: sum(({ expertRows }) => expertRows.cuda) },
    stagedBytes: sum(({ stagedBytes }) => stagedBytes),
    error: {
      relative: squaredError === 0 ? 0 : Math.sqrt(squaredError / sum(({ compared }) => compared.squaredReference)),
      largest: Math.max(...results.map(({ compared }) => compared.largest)),
      elements: sum(({ compared }) => compared.elements),
    },
    expectedElements: results.reduce((all, { rank }) => {
      // What it had done before went with it.
      const missed = rank === kill ? (replace ? replacedFrom(job) : killStep + 1) * batch : 0;
      return all + Math.max(0, tokens[rank]!.length - missed) * hidden;
    }, 0),
    tolerance: moeTolerances[dtype],
    ...(job.kill === undefined ? {} : { killed: job.kill }),
    ...(job.kill !== undefined && replace ? { replacedFrom: replacedFrom(job) } : {}),
    replaced: replace && results.some(({ rank }) => rank === kill),
    losses: results.flatMap(({ rank, losses }) => losses.map((loss) => ({ seenBy: rank, ...loss }))),
    droppedChoices: sum(({ droppedChoices }) => droppedChoices),
    routes: [...new Set(results[0]!.routes.map((route) => route.replace(/^rank \d+ by /, '')))],
    ...(turns && { turns: { ...turns, differ: sum(({ turnsDiffer = 0 }) => turnsDiffer) } }),
    ...(options.svg === undefined ? {} : { svg: options.svg }),
  };
  return { pass: moePasses(report), ...report };
}

const total = (bytes: Float64Array): number => bytes.reduce((sum, one) => sum + one, 0);
