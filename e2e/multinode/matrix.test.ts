/**
 * Every workload under every fault, on two hosts of two ranks: nothing hangs, nothing is wrong, survivors agree, nothing is left behind. A sample of the pairs by
 * default, in which every fault and every workload is; all of them with EP_TEST_FULL=1.
 */
import { execFile } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, vi } from 'vitest';
import { found, itUnless, type Job, type Report, type TwoHosts } from './hosts.js';

const run = promisify(execFile);
const ALONE = fileURLToPath(new URL('../data-parallel/main.mjs', import.meta.url));

const { missing, linksMissing, throttleMissing } = found;
const twoEach = found.slotsMissing(2);
const full = process.env.EP_TEST_FULL === '1';

const workloads = ['attention', 'experts', 'groups', 'training'] as const;
type Workload = (typeof workloads)[number];

const ranks = [0, 1, 2, 3];
/** Gradients that go in two levels, and fill a slow link. */
const training = { hidden: 256, batch: 4 };

interface Endured {
  readonly steps: number;
  readonly longestMs: number;
  readonly losses: readonly { readonly step: number; readonly lost: readonly number[] }[];
  readonly left: readonly number[];
  readonly result: unknown;
}

interface Fault {
  /** With this workload it is part of the sample. */
  readonly sample: Workload;
  /** Whom each rank that is left loses; nobody unless given. */
  readonly gone?: Readonly<Record<number, readonly number[]>>;
  readonly strike: (two: TwoHosts, job: Job) => void | Promise<void>;
  readonly mend?: (two: TwoHosts) => void;
  /** The longest step of each rank must have lasted at least so long: it has noticed the fault. */
  readonly atLeastMs?: number;
  /** Why it cannot be made here, where that is not all that hosts and links take; empty: it can. */
  readonly missing?: string;
}

const cut = (ms: number) => async (two: TwoHosts) => {
  two.links[1].link('down');
  await delay(ms);
  two.links[1].link('up');
};
const eachOther = { 0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1] };

const faults: Readonly<Record<string, Fault>> = {
  'a rank is killed': {
    sample: 'attention',
    gone: { 0: [1], 2: [1], 3: [1] },
    strike: (_, job) => job.kill(1),
    missing: '',
  },
  'a host goes, with all of its ranks': {
    sample: 'experts',
    gone: { 0: [2, 3], 1: [2, 3] },
    strike: (two, job) => {
      job.kill(2, 3);
      two.links[1].link('down');
    },
    mend: (two) => two.links[1].link('up'),
  },
  'the link is cut for good': {
    sample: 'training',
    gone: eachOther,
    strike: (two) => two.links[1].link('down'),
    mend: (two) => two.links[1].link('up'),
  },
  'one host is heard no more, and hears': {
    sample: 'groups',
    gone: eachOther,
    strike: (two) => two.links[1].mute(true),
    mend: (two) => two.links[1].mute(false),
  },
  'the link is cut for 200 ms': { sample: 'experts', strike: cut(200), atLeastMs: 150 },
  'the link is cut for 5 s': { sample: 'training', strike: cut(5000), atLeastMs: 4000 },
  'packets become half as long': {
    sample: 'groups',
    strike: async (two) => {
      for (const host of two.links) host.mtu(750);
      const before = two.links[0].bytesSent();
      await vi.waitUntil(() => two.links[0].bytesSent() > before + 200_000, { timeout: 30_000 });
    },
    mend: (two) => {
      for (const host of two.links) host.mtu(1500);
    },
  },
  'the link has 10 Mbit/s': {
    sample: 'attention',
    strike: async (two) => {
      for (const host of two.links) host.throttle(10);
      const before = two.links[0].bytesSent();
      await vi.waitUntil(() => two.links[0].bytesSent() > before + 1_000_000, { timeout: 30_000 });
    },
    mend: (two) => {
      for (const host of two.links) expect(host.unthrottle(), 'times that the link was full').toBeGreaterThan(0);
    },
    missing: throttleMissing,
  },
};

function survivorsOf(reports: readonly Report[], gone: Fault['gone']): ReadonlyMap<number, Endured> {
  const left = gone === undefined ? ranks : Object.keys(gone).map(Number);
  const values = new Map<number, Endured>();
  for (const { rank, value, error, exit } of reports) {
    if (!left.includes(rank)) expect(exit, `rank ${rank}`).toBe('SIGKILL');
    else if (value === undefined) throw new Error(`rank ${rank}: ${error?.message ?? `ended: ${exit}`}`);
    else values.set(rank, value as Endured);
  }
  return values;
}

/** As one process computes it that has all shards. */
async function trainedAlone(steps: number): Promise<unknown> {
  const settings = ['--hidden', `${training.hidden}`, '--batch', `${training.batch}`];
  const { stdout } = await run(process.execPath, [ALONE, '--json', '--ranks', '1', '--steps', `${steps}`, ...settings]);
  const end = stdout
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line))
    .find(({ event }) => event === 'done');
  const { losses, weights, velocity } = end;
  return { losses, weights, velocity };
}

async function expectAgreed(values: ReadonlyMap<number, Endured>, workload: Workload, gone: Fault['gone']) {
  for (const [rank, { steps, losses, left, result }] of values) {
    const others = gone?.[rank] ?? [];
    const stay = ranks.filter((one) => !others.includes(one));
    expect(left, `who is left, says rank ${rank}`).toEqual(stay);
    for (const { lost } of losses) for (const one of lost) expect(others, `lost by rank ${rank}`).toContain(one);
    if (workload === 'experts' || workload === 'groups') expect(result, `rank ${rank}`).toEqual(stay);
    // Those that are left know of the same losses, in the same steps.
    for (const mate of stay) {
      const told = values.get(mate)!;
      expect({ steps: told.steps, result: told.result }, `ranks ${rank} and ${mate}`).toEqual({ steps, result });
      if (workload === 'groups' || workload === 'training')
        expect(told.losses.map(({ step, lost }) => ({ step, lost }))).toEqual(
          losses.map(({ step, lost }) => ({ step, lost })),
        );
    }
    const lossesToTell = workload !== 'experts' && others.length > 0;
    expect(losses.length > 0, `losses of rank ${rank}: ${JSON.stringify(losses)}`).toBe(lossesToTell);
  }
  if (workload !== 'training') return;
  for (const { steps, result } of new Map([...values.values()].map((one) => [one.steps, one])).values())
    expect(result).toEqual(await trainedAlone(steps));
}

describe.skipIf(missing)(`two hosts under faults${missing && ` (skipped: ${missing})`}`, { timeout: 180_000 }, () => {
  let two: TwoHosts;
  let folder: string;
  beforeAll(async () => {
    two = await found.make();
  });
  afterAll(() => two?.close());
  beforeEach(() => {
    folder = mkdtempSync(join(tmpdir(), 'ep-matrix-'));
  });
  afterEach(async () => {
    if (linksMissing) return rmSync(folder, { recursive: true });
    // A process that was killed is there until its parent has heard of it.
    await vi.waitUntil(() => two.links.every((host) => host.processes().length === 0), { timeout: 10_000 });
    expect(readdirSync(folder)).toEqual([]);
    rmSync(folder, { recursive: true });
  });

  describe.each(workloads)('%s', (workload) => {
    for (const [name, fault] of Object.entries(faults)) {
      if (!full && fault.sample !== workload) continue;
      itUnless(twoEach, fault.missing ?? linksMissing)(name, async () => {
        const { gone, strike, mend, atLeastMs = 0 } = fault;
        const config = gone ? { heartbeatMs: 100, silenceMs: 3000 } : { heartbeatMs: 250, silenceMs: 60_000 };
        const strikeNow = async (job: Job) => {
          await delay(200);
          await strike(two, job);
          if (!gone) job.enough();
        };
        let struck: Promise<void> | undefined;
        const reports = await two.run('endure', 2, {
          data: { workload, config, ...training, ...(gone && { gone }) },
          env: linksMissing ? {} : { TMPDIR: folder },
          ready: (job) => {
            struck = strikeNow(job);
            struck.catch(() => job.kill(...ranks));
          },
        });
        try {
          await struck;
        } finally {
          mend?.(two);
        }
        const values = survivorsOf(reports, gone);
        for (const [rank, { longestMs }] of values)
          expect(longestMs, `rank ${rank} has not noticed`).toBeGreaterThan(atLeastMs);
        await expectAgreed(values, workload, gone);
      });
    }

    if (!full && workload !== 'training') return;
    itUnless(linksMissing)('a host goes and comes back: ep run starts all ranks again', async () => {
      const flags = ['--nodes', '2', '-n', '2', '--rdzv', `${two.hosts[0].address}:29514`, '--max-restarts', '1'];
      const first = two.launch(0, flags, workload);
      const lost = two.launch(1, flags, workload);
      const outputs = () => [first, lost].map(({ output }) => output).join('\n');
      await vi
        .waitUntil(() => outputs().match(/ready 0/g)?.length === 4, { timeout: 60_000 })
        .catch((error) => {
          throw new Error(outputs(), { cause: error });
        });
      two.links[1].link('down');
      for (const pid of two.links[1].processes()) process.kill(Number(pid), 'SIGKILL');
      await lost.ended;
      two.links[1].link('up');
      const again = two.launch(1, flags, workload);
      expect(await Promise.all([first.ended, again.ended]), first.output + again.output).toEqual([0, 0]);
      expect((first.output + again.output).match(/endured 1 0,1,2,3/g)).toHaveLength(4);
    });
  });
});
