/** Ranks that are processes, of which some die, stop or come later; the parent starts and continues them on request. */
import { type ChildProcess, fork } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const HUNG_MS = 60_000;

export interface ElasticArguments {
  readonly scenario: string;
  readonly rank: number;
  /** Ranks that are there from the beginning. */
  readonly worldSize: number;
  readonly capacity: number;
  readonly victim: number;
  /** 0, or how often this rank has been started again. */
  readonly life: number;
  readonly storePath: string;
  /** Shared memory without a transport unless given. */
  readonly transport?: 'hostile' | 'nvshmem' | 'ibgda' | 'efa' | 'mixed';
}

export type ElasticMessage =
  | { readonly kind: 'start'; readonly rank: number }
  | { readonly kind: 'continue'; readonly rank: number }
  /** The moment that the scenario is about came. */
  | { readonly kind: 'hit' }
  | { readonly kind: 'done' }
  | { readonly kind: 'failed'; readonly why: string };

/** `program`: the bundle of programs/elastic-rank.ts. Throws what the ranks threw, and where they hang. True if a rank told a `hit`. */
export async function runElastic(
  program: string,
  scenario: Omit<ElasticArguments, 'rank' | 'life' | 'storePath'>,
): Promise<boolean> {
  const directory = mkdtempSync(join(tmpdir(), 'ep-elastic-'));
  const failures: string[] = [];
  const current = new Map<number, ChildProcess>();
  const lives = new Map<number, number>();
  const all: ChildProcess[] = [];
  let running = 0;
  let hit = false;
  let settle = (): void => {};
  const ended = new Promise<void>((resolve) => {
    settle = resolve;
  });

  const start = (rank: number): void => {
    const life = lives.get(rank) ?? (rank < scenario.worldSize ? 0 : 1);
    lives.set(rank, life + 1);
    const args: ElasticArguments = { ...scenario, rank, life, storePath: join(directory, 'store') };
    const child = fork(fileURLToPath(program), [JSON.stringify(args)], { execArgv: ['--expose-gc'] });
    let done = false;
    running++;
    all.push(child);
    current.set(rank, child);
    child.on('message', (message: ElasticMessage) => {
      if (message.kind === 'start') start(message.rank);
      else if (message.kind === 'continue') current.get(message.rank)!.kill('SIGCONT');
      else if (message.kind === 'hit') hit = true;
      else if (message.kind === 'failed') failures.push(`rank ${rank}: ${message.why}`);
      else done = true;
    });
    child.on('exit', (code, signal) => {
      running--;
      const died = signal === 'SIGKILL' && rank === scenario.victim;
      if (!done && !died) failures.push(`rank ${rank} went away: ${signal ?? `exit code ${code}`}`);
      if (running === 0 || failures.length > 0) settle();
    });
  };

  for (let rank = 0; rank < scenario.worldSize; rank++) start(rank);
  const timer = setTimeout(() => {
    failures.push('the ranks hang');
    settle();
  }, HUNG_MS);
  await ended;
  clearTimeout(timer);
  for (const child of all) if (child.exitCode === null && child.signalCode === null) child.kill('SIGKILL');
  rmSync(directory, { recursive: true });
  if (failures.length > 0) throw new Error(failures.join('\n'));
  return hit;
}
