/** What the demo found, as data and as text. */
import type { AttentionDType } from '@ep/cuda-kernels';
import type { Explanation } from '@ep/plan';
import pc from 'picocolors';
import { formatBytes, type MachineDescription, machineText } from '../doctor/machine.js';
import { plainTable } from '../plain-table.js';
import { type GpuShare, placementFacts } from './devices.js';
import { type RankMode, ranksText } from './ranks.js';
import { COMPARED, type ComparedTensor } from './results.js';
import type { StepResult } from './step.js';
import type { DemoDevice, DemoTransportName } from './transports.js';

/** Relative error by norm that passes. */
export const tolerances: Readonly<Record<AttentionDType, number>> = { f32: 1e-5, bf16: 1e-2 };

export interface PhaseTime {
  readonly phase: string;
  /** Of the slowest rank. */
  readonly milliseconds: number;
}

export interface TensorError {
  readonly tensor: ComparedTensor;
  readonly elements: number;
  /** Norm of the difference over norm of the reference, over all documents. */
  readonly relative: number;
  readonly largestAbsolute: number;
}

/** Two halves of a batch in turns, in milliseconds by events of the GPU: of each round the slowest rank, of rounds the median. */
export interface TurnsReport {
  readonly rounds: number;
  /** The calls of both halves with nothing beside them, attention or experts of both likewise, and both in turns. */
  readonly transfer: number;
  readonly compute: number;
  readonly together: number;
  /** Of the transfer, the share that took no time of its own: 1 if it is all behind what is computed, 0 if one waits for the other, less if they slow each other down. */
  readonly hidden: number;
}

/** Bytes of one step, all ranks, forward and backward. */
export interface MovedBytes {
  /** Between ranks, and from a rank to itself. */
  readonly remote: number;
  readonly local: number;
  /** Between ranks, if every row went once to each server that needs it and its gradient came back once. */
  readonly needed: number;
  /** Copied before they could be sent. */
  readonly staged: number;
  /** What the ranks say that they sent, to themselves included; the rest is of the plan. */
  readonly sent: number;
}

export interface DemoReport {
  readonly pass: boolean;
  readonly date: string;
  readonly machine: MachineDescription;
  readonly mode: RankMode;
  /** Where tensors lay and kernels ran. */
  readonly device: DemoDevice;
  /** GPUs with their ranks; none on the host. */
  readonly gpus: readonly GpuShare[];
  readonly transport: DemoTransportName | 'cuda';
  readonly ranks: number;
  readonly dtype: AttentionDType;
  readonly documents: number;
  readonly tokens: number;
  readonly longest: { readonly name: string; readonly tokens: number };
  readonly imbalance: { readonly atHome: number; readonly planned: number };
  readonly bytes: MovedBytes;
  readonly bytesAtHome: number;
  readonly phases: readonly PhaseTime[];
  /** Payload bytes of the four dispatches over their times, of all ranks together; local copies are payload, too. */
  readonly bytesPerSecond: number;
  readonly turns?: TurnsReport;
  readonly tolerance: number;
  readonly errors: readonly TensorError[];
  readonly svg?: string;
}

/** Row bytes of Q (and O, dO, dQ), and of K and V together (and dK, dV). */
export interface RowBytes {
  readonly q: number;
  readonly kv: number;
}

/** Q out, O back, dO out, dQ back; K and V out, dK and dV back. */
export function movedBytesOf(
  explanation: Explanation,
  row: RowBytes,
  { staged, sent }: Pick<MovedBytes, 'staged' | 'sent'>,
): MovedBytes {
  let localQuery = 0;
  let localKv = 0;
  for (const { from, to, queryTokens, kvTokens } of explanation.traffic) {
    if (from !== to) continue;
    localQuery += queryTokens;
    localKv += kvTokens;
  }
  const both = (query: number, kv: number): number => 4 * query * row.q + 2 * kv * row.kv;
  return {
    remote: both(explanation.movedQueryTokens, explanation.movedKvTokens),
    local: both(localQuery, localKv),
    needed: both(explanation.movedQueryTokens, explanation.neededKvTokens),
    staged,
    sent,
  };
}

/** Of all ranks and both directions. */
export function sentBytesOf(results: readonly StepResult[]): number {
  return results.reduce((sum, { bytesSent }) => sum + bytesSent.forward + bytesSent.backward, 0);
}

export function phaseTimes(results: readonly StepResult[]): PhaseTime[] {
  return Object.keys(results[0]?.milliseconds ?? {}).map((phase) => ({
    phase,
    milliseconds: Math.max(...results.map((result) => result.milliseconds[phase]!)),
  }));
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/** Undefined where nothing went in turns. */
export function turnsOf(results: readonly Pick<StepResult, 'turns'>[]): TurnsReport | undefined {
  const all = results.flatMap(({ turns }) => (turns === undefined ? [] : [turns]));
  const first = all[0];
  if (first === undefined) return undefined;
  const slowest = (of: 'transfer' | 'compute' | 'together'): number =>
    median(first[of].map((_, round) => Math.max(...all.map((one) => one[of][round]!))));
  const [transfer, compute, together] = [slowest('transfer'), slowest('compute'), slowest('together')];
  const hidden = transfer === 0 ? 0 : Math.min(1, (transfer + compute - together) / transfer);
  return { rounds: first.transfer.length, transfer, compute, together, hidden };
}

export function tensorErrors(results: readonly StepResult[]): TensorError[] {
  return COMPARED.map((name) => {
    const parts = results.map((result) => result.compared[name]);
    const sum = (field: 'elements' | 'squaredError' | 'squaredReference'): number =>
      parts.reduce((total, part) => total + part[field], 0);
    const squaredError = sum('squaredError');
    return {
      tensor: name,
      elements: sum('elements'),
      relative: squaredError === 0 ? 0 : Math.sqrt(squaredError / sum('squaredReference')),
      largestAbsolute: parts.some((part) => Number.isNaN(part.largest))
        ? Number.NaN
        : Math.max(...parts.map((part) => part.largest)),
    };
  });
}

/** The ranks sent what was planned: what is reported as moved is both. */
export function sentAsPlanned({ remote, local, sent }: MovedBytes): boolean {
  return sent === remote + local;
}

/** HAZARD: every element must have been compared, and a NaN must fail: `error > tolerance` would let both pass. */
export function passes(
  errors: readonly TensorError[],
  tolerance: number,
  expectedElements: Readonly<Record<ComparedTensor, number>>,
  bytes: MovedBytes,
): boolean {
  return (
    sentAsPlanned(bytes) &&
    errors.length === COMPARED.length &&
    errors.every((error) => error.relative <= tolerance && error.elements === expectedElements[error.tensor])
  );
}

const dispatchPhases: readonly string[] = ['dispatch', 'return', 'dispatch dO', 'return gradients'];

export function bandwidthOf(results: readonly StepResult[], phases: readonly PhaseTime[]): number {
  const bytes = sentBytesOf(results);
  const milliseconds =
    turnsOf(results)?.transfer ??
    phases.filter(({ phase }) => dispatchPhases.includes(phase)).reduce((sum, time) => sum + time.milliseconds, 0);
  return milliseconds === 0 ? 0 : bytes / (milliseconds / 1000);
}

export function reportText(report: DemoReport): string {
  const { bytes, imbalance, longest } = report;
  const facts = plainTable();
  facts.push(
    ['documents', `${report.documents}, longest ${longest.name} with ${longest.tokens} tokens`],
    ['tokens', String(report.tokens)],
    ...placementFacts(report.gpus),
    ['ranks', `${ranksText(report.ranks, report.mode)} over ${report.transport}, ${report.dtype}`],
    [
      'imbalance',
      `${imbalance.atHome.toFixed(3)} with every shard at home, ${imbalance.planned.toFixed(3)} as planned (largest rank over average)`,
    ],
    [
      'bytes moved',
      `${formatBytes(bytes.remote)} between ranks, ${formatBytes(bytes.needed)} needed; ${formatBytes(bytes.local)} stayed on their rank; ${formatBytes(bytes.staged)} staged`,
    ],
    ['', `${formatBytes(report.bytesAtHome)} between ranks without balancing`],
    [
      'bandwidth',
      `${(report.bytesPerSecond / 1e9).toFixed(2)} GB/s payload over the ${report.turns === undefined ? 'four' : 'eight'} dispatches, all ranks`,
    ],
  );
  if (report.turns !== undefined) {
    const { rounds, transfer, compute, together, hidden } = report.turns;
    facts.push(
      [
        'two halves in turns',
        `${together.toFixed(3)} ms; transfer alone ${transfer.toFixed(3)} ms, attention alone ${compute.toFixed(3)} ms`,
      ],
      [
        'transfer hidden',
        `${(100 * hidden).toFixed(0)} % (medians of ${rounds} rounds, slowest rank, events of the GPU)`,
      ],
    );
  }
  const times = plainTable(['left', 'right']);
  for (const { phase, milliseconds } of report.phases) times.push([phase, `${milliseconds.toFixed(1)} ms`]);
  const errors = plainTable(['left', 'right', 'right']);
  errors.push(['', 'relative error', 'largest']);
  for (const { tensor, relative, largestAbsolute } of report.errors) {
    const text = relative.toExponential(2);
    errors.push([tensor, relative <= report.tolerance ? text : pc.red(text), largestAbsolute.toExponential(2)]);
  }
  const unplanned = sentAsPlanned(bytes)
    ? ''
    : `; the ranks sent ${bytes.sent} bytes where ${bytes.remote + bytes.local} were planned`;
  const verdict = report.pass
    ? pc.green(`PASS: every relative error is at most ${report.tolerance}`)
    : pc.red(`FAIL: the relative errors must be at most ${report.tolerance}, and every row compared${unplanned}`);
  return [
    facts.toString(),
    '',
    `time per phase, slowest rank; ${machineText(report.machine)}; ${report.date}`,
    times.toString(),
    '',
    'against single-rank attention over each whole document in f32',
    errors.toString(),
    '',
    ...(report.svg === undefined ? [] : [`picture: ${report.svg}`]),
    verdict,
    '',
  ]
    .map((block) =>
      block
        .split('\n')
        .map((line) => line.trimEnd())
        .join('\n'),
    )
    .join('\n');
}
