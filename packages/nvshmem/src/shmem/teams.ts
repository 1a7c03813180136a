/** Teams: subsets of the PEs with a numbering, a barrier and collectives of their own. */
import { checkInteger, EpError, invalid, type Rank, type WaitOptions } from '@ep/core';
import { checkAgreement, type RankTeam } from '@ep/native/ranks';
import type { ShmTransport } from '../transport.js';
import { type Context, createContext } from './context.js';
import type { Space } from './space.js';

/** What a team needs of the PE that it belongs to. */
export interface TeamHome {
  readonly transport: ShmTransport;
  readonly space: Space;
}

/** How a parent's members describe the split that they ask for. */
async function agreeOnSplit(parent: RankTeam, where: string, numbers: readonly number[], options?: WaitOptions) {
  const blob = new Uint8Array(new Float64Array(numbers).buffer);
  const blobs = await parent.allGather(blob, options);
  checkAgreement(where, parent, blobs, (bytes) => new Float64Array(bytes.buffer).join(', '));
}

export class Team {
  /** This PE's number in the team: `shmem_team_my_pe`. */
  readonly myPe: Rank;
  readonly nPes: number;
  readonly #home: TeamHome;
  readonly #native: RankTeam;
  /** The predefined teams live as long as the library. */
  readonly #predefined: boolean;

  constructor(home: TeamHome, native: RankTeam, predefined: boolean) {
    this.#home = home;
    this.#native = native;
    this.#predefined = predefined;
    this.myPe = native.position;
    this.nPes = native.size;
  }

  /** World numbers of the members, in team order. */
  get ranks(): Int32Array {
    return this.#native.ranks.slice();
  }

  /** What the collectives run on. */
  get native(): RankTeam {
    return this.#native;
  }

  get destroyed(): boolean {
    return this.#native.closed;
  }

  /** Number in `dest` of the PE that is `pe` here; -1 if it is not a member there. */
  translatePe(pe: Rank, dest: Team): Rank {
    checkInteger(pe, 'pe', 'translatePe', 0, this.nPes - 1);
    if (!(dest instanceof Team)) throw invalid('dest', { where: 'translatePe', expected: 'a team', found: dest });
    return dest.#native.ranks.indexOf(this.#native.ranks[pe]!);
  }

  /** Barrier of the members; orders nothing but what `quiet()` has ordered. */
  sync(options?: WaitOptions): Promise<void> {
    return this.#native.barrier(options);
  }

  /**
   * Collective over this team: members `start`, `start + stride`, … , `size` of them. Undefined for PEs outside of it. A negative stride counts
   * down. Throws `EP_MISMATCH` naming PEs that gave other numbers.
   */
  async splitStrided(start: number, stride: number, size: number, options?: WaitOptions): Promise<Team | undefined> {
    const where = 'splitStrided';
    checkInteger(start, 'start', where, 0, this.nPes - 1);
    checkInteger(size, 'size', where, 1, this.nPes);
    checkInteger(stride, 'stride', where, Number.MIN_SAFE_INTEGER);
    if (stride === 0 && size > 1)
      throw invalid('stride', { where, expected: 'not 0 for more than one member', found: 0 });
    checkInteger(start + stride * (size - 1), 'last member', where, 0, this.nPes - 1);
    await agreeOnSplit(this.#native, where, [start, stride, size], options);
    return this.#make(
      Array.from({ length: size }, (_, i) => start + i * stride),
      options,
    );
  }

  /**
   * Collective over this team, seen as rows of `xRange` members (the last may be shorter): `x` has the members of this PE's row, `y` those of
   * its column.
   */
  async split2d(xRange: number, options?: WaitOptions): Promise<{ readonly x: Team; readonly y: Team }> {
    checkInteger(xRange, 'xRange', 'split2d', 1);
    await agreeOnSplit(this.#native, 'split2d', [xRange], options);
    const everyone = Array.from({ length: this.nPes }, (_, pe) => pe);
    const row = Math.floor(this.myPe / xRange);
    const inRow = everyone.filter((pe) => Math.floor(pe / xRange) === row);
    const inColumn = everyone.filter((pe) => pe % xRange === this.myPe % xRange);
    const x = await this.#make(inRow, options);
    const y = await this.#make(inColumn, options);
    return { x: x!, y: y! };
  }

  /** Puts, gets, atomics and signals whose PEs are numbered as in this team. */
  createContext(): Context {
    const { space } = this.#home;
    const { ranks } = this.#native;
    return createContext({
      ...space,
      pe: (pe, where) => {
        if (this.destroyed) throw new EpError('EP_CLOSED', `${where}: the team of the context was destroyed`);
        return ranks[checkInteger(pe, 'pe', where, 0, ranks.length - 1)]!;
      },
    });
  }

  /** Collective by contract, local in effect: frees this PE's part. Nothing happens to predefined teams. */
  async destroy(): Promise<void> {
    if (!this.#predefined) await this.#native.close();
  }

  async #make(members: readonly number[], options: WaitOptions | undefined): Promise<Team | undefined> {
    const ranks = members.map((pe) => this.#native.ranks[pe]!);
    const made = await this.#home.transport.createTeam(ranks, this.#native, options);
    return made && new Team(this.#home, made, false);
  }
}
