/** Runs ranks of which one is stopped for a while, by a real SIGSTOP. */
import { type ChildProcess, fork } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { BackendName } from './protocol.js';

const HUNG_MS = 40_000;

export interface StragglerArguments {
  readonly rank: number;
  readonly worldSize: number;
  readonly stopped: number;
  readonly storePath: string;
  readonly backend: BackendName;
  /** The others make a call meanwhile, with a deadline. */
  readonly busy: boolean;
}

export type StragglerMessage =
  | { readonly kind: 'ready' }
  | { readonly kind: 'ended'; readonly code: string; readonly message: string; readonly awaited?: readonly number[] }
  | { readonly kind: 'done' }
  | { readonly kind: 'failed'; readonly why: string };

type CallEnd = Extract<StragglerMessage, { readonly kind: 'ended' }>;

const isStopped = (pid: number): boolean => /^State:\s+T/m.test(readFileSync(`/proc/${pid}/status`, 'utf8'));

/** `program`: the bundle of programs/straggler-rank.ts. Returns how each rank's call ended; throws what the ranks threw, and when they hang. */
export async function runStraggler(
  program: string,
  { stoppedMs, ...scenario }: Omit<StragglerArguments, 'rank' | 'storePath'> & { readonly stoppedMs: number },
): Promise<readonly (CallEnd | undefined)[]> {
  const { worldSize, stopped, busy } = scenario;
  const directory = mkdtempSync(join(tmpdir(), 'ep-straggler-'));
  const ends: (CallEnd | undefined)[] = Array.from({ length: worldSize });
  const done = new Set<number>();
  const failures: string[] = [];
  let ready = 0;
  let changed = (): void => {};
  const children: ChildProcess[] = Array.from({ length: worldSize }, (_, rank) => {
    const args: StragglerArguments = { ...scenario, rank, storePath: join(directory, 'store') };
    const child = fork(fileURLToPath(program), [JSON.stringify(args)], { execArgv: [] });
    child.on('message', (message: StragglerMessage) => {
      if (message.kind === 'ready') ready++;
      else if (message.kind === 'ended') ends[rank] = message;
      else if (message.kind === 'failed') failures.push(`rank ${rank}: ${message.why}`);
      else done.add(rank);
      changed();
    });
    child.on('exit', (code, signal) => {
      if (code !== 0) failures.push(`rank ${rank} went away: ${signal ?? `exit code ${code}`}`);
      changed();
    });
    return child;
  });
  const until = (holds: () => boolean, what: string): Promise<void> =>
    new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`hangs: ${what}`)), HUNG_MS);
      changed = () => {
        if (failures.length === 0 && !holds()) return;
        clearTimeout(timer);
        if (failures.length > 0) reject(new Error(failures.join('\n')));
        else resolve();
      };
      changed();
    });
  try {
    await until(() => ready === worldSize, 'the group does not come up');
    for (const child of children) child.send('go');
    const victim = children[stopped]!;
    while (!isStopped(victim.pid!)) await new Promise((resolve) => setTimeout(resolve, 5));
    if (busy) {
      const others = ends.flatMap((_, rank) => (rank === stopped ? [] : [rank]));
      await until(() => others.every((rank) => ends[rank] !== undefined), 'the others wait for the stopped rank');
    }
    await new Promise((resolve) => setTimeout(resolve, stoppedMs));
    victim.kill('SIGCONT');
    for (const child of children) child.send('continued');
    await until(() => done.size === worldSize, 'the ranks do not go on');
    return ends;
  } finally {
    for (const child of children) if (child.exitCode === null && child.signalCode === null) child.kill('SIGKILL');
    rmSync(directory, { recursive: true });
  }
}
