/** Ways to peers that are made anew (`Generations`) at awkward moments. Over a transport that does nothing but what the test says. */
import { type Endpoint, memoryStore, type Pausing, type Store, type SymmetricMemory, type Transport } from '@ep/core';
import { expect, it } from 'vitest';
import { type Arena, type ArenaOptions, arenaOf } from '../../src/portable/arena.js';
import type { Portable } from '../../src/portable/channel.js';
import { Links, type LinksInit } from '../../src/portable/links.js';
import { pause, withMembers } from './world.js';

/** A turn of everything that needs no time. */
const turn = (): Promise<void> => pause(5);

class Gate {
  open = (): void => {};
  readonly opened: Promise<void>;

  constructor() {
    this.opened = new Promise((resolve) => {
      this.open = resolve;
    });
  }
}

/** Rank 0 of two, whose ways are made anew by `pause` and `resume`. */
class Ways {
  generation = 0;
  readonly users = new Set<Pausing>();
  /** What was done with this rank's own part, and by which ways. */
  readonly reconnected: string[] = [];
  allocating: () => Promise<void> = () => Promise.resolve();
  /** Users are asked to pause, and have not been told to go on. */
  isChanging = false;
  paused = 0;

  readonly transport = {
    ...{ name: 'scripted', rank: 0, worldSize: 2, capabilities: { maxSignalSlots: 64 } },
    allocate: async () => {
      await this.allocating();
      return { close: () => Promise.resolve() };
    },
    succession: {
      ...{ world: 'world', isNew: false, lifeOf: (rank: number) => `life ${rank}` },
      part: () => Uint8Array.of(this.generation),
      replace: () => {},
      generations: {
        current: () => String(this.generation),
        onChange: (user: Pausing) => {
          this.users.add(user);
          if (this.isChanging) void this.#ask(user);
          return () => this.users.delete(user);
        },
        reconnect: (_: unknown, rank: number) => this.reconnected.push(`rank ${rank} by ${this.generation}`),
      },
    },
  } as unknown as Transport<Portable>;

  async pause(): Promise<void> {
    this.isChanging = true;
    await Promise.all([...this.users].map((user) => this.#ask(user)));
  }

  resume(): void {
    this.generation++;
    this.isChanging = false;
    for (const user of this.users) user.resume();
  }

  async #ask(user: Pausing): Promise<void> {
    this.paused++;
    await user.pause({});
  }

  options(store: Store): ArenaOptions {
    const { transport } = this;
    const none = { stagingBytes: undefined, maxGroups: undefined, signal: undefined };
    return { transport, store, ...none, timeoutMs: 1000, joins: false };
  }
}

const PART = 'collectives/parts/0';

async function saidIn(store: Store): Promise<object> {
  return JSON.parse(Buffer.from(await store.get(PART)).toString()) as object;
}

/** A store in which this rank says where its part is when `gate` opens, the first time. */
function slow(store: Store, gate: Gate): { readonly store: Store; readonly asked: Promise<void> } {
  const asked = new Gate();
  let first = true;
  const set: Store['set'] = async (key, ...rest) => {
    if (key === PART && first) {
      first = false;
      asked.open();
      await gate.opened;
    }
    return store.set(key, ...rest);
  };
  return { store: withMembers(store, { set }), asked: asked.opened };
}

/** That peers find it, and that this rank reaches itself. */
async function isReached(ways: Ways, store: Store, arena: Arena): Promise<void> {
  await turn();
  expect(arena.paused).toBe(false);
  expect(await saidIn(store)).toMatchObject({ generation: String(ways.generation) });
  expect(ways.reconnected.at(-1)).toBe(`rank 0 by ${ways.generation}`);
}

it('they change while a rank says where its part of the memory for groups is: it says so anew, and last', async () => {
  const ways = new Ways();
  const store = memoryStore();
  const gate = new Gate();
  const behind = slow(store, gate);
  const opening = arenaOf(ways.options(behind.store));
  await behind.asked;
  await ways.pause();
  ways.resume();
  await turn();
  gate.open();
  await isReached(ways, store, await opening);
});

it('they change while the memory is allocated: the rank tells what holds afterwards', async () => {
  const ways = new Ways();
  const store = memoryStore();
  ways.allocating = async () => {
    await ways.pause();
    ways.resume();
  };
  await isReached(ways, store, await arenaOf(ways.options(store)));
});

it('they are being changed when the memory has been allocated: nothing is put until they are new', async () => {
  const ways = new Ways();
  const store = memoryStore();
  ways.allocating = () => ways.pause();
  const arena = await arenaOf(ways.options(store));
  expect(ways.paused).toBe(1);
  expect(arena.paused).toBe(true);
  ways.resume();
  await isReached(ways, store, arena);
});

/** A rank's way to another one, whose puts land when `landed` says so. */
function linkTo(landed: Promise<void>): { readonly links: Links; readonly connected: Promise<void> } {
  const connected = new Gate();
  const endpoint = { post: () => {}, flush: () => landed } as unknown as Endpoint<Portable>;
  const store = memoryStore();
  const signals = { peek: () => 0n, until: () => new Promise(() => {}) };
  const memory = {
    signals,
    view: (_: string, __: number, byteLength: number) => new Uint8Array(byteLength),
    local: () => ({}),
    remote: () => ({}),
  } as unknown as SymmetricMemory;
  const transport = { connect: () => Promise.resolve(endpoint) } as unknown as Transport<Portable>;
  const links = new Links({
    options: { transport, store, ranks: [0, 1], rank: 0 },
    arena: { memory, sectionBytes: 2 ** 16, paused: false, follow: () => () => {} },
    section: { byteOffset: 0, firstSlot: 0 },
    readersOf: () => ({ control: () => true, collective: () => true, message: () => true }),
    ...{ onLost: () => {}, onBroken: () => {}, onEvent: () => {}, onConnected: () => connected.open() },
    quiet: () => new Promise<void>(() => {}),
  } as unknown as LinksInit);
  void store.set('ready', Uint8Array.of(1)).then(() => links.connect(1, 'ready'));
  return { links, connected: connected.opened };
}

it('they change while a channel is retired: what it has put lands before', async () => {
  const landing = new Gate();
  const { links, connected } = linkTo(landing.opened);
  await connected;
  const retired = links.retire(1);
  let isPaused = false;
  const pausing = links.pause({}).then(() => {
    isPaused = true;
  });
  await turn();
  expect(isPaused).toBe(false);
  landing.open();
  await Promise.all([retired, pausing]);
  expect(links.at(1)!.lost).toBe(false);
});
