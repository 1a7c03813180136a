/** What `ep demo moe` found, as data and as text. */
import type { MoeForm } from '@ep/plan/moe';
import pc from 'picocolors';
import { type GpuShare, placementFacts } from '../demo/devices.js';
import { type RankMode, ranksText } from '../demo/ranks.js';
import type { TurnsReport } from '../demo/report.js';
import type { DemoDevice } from '../demo/transports.js';
import { formatBytes, type MachineDescription, machineText } from '../doctor/machine.js';
import { plainTable } from '../plain-table.js';
import type { MoeDemoDType } from './job.js';
import { MOE_PHASES, type MoePhase, type MoeRankResult } from './step.js';

/** Relative error by norm that passes. */
export const moeTolerances: Readonly<Record<MoeDemoDType, number>> = { bf16: 1e-2, fp8: 6e-2 };

export interface ExpertLoad {
  readonly expert: number;
  /** Of all tokens: what its one rank computes where experts are spread in order. */
  readonly choices: number;
  /** As placed by `balanceExperts`, which has replicas share the choices evenly. */
  readonly replicas: number;
}

export interface MoeDemoReport {
  readonly pass: boolean;
  readonly date: string;
  readonly machine: MachineDescription;
  readonly ranks: number;
  readonly rankMode: RankMode;
  readonly mode: MoeForm['mode'];
  readonly dtype: MoeDemoDType;
  /** Where rows lay, what carried them and where experts computed. */
  readonly device: DemoDevice;
  /** GPUs with their ranks; none on the host. */
  readonly gpus: readonly GpuShare[];
  readonly transport: string;
  readonly documents: number;
  readonly tokens: number;
  readonly steps: number;
  readonly experts: number;
  readonly topK: number;
  readonly replicas: number;
  /** Of the choices of each expert; 0: all alike. */
  readonly gini: number;
  /** Most loaded rank over the average: experts spread in order, and as placed by `balanceExperts`. */
  readonly imbalance: { readonly spread: number; readonly balanced: number };
  /** Most chosen first; and choices of each rank, in order and as placed. */
  readonly load: {
    readonly experts: readonly ExpertLoad[];
    readonly spread: readonly number[];
    readonly balanced: readonly number[];
  };
  /** Dispatch and combine of all steps, as planned, all ranks; docs/moe.md says what each counts. */
  readonly bytes: { readonly logical: number; readonly ownRank: number; readonly wire: number };
  readonly phases: readonly { readonly phase: MoePhase; readonly milliseconds: number }[];
  /** Of the slowest rank, within `steps`. */
  readonly expertMilliseconds: number;
  /** Rows that experts of all ranks have computed, by where. */
  readonly expertRows: Readonly<Record<DemoDevice, number>>;
  readonly stagedBytes: number;
  readonly error: { readonly relative: number; readonly largest: number; readonly elements: number };
  readonly expectedElements: number;
  readonly tolerance: number;
  readonly killed?: { readonly rank: number; readonly step: number };
  /** The first step of the one in its place. */
  readonly replacedFrom?: number;
  /** Another process, or thread, did the killed rank's later steps. */
  readonly replaced: boolean;
  readonly losses: readonly {
    readonly seenBy: number;
    readonly rank: number;
    readonly why: string;
    readonly step: number;
  }[];
  readonly droppedChoices: number;
  readonly routes: readonly string[];
  /** The first two steps in turns; `differ`: numbers of their results that were not those of the steps. */
  readonly turns?: TurnsReport & { readonly differ: number };
  readonly svg?: string;
}

/** HAZARD: every element must have been compared, every survivor must have seen a death, and a NaN must fail. */
export function moePasses(report: Omit<MoeDemoReport, 'pass'>): boolean {
  const { error, expectedElements, tolerance, killed, losses, ranks, turns } = report;
  const survivors = killed === undefined ? 0 : ranks - 1;
  const seen = killed === undefined || losses.every(({ rank }) => rank === killed.rank);
  const sameInTurns = turns === undefined || turns.differ === 0;
  const compared = error.relative <= tolerance && error.elements === expectedElements;
  return compared && seen && losses.length === survivors && sameInTurns;
}

export function moePhaseTimes(results: readonly MoeRankResult[]): MoeDemoReport['phases'] {
  return MOE_PHASES.map((phase) => ({
    phase,
    milliseconds: Math.max(...results.map(({ milliseconds }) => milliseconds[phase])),
  }));
}

const EXPERTS_IN_A_LINE = 4;

/** Of each expert its choices on one rank, and on each of its replicas. */
function loadText({ experts, spread, balanced }: MoeDemoReport['load']): string {
  const table = plainTable(Array.from({ length: EXPERTS_IN_A_LINE }, () => ['right', 'right', 'left'] as const).flat());
  for (let first = 0; first < experts.length; first += EXPERTS_IN_A_LINE) {
    table.push(
      experts
        .slice(first, first + EXPERTS_IN_A_LINE)
        .flatMap(({ expert, choices, replicas }) => [
          `expert ${expert}`,
          `${choices} ->`,
          replicas === 1 ? `${choices}` : `${replicas} x ${(choices / replicas).toFixed(1)}`,
        ]),
    );
  }
  const ranks = plainTable();
  const shown = (loads: readonly number[]): string => loads.map((load) => load.toFixed(0)).join(' ');
  ranks.push(['ranks, in order', shown(spread)], ['ranks, balanced', shown(balanced)]);
  return `${table.toString()}\n${ranks.toString()}`;
}

export function moeReportText(report: MoeDemoReport): string {
  const { bytes, imbalance, killed, error } = report;
  const facts = plainTable();
  facts.push(
    ['documents', `${report.documents}, ${report.tokens} tokens in ${report.steps} steps`],
    [
      'experts',
      `${report.experts}, top-${report.topK}, ${report.replicas} replicas; Gini of their load ${report.gini.toFixed(3)}`,
    ],
    ...placementFacts(report.gpus),
    ...(report.gpus.length === 0 ? [] : [['experts on', 'the GPUs of their ranks']]),
    [
      'ranks',
      `${ranksText(report.ranks, report.rankMode)} over ${report.transport}, ${report.mode}, ${report.dtype}; ${report.routes.join(', ')}`,
    ],
    [
      'imbalance',
      `${imbalance.spread.toFixed(3)} with experts spread in order, ${imbalance.balanced.toFixed(3)} balanced (largest rank over average)`,
    ],
    [
      'bytes',
      `${formatBytes(bytes.logical)} logical, ${formatBytes(bytes.ownRank)} of it on its own rank; ${formatBytes(bytes.wire)} on the wire; ${formatBytes(report.stagedBytes)} staged`,
    ],
  );
  if (killed !== undefined) {
    const who = report.losses.map(({ seenBy, why, step }) => `rank ${seenBy} in step ${step} (${why})`);
    facts.push(
      ['killed', `rank ${killed.rank} in step ${killed.step}; seen by ${who.join(', ') || 'nobody'}`],
      ...(report.replaced ? [['replaced', `rank ${killed.rank} from step ${report.replacedFrom} on`]] : []),
      [
        '',
        `${report.droppedChoices} choices of the survivors had no expert left; the weights of the others were scaled`,
      ],
    );
  }
  if (report.turns !== undefined) {
    const { rounds, transfer, compute, together, hidden, differ } = report.turns;
    facts.push(
      [
        'two steps in turns',
        `${together.toFixed(3)} ms; calls alone ${transfer.toFixed(3)} ms, experts alone ${compute.toFixed(3)} ms`,
      ],
      [
        'transfer hidden',
        `${(100 * hidden).toFixed(0)} % (medians of ${rounds} rounds, slowest rank, events of the GPU); ${differ} numbers differ from those of the steps`,
      ],
    );
  }
  const times = plainTable(['left', 'right']);
  for (const { phase, milliseconds } of report.phases) times.push([phase, `${milliseconds.toFixed(1)} ms`]);
  times.push(['  experts, in steps', `${report.expertMilliseconds.toFixed(1)} ms`]);
  const verdict = report.pass
    ? pc.green(`PASS: the relative error ${error.relative.toExponential(2)} is at most ${report.tolerance}`)
    : pc.red(
        `FAIL: the relative error is ${error.relative.toExponential(2)} of ${error.elements} elements, expected at most ${report.tolerance} of ${report.expectedElements}`,
      );
  return [
    facts.toString(),
    '',
    'choices of each expert on one rank, and on each of its replicas as balanced; of each rank',
    loadText(report.load),
    '',
    `time per phase, slowest rank; ${machineText(report.machine)}; ${report.date}`,
    times.toString(),
    '',
    `against the dense layer, computed by each rank for its own tokens; largest error ${error.largest.toExponential(2)}`,
    ...(report.svg === undefined ? [] : [`picture: ${report.svg}`]),
    verdict,
    '',
  ]
    .flatMap((block) => block.split('\n').map((line) => line.trimEnd()))
    .join('\n');
}
