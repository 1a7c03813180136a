/** Ranks that are killed at any moment: threads by terminate(), processes by SIGKILL. All survivors must tell the same story. */
import { fork } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';
import { nvshmem } from '@ep/nvshmem';
import { beforeAll, describe, expect, it } from 'vitest';
import { bundleProgram } from '../bundle.js';
import type { RankInit, Told } from '../programs/portable-rank.js';
import { LOOPBACK, numbers, pause } from './world.js';

const probe = await nvshmem.fabric.probe(LOOPBACK);
const unavailable = probe.available ? '' : ` (skipped: ${probe.reason})`;

let program: URL;
const ROUNDS = process.env.EP_TEST_FULL === '1' ? 40 : 2;
/** That of all tests here, or of many rounds: with six processes on two cores one takes 3.7 s. */
const timeout = Math.max(120_000, ROUNDS * 10_000);

beforeAll(async () => {
  program = new URL(await bundleProgram('portable-rank'));
});

type Mode = 'threads' | 'processes';

interface Started {
  readonly ready: Promise<void>;
  readonly kill: () => void;
  /** Undefined if it died. */
  readonly told: Promise<Extract<Told, { readonly calls: unknown }> | undefined>;
}

function start(mode: Mode, init: RankInit): Started {
  let onReady = (): void => {};
  const ready = new Promise<void>((resolve) => {
    onReady = resolve;
  });
  let story: Extract<Told, { readonly calls: unknown }> | undefined;
  const hear = (message: Told): void => {
    if ('ready' in message) onReady();
    else story = message;
  };
  if (mode === 'threads') {
    const worker = new Worker(program, { workerData: init });
    worker.on('message', hear);
    return {
      ready,
      kill: () => void worker.terminate(),
      told: new Promise((resolve, reject) => {
        worker.on('error', reject);
        worker.on('exit', () => resolve(story));
      }),
    };
  }
  const child = fork(fileURLToPath(program), [JSON.stringify(init)], { execArgv: [], serialization: 'advanced' });
  child.on('message', (message) => hear(message as Told));
  return {
    ready,
    kill: () => void child.kill('SIGKILL'),
    told: new Promise((resolve) => child.on('exit', () => resolve(story))),
  };
}

async function tell(
  mode: Mode,
  kind: RankInit['kind'],
  size: number,
  victims: readonly number[],
  seed: number,
): Promise<void> {
  const directory = mkdtempSync(join(tmpdir(), 'ep-portable-'));
  const storePath = join(directory, 'store');
  const ranks = [...Array(size).keys()].map((rank) =>
    start(mode, { rank, size, storePath, kind, seed, victims: victims.length }),
  );
  try {
    await Promise.all(ranks.map(({ ready }) => ready));
    const below = numbers(seed);
    for (const victim of victims) {
      await pause(below(25));
      ranks[victim]!.kill();
    }
    const survivors = [...ranks.keys()].filter((rank) => !victims.includes(rank));
    const stories = await Promise.all(survivors.map((rank) => ranks[rank]!.told));
    for (const [i, story] of stories.entries()) {
      expect(story, `rank ${survivors[i]} died`).toBeDefined();
      // The last calls are not of interest: who has enough leaves, which the others find at different calls.
      const length = Math.min(...stories.map((other) => other!.calls.length)) - 1;
      expect(story!.calls.slice(0, length)).toEqual(stories[0]!.calls.slice(0, length));
    }
    const { calls } = stories[0]!;
    const losses = calls.filter((call) => victims.some((victim) => call.includes(`EP_PEER_LOST ${victim}`)));
    expect(losses.length).toBeGreaterThan(0);
    expect(losses.length).toBeLessThanOrEqual(victims.length);
    expect(calls.some((call) => call.includes(` of ${survivors} `))).toBe(true);
  } finally {
    for (const { kill } of ranks) kill();
    rmSync(directory, { recursive: true, force: true });
  }
}

describe.each(['threads', 'processes'] as const)('survivors of a killed rank, as %s', (mode) => {
  it.each(['hostile', 'shm'] as const)('over %s, tell the same', async (kind) => {
    for (let round = 0; round < ROUNDS; round++)
      await tell(mode, kind, 3, [(round + (kind === 'shm' ? 2 : 0)) % 3], round + 1);
  });
});

describe('over libfabric, on several hosts', () => {
  it.skipIf(unavailable)(`survivors of a killed process tell the same${unavailable}`, { timeout }, async () => {
    for (let round = 0; round < ROUNDS; round++) await tell('processes', 'fabric', 4, [round % 4], 200 + round);
  });

  it.skipIf(unavailable)(`and so they do on three hosts${unavailable}`, { timeout }, async () => {
    for (let round = 0; round < ROUNDS; round++) await tell('processes', 'fabric', 6, [(5 * round) % 6], 400 + round);
  });

  it.skipIf(unavailable)(`and of two, of one host or of both${unavailable}`, { timeout }, async () => {
    for (let round = 0; round < ROUNDS; round++) {
      const first = round % 4;
      await tell('processes', 'fabric', 4, [first, (first + 1 + (round % 3)) % 4], 300 + round);
    }
  });
});

it('survivors of two that are killed tell the same', async () => {
  for (let round = 0; round < ROUNDS; round++) {
    const first = round % 4;
    await tell('threads', round % 2 === 0 ? 'hostile' : 'shm', 4, [first, (first + 1 + (round % 3)) % 4], 100 + round);
  }
});
