/** Our own ranks: processes that make the calls that a program would make. */
import { spawn, spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Contender } from './contender.js';
import type { StartOptions } from './peers.js';

/** What a rank is started with, as JSON. */
export interface RankTask {
  readonly rank: number;
  readonly size: number;
  readonly store: string;
  readonly socketPath: string;
  /** Of its largest buffer. */
  readonly mostBytes: number;
  readonly timeoutMs: number;
}

/** The numbers in a list of the kernel's, as `0-3,8`. */
export function numbersOf(list: string): readonly number[] {
  return list
    .trim()
    .split(',')
    .flatMap((part) => {
      const [first, last = first] = part.split('-').map(Number);
      return Array.from({ length: last! - first! + 1 }, (_, i) => first! + i);
    });
}

/**
 * A core for each rank, by turns where ranks outnumber them, if `taskset` is there. mpirun binds its ranks alike; without it ranks may begin with more of them on one core than on another, and
 * it takes the kernel as long as a turn to part them.
 */
export function coresFor({
  ranks,
  usableCores,
}: Pick<StartOptions, 'ranks' | 'usableCores'>): readonly number[] | undefined {
  if (spawnSync('taskset', ['--version']).status !== 0) return undefined;
  const allowed = /^Cpus_allowed_list:(.*)$/m.exec(readFileSync('/proc/self/status', 'utf8'))?.[1];
  const cores = allowed === undefined ? [] : numbersOf(allowed);
  if (cores.length < Math.min(ranks, usableCores)) return undefined;
  return Array.from({ length: ranks }, (_, rank) => cores[rank % cores.length]!);
}

export function startOurs(options: StartOptions): Promise<Contender> {
  const { folder, ranks, mostBytes, timeoutMs, signal } = options;
  const cores = coresFor(options);
  // Built beside this file; see tsup.config.ts.
  const program = fileURLToPath(new URL('./rank.js', import.meta.url));
  return Contender.start({
    name: '@ep/collectives',
    ranks,
    timeoutMs,
    signal,
    socketPath: join(folder, 'ours.sock'),
    launch: (socketPath) =>
      Array.from({ length: ranks }, (_, rank) => {
        const task: RankTask = { rank, size: ranks, store: join(folder, 'store'), socketPath, mostBytes, timeoutMs };
        const node = [process.execPath, ...process.execArgv, program, JSON.stringify(task)];
        const [command, ...args] = cores === undefined ? node : ['taskset', '-c', `${cores[rank]}`, ...node];
        return spawn(command!, args, { stdio: ['ignore', 'pipe', 'pipe'] });
      }),
  });
}
