/**
 * Agreement on who goes on, and on how far the calls have come: records between survivors, no coordinator, no store.
 *
 * Every rank tells every survivor which members of the view it knows to be gone (a set that only grows) and its last completed call. A rank that has
 * the same set from all survivors commits: it tells them `view` and goes on. A rank that gets a `view` takes it over and passes it on.
 *
 * Why two survivors never commit different views: records between two ranks are in order; a rank tells no more `state` of an epoch after it has told
 * `view`; records of a rank that is known to be gone are ignored. Let p commit D and q commit E, E larger. q has a `state` of E from p (p is in q's view), sent
 * before p committed, so p knew of E by then and can only have taken D over from a rank outside of E; that rank, in turn, has told E before it took D
 * over; and so on down to one that committed D by itself, which would have had to know of D and of nothing else.
 *
 * A repair is an agreement of the same kind for which a rank has to come: it tells the number of its call, once, and survivors commit only what all of them, or none,
 * have told with a number. So the proof holds for the pair of set and number, too. All go on behind the highest number: whatever was said before it, of calls that
 * had lower ones, is told apart by that alone.
 *
 * Ranks are admitted, and the group grows, by a view that any member commits once it has completed the call that does so, unless it has told a `state` in this epoch: for that, all members have told
 * that they have their part of that call, none of them commits anything else by itself without a `state` of this one, and the rest is as above.
 *
 * Needs what transports promise: a death is found by every survivor, and nobody is found dead who is not. Who is taken out alive is in evictions.ts.
 */
import type { Found } from './admission.js';
import { formatSet, parseSet, type StateRecord } from './records.js';

export interface MembershipInit {
  readonly rank: number;
  readonly size: number;
  /** Of the first view; this rank is among them. */
  readonly active: readonly number[];
  readonly tell: (peer: number, record: StateRecord) => void;
  /** Asked whenever this rank tells its state; its calls stand still from the first time until `onCommit`, but for what `onRepair` completes. */
  readonly completed: () => number;
  readonly onCommit: (commit: Commit) => void;
  /** All survivors have told what they know, and some have yet to come to a repair. */
  readonly onAwaited: () => void;
  /** A member repairs the group; `completed`: its last completed call. Before this rank tells its own state. */
  readonly onRepair: (from: number, completed: number) => void;
  /** The others take this rank for gone. */
  readonly onExpelled: (by: number) => void;
}

export interface Commit {
  /** Of the view before. */
  readonly lost: readonly number[];
  /** The last call that any survivor completed, as they know. */
  readonly completed: number;
  /** Of a repair: the call behind which all go on. */
  readonly repair?: number;
  /** Members from now on, since all have completed the call `completed`. */
  readonly admitted?: Found;
  /** With `admitted`, of which there may be none: so many ranks are in the group from now on. */
  readonly size?: number;
}

export class Membership {
  readonly #init: MembershipInit;
  /** Known to be dead or gone, in the view or not. */
  readonly #gone = new Set<number>();
  readonly #states = new Map<number, StateRecord>();
  #active: readonly number[];
  /** Agreements, and those that changed the view. */
  #epoch = 0;
  #changes = 0;
  /** Some member of the view is gone. */
  #losing = false;
  /** The last `state` told in this epoch, if any. */
  #told: StateRecord | undefined;
  /** Of this rank in this epoch. */
  #repair: number | undefined;

  constructor(init: MembershipInit) {
    this.#init = init;
    this.#active = [...init.active];
    this.#loseOthers();
  }

  get epoch(): number {
    return this.#epoch;
  }

  /** Grows with every change of the view. */
  get changes(): number {
    return this.#changes;
  }

  get active(): readonly number[] {
    return this.#active;
  }

  /** True while a view is being agreed on. */
  get agreeing(): boolean {
    return this.#told !== undefined;
  }

  /** No member of the view is known to be gone, and nothing is being agreed on. */
  get undisturbed(): boolean {
    return !this.#losing && this.#told === undefined;
  }

  isGone(rank: number): boolean {
    return this.#gone.has(rank);
  }

  /** Members of the view that are gone. */
  get goneMembers(): readonly number[] {
    return this.#active.filter((rank) => this.#gone.has(rank));
  }

  /** Members of the view that have not told what an agreement under way needs. */
  get awaited(): readonly number[] {
    const { rank } = this.#init;
    const hasTold = (peer: number): boolean => {
      const state = this.#states.get(peer);
      return state?.dead === this.#told?.dead && (this.#repair === undefined || state?.repair !== undefined);
    };
    return this.#active.filter((peer) => peer !== rank && !this.#gone.has(peer) && !hasTold(peer));
  }

  /** A rank is gone. Goes into an agreement under way; begins none. */
  lose(rank: number): void {
    if (this.#gone.has(rank)) return;
    this.#miss(rank);
    if (this.agreeing) this.#tell();
  }

  /** Begins an agreement without the members that are gone, unless one is under way. */
  begin(): void {
    if (!this.agreeing) this.#tell();
  }

  /**
   * Begins to agree on going on behind the call `sequence`, or the highest that a survivor names: once all of them have come to repair. HAZARD: the first number of an epoch
   * stays, whatever comes of the call: two survivors must not count with two numbers of one rank.
   */
  repair(sequence: number): void {
    this.#repair ??= sequence;
    this.#tell();
  }

  /** All have completed the call that admits these ranks, or makes the group of `size` ranks, and this rank is in no agreement. */
  admit(admitted: Found, completed: number, size?: number): void {
    const grown = size !== undefined && { size };
    this.#commit({ kind: 'view', epoch: this.#epoch, dead: formatSet([]), completed, admitted, ...grown });
  }

  /** What others have agreed on, for a rank that comes to them; or alone, before. */
  enter({ active, epoch, changes }: { active: readonly number[]; epoch: number; changes: number }): void {
    this.#active = [...active];
    this.#epoch = epoch;
    this.#changes = changes;
    this.#gone.clear();
    this.#losing = false;
    this.#loseOthers();
    this.#forget();
  }

  receive(from: number, record: StateRecord): void {
    if (this.#gone.has(from) || record.epoch !== this.#epoch) return;
    const dead = parseSet(record.dead);
    if (dead.includes(this.#init.rank)) {
      this.#init.onExpelled(from);
      return;
    }
    for (const rank of dead) this.#miss(rank);
    if (record.kind === 'view') {
      this.#commit(record);
      return;
    }
    this.#states.set(from, record);
    if (record.repair !== undefined) this.#init.onRepair(from, record.completed);
    // HAZARD: this rank may have come to the repair by that, and all be over.
    if (record.epoch === this.#epoch) this.#tell();
  }

  /** Tells what is known, if that is news, and commits if all say the same. */
  #tell(): void {
    const { rank, tell, completed } = this.#init;
    const dead = formatSet(this.goneMembers);
    const survivors = this.#active.filter((peer) => !this.#gone.has(peer));
    if (this.#told?.dead !== dead || this.#told.repair !== this.#repair) {
      // HAZARD: calls stand still since the first time, but for one that others have told of a repair as completed. Who hears of this rank's repair ends the calls that it does not name.
      this.#told = {
        kind: 'state',
        epoch: this.#epoch,
        dead,
        completed: completed(),
        ...(this.#repair !== undefined && { repair: this.#repair }),
      };
      for (const peer of survivors) if (peer !== rank) tell(peer, this.#told);
    }
    const states = survivors.map((peer) => (peer === rank ? this.#told : this.#states.get(peer)));
    if (states.some((state) => state?.dead !== dead)) return;
    const repairs = states.flatMap((state) => state!.repair ?? []);
    if (repairs.length > 0 && repairs.length < states.length) {
      this.#init.onAwaited();
      return;
    }
    this.#commit({
      kind: 'view',
      epoch: this.#epoch,
      dead,
      completed: Math.max(...states.map((state) => state!.completed)),
      ...(repairs.length > 0 && { repair: Math.max(...repairs) }),
    });
  }

  #commit(view: StateRecord): void {
    const { rank, tell, onCommit } = this.#init;
    const { dead, completed, repair, admitted, size } = view;
    const lost = parseSet(dead);
    const comers = (admitted ?? []).map(([comer]) => comer);
    const active = this.#active.filter((peer) => !lost.includes(peer));
    for (const peer of active) if (peer !== rank && !this.#gone.has(peer)) tell(peer, view);
    this.#active = [...active, ...comers].sort((a, b) => a - b);
    for (const peer of comers) this.#gone.delete(peer);
    this.#losing = this.goneMembers.length > 0;
    this.#epoch++;
    if (lost.length > 0 || comers.length > 0 || size !== undefined) this.#changes++;
    this.#forget();
    onCommit({
      lost,
      completed,
      ...(repair !== undefined && { repair }),
      ...(admitted && { admitted }),
      ...(size !== undefined && { size }),
    });
  }

  #miss(rank: number): void {
    this.#gone.add(rank);
    this.#losing ||= this.#active.includes(rank);
  }

  #forget(): void {
    this.#states.clear();
    this.#told = undefined;
    this.#repair = undefined;
  }

  /** Whoever is no member is as good as gone. */
  #loseOthers(): void {
    for (let rank = 0; rank < this.#init.size; rank++) if (!this.#active.includes(rank)) this.#gone.add(rank);
  }
}
