/** What every rank of the demo needs to know: plain data, so that it passes files, pipes and thread messages. */
import { readFileSync, writeFileSync } from 'node:fs';
import type { AttentionDType } from '@ep/cuda-kernels';
import { type AttentionPlan, parseAttentionPlan, serialize } from '@ep/plan';
import type { DemoDevice, DemoTransportName } from './transports.js';

export interface Job {
  readonly dtype: AttentionDType;
  readonly seed: number;
  readonly device: DemoDevice;
  readonly transport: DemoTransportName;
  readonly plan: AttentionPlan;
  /** Tokens by document. */
  readonly documents: readonly Int32Array[];
}

/** The plan travels in its own format, with its version and digest: a rank of another version refuses it. */
export function writeJob(path: string, job: Job): void {
  const { plan, documents, ...rest } = job;
  writeFileSync(`${path}.plan`, serialize(plan));
  writeFileSync(path, JSON.stringify({ ...rest, documents: documents.map((tokens) => [...tokens]) }));
}

export function readJob(path: string): Job {
  const { documents, ...rest } = JSON.parse(readFileSync(path, 'utf8')) as Pick<
    Job,
    'dtype' | 'seed' | 'device' | 'transport'
  > & {
    readonly documents: readonly (readonly number[])[];
  };
  const plan = parseAttentionPlan(readFileSync(`${path}.plan`, 'utf8'));
  return { ...rest, plan, documents: documents.map((tokens) => Int32Array.from(tokens)) };
}
