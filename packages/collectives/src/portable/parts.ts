/**
 * What ranks say of their parts of the arena, through the store, for processes that come in the place of others. Such a process makes its part when it opens its first group, while
 * the others go on; each of them maps it before it connects to that process, and it theirs.
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
  /** By transport rank: the processes whose parts are mapped; empty where none is. */
  readonly mapped: readonly string[];
}

export class Parts {
  readonly #init: PartsInit;
  readonly #mapped: string[];

  constructor(init: PartsInit) {
    this.#init = init;
    this.#mapped = [...init.mapped];
  }

  async publish(rank: number, { sections, sectionBytes }: ArenaShape): Promise<void> {
    const { succession, store, memory } = this.#init;
    const part = Buffer.from(succession.part(memory)).toString('base64');
    const said: Said = { life: succession.lifeOf(rank), part, sections, sectionBytes };
    await store.set(partKey(rank), new Uint8Array(Buffer.from(JSON.stringify(said))));
  }

  /** Resolves when the part of the process that is in the place of this transport rank is mapped. HAZARD: nothing may be under way to that rank. */
  async map(peer: number, signal: AbortSignal): Promise<void> {
    const { succession, store } = this.#init;
    while (this.#mapped[peer] !== succession.lifeOf(peer)) {
      const said = parse(await store.get(partKey(peer), { signal, timeoutMs: Number.POSITIVE_INFINITY }));
      if (said.life === succession.lifeOf(peer) && this.#replace(peer, said)) return;
      await setTimeout(LOOK_MS, undefined, { signal });
    }
  }

  /** False while who had it before, a thread of this process, is closing. */
  #replace(peer: number, { part, life }: Said): boolean {
    const { succession, memory } = this.#init;
    try {
      succession.replace(memory, peer, new Uint8Array(Buffer.from(part, 'base64')));
    } catch (error) {
      if (isEpError(error) && error.code === 'EP_BUSY') return false;
      throw error;
    }
    this.#mapped[peer] = life;
    return true;
  }
}
