/** What every rank of the demo needs to know: plain data, so that it passes files, pipes and thread messages. */
import { readFileSync, writeFileSync } from 'node:fs';
import type { AttentionDType } from '@ep/cuda-kernels';
import { type AttentionPlan, parseAttentionPlan, serialize } from '@ep/plan';
import type { DemoDevice, DemoTransportName } from './transports.js';

interface Batch {
  readonly plan: AttentionPlan;
  /** Tokens by document. */
  readonly documents: readonly Int32Array[];
}

export interface Job extends Batch {
  readonly dtype: AttentionDType;
  readonly seed: number;
  readonly device: DemoDevice;
  /** Those that ranks take in turn; none on the host. */
  readonly gpus: readonly number[];
  readonly transport: DemoTransportName;
  /** The second half of the batch, where two go in turns, and how many rounds of them are timed. */
  readonly turns?: { readonly rounds: number; readonly other: Batch };
}

/** The plan travels in its own format, with its version and digest: a rank of another version refuses it. */
export function writeJob(path: string, job: Job): void {
  const { plan, documents, turns, ...rest } = job;
  const listed = (of: Batch['documents']) => of.map((tokens) => [...tokens]);
  writeFileSync(`${path}.plan`, serialize(plan));
  if (turns !== undefined) writeFileSync(`${path}.other.plan`, serialize(turns.other.plan));
  const other = turns && { rounds: turns.rounds, other: listed(turns.other.documents) };
  writeFileSync(path, JSON.stringify({ ...rest, documents: listed(documents), ...(other && { turns: other }) }));
}

interface Written extends Pick<Job, 'dtype' | 'seed' | 'device' | 'gpus' | 'transport'> {
  readonly documents: readonly (readonly number[])[];
  readonly turns?: { readonly rounds: number; readonly other: readonly (readonly number[])[] };
}

export function readJob(path: string): Job {
  const { documents, turns, ...rest } = JSON.parse(readFileSync(path, 'utf8')) as Written;
  const batch = (from: string, listed: Written['documents']): Batch => ({
    plan: parseAttentionPlan(readFileSync(from, 'utf8')),
    documents: listed.map((tokens) => Int32Array.from(tokens)),
  });
  const other = turns && { rounds: turns.rounds, other: batch(`${path}.other.plan`, turns.other) };
  return { ...rest, ...batch(`${path}.plan`, documents), ...(other && { turns: other }) };
}
