/** Ranks that take no part, and how they come to take part: what a member does about them, and what such a rank does itself. See admission.ts. */
import { EpError, isEpError } from '@ep/core';
import type { LookLimits } from '../engine.js';
import { Look } from '../look.js';
import { type Admission, type Attempt, answer, ask, attemptOf, type Found, joinedKey } from './admission.js';
import type { Links } from './links.js';
import { readyKey, readyWord } from './meeting.js';
import type { Membership } from './membership.js';
import type { PortableEngineOptions } from './options.js';

export interface ComersInit {
  readonly options: PortableEngineOptions;
  readonly key: string;
  readonly links: Links;
  readonly membership: Membership;
  /** A rank that was admitted had given up. */
  readonly onGivenUp: (rank: number) => void;
  /** Ranks of the group, whether or not they take part. */
  readonly size: () => number;
  /** This rank is a member of a group of so many, behind the call that admitted it. Before anybody speaks to it. */
  readonly onEnter: (sequence: number, size: number) => void;
}

export interface JoinLimits {
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

export class Comers {
  readonly #init: ComersInit;
  /** Ranks that are there beside the members, and their attempts to join, for which their channels were made anew; 0 if they make none. */
  readonly #found = new Map<number, number>();
  /** By rank: how often it was admitted. */
  readonly #lives: number[];
  readonly #answers = new Set<Promise<void>>();
  /** Whom this rank knew as members last. */
  #members: readonly number[];

  constructor(init: ComersInit) {
    this.#init = init;
    this.#lives = init.options.ranks.map(() => 0);
    this.#members = init.options.active ?? [];
  }

  /** Beside the members, when this rank looked last. */
  get found(): Found {
    return [...this.#found].filter(([rank]) => this.#init.membership.isGone(rank));
  }

  /** It asks to be taken in, and this rank has made its channel anew. */
  expects(rank: number): boolean {
    return (this.#found.get(rank) ?? 0) > 0 && this.#init.membership.isGone(rank);
  }

  lifeOf(rank: number): number {
    return this.#lives[rank]!;
  }

  /** Looks whom there is. */
  async refresh(limits?: LookLimits): Promise<void> {
    const { options, key, links, membership } = this.#init;
    const look = new Look(limits);
    for (let peer = 0; peer < options.ranks.length; peer++) {
      const channel = links.at(peer);
      if (channel === undefined || !membership.isGone(peer)) continue;
      let attempt: number | undefined;
      try {
        attempt = links.isVacant(peer)
          ? undefined
          : await look.for(attemptOf(options.store, key, peer, links.lifeOf(peer)));
      } catch {
        if (look.hasEnded) return;
        // HAZARD: a store that fails this rank must not keep it from the call that all others make behind this look. It has found nothing new.
        continue;
      }
      if (attempt === undefined) {
        this.#found.delete(peer);
        continue;
      }
      // Once for each attempt: nothing of this rank may land behind what the other one counts from.
      if (attempt > 0 && this.#found.get(peer) !== attempt) await links.retire(peer);
      this.#found.set(peer, attempt);
    }
  }

  /** All members have completed the call that admits these ranks. */
  welcome(found: Found, sequence: number): void {
    const { key, links, membership } = this.#init;
    const admitted = found.map(([rank, attempt]): Attempt => ({ rank, attempt }));
    for (const one of admitted) {
      this.#lives[one.rank]!++;
      this.#found.delete(one.rank);
      links.connect(one.rank, joinedKey(key, one));
    }
    const { epoch, changes, active } = membership;
    const size = this.#init.size();
    const answered = this.#answer({ epoch, changes, active, sequence, size, lives: [...this.#lives], admitted });
    this.#answers.add(answered);
    void answered.finally(() => this.#answers.delete(answered));
  }

  /** Of a rank that takes no part. The call that admitted it. */
  async join(limits: JoinLimits): Promise<number> {
    const { options, key, links, membership } = this.#init;
    const { epoch, changes } = membership;
    const { rank, store } = options;
    if (membership.active.length > 1) this.#members = membership.active;
    // What it was a member of goes on without it.
    membership.enter({ active: [rank], epoch, changes });
    limits.signal?.throwIfAborted();
    await Promise.all(options.ranks.map((_, peer) => links.retire(peer)));
    try {
      const { mine, admission } = await ask(store, key, { rank, life: links.lifeOf(rank) }, limits);
      await this.#enter(mine, admission);
      return admission.sequence;
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      const { timeoutMs } = limits;
      const awaited = this.#members.filter((member) => member !== rank);
      throw new EpError('EP_TIMEOUT', `joinGroup of rank ${rank}: nobody took it in within ${timeoutMs} ms`, {
        context: { timeoutMs, awaited },
      });
    }
  }

  /** Resolves when nothing is under way. */
  async idle(): Promise<void> {
    await Promise.all(this.#answers);
  }

  async #answer(admission: Admission): Promise<void> {
    const { options, key, links, membership, onGivenUp } = this.#init;
    const newcomers = admission.admitted.map(({ rank }) => rank);
    const members = admission.active.filter((rank) => !newcomers.includes(rank));
    try {
      // Of one that dies now, nothing is needed.
      const waits = (rank: number): boolean => !membership.isGone(rank) && !links.stopped.aborted;
      await Promise.allSettled(
        members.map((rank) =>
          links.land(
            rank,
            () => waits(rank),
            () => options.timeoutMs,
          ),
        ),
      );
      for (const one of admission.admitted) {
        if (!(await answer(options.store, key, one, admission))) onGivenUp(one.rank);
      }
    } catch {
      // Without a store the rank hears of it from another member, or from nobody: then it does not come to its first call.
    }
  }

  async #enter(mine: Attempt, admission: Admission): Promise<void> {
    const { options, key, links, membership, onEnter } = this.#init;
    const { active, sequence, size, lives, admitted } = admission;
    this.#found.clear();
    for (const [rank, life] of lives.entries()) this.#lives[rank] = life;
    membership.enter(admission);
    onEnter(sequence, size);
    for (const peer of active) links.renew(peer);
    // HAZARD: after the channels, which read the words that count from now on.
    await options.store.set(joinedKey(key, mine), readyWord(links.lifeOf(options.rank)));
    for (const peer of active) {
      const newcomer = admitted.find(({ rank }) => rank === peer);
      links.connect(peer, newcomer === undefined ? readyKey(key, peer) : joinedKey(key, newcomer));
    }
  }
}
