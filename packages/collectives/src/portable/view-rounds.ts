/**
 * The rounds of a group, view by view: those of the beginning have places that belong to the group's section; after a loss or a repair those who are left open others among themselves, in the background,
 * in places that are there for that. Until all have them calls go in records; where no place is left, for good.
 *
 * HAZARD: never in the places of the view before: what a member that is gone, or was taken out alive, had under way may land there at any time.
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
}

interface View {
  readonly members: readonly number[];
  /** Of the keys of its rounds. */
  readonly key: string;
  /** Another view has taken its place, or the group is closed. */
  readonly over: AbortController;
  /** What was taken for it, which is given back. */
  place: SectionName | undefined;
  rounds: GroupRounds | undefined;
}

function viewOf(members: readonly number[], key: string): View {
  return { members, key, over: new AbortController(), place: undefined, rounds: undefined };
}

export class ViewRounds {
  readonly #init: ViewRoundsInit;
  readonly #closings: Promise<void>[] = [];
  /** All that had places of their own, in turn; the last one may be over. */
  readonly #renewed: View[] = [];
  #view: View | undefined;
  /** No view has rounds any more. */
  #ended: boolean;

  /** `members`: what `Membership.active` is at first. No view has rounds where these are not all ranks of the group. */
  constructor(init: ViewRoundsInit, members: readonly number[]) {
    const { arena, options, section, key } = init;
    this.#init = init;
    const isWhole = section.members === options.ranks.length && options.joins !== true;
    this.#ended = arena.rounds === undefined || !isWhole;
    if (this.#ended || members.length < 2) return;
    this.#view = viewOf(members, key);
    this.#view.rounds = this.#roundsOf(this.#view, section);
  }

  /** Of the last view that members have agreed on. */
  readonly current = (): GroupRounds | undefined => this.#view?.rounds;

  begin(): void {
    this.#view?.rounds?.begin();
  }

  /** These go on, all of whom were members before; they call the view alike. */
  renew(members: readonly number[], epoch: number): void {
    this.#drop();
    if (this.#ended || members.length < 2 || this.#init.arena.spare === undefined) return;
    // HAZARD: ranks that lose each other, since a link is cut, go on in two views of one number, and may reach one store.
    const view = viewOf(members, `${this.#init.key}/views/${epoch}/${members[0]}`);
    this.#view = view;
    this.#renewed.push(view);
    this.#await(this.#open(view), view);
  }

  /** Somebody has come who has none. */
  end(): void {
    this.#ended = true;
    this.#drop();
  }

  /** Those of the last view are kept, for what others may still lack. */
  async close(): Promise<void> {
    this.#ended = true;
    this.#view?.over.abort();
    await this.#view?.rounds?.close();
    await Promise.all(this.#closings);
  }

  /** After `close`. `landed`, by rank: whether all has that was put there. The places of a view that has lost one are nobody's any more. */
  async giveBack(landed: readonly boolean[]): Promise<void> {
    const { arena, options } = this.#init;
    const { rank, store } = options;
    for (const { members, key, place } of this.#renewed) {
      if (place === undefined || members.some((peer) => peer !== rank && !landed[peer])) continue;
      if (!(await arena.spare!.giveBack(place, rank, [], false))) continue;
      for (const member of members) await forgetRounds(store, key, member);
      await store.delete(sectionKey(key));
    }
  }

  #drop(): void {
    const view = this.#view;
    this.#view = undefined;
    view?.over.abort();
    if (view?.rounds !== undefined) this.#await(view.rounds.close(), view);
  }

  /** In `close`. */
  #await(work: Promise<void>, { over }: View): void {
    const ended = work.catch((error: unknown) => {
      // Of a store or a transport that was closed, or does not answer: then there are none.
      if (!isEpError(error) && !over.signal.aborted) throw error;
    });
    this.#closings.push(ended);
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
  async #placeOf({ members, key, over }: View): Promise<SectionName | undefined> {
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
    const limits = { signal: over.signal, timeoutMs: Number.POSITIVE_INFINITY };
    const told = JSON.parse(Buffer.from(await store.get(sectionKey(key), limits)).toString()) as object;
    return 'index' in told ? (told as SectionName) : undefined;
  }

  #roundsOf({ members, key }: View, section: SectionName): GroupRounds {
    const { arena, options, placement } = this.#init;
    const { rank, store, transport } = options;
    const ofMembers = (values: readonly number[]): readonly number[] => members.map((member) => values[member]!);
    const ranks = ofMembers(options.ranks);
    const hosts =
      options.hosts === undefined ? ranks.map((of) => transport.hosts?.[of] ?? 0) : ofMembers(options.hosts);
    const folds = foldsOf(placement, members).map((some) => some.map((member) => members.indexOf(member)));
    const { maker, memory, carriers } = arena.rounds!;
    const size = options.ranks.length;
    const places = { maker, memory, carriers, section, key, store };
    return new GroupRounds({ ...places, members, ranks, hosts, folds, size, rank });
  }
}
