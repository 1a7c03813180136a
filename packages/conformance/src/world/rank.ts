/** The `CaseRank` that a body gets. */
import { readdirSync, readFileSync } from 'node:fs';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import {
  type AbortOptions,
  barrier,
  CloseScope,
  exchange,
  linkSignals,
  type Need,
  prefixStore,
  type Rank,
  type Store,
  type Transport,
  type TransportProvider,
} from '@ep/core';
import { native } from '@ep/native';
import type { CaseRank, Resources, TransportCase } from '../cases/case.js';
import { type CaseOrder, type FromRank, type RankIdentity, resolveNamed } from './protocol.js';

/** At least; ranks that are very many, and have the longer for it, come the later. */
const MEETING_MS = 30_000;

export interface RankRunInit {
  readonly identity: RankIdentity;
  readonly order: CaseOrder;
  readonly provider: TransportProvider<Need>;
  readonly store: Store;
  readonly signal: AbortSignal;
  readonly scope: CloseScope;
  readonly tell: (message: FromRank) => void;
}

/** The same numbers in every run of one case on one rank. SplitMix64's finaliser over a counter, 32 bits of it. */
function seededRandom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x9e3779b9) >>> 0;
    let mixed = state;
    mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
    mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
    return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
  };
}

let collect: (() => void) | undefined;

function collectGarbage(): void {
  if (collect === undefined) {
    setFlagsFromString('--expose-gc');
    collect = runInNewContext('gc') as () => void;
  }
  collect();
}

export class RankRun implements CaseRank {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly next: Rank;
  readonly previous: Rank;
  readonly random: () => number;
  readonly #init: RankRunInit;
  #opened = 0;
  #meetings = 0;

  constructor(init: RankRunInit) {
    const { rank, worldSize } = init.identity;
    this.#init = init;
    this.rank = rank;
    this.worldSize = worldSize;
    this.next = (rank + 1) % worldSize;
    this.previous = (rank + worldSize - 1) % worldSize;
    this.random = seededRandom(init.order.seed * 1009 + rank);
  }

  get #meetingMs(): number {
    return Math.max(MEETING_MS, this.#init.order.limitMs / 2);
  }
  get mode() {
    return this.#init.identity.mode;
  }
  get provider() {
    return this.#init.provider;
  }
  get config() {
    return this.#init.order.config;
  }
  get otherConfig() {
    return this.#init.order.otherConfig;
  }
  get store() {
    return this.#init.store;
  }
  get signal() {
    return this.#init.signal;
  }

  async open(
    options: AbortOptions & { readonly timeoutMs?: number; readonly config?: object } = {},
  ): Promise<Transport<Need>> {
    const { provider, scope, store, signal, order } = this.#init;
    const { signal: both, unlink } = linkSignals(signal, options.signal);
    try {
      const transport = await provider.open(
        { rank: this.rank, worldSize: this.worldSize, store: prefixStore(store, `transport-${this.#opened++}`) },
        { signal: both, config: options.config ?? order.config, timeoutMs: options.timeoutMs ?? this.#meetingMs },
      );
      return scope.add(transport);
    } finally {
      unlink();
    }
  }

  async meet(ranks?: readonly Rank[]): Promise<void> {
    const members = ranks ?? Array.from({ length: this.worldSize }, (_, rank) => rank);
    await barrier(
      this.store,
      { key: `meet/${this.#meetings++}`, rank: members.indexOf(this.rank), worldSize: members.length },
      { timeoutMs: this.#meetingMs, signal: this.signal },
    );
  }

  async share<T>(value: T): Promise<readonly T[]> {
    const parts = await exchange(
      this.store,
      {
        key: `share/${this.#meetings++}`,
        rank: this.rank,
        worldSize: this.worldSize,
        bytes: Buffer.from(JSON.stringify(value)),
      },
      { timeoutMs: this.#meetingMs, signal: this.signal },
    );
    return parts.map((bytes) => JSON.parse(Buffer.from(bytes).toString()) as T);
  }

  report(text: string): void {
    this.#init.tell({ kind: 'report', text });
  }

  die(): Promise<never> {
    this.#init.tell({ kind: 'die' });
    return new Promise(() => {});
  }

  async resources(): Promise<Resources> {
    collectGarbage();
    // Finalizers of array buffers run after the collection, from the event loop.
    await new Promise((resolve) => setImmediate(resolve));
    const { segments, pending } = native().binding.leaks();
    return {
      fileDescriptors: readdirSync('/proc/self/fd').length,
      mappings: readFileSync('/proc/self/maps', 'utf8').split('memfd:').length - 1,
      segments,
      pending,
    };
  }
}

/** Everything that one rank does for one order. Throws what the body threw, or what closing found. */
export async function runOrder(
  identity: RankIdentity,
  order: CaseOrder,
  openStore: (path: string) => Promise<Store>,
  tell: (message: FromRank) => void,
): Promise<void> {
  const suite = (await resolveNamed(order.suite)) as readonly Pick<TransportCase, 'id' | 'body'>[];
  const one = suite.find((entry) => entry.id === order.id);
  if (one === undefined) throw new Error(`no case ${order.id} in ${order.suite.name} of ${order.suite.module}`);
  const typed = (await resolveNamed(order.provider)) as TransportProvider<Need>;
  const probe = await typed.probe(order.config);
  if (!probe.available) throw new Error(`${typed.name} is unavailable here: ${probe.code}: ${probe.reason}`);
  const time = new AbortController();
  const timer = setTimeout(() => time.abort(new Error(`the case's ${order.limitMs} ms are over`)), order.limitMs);
  const scope = new CloseScope();
  try {
    const store = scope.add(await openStore(order.storePath));
    const run = new RankRun({
      identity,
      order,
      provider: typed,
      store,
      signal: time.signal,
      scope,
      tell,
    });
    await one.body(run);
    tell({ kind: 'report', text: 'the body has ended; closing' });
  } finally {
    clearTimeout(timer);
    await scope.close();
  }
}
