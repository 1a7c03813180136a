// Runs one scenario on N ranks, as worker threads of this process or as processes.
import { fork } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';

const PROGRAM = new URL('./rank.mjs', import.meta.url);

/** @typedef {'threads' | 'processes'} Mode */
/** @typedef {{ rank: number, value?: any, error?: { code?: string, message: string }, exit?: string }} Report */

/**
 * @param {object} start
 * @param {Mode} mode
 * @param {() => void} onReady
 */
function startRank(start, mode, onReady) {
  const rank = /** @type {{ rank: number }} */ (start).rank;
  /** @type {Report | undefined} */
  let report;
  const thread = mode === 'threads' ? new Worker(PROGRAM, { workerData: start }) : undefined;
  const child =
    thread === undefined
      ? fork(fileURLToPath(PROGRAM), [JSON.stringify(start)], { serialization: 'advanced' })
      : undefined;
  const one = /** @type {import('node:events').EventEmitter} */ (thread ?? child);
  /** @type {Promise<Report>} */
  const ended = new Promise((resolve) => {
    one.on('message', (message) => {
      if (message === 'ready') onReady();
      else report = message;
    });
    one.on('error', (error) => {
      report = { rank, error: { message: String(error) } };
    });
    one.on('exit', (code, signal) => resolve(report ?? { rank, exit: signal ?? `exit ${code}` }));
  });
  return { ended, kill: () => void (thread === undefined ? child?.kill('SIGKILL') : thread.terminate()) };
}

/**
 * Reports in rank order. Rejects, after killing all ranks, when one has not ended in time.
 * @param {string} scenario
 * @param {number} worldSize
 * @param {{ mode?: Mode, data?: unknown, timeoutMs?: number, kill?: number }} [options] kill: that rank, as soon as it says that it is ready
 * @returns {Promise<Report[]>}
 */
export async function runRanks(scenario, worldSize, { mode = 'threads', data, timeoutMs = 60_000, kill } = {}) {
  const folder = await mkdtemp(join(tmpdir(), 'ep-gpu-'));
  const ranks = Array.from({ length: worldSize }, (_, rank) =>
    startRank({ scenario, rank, worldSize, store: join(folder, 'store'), data }, mode, () => {
      if (kill === rank) setTimeout(() => ranks[rank]?.kill(), 100);
    }),
  );
  /** @type {NodeJS.Timeout | undefined} */
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(
      () => reject(new Error(`${scenario} on ${worldSize} ${mode} did not end within ${timeoutMs} ms`)),
      timeoutMs,
    );
  });
  try {
    return /** @type {Report[]} */ (await Promise.race([Promise.all(ranks.map((rank) => rank.ended)), late]));
  } finally {
    clearTimeout(timer);
    for (const rank of ranks) rank.kill();
    await rm(folder, { recursive: true, force: true });
  }
}

/** The values of all ranks; throws what went wrong on any of them. @param {readonly Report[]} reports */
export function valuesOf(reports) {
  const failures = reports.flatMap(({ rank, error, exit }) => {
    if (error !== undefined) return [`rank ${rank}: ${error.code ?? ''} ${error.message}`];
    return exit === undefined ? [] : [`rank ${rank} ended with ${exit}`];
  });
  if (failures.length > 0) throw new Error(failures.join('\n'));
  return reports.map(({ value }) => value);
}
