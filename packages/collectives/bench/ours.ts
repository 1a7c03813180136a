/** Our own ranks: processes that make the calls that a program would make. */
import { spawn } from 'node:child_process';
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

export function startOurs({ folder, ranks, mostBytes, timeoutMs, signal }: StartOptions): Promise<Contender> {
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
        return spawn(process.execPath, [...process.execArgv, program, JSON.stringify(task)], {
          stdio: ['ignore', 'pipe', 'pipe'],
        });
      }),
  });
}
