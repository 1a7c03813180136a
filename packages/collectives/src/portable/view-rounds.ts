/**
 * The rounds of a group, view by view: those of the beginning have places that belong to the group's section; the members of each later view (after a loss, a repair, an admission) open others among
 * themselves, in the background, in places that are there for that. Until all have them calls go in records; where no place is left, or one of them has no rounds, for good.
 *
 * HAZARD: never in the places of the view before: what a member that is gone, or was taken out alive, had under way may land there at any time. They are free again when all of that view have said that what
 * they had put has landed; so a rank that died keeps them.
 */
import { isEpError } from '@ep/core';
import type { Arena } from './arena.js';
import { foldsOf } from './fold-order.js';
import { forgetRounds, GroupRounds } from './group-rounds.js';
import { sectionKey } from './meeting.js';
import type { PortableEngineOptions } from './options.js';
import type { Placement } from './placement.js';
import { describeError } from './records.js';
import type { Section, SectionName } from './sections.js';

export interface ViewRoundsInit {
  readonly options: PortableEngineOptions;
  readonly arena: Arena;
  readonly section: Section;
  readonly key: string;
  readonly placement: Placement;
  /** Ranks of the group, whether or not they take part. */
  readonly size: () => number;
  /** Whether all has landed on the peer that was put there. */
  readonly land: (peer: number) => Promise<boolean>;
}

interface View {
  readonly members: readonly number[];
  /** Of the keys of its rounds. */
  readonly key: string;
  /** Another view has taken its place, or the group is closed. */
  readonly over: AbortController;
  /** What was taken for it, until it is given back. */
  place: SectionName | undefined;
  opening: Promise<void>;
  rounds: GroupRounds | undefined;
}

function viewOf(members: readonly number[], key: string): View {
  const over = new AbortController();
  return { members, key, over, place: undefined, opening: Promise.resolve(), rounds: undefined };
}

export class ViewRounds {
  readonly #init: ViewRoundsInit;
  readonly #stop = new AbortController();
  readonly #underWay = new Set<Promise<void>>();
  /** All that have places of their own, or are about to. */
  readonly #renewed = new Set<View>();
  #view: View | undefined;

  /** `members`: what `Membership.active` is at first. */
  constructor(init: ViewRoundsInit, members: readonly number[]) {
    const { arena, section, key } = init;
    this.#init = init;
    if (arena.rounds === undefined || members.length < 2) return;
    this.#view = viewOf(members, key);
    this.#view.rounds = this.#roundsOf(this.#view, section);
  }

  /** Of the last view that members have agreed on. */
  readonly current = (): GroupRounds | undefined => this.#view?.rounds;

  begin(): void {
    this.#view?.rounds?.begin();
  }

  /** These go on; they call the view alike. */
  renew(members: readonly number[], epoch: number): void {
    this.#drop();
    if (members.length < 2 || this.#init.arena.spare === undefined) return;
    // HAZARD: ranks that lose each other, since a link is cut, go on in two views of one number, and may reach one store.
    const view = viewOf(members, `${this.#init.key}/views/${epoch}/${members[0]}`);
    this.#view = view;
    this.#renewed.add(view);
    view.opening = this.#open(view);
    this.#await(view.opening, view);
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
      if (this.#othersOf(view).every((peer) => landed[peer])) await this.#return(view);
    }
  }

  #othersOf({ members }: View): readonly number[] {
    return members.filter((peer) => peer !== this.#init.options.rank);
  }

  async #return(view: View): Promise<void> {
    const { arena, options } = this.#init;
    const { rank, store } = options;
    const { members, key, place } = view;
    this.#renewed.delete(view);
    if (place === undefined) return;
    if (!(await arena.spare!.giveBack(place, rank, [], false))) return;
    for (const member of members) await forgetRounds(store, key, member);
    await store.delete(sectionKey(key));
  }

  #drop(): void {
    const view = this.#view;
    if (view === undefined) return;
    this.#view = undefined;
    view.over.abort();
    this.#await(this.#leave(view), view);
  }

  async #leave(view: View): Promise<void> {
    await view.rounds?.close();
    view.rounds = undefined;
    // HAZARD: also of a view that was over before this rank knew its places: who took them does not know that.
    await view.opening;
    const others = view.place === undefined ? [] : this.#othersOf(view);
    const landed = await Promise.all(others.map((peer) => this.#init.land(peer)));
    if (!landed.includes(false)) await this.#return(view);
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
    const { signal } = view.over;
    const place = await this.#placeOf(view);
    view.place = place;
    // Another view, or none, by now.
    if (place === undefined || signal.aborted) return;
    view.rounds = this.#roundsOf(view, arena.sparePlace(place));
    view.rounds.begin();
  }

  /** The lowest member takes places and tells the others, or that there are none. */
  async #placeOf({ members, key }: View): Promise<SectionName | undefined> {
    const { arena, options } = this.#init;
    const { rank, ranks, store, name } = options;
    if (rank === members[0]) {
      const told = await arena.spare!.take(name, ranks, members).catch((error: unknown) => {
        if (!isEpError(error)) throw error;
        return describeError(error);
      });
      await store.set(sectionKey(key), Buffer.from(JSON.stringify(told)));
      return 'index' in told ? told : undefined;
    }
    const limits = { signal: this.#stop.signal, timeoutMs: Number.POSITIVE_INFINITY };
    const told = JSON.parse(Buffer.from(await store.get(sectionKey(key), limits)).toString()) as object;
    return 'index' in told ? (told as SectionName) : undefined;
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
