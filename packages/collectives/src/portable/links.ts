/**
 * The channels of one rank: one to each peer at a time, how it is followed and connected, and what keeps it from being used.
 *
 * A rank that was taken out and comes back gets another channel in the same slots, once nothing of the one before is under way: both sides have stopped it and flushed what they
 * had put, and count from the value that their word has then. So does a process that comes in the place of a dead one, of which nothing can be under way.
 *
 * Where the ways to all ranks are made anew when such a process comes (`Generations`), the channels between those who stay pause: what they have put lands before, so that slots and words say
 * the same on both sides, and what is given to them meanwhile goes when the peer is mapped again. Nothing is lost, and no call ends because of it.
 */
import { setTimeout } from 'node:timers/promises';
import { type Endpoint, isEpError, type WaitOptions } from '@ep/core';
import type { Arena } from './arena.js';
import { Channel, type ChannelInit, type Portable } from './channel.js';
import { layOut } from './layout.js';
import { LEFT_DETAIL, saysLeft } from './meeting.js';
import type { PortableEngineOptions } from './options.js';
import type { Section } from './sections.js';

const FIRST_PAUSE_MS = 10;
const LONGEST_PAUSE_MS = 1000;

export interface LinksInit extends Pick<ChannelInit, 'onEvent' | 'quiet'> {
  readonly options: PortableEngineOptions;
  readonly arena: Arena;
  readonly section: Section;
  readonly readersOf: (peer: number) => ChannelInit['readers'];
  readonly onLost: (peer: number, why: string) => void;
  /** The peer may be written to: what it was told goes. */
  readonly onConnected: () => void;
  readonly onBroken: (peer: number, error: unknown) => void;
}

export class Links {
  readonly #init: LinksInit;
  readonly #stop = new AbortController();
  /** By group rank; none to itself. */
  readonly #channels: (Channel | undefined)[];
  /** Of the channel that is there now: ends what follows and connects it. */
  readonly #ends: AbortController[];
  /** The process that it was made for. */
  readonly #lives: string[];
  readonly #details = new Map<number, string>();
  /** Of all channels to a peer. */
  readonly #endpoints = new Map<number, Endpoint<Portable>>();
  readonly #background = new Set<Promise<void>>();
  /** What was put to these peers is awaited, whether or not they are lost. */
  readonly #landing: number[] = [];

  readonly #unfollow: () => void;
  #paused: boolean;

  constructor(init: LinksInit) {
    this.#init = init;
    this.#paused = init.arena.paused;
    this.#unfollow = init.arena.follow(this);
    const { ranks, rank } = init.options;
    this.#ends = ranks.map(() => new AbortController());
    this.#lives = ranks.map((_, peer) => this.lifeOf(peer));
    this.#channels = ranks.map((_, peer) => (peer === rank ? undefined : this.#open(peer)));
  }

  /** Fires when all of this ends. */
  get stopped(): AbortSignal {
    return this.#stop.signal;
  }

  get all(): readonly (Channel | undefined)[] {
    return this.#channels;
  }

  at(peer: number): Channel | undefined {
    return this.#channels[peer];
  }

  each(action: (channel: Channel) => void): void {
    for (const channel of this.#channels) if (channel !== undefined) action(channel);
  }

  /** Names the process in the peer's place, where another one may come. */
  lifeOf(peer: number): string {
    const { transport, ranks } = this.#init.options;
    return transport.succession?.lifeOf(ranks[peer]!) ?? '';
  }

  /** The peer is lost, and nobody has come in its place. */
  isVacant(peer: number): boolean {
    return this.#channels[peer]?.lost === true && this.#lives[peer] === this.lifeOf(peer);
  }

  /** True if there was something. */
  readonly look = (): boolean => {
    let seen = false;
    this.each((channel) => {
      seen = channel.look() || seen;
    });
    return seen;
  };

  /** Holds the thread, where the transport can, until a peer has told something or a moment is over. */
  readonly hold = (): void => {
    const followed = this.#channels.filter((channel) => channel !== undefined && !channel.lost) as readonly Channel[];
    this.#init.arena.memory.signals.hold?.(followed.map(({ seen }) => seen));
  };

  detail(peer: number): string | undefined {
    return this.#details.get(peer);
  }

  explain(peer: number, why: string): void {
    this.#details.set(peer, why);
  }

  /** Hears of what the peer does, and of its death, from now on. */
  follow(peer: number): void {
    const channel = this.#channels[peer];
    if (channel !== undefined) this.#run(channel.watch(this.#ends[peer]!.signal));
  }

  /** Until the peer has written `ready` into the store, records to it wait in their lane. Nobody waits for it. */
  connect(peer: number, ready: string): void {
    const channel = this.#channels[peer];
    if (channel !== undefined) this.#run(this.#connect(peer, channel, ready, this.#ends[peer]!.signal));
  }

  /** Resolves when all records have landed that were given to the peer's channel, while `waits` says so, and all else that was put. Rejects as `Endpoint.flush` does. */
  async land(peer: number, waits: () => boolean, leftMs: () => number): Promise<void> {
    const channel = this.#channels[peer];
    const endpoint = channel?.endpoint;
    if (channel === undefined || endpoint === undefined) return;
    while (!channel.idle('control') && waits()) await setTimeout(1);
    await this.#flush(peer, endpoint, { timeoutMs: leftMs() });
  }

  /** Puts nothing more to the peer, and begins anew when all has landed; leaves it if the peer is lost. Rejects if it cannot land for another reason. */
  async retire(peer: number): Promise<void> {
    const channel = this.#channels[peer];
    if (channel === undefined || this.isVacant(peer)) return;
    const isDead = channel.lost;
    channel.lose();
    this.#ends[peer]!.abort();
    try {
      if (!isDead && channel.endpoint !== undefined) await this.#flush(peer, channel.endpoint);
    } catch (error) {
      if (isEpError(error) && error.code === 'EP_PEER_LOST') return;
      throw error;
    }
    this.renew(peer);
  }

  /** Another channel in the place of one that is retired, on this side and on the other. */
  renew(peer: number): void {
    if (this.#channels[peer] === undefined) return;
    this.#ends[peer]!.abort();
    this.#ends[peer] = new AbortController();
    if (this.#stop.signal.aborted) this.#ends[peer]!.abort();
    this.#channels[peer] = this.#open(peer);
    this.follow(peer);
  }

  /**
   * Puts nothing until `resume`. Resolves when all has landed that was put, but to peers that are lost and of which nobody awaits it. Rejects with `EP_TIMEOUT`, or the reason of the
   * signal. HAZARD: a channel that is retired is lost as well; what it has under way would be cut, and with it the call that takes its peer in.
   */
  async pause(limits: WaitOptions): Promise<void> {
    this.#paused = true;
    this.each((channel) => channel.pause());
    await Promise.all(
      this.#channels.map(async (channel, peer) => {
        if (channel === undefined || (channel.lost && !this.#landing.includes(peer))) return;
        await channel.endpoint?.flush(limits).catch((error: unknown) => {
          // Of any other failure the channel hears by itself.
          if (!isEpError(error) || error.code === 'EP_TIMEOUT') throw error;
        });
      }),
    );
  }

  /** The ways to all ranks are new: each goes on once its peer is mapped again. */
  resume(): void {
    this.#paused = false;
    for (const [peer, channel] of this.#channels.entries()) {
      if (channel !== undefined && !channel.lost) this.#run(this.#resume(peer, channel));
    }
  }

  /** The ways to all ranks are gone. */
  fail(error: unknown): void {
    for (const [peer, channel] of this.#channels.entries()) {
      if (channel?.lost === false) this.#init.onBroken(peer, error);
    }
  }

  async stop(): Promise<void> {
    this.#unfollow();
    this.#stop.abort();
    for (const end of this.#ends) end.abort();
    await Promise.all(this.#background);
  }

  async #flush(peer: number, endpoint: Endpoint<Portable>, limits?: WaitOptions): Promise<void> {
    this.#landing.push(peer);
    try {
      await endpoint.flush(limits);
    } finally {
      this.#landing.splice(this.#landing.indexOf(peer), 1);
    }
  }

  #run(work: Promise<void>): void {
    this.#background.add(work);
    void work.finally(() => this.#background.delete(work));
  }

  async #resume(peer: number, channel: Channel): Promise<void> {
    const { options, arena, onBroken } = this.#init;
    const { signal } = this.#ends[peer]!;
    try {
      // Whoever connects maps by himself.
      if (channel.endpoint !== undefined) await arena.parts?.map(options.ranks[peer]!, signal, () => channel.lost);
    } catch (error) {
      if (!signal.aborted) onBroken(peer, error);
      return;
    }
    if (!this.#paused && !channel.lost) channel.resume();
  }

  #open(peer: number): Channel {
    const { options, arena, section, readersOf, onEvent, quiet, onLost, onBroken } = this.#init;
    const { memory, sectionBytes } = arena;
    const { ranks, rank } = options;
    const ownSlot = section.firstSlot + peer;
    this.#lives[peer] = this.lifeOf(peer);
    const channel = new Channel({
      self: rank,
      peer,
      memory,
      layout: layOut(sectionBytes, ranks.length),
      sectionOffset: section.byteOffset,
      section: memory.view('u8', section.byteOffset, sectionBytes),
      ownSlot,
      peerSlot: section.firstSlot + rank,
      peerRank: ranks[peer]!,
      base: memory.signals.peek(ownSlot),
      readers: readersOf(peer),
      onEvent,
      quiet,
      onLost: (error) => onLost(peer, error.message),
      onBroken: (error) => onBroken(peer, error),
    });
    if (this.#paused) channel.pause();
    return channel;
  }

  async #connect(peer: number, channel: Channel, ready: string, signal: AbortSignal): Promise<void> {
    const { options, arena } = this.#init;
    const { transport, ranks, store } = options;
    for (let pause = FIRST_PAUSE_MS; !signal.aborted && !channel.lost; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      try {
        this.explain(peer, 'connecting the transport');
        const endpoint = this.#endpoints.get(peer) ?? (await transport.connect(ranks[peer]!, { signal }));
        this.#endpoints.set(peer, endpoint);
        this.explain(peer, 'it has not said where its memory is');
        await arena.parts?.map(ranks[peer]!, signal, () => channel.lost);
        this.explain(peer, 'it has not opened the group');
        const state = await store.get(ready, { signal, timeoutMs: Number.POSITIVE_INFINITY });
        if (saysLeft(state)) {
          this.#init.onLost(peer, LEFT_DETAIL);
          return;
        }
        // By other ways than those of before, perhaps.
        await arena.parts?.map(ranks[peer]!, signal, () => channel.lost);
        if (signal.aborted || channel.lost) return;
        channel.connect(endpoint);
        this.#init.onConnected();
        return;
      } catch (error) {
        if (signal.aborted) return;
        this.explain(peer, error instanceof Error ? error.message : String(error));
      }
      await setTimeout(pause, undefined, { signal }).catch(() => {});
    }
  }
}
