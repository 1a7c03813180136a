/** Runs a program of test/programs as so many ranks, each a worker thread or a process of its own, and collects what they report. */
import { type ChildProcess, fork } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';

export type RankKind = 'threads' | 'processes';
export const RANK_KINDS: readonly RankKind[] = ['threads', 'processes'];

export interface RankFailure {
  readonly code?: string;
  readonly message: string;
  readonly context?: Readonly<Record<string, unknown>>;
}

/** What a rank sends: any number of notes, then how it ended. */
export type RankMessage =
  | { readonly kind: 'note'; readonly value: unknown }
  | { readonly kind: 'done'; readonly value: unknown }
  | { readonly kind: 'failed'; readonly error: RankFailure };

export interface RankEnd {
  readonly notes: readonly unknown[];
  readonly value?: unknown;
  readonly error?: RankFailure;
  /** Neither finished nor failed: it was killed, or its environment ended early. */
  readonly died: boolean;
}

export interface Ranks {
  /** Resolves when the rank has sent its n-th note (from 1). */
  noted(rank: number, count: number): Promise<void>;
  /** SIGKILL for a process, terminate() for a thread. */
  kill(rank: number): void;
  readonly ends: Promise<readonly RankEnd[]>;
}

const program = (name: string): string => fileURLToPath(new URL(`programs/${name}.mjs`, import.meta.url));

class RankSlot {
  readonly notes: unknown[] = [];
  readonly end: Promise<RankEnd>;
  readonly #waiting = new Set<() => void>();
  #last: RankMessage | undefined;
  #finish!: (end: RankEnd) => void;

  constructor() {
    this.end = new Promise((resolve) => {
      this.#finish = resolve;
    });
  }

  receive(message: RankMessage): void {
    if (message.kind === 'note') this.notes.push(message.value);
    else this.#last = message;
    for (const wake of this.#waiting) wake();
  }

  exited(): void {
    const { notes } = this;
    if (this.#last?.kind === 'done') this.#finish({ notes, value: this.#last.value, died: false });
    else if (this.#last?.kind === 'failed') this.#finish({ notes, error: this.#last.error, died: false });
    else this.#finish({ notes, died: true });
    for (const wake of this.#waiting) wake();
  }

  noted(count: number): Promise<void> {
    return new Promise((resolve) => {
      const look = (): void => {
        if (this.notes.length < count) return;
        this.#waiting.delete(look);
        resolve();
      };
      this.#waiting.add(look);
      void this.end.then(() => resolve());
      look();
    });
  }
}

/**
 * Starts the ranks. `args` reaches each program as it is. `through`: processes are started by this command, which ends in executing what follows it.
 */
export function startRanks(
  kind: RankKind,
  worldSize: number,
  name: string,
  args: unknown = {},
  through: readonly string[] = [],
): Ranks {
  const directory = mkdtempSync(join(tmpdir(), 'ep-ranks-'));
  const slots = Array.from({ length: worldSize }, () => new RankSlot());
  const kills: (() => void)[] = [];
  for (const [rank, slot] of slots.entries()) {
    const init = { rank, worldSize, storePath: join(directory, 'store'), args };
    if (kind === 'threads') {
      const worker = new Worker(program(name), { workerData: init });
      worker.on('message', (message: RankMessage) => slot.receive(message));
      worker.on('error', (error) => slot.receive({ kind: 'failed', error: { message: String(error) } }));
      worker.on('exit', () => slot.exited());
      kills.push(() => void worker.terminate());
    } else {
      const child: ChildProcess = fork(program(name), {
        serialization: 'advanced',
        env: { ...process.env, EP_TEST_RANK: JSON.stringify(init) },
        execPath: through[0] ?? process.execPath,
        execArgv: through.length === 0 ? [] : [...through.slice(1), process.execPath],
      });
      child.on('message', (message) => slot.receive(message as RankMessage));
      child.on('exit', () => slot.exited());
      kills.push(() => child.kill('SIGKILL'));
    }
  }
  const ends = Promise.all(slots.map((slot) => slot.end)).finally(() => rmSync(directory, { recursive: true }));
  return {
    noted: (rank, count) => slots[rank]!.noted(count),
    kill: (rank) => kills[rank]!(),
    ends,
  };
}

/** Runs them to the end; throws what failed. Returns the ranks' values. */
export async function runRanks(
  kind: RankKind,
  worldSize: number,
  name: string,
  args: unknown = {},
  through: readonly string[] = [],
): Promise<readonly unknown[]> {
  const ends = await startRanks(kind, worldSize, name, args, through).ends;
  // One rank that fails takes the others with it: those are told last.
  const failures = ends
    .flatMap(({ error, died }, rank) =>
      error || died ? [{ rank, text: error?.message ?? 'died', code: error?.code }] : [],
    )
    .sort((a, b) => Number(a.code === 'EP_PEER_LOST') - Number(b.code === 'EP_PEER_LOST'));
  if (failures.length > 0) {
    const told = failures.slice(0, 4).map(({ rank, text }) => `rank ${rank}: ${text}`);
    throw new Error(`${failures.length} of ${worldSize} ${kind} failed\n${told.join('\n')}`);
  }
  return ends.map(({ value }) => value);
}
