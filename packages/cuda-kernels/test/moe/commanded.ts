/** Ranks that do what a test tells them, as processes or threads of their own: they can be killed at any moment, and others can come in their place. */
import { type ChildProcess, fork } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';
import { openFileStore } from '@ep/core';

export type RankKind = 'processes' | 'threads';

const program = fileURLToPath(new URL('programs/member.mjs', import.meta.url));

export interface CommandError extends Error {
  readonly code?: string;
  readonly ranks?: readonly number[];
}

/** One rank. What it is told after its death is never answered. */
export class CommandedRank {
  readonly rank: number;
  readonly gone: Promise<void>;
  readonly #child: ChildProcess | Worker;
  readonly #ready: Promise<void>;
  readonly #answers = new Map<number, (message: { value?: unknown; error?: CommandError }) => void>();
  #next = 0;

  constructor(kind: RankKind, rank: number, worldSize: number, storePath: string) {
    this.rank = rank;
    const init = { rank, worldSize, storePath };
    this.#child =
      kind === 'threads'
        ? new Worker(program, { workerData: init })
        : fork(program, [], {
            serialization: 'advanced',
            execArgv: [],
            env: { ...process.env, EP_TEST_RANK: JSON.stringify(init) },
          });
    const child = this.#child as ChildProcess;
    this.gone = new Promise((resolve) => child.once('exit', () => resolve()));
    this.#ready = new Promise((resolve, reject) => {
      child.on('message', (message: { id?: number; ready?: boolean; value?: unknown; error?: CommandError }) => {
        if (message.ready === true) resolve();
        else this.#answers.get(message.id!)?.(message);
      });
      child.once('error', reject);
    });
  }

  async tell<T>(name: string, args: object = {}): Promise<T> {
    await this.#ready;
    const id = this.#next++;
    const answer = new Promise<T>((resolve, reject) => {
      this.#answers.set(id, ({ value, error }) => {
        this.#answers.delete(id);
        if (error === undefined) resolve(value as T);
        else reject(Object.assign(new Error(error.message), error));
      });
    });
    const message = { id, name, args };
    if (this.#child instanceof Worker) this.#child.postMessage(message);
    else this.#child.send(message);
    return answer;
  }

  /** SIGKILL for a process, terminate() for a thread. */
  async kill(): Promise<void> {
    if (this.#child instanceof Worker) await this.#child.terminate();
    else this.#child.kill('SIGKILL');
    await this.gone;
  }
}

/** A world of them. Whoever is left at the end is killed. */
export class CommandedWorld implements AsyncDisposable {
  readonly ranks: CommandedRank[];
  readonly #kind: RankKind;
  readonly #worldSize: number;
  readonly #directory = mkdtempSync(join(tmpdir(), 'ep-moe-'));
  readonly #all: CommandedRank[] = [];

  /** `first`: ranks that are there from the beginning; all unless given. */
  constructor(kind: RankKind, worldSize: number, first = worldSize) {
    this.#kind = kind;
    this.#worldSize = worldSize;
    this.ranks = [];
    for (let rank = 0; rank < first; rank++) this.ranks.push(this.#start(rank, worldSize));
  }

  /** Another one in the place of a rank that was killed, or one in an empty place. */
  replace(rank: number): CommandedRank {
    const other = this.#start(rank, this.#worldSize);
    this.ranks[rank] = other;
    return other;
  }

  /** Waits until a key is in the ranks' store. */
  async has(key: string): Promise<void> {
    await using store = await openFileStore(join(this.#directory, 'store'));
    await store.wait([key], { timeoutMs: 30_000 });
  }

  others(...without: readonly number[]): CommandedRank[] {
    return this.ranks.filter(({ rank }) => !without.includes(rank));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.#all.map((one) => one.kill()));
    rmSync(this.#directory, { recursive: true });
  }

  #start(rank: number, worldSize: number): CommandedRank {
    const one = new CommandedRank(this.#kind, rank, worldSize, join(this.#directory, 'store'));
    this.#all.push(one);
    return one;
  }
}
