/**
 * What ranks say of their parts of the arena, through the store, for processes that come in the place of others. Such a process makes its part when it opens its first group, while
 * the others go on; each of them maps it before it connects to that process, and it theirs. Where the ways of all ranks are made anew then (`Generations`), all tell their parts anew, and
 * map those of all others again.
 */
import { setTimeout } from 'node:timers/promises';
import { isEpError, type Store, type Succession, type SymmetricMemory } from '@ep/core';

const LOOK_MS = 10;

export interface ArenaShape {
  readonly sections: number;
  readonly sectionBytes: number;
}

interface Said extends ArenaShape {
  /** Which process says it. */
  readonly life: string;
  /** Of the ways by which it is reached so; absent where these stay. */
  readonly generation?: string;
  /** In base64. */
  readonly part: string;
}

const partKey = (rank: number): string => `collectives/parts/${rank}`;
const parse = (bytes: Uint8Array): Said => JSON.parse(Buffer.from(bytes).toString()) as Said;

/** The arena that those have who were there before; undefined if they have none. */
export async function shapeOfOthers(
  store: Store,
  { lifeOf }: Succession,
  worldSize: number,
): Promise<ArenaShape | undefined> {
  for (let rank = 0; rank < worldSize; rank++) {
    if (!(await store.check([partKey(rank)]))) continue;
    const said = parse(await store.get(partKey(rank)));
    if (said.life === lifeOf(rank)) return said;
  }
  return undefined;
}

export interface PartsInit {
  readonly succession: Succession;
  readonly store: Store;
  readonly memory: SymmetricMemory;
  /** This rank, of the transport. */
  readonly rank: number;
  /** By transport rank: the processes whose parts are mapped; empty where none is. */
  readonly mapped: readonly string[];
  /** The ways by which they are. */
  readonly generation: string | undefined;
}

export class Parts {
  readonly #init: PartsInit;
  /** And by which ways. */
  readonly #mapped: { life: string; generation: string | undefined }[];
  #paused = false;
  #publishing: Promise<void> = Promise.resolve();

  constructor(init: PartsInit) {
    this.#init = init;
    const { generation } = init;
    this.#mapped = init.mapped.map((life) => ({ life, generation }));
  }

  get #generation(): string | undefined {
    return this.#init.succession.generations?.current();
  }

  /** HAZARD: one after the other: what is said last must be of the latest ways. */
  publish(shape: ArenaShape): Promise<void> {
    const published = this.#publishing.then(() => this.#publish(shape));
    this.#publishing = published.catch(() => {});
    return published;
  }

  async #publish({ sections, sectionBytes }: ArenaShape): Promise<void> {
    const { succession, store, memory, rank } = this.#init;
    const part = Buffer.from(succession.part(memory)).toString('base64');
    const generation = this.#generation;
    const said: Said = {
      life: succession.lifeOf(rank),
      ...(generation !== undefined && { generation }),
      part,
      sections,
      sectionBytes,
    };
    await store.set(partKey(rank), new Uint8Array(Buffer.from(JSON.stringify(said))));
  }

  /** The ways are about to be made anew: maps nothing until `resume`. */
  pause(): void {
    this.#paused = true;
  }

  /** From here on others are reached once they are mapped again. */
  resume(): void {
    this.#paused = false;
    const { succession, memory, rank } = this.#init;
    succession.generations?.reconnect(memory, rank, succession.part(memory));
  }

  /** Resolves when the part of the process that is in the place of this transport rank is mapped, or `isGone`. HAZARD: nothing may be under way to that rank. */
  async map(peer: number, signal: AbortSignal, isGone: () => boolean): Promise<void> {
    const { store } = this.#init;
    while (!this.#isMapped(peer) && !isGone()) {
      const said = parse(await store.get(partKey(peer), { signal, timeoutMs: Number.POSITIVE_INFINITY }));
      // HAZARD: another group may have mapped it meanwhile, and have put something there.
      if (this.#isMapped(peer) || this.#replace(peer, said)) return;
      await setTimeout(LOOK_MS, undefined, { signal });
    }
  }

  #isMapped(peer: number): boolean {
    const { life, generation } = this.#mapped[peer]!;
    return !this.#paused && life === this.#init.succession.lifeOf(peer) && generation === this.#generation;
  }

  /** False where the peer has yet to say it, and while who had it before, a thread of this process, is closing. */
  #replace(peer: number, { part, life, generation }: Said): boolean {
    const { succession, memory } = this.#init;
    if (this.#paused || life !== succession.lifeOf(peer) || generation !== this.#generation) return false;
    const { generations } = succession;
    const isSame = this.#mapped[peer]!.life === life;
    const map = isSame && generations !== undefined ? generations.reconnect : succession.replace;
    try {
      map(memory, peer, new Uint8Array(Buffer.from(part, 'base64')));
    } catch (error) {
      if (isEpError(error) && error.code === 'EP_BUSY') return false;
      throw error;
    }
    this.#mapped[peer] = { life, generation };
    return true;
  }
}
