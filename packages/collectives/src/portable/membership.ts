/**
 * Agreement on who goes on after deaths, and on how far the calls have come: records between survivors, no coordinator, no store.
 *
 * Every rank tells every survivor which members of the view it knows to be dead (a set that only grows) and its last completed call. A rank that has
 * the same set from all survivors commits: it tells them `view` and goes on. A rank that gets a `view` takes it over and passes it on.
 *
 * Why two survivors never commit different views: records between two ranks are in order; a rank tells no more `state` of an epoch after it has told
 * `view`; records of a rank that is known to be dead are ignored. Let p commit D and q commit E, E larger. q has a `state` of E from p (p is alive), sent
 * before p committed, so p knew of E by then and can only have taken D over from a rank outside of E; that rank, in turn, has told E before it took D
 * over; and so on down to one that committed D by itself, which would have had to know of D and of nothing else.
 *
 * Needs what transports promise: a death is found by every survivor, and nobody is found dead who is not.
 */
import { formatSet, parseSet, type StateRecord } from './records.js';

export interface MembershipInit {
  readonly rank: number;
  readonly size: number;
  readonly tell: (peer: number, record: StateRecord) => void;
  /** Asked when this rank joins an agreement; its calls stand still until `onCommit`. */
  readonly completed: () => number;
  /** `completed`: the last call that any survivor completed; all of them had its data. `lost`: of the view before. */
  readonly onCommit: (lost: readonly number[], completed: number) => void;
  /** The others take this rank for dead. */
  readonly onExpelled: (by: number) => void;
}

export class Membership {
  readonly #init: MembershipInit;
  /** Known to be dead or gone, in the view or not. */
  readonly #gone = new Set<number>();
  readonly #states = new Map<number, StateRecord>();
  #active: readonly number[];
  #epoch = 0;
  /** The last `state` told in this epoch, if any. */
  #told: StateRecord | undefined;

  constructor(init: MembershipInit) {
    this.#init = init;
    this.#active = Array.from({ length: init.size }, (_, rank) => rank);
  }

  get epoch(): number {
    return this.#epoch;
  }

  get active(): readonly number[] {
    return this.#active;
  }

  /** True while a view is being agreed on. */
  get agreeing(): boolean {
    return this.#told !== undefined;
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
    return this.#active.filter(
      (peer) => peer !== rank && !this.#gone.has(peer) && this.#states.get(peer)?.dead !== this.#told?.dead,
    );
  }

  /** A rank is gone. Goes into an agreement under way; begins none. */
  lose(rank: number): void {
    if (this.#gone.has(rank)) return;
    this.#gone.add(rank);
    if (this.agreeing) this.#tell();
  }

  /** Begins an agreement without the members that are gone, unless one is under way. */
  begin(): void {
    if (!this.agreeing) this.#tell();
  }

  receive(from: number, record: StateRecord): void {
    if (this.#gone.has(from) || record.epoch !== this.#epoch) return;
    const dead = parseSet(record.dead);
    if (dead.includes(this.#init.rank)) {
      this.#init.onExpelled(from);
      return;
    }
    for (const rank of dead) this.#gone.add(rank);
    if (record.kind === 'view') {
      this.#commit(record);
      return;
    }
    this.#states.set(from, record);
    this.#tell();
  }

  /** Tells what is known, if that is news, and commits if all say the same. */
  #tell(): void {
    const { rank, tell, completed } = this.#init;
    const dead = formatSet(this.goneMembers);
    const survivors = this.#active.filter((peer) => !this.#gone.has(peer));
    if (this.#told?.dead !== dead) {
      // Told again with a larger set, `completed` is the same: calls stand still since the first time.
      this.#told = { kind: 'state', epoch: this.#epoch, dead, completed: this.#told?.completed ?? completed() };
      for (const peer of survivors) if (peer !== rank) tell(peer, this.#told);
    }
    const states = survivors.map((peer) => (peer === rank ? this.#told : this.#states.get(peer)));
    if (states.some((state) => state?.dead !== dead)) return;
    this.#commit({
      kind: 'view',
      epoch: this.#epoch,
      dead,
      completed: Math.max(...states.map((state) => state!.completed)),
    });
  }

  #commit(view: StateRecord): void {
    const { rank, tell, onCommit } = this.#init;
    const lost = parseSet(view.dead);
    const active = this.#active.filter((peer) => !lost.includes(peer));
    for (const peer of active) if (peer !== rank && !this.#gone.has(peer)) tell(peer, view);
    this.#active = active;
    this.#epoch++;
    this.#states.clear();
    this.#told = undefined;
    onCommit(lost, view.completed);
  }
}
