/**
 * Workloads go on for long while the link between two hosts fails in all the ways that end: nobody is lost, nothing is wrong, nothing is left behind. Some seconds by default;
 * EP_SOAK_MINUTES, or half an hour with EP_TEST_FULL=1. EP_SOAK_SEED repeats one: the faults are the same, when they strike is not.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { found, type Report, type TwoHosts } from './hosts.js';

const missing = found.missing || found.linksMissing;
const workloads = ['attention', 'experts', 'groups', 'training'] as const;

const minutes = Number(process.env.EP_SOAK_MINUTES ?? (process.env.EP_TEST_FULL === '1' ? 30 : 0.1));
const seed = Number(process.env.EP_SOAK_SEED ?? Date.now() % 2 ** 31);
const workloadMs = (minutes * 60_000) / workloads.length;

interface Footprint {
  readonly megabytes: number;
  readonly descriptors: number;
}

interface Endured {
  readonly steps: number;
  readonly losses: readonly unknown[];
  readonly left: readonly number[];
  readonly result: unknown;
  readonly early: Footprint;
  readonly late: Footprint;
}

/** The same numbers, each below the one asked for, for the same seed. */
function randomOf(seed: number): (below: number) => number {
  let state = Math.imul(seed, 0x9e3779b1) >>> 0;
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

/** One fault, and its end. */
async function strike(two: TwoHosts, random: (below: number) => number): Promise<string> {
  const [kind, side, ms] = [random(4), random(2), 20 + random(1500)];
  const host = two.links[side]!;
  switch (kind) {
    case 0:
      host.link('down');
      await delay(ms);
      host.link('up');
      return `host ${side} cut for ${ms} ms`;
    case 1:
      host.mute(true);
      await delay(ms);
      host.mute(false);
      return `host ${side} mute for ${ms} ms`;
    case 2:
      for (const one of two.links) one.mtu(750);
      await delay(ms);
      for (const one of two.links) one.mtu(1500);
      return `packets of 750 bytes for ${ms} ms`;
    default:
      if (found.throttleMissing) return 'none: tc cannot limit an interface';
      host.throttle(10);
      await delay(ms);
      host.unthrottle();
      return `host ${side} at 10 Mbit/s for ${ms} ms`;
  }
}

function valuesOf(reports: readonly Report[]): readonly Endured[] {
  return reports.map(({ rank, value, error, exit }) => {
    if (value === undefined) throw new Error(`rank ${rank}: ${error?.message ?? `ended: ${exit}`}`);
    return value as Endured;
  });
}

describe.skipIf(missing)(`two hosts for ${minutes} minutes, seed ${seed}${missing && ` (skipped: ${missing})`}`, () => {
  let two: TwoHosts;
  beforeAll(async () => {
    two = await found.make();
  });
  afterAll(() => two?.close());

  it.each(workloads)('%s', { timeout: workloadMs + 180_000 }, async (workload) => {
    const random = randomOf(seed + workloads.indexOf(workload));
    const faults: string[] = [];
    const rage = async (): Promise<void> => {
      const end = performance.now() + workloadMs;
      do {
        faults.push(await strike(two, random));
        await delay(random(1000));
      } while (performance.now() < end);
    };
    let raged: Promise<void> | undefined;
    const reports = await two.run('endure', 2, {
      data: { workload, config: { heartbeatMs: 250, silenceMs: 60_000 }, hidden: 256, batch: 4 },
      ready: (job) => {
        raged = rage().finally(() => job.enough());
        raged.catch(() => {});
      },
    });
    await raged;
    const told = `seed ${seed}: ${faults.join(', ')}`;
    const values = valuesOf(reports);
    const [first] = values;
    expect(first!.steps, told).toBeGreaterThan(1);
    for (const [rank, { steps, losses, left, result, early, late }] of values.entries()) {
      const who = `rank ${rank}, ${told}`;
      expect({ losses, left }, who).toEqual({ losses: [], left: [0, 1, 2, 3] });
      expect({ steps, result }, who).toEqual({ steps: first!.steps, result: first!.result });
      expect(late.descriptors, `descriptors of ${who}`).toBeLessThanOrEqual(early.descriptors + 2);
      // Of a heap that is collected now and then; a leak of a kilobyte for each step would be seen in half an hour.
      expect(late.megabytes, `memory of ${who}`).toBeLessThan(early.megabytes + 128);
    }
  });
});
