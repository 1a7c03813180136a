/** What every rank of `ep demo moe` needs to know: plain data in a file. */
import { readFileSync, writeFileSync } from 'node:fs';
import { type ExpertMap, type MoeForm, mapExperts } from '@ep/plan/moe';
import type { DemoDevice, DemoTransportName } from '../demo/transports.js';

export const moeDTypes = ['bf16', 'fp8'] as const;
export type MoeDemoDType = (typeof moeDTypes)[number];

export interface MoeJob {
  readonly seed: number;
  readonly mode: MoeForm['mode'];
  readonly dtype: MoeDemoDType;
  readonly device: DemoDevice;
  /** Those that ranks take in turn; none on the host. */
  readonly gpus: readonly number[];
  readonly transport: DemoTransportName;
  readonly map: ExpertMap;
  /** Tokens of a rank in one step. */
  readonly batch: number;
  /** Tokens of each rank, in order. */
  readonly tokens: readonly Int32Array[];
  /** Dies in the middle of this step, after it has sent its tokens. */
  readonly kill?: { readonly rank: number; readonly step: number };
  /** Then one more is started than there are ranks: it takes the place of the killed one (`replacedFrom`). */
  readonly replace?: boolean;
  /** Afterwards the first two steps go in turns, in rounds that are timed: on a GPU. */
  readonly turns?: { readonly rounds: number };
}

/** Whether a death ends the step in which it comes, on all ranks, so that they do it again: with the one that was taken in, or without. */
export const repeatsStep = ({ transport }: Pick<MoeJob, 'transport'>): boolean => transport === 'efa';

/** The first step of the one that takes the place of the killed rank. */
export const replacedFrom = (job: Pick<MoeJob, 'transport' | 'kill'>): number =>
  job.kill!.step + (repeatsStep(job) ? 0 : 1);

export const stepsOf = ({ tokens, batch }: Pick<MoeJob, 'tokens' | 'batch'>): number =>
  Math.ceil(Math.max(...tokens.map((of) => of.length)) / batch);

export function writeMoeJob(path: string, { map, tokens, ...rest }: MoeJob): void {
  const { worldSize, experts, rankOffsets, expert } = map;
  writeFileSync(
    path,
    JSON.stringify({
      ...rest,
      map: { worldSize, experts, rankOffsets: [...rankOffsets], expert: [...expert] },
      tokens: tokens.map((of) => [...of]),
    }),
  );
}

type Written = Omit<MoeJob, 'map' | 'tokens'> & {
  readonly map: Pick<ExpertMap, 'worldSize' | 'experts'> & {
    readonly rankOffsets: readonly number[];
    readonly expert: readonly number[];
  };
  readonly tokens: readonly (readonly number[])[];
};

export function readMoeJob(path: string): MoeJob {
  const { map, tokens, ...rest } = JSON.parse(readFileSync(path, 'utf8')) as Written;
  return {
    ...rest,
    map: mapExperts({
      ...map,
      rankOffsets: Int32Array.from(map.rankOffsets),
      expert: Int32Array.from(map.expert),
    }),
    tokens: tokens.map((of) => Int32Array.from(of)),
  };
}
