/**
 * The rounds of a group, view by view: those of the beginning have places that belong to the group's section; the members of each later view (after a loss, a repair, an admission) open others among
 * themselves, in the background, in places that are there for that. Until all have them calls go in records.
 *
 * HAZARD: never in the places of the view before: what a member that is gone, or was taken out alive, had under way may land there at any time. They are free again when all of that view have said that what
 * they had put has landed; so a rank that died keeps them.
 */
import { setTimeout } from 'node:timers/promises';
import { isEpError } from '@ep/core';
import type { Arena } from './arena.js';
import { foldsOf } from './fold-order.js';
import { forgetRounds, GroupRounds } from './group-rounds.js';
import { sectionKey } from './meeting.js';
import type { Membership } from './membership.js';
import type { PortableEngineOptions } from './options.js';
import type { Placement } from './placement.js';
import type { Section, SectionName } from './sections.js';

export interface ViewRoundsInit {
  readonly options: PortableEngineOptions;
  readonly arena: Arena;
  readonly section: Section;
  readonly key: string;
  readonly placement: Placement;
  readonly membership: Membership;
  /** Ranks of the group, whether or not they take part. */
  readonly size: () => number;
}

interface View {
  readonly members: readonly number[];
  /** Of the keys of its rounds. */
  readonly key: string;
  /** Another view has taken its place, or the group is closed. */
  readonly over: AbortController;
  /** Where it has places of its own: those, until they are given back. */
  place: SectionName | undefined;
  opening: Promise<void>;
  /** This rank may have put something there. */
  used: boolean;
  rounds: GroupRounds | undefined;
}

/** Between tries to find a place: others give theirs back when they have left the view before. */
const FIRST_PAUSE_MS = 10;
const LONGEST_PAUSE_MS = 60_000;

export class ViewRounds {
  readonly #init: ViewRoundsInit;
  readonly #stop = new AbortController();
  readonly #underWay = new Set<Promise<void>>();
  /** All that have places of their own, or are about to. */
  readonly #renewed = new Set<View>();
  #view: View | undefined;

  constructor(init: ViewRoundsInit) {
    const { arena, section, key, membership } = init;
    this.#init = init;
    if (arena.rounds === undefined || membership.active.length < 2) return;
    this.#view = this.#viewOf(key);
    this.#view.rounds = this.#roundsOf(this.#view, section);
  }

  /** Of the last view that members have agreed on. */
  readonly current = (): GroupRounds | undefined => this.#view?.rounds;

  begin(): void {
    this.#view?.rounds?.begin();
  }

  /** Members have agreed on another view. */
  renew(): void {
    const { arena, key, membership } = this.#init;
    const { active, epoch } = membership;
    this.leave();
    if (active.length < 2 || arena.spare === undefined || this.#stop.signal.aborted) return;
    // HAZARD: ranks that lose each other, since a link is cut, go on in two views of one number, and may reach one store.
    const view = this.#viewOf(`${key}/views/${epoch}/${active[0]}`);
    this.#view = view;
    this.#renewed.add(view);
    view.opening = this.#open(view);
    this.#await(view.opening, view);
  }

  /** This rank is a member of no view from now on. */
  leave(): void {
    const view = this.#view;
    if (view === undefined) return;
    this.#view = undefined;
    view.over.abort();
    this.#await(this.#leave(view), view);
  }

  /** Those of the last view are kept, for what others may still lack. */
  async close(): Promise<void> {
    this.#stop.abort();
    this.#view?.over.abort();
    await this.#view?.rounds?.close();
    await Promise.all(this.#underWay);
  }

  /** After `close`, what has not been given back. `landed`, by rank: whether all has that was put there. */
  async giveBack(landed: readonly boolean[]): Promise<void> {
    for (const view of this.#renewed) {
      if (this.#targetsOf(view).every((peer) => landed[peer])) await this.#return(view);
      else await this.#forget(view);
    }
  }

  #viewOf(key: string): View {
    const members = this.#init.membership.active;
    const over = new AbortController();
    return { members, key, over, place: undefined, opening: Promise.resolve(), used: false, rounds: undefined };
  }

  async #leave(view: View): Promise<void> {
    const { arena, options } = this.#init;
    await view.rounds?.close();
    // It may have been about to take places.
    await view.opening.catch(() => {});
    const targets = view.place === undefined ? [] : this.#targetsOf(view);
    view.rounds = undefined;
    const limits = { signal: this.#stop.signal, timeoutMs: Number.POSITIVE_INFINITY };
    await Promise.all(targets.map((peer) => arena.rounds!.maker.settle(options.ranks[peer]!, limits)));
    await this.#return(view);
  }

  /** On whom there may be something under way in its places. */
  #targetsOf(view: View): readonly number[] {
    const { rank } = this.#init.options;
    view.used ||= view.rounds?.used === true;
    return view.used ? view.members.filter((peer) => peer !== rank) : [];
  }

  async #return(view: View): Promise<void> {
    const { arena, options } = this.#init;
    const { place } = view;
    if (place !== undefined) await arena.spare!.giveBack(place, options.rank, [], false);
    this.#renewed.delete(view);
    await this.#forget(view);
    if (place !== undefined) await arena.spare!.sweep();
  }

  /** What this rank has said of the view in the store: whoever still waits for it there is about to hear that the view is over. */
  async #forget({ members, key, place }: View): Promise<void> {
    const { rank, store } = this.#init.options;
    if (place === undefined) return;
    await forgetRounds(store, key, rank);
    if (rank === members[0]) await store.delete(sectionKey(key));
  }

  /** In `close`. */
  #await(work: Promise<void>, { over }: View): void {
    const ended = work
      .catch((error: unknown) => {
        // Of a store or a transport that was closed, or does not answer: then there are none.
        if (!isEpError(error) && !over.signal.aborted) throw error;
      })
      .finally(() => this.#underWay.delete(ended));
    this.#underWay.add(ended);
  }

  async #open(view: View): Promise<void> {
    const { arena } = this.#init;
    await this.#findPlace(view);
    // Another view, or none, by now.
    if (view.place === undefined || view.over.signal.aborted) return;
    view.rounds = this.#roundsOf(view, arena.sparePlace(view.place));
    view.rounds.begin();
  }

  /**
   * The lowest member takes places, and tells the others. HAZARD: each member enters them by itself: one that never hears of them is not awaited when they are given back, and nobody writes there before all
   * have entered. What a store may have done that has not answered in time is given back as if it had.
   */
  async #findPlace(view: View): Promise<void> {
    const { arena, options } = this.#init;
    const { rank, store } = options;
    const { signal } = view.over;
    const key = sectionKey(view.key);
    if (rank === view.members[0]) {
      view.place = await this.#take(view);
      if (view.place !== undefined) await store.set(key, Buffer.from(JSON.stringify(view.place)));
      return;
    }
    const told = await store.get(key, { signal, timeoutMs: Number.POSITIVE_INFINITY });
    view.place = JSON.parse(Buffer.from(told).toString()) as SectionName;
    if (!(await arena.spare!.enter(view.place, rank))) view.place = undefined;
  }

  /** Undefined where there was none until the view was over. */
  async #take({ key, over: { signal } }: View): Promise<SectionName | undefined> {
    const { arena, options } = this.#init;
    const { name, ranks, rank } = options;
    for (let pauseMs = FIRST_PAUSE_MS; !signal.aborted; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
      try {
        return await arena.spare!.take(name, ranks, [rank], key);
      } catch (error) {
        if (!isEpError(error) || error.code !== 'EP_CAPACITY') throw error;
      }
      await setTimeout(pauseMs, undefined, { signal, ref: false }).catch(() => {});
    }
    return undefined;
  }

  #roundsOf({ members, key }: View, section: SectionName): GroupRounds {
    const { arena, options, placement, size } = this.#init;
    const { rank, store, transport } = options;
    const ofMembers = (values: readonly number[]): readonly number[] => members.map((member) => values[member]!);
    const ranks = ofMembers(options.ranks);
    const hosts =
      options.hosts === undefined ? ranks.map((of) => transport.hosts?.[of] ?? 0) : ofMembers(options.hosts);
    const folds = foldsOf(placement, members).map((some) => some.map((member) => members.indexOf(member)));
    const { maker, memory, carriers } = arena.rounds!;
    const places = { maker, memory, carriers, section, key, store };
    return new GroupRounds({ ...places, members, ranks, hosts, folds, size, rank });
  }
}
