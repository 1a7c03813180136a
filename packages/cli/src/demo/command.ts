/** `ep demo`: the main jobs on real text. */

import { invalid } from '@ep/core';
import type { AttentionDType } from '@ep/cuda-kernels';
import { explain } from '@ep/plan';
import type { MoeForm } from '@ep/plan/moe';
import { Argument, Command, Option } from 'commander';
import { Listr } from 'listr2';
import type { MoeDemoDType } from '../demo-moe/job.js';
import { moeReportText } from '../demo-moe/report.js';
import { runMoeDemo } from '../demo-moe/run.js';
import { describeMachine } from '../doctor/machine.js';
import { CommandExit, jsonText, misused } from '../failure.js';
import { integerOption } from '../options.js';
import { drawPlan } from '../picture/draw.js';
import { checkPicture, writePicture } from '../plan/command.js';
import { evenBudgets, type PlannedStep, planStep } from '../plan/plan-step.js';
import { untilStopped } from '../stop.js';
import { type DeviceChoice, deviceHelp, deviceOption, type Placement, placeRanks, sharesOf } from './devices.js';
import {
  collectDocuments,
  type DemoDocument,
  findRoot,
  fullSelection,
  selectDocuments,
  shortName,
  smallSelection,
  type TextFile,
} from './documents.js';
import { demoShape } from './inputs.js';
import { writeJob } from './job.js';
import { ranksText, runRanks } from './ranks.js';
import {
  bandwidthOf,
  type DemoReport,
  movedBytesOf,
  passes,
  phaseTimes,
  type RowBytes,
  reportText,
  sentBytesOf,
  tensorErrors,
  tolerances,
  turnsOf,
} from './report.js';
import type { StepResult } from './step.js';
import { checkGpu, type DemoTransportName, demoTransportNames, isElastic } from './transports.js';

type DemoJob = 'attention' | 'moe';

interface DemoFlags {
  readonly ranks: number;
  readonly threads?: boolean;
  readonly small?: boolean;
  readonly dtype: AttentionDType | MoeDemoDType;
  readonly seed: number;
  readonly device: DeviceChoice;
  readonly transport: DemoTransportName;
  readonly mode?: MoeForm['mode'];
  readonly kill?: number;
  readonly replace?: boolean;
  readonly pingPong?: boolean;
  readonly from?: string;
  readonly svg: string | false;
  readonly json?: boolean;
}

const rankProgram = new URL('./demo-rank.js', import.meta.url);

/** Attention kernels work in blocks of rows: finer borders cost more than they balance. */
const block = 64;
const smallBlock = 16;
const tolerance = 0.02;
const TIMED_ROUNDS = 5;
const TIMED_ROUNDS_SMALL = 2;

export function demoCommand(): Command {
  return new Command('demo')
    .description('plan, dispatch and verify attention, or a layer of experts, over real documents on local ranks')
    .addArgument(new Argument('[job]', 'what to run').choices(['attention', 'moe']).default('attention'))
    .addOption(new Option('-n, --ranks <count>', 'ranks').argParser(integerOption(1, 128)).default(4))
    .option(
      '--threads',
      'ranks as worker threads of one process instead of processes; with --device cuda all on one GPU',
    )
    .option('--small', 'far less text: for tests')
    .addOption(
      new Option('--dtype <type>', 'of Q, K, V and gradients: bf16 or f32; of tokens to experts: bf16 or fp8')
        .choices(['bf16', 'f32', 'fp8'])
        .default('bf16'),
    )
    .addOption(
      new Option('--mode <form>', 'moe: how rows are received (default: low-latency)').choices([
        'low-latency',
        'high-throughput',
      ]),
    )
    .addOption(new Option('--kill <rank>', 'moe: this rank dies in the middle').argParser(integerOption(0, 127)))
    .option('--replace', 'moe: with --kill: another process takes its place in the next step')
    .option(
      '--ping-pong',
      'with --device cuda: two halves of the batch in turns, rows of one travelling while attention, or experts, of the other run',
    )
    .addOption(
      new Option('--seed <number>', 'of embeddings, projections and dO')
        .argParser(integerOption(0, 2 ** 31 - 1))
        .default(1),
    )
    .addOption(
      new Option('--device <where>', deviceHelp)
        .argParser(deviceOption)
        .default({ device: 'host' } satisfies DeviceChoice, 'host'),
    )
    .addOption(
      new Option(
        '--transport <name>',
        'what carries rows: shared memory, queue pairs of a software NIC, the one within nodes of two ranks and the other between them (mixed), or libfabric on the loopback interface',
      )
        .choices(demoTransportNames)
        .default('shm' satisfies DemoTransportName),
    )
    .option('--from <folder>', 'where the documents are (default: the workspace around the current folder)')
    .option('--svg <path>', 'where the picture of the plan goes', 'ep-demo.svg')
    .option('--no-svg', 'draw no picture')
    .option('--json', 'the report as one JSON object')
    .action(async (job: DemoJob, flags: DemoFlags) => {
      if (job === 'moe') return moe(flags);
      const { dtype } = flags;
      if (dtype === 'fp8') throw misused('--dtype', { where: 'demo attention', expected: 'bf16 or f32', found: dtype });
      if (flags.replace === true) {
        throw misused('--replace', { where: 'demo attention', expected: 'absent: it is of demo moe', found: true });
      }
      if (flags.kill !== undefined) {
        throw misused('--kill', { where: 'demo attention', expected: 'absent: it is of demo moe', found: flags.kill });
      }
      if (flags.mode !== undefined) {
        throw misused('--mode', { where: 'demo attention', expected: 'absent: it is of demo moe', found: flags.mode });
      }
      if (flags.pingPong === true && flags.device.device !== 'cuda') {
        const expected = 'with --device cuda, whose streams run beside each other';
        throw misused('--ping-pong', { where: 'demo attention', expected, found: true });
      }
      if (flags.svg !== false) checkPicture(flags.svg);
      const placement = await placementOf('demo attention', flags);
      const report = await untilStopped('demo', (signal) => runDemo({ ...flags, dtype }, placement, signal));
      process.stdout.write(flags.json === true ? `${jsonText(report)}\n` : reportText(report));
      if (!report.pass) throw new CommandExit(1);
    });
}

/** Throws unless there are the GPUs that were asked for, and nothing was asked for beside them that is of the host. */
async function placementOf(where: string, { device, transport, ranks, threads }: DemoFlags): Promise<Placement> {
  if (device.device === 'cuda') {
    if (transport !== 'shm') {
      throw misused('--transport', { where, expected: 'absent with --device cuda', found: transport });
    }
    await checkGpu(`${where}: --device cuda`);
  }
  return placeRanks(where, { ...device, ranks, threads: threads === true });
}

interface Progress {
  files: readonly TextFile[];
  documents: readonly DemoDocument[];
  /** All documents, or two halves of them that go in turns; and their plans. */
  batches: readonly (readonly DemoDocument[])[];
  steps: readonly PlannedStep[];
  results: readonly StepResult[];
  svg?: string;
}

async function moe(flags: DemoFlags): Promise<void> {
  const { dtype, ranks, kill, from } = flags;
  if (dtype === 'f32') throw misused('--dtype', { where: 'demo moe', expected: 'bf16 or fp8', found: dtype });
  if (flags.pingPong === true && (flags.device.device !== 'cuda' || kill !== undefined)) {
    const expected = 'with --device cuda, whose streams run beside each other, and without --kill';
    throw misused('--ping-pong', { where: 'demo moe', expected, found: true });
  }
  if (kill !== undefined && (kill >= ranks || ranks < 2)) {
    throw misused('--kill', { where: 'demo moe', expected: `one of ${ranks} ranks, not the only one`, found: kill });
  }
  if (flags.replace === true && (kill === undefined || !isElastic(flags.transport) || flags.device.device === 'cuda')) {
    const expected = 'with --kill, over shm, ibgda, efa or mixed, with rows on the host';
    throw misused('--replace', { where: 'demo moe', expected, found: true });
  }
  if (flags.svg !== false) checkPicture(flags.svg);
  const placement = await placementOf('demo moe', flags);
  const tell = (text: string): void => {
    if (flags.json !== true && process.stderr.isTTY) process.stderr.write(`\r\x1b[K${text}`);
  };
  const options = {
    ranks,
    ...placement,
    small: flags.small === true,
    dtype,
    mode: flags.mode ?? ('low-latency' as const),
    seed: flags.seed,
    transport: flags.transport,
    ...(from === undefined ? {} : { from }),
    ...(flags.svg === false ? {} : { svg: flags.svg }),
    ...(kill === undefined ? {} : { kill }),
    replace: flags.replace === true,
    pingPong: flags.pingPong === true,
  };
  const report = await untilStopped('demo', (signal) => runMoeDemo(options, tell, signal));
  tell('');
  process.stdout.write(flags.json === true ? `${jsonText(report)}\n` : moeReportText(report));
  if (!report.pass) throw new CommandExit(1);
}

type AttentionFlags = DemoFlags & { readonly dtype: AttentionDType };

async function runDemo(flags: AttentionFlags, placement: Placement, signal: AbortSignal): Promise<DemoReport> {
  const elementBytes = flags.dtype === 'bf16' ? 2 : 4;
  const { queryHeads, kvHeads, headDim } = demoShape;
  const row: RowBytes = { q: queryHeads * headDim * elementBytes, kv: 2 * kvHeads * headDim * elementBytes };
  const { rankMode: mode, device, gpus } = placement;
  const root = flags.from ?? findRoot(process.cwd());
  const progress: Progress = { files: [], documents: [], batches: [], steps: [], results: [] };
  const quiet = flags.json === true || process.stdout.isTTY !== true;
  const tasks = new Listr<Progress, 'default' | 'silent'>(
    [
      {
        title: 'collect documents',
        task: (context, task) => {
          context.files = collectDocuments(root);
          task.title = `collect documents: ${context.files.length} different files`;
        },
      },
      {
        title: 'tokenise',
        task: async (context, task) => {
          const { encode } = await import('gpt-tokenizer/encoding/o200k_base');
          // Text that happens to spell a control token is text.
          const options = { disallowedSpecial: new Set<string>() };
          const wanted = flags.small === true ? smallSelection : fullSelection;
          context.documents = selectDocuments(context.files, wanted, (text) => encode(text, options));
          task.title = `tokenise: ${context.documents.length} documents`;
        },
      },
      {
        title: 'plan',
        task: (context, task) => {
          context.batches = flags.pingPong === true ? halvesOf(context.documents) : [context.documents];
          context.steps = context.batches.map((documents) => planDemo(documents, flags, row));
          const { atHome, planned } = imbalanceOf(context.steps);
          task.title = `plan: imbalance ${atHome.toFixed(3)} -> ${planned.toFixed(3)}`;
        },
      },
      {
        title: `run ${ranksText(flags.ranks, mode)}`,
        task: async (context, task) => {
          const job = {
            dtype: flags.dtype,
            seed: flags.seed,
            ...{ device, gpus, transport: flags.transport },
            ...batchOf(context, 0),
            ...(flags.pingPong === true && {
              turns: { rounds: flags.small === true ? TIMED_ROUNDS_SMALL : TIMED_ROUNDS, other: batchOf(context, 1) },
            }),
          };
          const onPhase = (phase: string): void => {
            task.output = phase;
          };
          const rankJob = { program: rankProgram, write: (path: string) => writeJob(path, job), gpus: gpus.length };
          context.results = await runRanks<string, StepResult>(flags.ranks, rankJob, mode, onPhase, signal);
        },
      },
      {
        title: 'draw',
        enabled: () => flags.svg !== false,
        task: async (context) => {
          const { explanation } = context.steps[0]!;
          const half = flags.pingPong === true ? ', the first of two halves' : '';
          const title = `ep demo: ${explanation.documents} documents, ${explanation.tokens} tokens on ${flags.ranks} rank${flags.ranks === 1 ? '' : 's'}${half}`;
          const svg = await drawPlan(explanation, { title, rowBytesQ: row.q, rowBytesKv: row.kv });
          context.svg = flags.svg as string;
          writePicture(context.svg, svg);
        },
      },
    ],
    // Its own handler would end the process with 127 before the ranks and the job folder are seen to.
    { ctx: progress, renderer: quiet ? 'silent' : 'default', registerSignalListeners: false },
  );
  await tasks.run();
  return reportOf(progress, flags, placement, row);
}

const batchOf = ({ steps, batches }: Progress, at: number) => ({
  plan: steps[at]!.planned,
  documents: batches[at]!.map((document) => document.tokens),
});

/** Longest first, each to the half with less work so far: attention costs length squared. */
function halvesOf(documents: readonly DemoDocument[]): readonly (readonly DemoDocument[])[] {
  if (documents.length < 2) {
    const expected = 'at least two documents, one for each half';
    throw invalid('--ping-pong', { where: 'demo attention', expected, found: documents.length });
  }
  const halves: DemoDocument[][] = [[], []];
  const work = [0, 0];
  for (const document of [...documents].sort((a, b) => b.tokens.length - a.tokens.length)) {
    const at = work[0]! <= work[1]! ? 0 : 1;
    halves[at]!.push(document);
    work[at]! += document.tokens.length ** 2;
  }
  return halves;
}

/** Of the half that has more of it. */
const imbalanceOf = (steps: readonly PlannedStep[]) => ({
  atHome: Math.max(...steps.map(({ explanation }) => explanation.imbalanceBefore)),
  planned: Math.max(...steps.map(({ explanation }) => explanation.imbalanceAfter)),
});

function planDemo(documents: readonly DemoDocument[], flags: AttentionFlags, row: RowBytes): PlannedStep {
  const lengths = Int32Array.from(documents, (document) => document.tokens.length);
  const tokens = lengths.reduce((sum, length) => sum + length, 0);
  return planStep({
    lengths,
    budgets: evenBudgets(tokens, flags.ranks),
    balance: true,
    tolerance,
    block: flags.small === true ? smallBlock : block,
    sharing: 'each-server',
    rowBytesQ: row.q,
    rowBytesKv: row.kv,
  });
}

function reportOf(progress: Progress, flags: AttentionFlags, placement: Placement, row: RowBytes): DemoReport {
  const { rankMode: mode, device, gpus } = placement;
  const { documents, results } = progress;
  const { steps } = progress;
  const tokens = steps.reduce((sum, { explanation }) => sum + explanation.tokens, 0);
  const { queryHeads, kvHeads, headDim } = demoShape;
  const longest = documents.reduce((a, b) => (b.tokens.length > a.tokens.length ? b : a));
  const staged = results.reduce((sum, result) => sum + result.stagedBytes, 0);
  const none = { staged: 0, sent: 0 };
  const moved = steps.map(({ explanation }) => movedBytesOf(explanation, row, none));
  const movedOf = (of: 'remote' | 'local' | 'needed') => moved.reduce((sum, one) => sum + one[of], 0);
  const bytes = {
    ...{ remote: movedOf('remote'), local: movedOf('local'), needed: movedOf('needed') },
    ...{ staged, sent: sentBytesOf(results) },
  };
  const turns = turnsOf(results);
  const phases = phaseTimes(results);
  const errors = tensorErrors(results);
  const bound = tolerances[flags.dtype];
  const q = tokens * queryHeads * headDim;
  const kv = tokens * kvHeads * headDim;
  return {
    pass: passes(errors, bound, { o: q, dQ: q, dK: kv, dV: kv }, bytes),
    date: new Date().toISOString(),
    machine: describeMachine(),
    mode,
    device,
    gpus: sharesOf(gpus, flags.ranks, results),
    transport: device === 'cuda' ? 'cuda' : flags.transport,
    ranks: flags.ranks,
    dtype: flags.dtype,
    documents: documents.length,
    tokens,
    longest: { name: shortName(longest.name), tokens: longest.tokens.length },
    imbalance: imbalanceOf(steps),
    bytes,
    bytesAtHome: steps.reduce((sum, { atHome }) => sum + movedBytesOf(explain(atHome), row, none).remote, 0),
    phases,
    bytesPerSecond: bandwidthOf(results, phases),
    ...(turns && { turns }),
    tolerance: bound,
    errors,
    ...(progress.svg === undefined ? {} : { svg: progress.svg }),
  };
}
