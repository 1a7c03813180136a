/**
 * Ranks that are killed at every moment of every operation. Survivors' operations end alike, in time, and the next ones work: see scenario.ts. A fixed
 * sample, the same in every run; the whole matrix under EP_TEST_FULL=1.
 */
import { afterAll, describe, expect, it } from 'vitest';
import { bundleProgram } from '../bundle.js';
import { sampleOf, wholeMatrix } from './matrix.js';
import type { BackendName } from './protocol.js';
import { BOUND_MS, runScenario } from './scenario.js';

/** What the end of an operation may take after the death that ends it, in 99 of 100 cases. Seen: 32 ms at ten times as many runnable threads as cores. */
const P99_MS = 500;

const full = process.env.EP_TEST_FULL === '1';
const program = await bundleProgram('failure-rank');

const backends: readonly (readonly [BackendName, number])[] = [
  ['shm', 1],
  ['nvshmem', 6],
];

describe.each(backends)('process groups over %s', (backend, stride) => {
  const scenarios = full ? wholeMatrix(backend) : sampleOf(backend, stride);
  const latencies: number[] = [];

  const percentile = (part: number): number => {
    const sorted = latencies.toSorted((a, b) => a - b);
    return sorted[Math.floor(part * (sorted.length - 1))] ?? Number.NaN;
  };

  afterAll(() => {
    const at = (part: number): string => percentile(part).toFixed(1);
    console.log(
      `${backend}: ${latencies.length} operations ended by a death, after it p50 ${at(0.5)} ms, p99 ${at(0.99)} ms, longest ${at(1)} ms`,
    );
  });

  it.each(scenarios)('$title', async (scenario) => {
    const end = await runScenario(program, scenario);
    latencies.push(...end.latencies);
  });

  it('ended operations in time', () => {
    // Where deaths fall between operations none is ended by them; not everywhere.
    expect(latencies.length).toBeGreaterThan(scenarios.length / 4);
    expect(percentile(0.99)).toBeLessThan(P99_MS);
    expect(Math.max(...latencies)).toBeLessThan(BOUND_MS);
  });
});
