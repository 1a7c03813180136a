/** N ranks, started once, that run cases one after the other until one of them dies or does not finish. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Mode } from '../cases/case.js';
import { type Launched, launch } from './launch.js';
import {
  type CaseOrder,
  type FromRank,
  type RankIdentity,
  type SentError,
  showError,
  type ToRank,
} from './protocol.js';

/** How long the others may go on once one rank has failed: their waits on it end by themselves, or not at all. */
const GRACE_MS = 1_500;
const START_MS = 60_000;

export type RankEnd =
  | { readonly status: 'ended' }
  | { readonly status: 'killed' }
  | { readonly status: 'failed'; readonly error: SentError }
  | { readonly status: 'exited'; readonly how: string }
  | { readonly status: 'unfinished' };

interface RankState {
  readonly rank: number;
  readonly program: Launched<ToRank, FromRank>;
  ready: boolean;
  gone: string | undefined;
  killing: boolean;
  lastReport: string;
  end: RankEnd | undefined;
}

export class World {
  readonly mode: Mode;
  readonly worldSize: number;
  readonly #ranks: readonly RankState[];
  readonly #directory = mkdtempSync(join(tmpdir(), 'ep-conformance-'));
  #changed: () => void = () => {};
  #orders = 0;
  #spent = false;

  constructor(mode: Mode, worldSize: number) {
    this.mode = mode;
    this.worldSize = worldSize;
    const main = new URL('./rank-main.js', import.meta.url);
    this.#ranks = Array.from({ length: worldSize }, (_, rank) => {
      const identity: RankIdentity = { rank, worldSize, mode };
      const program = launch<ToRank, FromRank>(mode, main, identity);
      const state: RankState = {
        rank,
        program,
        ready: false,
        gone: undefined,
        killing: false,
        lastReport: 'nothing',
        end: undefined,
      };
      program.onMessage((message) => this.#hear(state, message));
      program.onExit((how) => {
        state.gone ??= how;
        state.end ??= state.killing ? { status: 'killed' } : { status: 'exited', how };
        this.#changed();
      });
      return state;
    });
  }

  /** True when a rank is gone or may still be busy: the next case needs a new world. */
  get spent(): boolean {
    return this.#spent;
  }

  /** Runs one case on all ranks. Throws an error that says, for each rank that did not end well, what it last reported. */
  async run(order: Omit<CaseOrder, 'storePath'>): Promise<void> {
    await this.#until(START_MS, () => this.#ranks.every((state) => state.ready || state.gone !== undefined));
    const storePath = join(this.#directory, `store-${this.#orders++}`);
    for (const state of this.#ranks) {
      state.lastReport = 'nothing';
      state.end = state.gone === undefined ? undefined : { status: 'exited', how: state.gone };
      if (state.end === undefined) state.program.send({ kind: 'run', order: { ...order, storePath } });
    }
    const ended = (): boolean => this.#ranks.every((state) => state.end !== undefined);
    const wrong = ({ end }: RankState): boolean => end?.status === 'failed' || end?.status === 'exited';
    await this.#until(order.limitMs, () => ended() || this.#ranks.some(wrong));
    await this.#until(GRACE_MS, ended);
    const late = this.#ranks.filter((state) => state.end === undefined);
    for (const state of late) state.end = { status: 'unfinished' };
    this.#spent = this.#ranks.some(({ end }) => end?.status !== 'ended');
    if (this.#spent) await this.#kill();
    rmSync(storePath, { force: true });
    const complaints = this.#ranks.flatMap((state) => this.#complaint(state, order.limitMs));
    if (complaints.length > 0) {
      throw new Error(`${order.id}, ${this.worldSize} ${this.mode}:\n${complaints.join('\n')}`);
    }
  }

  async close(): Promise<void> {
    if (!this.#spent) {
      for (const { program, gone } of this.#ranks) if (gone === undefined) program.send({ kind: 'quit' });
      await this.#until(GRACE_MS, () => this.#ranks.every((state) => state.gone !== undefined));
    }
    await this.#kill();
    rmSync(this.#directory, { recursive: true, force: true });
  }

  #hear(state: RankState, message: FromRank): void {
    switch (message.kind) {
      case 'ready':
        state.ready = true;
        break;
      case 'report':
        state.lastReport = message.text;
        break;
      case 'die':
        state.killing = true;
        void state.program.kill();
        break;
      case 'ended':
        state.end ??= message.error === undefined ? { status: 'ended' } : { status: 'failed', error: message.error };
        break;
    }
    this.#changed();
  }

  #complaint({ rank, end, lastReport }: RankState, limitMs: number): string[] {
    switch (end?.status) {
      case 'failed':
        return [`rank ${rank} failed, last reported ${lastReport}: ${showError(end.error)}`];
      case 'exited':
        return [`rank ${rank} went away with ${end.how}, last reported ${lastReport}`];
      case 'unfinished':
        return [`rank ${rank} did not finish within ${limitMs} ms, last reported ${lastReport}`];
      default:
        return [];
    }
  }

  async #kill(): Promise<void> {
    this.#spent = true;
    await Promise.all(this.#ranks.map((state) => (state.gone === undefined ? state.program.kill() : undefined)));
  }

  /** Resolves when the condition holds or the time is over. */
  async #until(limitMs: number, holds: () => boolean): Promise<void> {
    if (holds()) return;
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, limitMs);
      this.#changed = () => {
        if (!holds()) return;
        clearTimeout(timer);
        resolve();
      };
    });
    this.#changed = () => {};
  }
}

/** Worlds by mode and size, started when first needed and replaced when spent. */
export class Worlds {
  readonly #worlds = new Map<string, World>();

  async run(mode: Mode, worldSize: number, order: Omit<CaseOrder, 'storePath'>): Promise<void> {
    const key = `${mode} ${worldSize}`;
    let world = this.#worlds.get(key);
    if (world === undefined || world.spent) {
      await world?.close();
      // One world at a time: idle ranks of others would still count against the cores.
      for (const [other, open] of this.#worlds) {
        if (other !== key) await open.close();
      }
      this.#worlds.clear();
      world = new World(mode, worldSize);
      this.#worlds.set(key, world);
    }
    await world.run(order);
  }

  async close(): Promise<void> {
    for (const world of this.#worlds.values()) await world.close();
    this.#worlds.clear();
  }
}
