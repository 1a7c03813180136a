/** A team of ranks on this host: barrier and small all-gathers, on which everything collective is built. */
import { checkInteger, type EpCode, EpError, type Rank, Resource, turnLoopIfDue, type WaitOptions } from '@ep/core';
import { EP_TEAM_EXCHANGE_BYTES } from '../abi.gen.js';
import type { NativeRankContext, NativeTeam } from '../binding.js';
import { type Native, native } from '../native.js';
import type { Liveness } from './liveness.js';
import { checkLimits, nativeTimeout, runWait, waitError } from './outcome.js';

/** Number of the call and length of the blob, before each blob: ranks that are at different calls find out instead of reading old bytes. */
const HEADER_BYTES = 16;
/** Bytes that each member may give to one all-gather. */
export const GATHER_BYTES = EP_TEAM_EXCHANGE_BYTES - HEADER_BYTES;

/** Ranks that give each other bytes, collectively. */
export interface Gathering {
  /** World ranks of the members, in order. */
  readonly ranks: Int32Array;
  /** This rank's place among them. */
  readonly position: number;
  /** Every member's bytes in order; all give the same length, at most `GATHER_BYTES`. */
  allGather(bytes: Uint8Array, options?: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]>;
}

export interface RankTeamInit {
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly worldRank: Rank;
  /** `ep_segment_handle` of the segment that the first member made. */
  readonly handle: Uint8Array;
  /** World ranks of the members, in team order. */
  readonly ranks: Int32Array;
  readonly timeoutMs: number;
}

/**
 * Collective calls of one team run one after the other in the order in which they were made on this rank, so that two that are under way at
 * one time do not mix their barriers. `close()` is local: it cuts off this rank's calls (`EP_ABORTED`) and drops its part of the team.
 */
export class RankTeam extends Resource implements Gathering {
  /** World ranks of the members, in team order. */
  readonly ranks: Int32Array;
  /** This rank's place among them. */
  readonly position: number;
  readonly #native: Native = native();
  readonly #team: NativeTeam;
  readonly #liveness: Liveness;
  readonly #timeoutMs: number;
  readonly #worldSize: number;
  #tail: Promise<unknown> = Promise.resolve();
  #queued = 0;
  #gathers = 0;
  /** A barrier that was entered and not passed: whatever comes next must pass it first. */
  #unfinished = false;
  /** A cut-off all-gather: members no longer agree how many there were. Or a lost member: none can be complete again. */
  #poison: EpError | undefined;

  constructor(init: RankTeamInit) {
    super(`team of ${init.ranks.length}`);
    this.#team = new this.#native.binding.Team(init.context, init.handle, init.ranks);
    this.#liveness = init.liveness;
    this.#timeoutMs = init.timeoutMs;
    this.#worldSize = init.liveness.worldSize;
    this.ranks = init.ranks;
    this.position = init.ranks.indexOf(init.worldRank);
  }

  /** The addon's object, for native measurements; nothing else may use it while they run. */
  get nativeTeam(): NativeTeam {
    return this.#team;
  }

  get size(): number {
    return this.ranks.length;
  }

  /**
   * Rejects with `EP_TIMEOUT` or `EP_PEER_LOST` naming the ranks that have not come. After a timeout or an abort this rank stays counted as arrived,
   * and calling again goes on with the same barrier; after the loss of a member every call rejects.
   */
  async barrier(options?: WaitOptions): Promise<void> {
    this.#checkUsable('barrier', options);
    if (this.#queued === 0) {
      this.#unfinished = true;
      if (this.#team.barrierTry()) {
        this.#unfinished = false;
        await turnLoopIfDue();
        return;
      }
    }
    await this.#queue('barrier', options, () => this.#barrier(options));
  }

  /**
   * Every member's bytes in team order; all give the same length, at most `GATHER_BYTES`. Throws `EP_MISMATCH` where members are at different
   * calls. One that was cut off poisons the team.
   */
  async allGather(bytes: Uint8Array, options?: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]> {
    this.#checkUsable('allGather', options);
    checkInteger(bytes.byteLength, 'byteLength', 'allGather', 0, GATHER_BYTES);
    return this.#queue('allGather', options, async () => {
      if (this.#unfinished) await this.#barrier(options);
      const blob = new Uint8Array(HEADER_BYTES + bytes.byteLength);
      new Float64Array(blob.buffer, 0, 2).set([++this.#gathers, bytes.byteLength]);
      blob.set(bytes, HEADER_BYTES);
      this.#team.exchangePut(blob);
      try {
        await this.#barrier(options);
      } catch (error) {
        this.#poison ??= this.#poisonOf('EP_POISONED', error);
        throw error;
      }
      const blobs = Array.from(this.ranks, (_, position) => this.#team.exchangeGet(position, blob.byteLength));
      checkAgreement('collective call', this, blobs, (theirs) => {
        const [call, byteLength] = new Float64Array(theirs.buffer, theirs.byteOffset, 2);
        return `call ${call} with ${byteLength} bytes`;
      });
      return blobs.map((theirs) => theirs.slice(HEADER_BYTES));
    });
  }

  protected override release(): void {
    this.#team.release();
  }

  async #barrier(options?: WaitOptions): Promise<void> {
    const where = 'barrier';
    const timeoutMs = nativeTimeout(options, this.#timeoutMs, where);
    this.#unfinished = true;
    if (!this.#team.barrierTry()) {
      const outcome = await runWait(
        this.#native.operations,
        () => this.#team.barrierWatch(timeoutMs),
        this.closing,
        options?.signal,
      );
      if (outcome.status !== 0) {
        const awaited = [...this.#team.missing()];
        const progress = `${this.size - awaited.length} of ${this.size} ranks arrived`;
        const error = this.#liveness.notice(waitError(where, outcome, { awaited, timeoutMs, progress }));
        // The barrier may still be passed, if who was lost had been counted before; but it would be the last one.
        if (error.code === 'EP_PEER_LOST') this.#poison = this.#poisonOf('EP_PEER_LOST', error);
        throw error;
      }
      this.#team.barrierLeave();
    }
    this.#unfinished = false;
  }

  #poisonOf(code: EpCode, cause: unknown): EpError {
    const why = cause instanceof Error ? cause.message : String(cause);
    const message = `an earlier collective call of this team of ${this.size} was cut off: ${why}`;
    return new EpError(code, message, { cause, context: cause instanceof EpError ? cause.context : {} });
  }

  #checkUsable(operation: string, options: WaitOptions | undefined): void {
    this.checkOpen(operation);
    if (options !== undefined) checkLimits(options, operation, this.#worldSize);
    this.#checkPoison(operation, options);
  }

  #checkPoison(operation: string, options: WaitOptions | undefined): void {
    options?.signal?.throwIfAborted();
    if (this.#poison === undefined) return;
    const { code, message, context, cause } = this.#poison;
    throw new EpError(code, `${operation}: ${message}`, { context, cause });
  }

  #queue<T>(operation: string, options: WaitOptions | undefined, body: () => Promise<T>): Promise<T> {
    this.#queued++;
    const run = this.guard(operation, async () => {
      await this.#tail;
      this.closing.throwIfAborted();
      this.#checkPoison(operation, options);
      return body();
    }).finally(() => {
      this.#queued--;
    });
    this.#tail = run.catch(() => {});
    return run;
  }
}

/** Throws `EP_MISMATCH` naming the members whose blob differs from this rank's. */
export function checkAgreement(
  where: string,
  team: Gathering,
  blobs: readonly Uint8Array[],
  describe: (blob: Uint8Array) => string,
): void {
  const described = blobs.map(describe);
  const own = described[team.position]!;
  const odd = described.flatMap((theirs, position) =>
    theirs === own ? [] : [{ rank: team.ranks[position]!, theirs }],
  );
  if (odd.length === 0) return;
  const shown = odd.slice(0, 8).map(({ rank, theirs }) => `rank ${rank}: ${theirs}`);
  const more = odd.length > shown.length ? `; ${odd.length - shown.length} more` : '';
  throw new EpError('EP_MISMATCH', `${where}: ranks differ; this rank: ${own}; ${shown.join('; ')}${more}`, {
    context: { own, odd: odd.map(({ rank }) => rank) },
  });
}
