/** A team of ranks on this host: barrier and small all-gathers, on which everything collective is built. */
import { EpError, type WaitOptions } from '@ep/core';
import { type Native, type NativeRankContext, type NativeTeam, native } from '@ep/native';
import { nativeTimeout, waitError } from './outcome.js';

/** `ep_segment_handle` in native/include/ep/abi/segment.h. */
export const SEGMENT_HANDLE_BYTES = 56;
/** `EP_TEAM_EXCHANGE_BYTES` in native/include/ep/abi/rank.h. */
export const EXCHANGE_BYTES = 1024;

/**
 * Collective calls of one team run one after the other in the order in which they were made on this rank, so that two that are under way at
 * one time do not mix their barriers.
 */
export class ShmTeam {
  /** World ranks of the members, in team order. */
  readonly ranks: Int32Array;
  /** This rank's place among them. */
  readonly position: number;
  readonly #native: Native = native();
  readonly #team: NativeTeam;
  readonly #timeoutMs: number;
  #tail: Promise<unknown> = Promise.resolve();
  #queued = 0;

  constructor(rank: NativeRankContext, worldRank: number, handle: Uint8Array, ranks: Int32Array, timeoutMs: number) {
    this.#team = new this.#native.binding.Team(rank, handle, ranks);
    this.ranks = ranks;
    this.position = ranks.indexOf(worldRank);
    this.#timeoutMs = timeoutMs;
  }

  get size(): number {
    return this.ranks.length;
  }

  /** Rejects with `EP_TIMEOUT` or `EP_PEER_LOST` naming the ranks that have not come; calling again goes on with the same barrier. */
  barrier(options?: WaitOptions): Promise<void> {
    if (options?.signal?.aborted) return Promise.reject(options.signal.reason);
    if (this.#queued === 0 && this.#team.barrierTry()) return Promise.resolve();
    return this.#queue(() => this.#barrier(options));
  }

  /** Every member's bytes in team order; all give the same length, at most 1024. */
  allGather(bytes: Uint8Array, options?: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]> {
    return this.#queue(async () => {
      this.#team.exchangePut(bytes);
      await this.#barrier(options);
      return Array.from(this.ranks, (_, position) => this.#team.exchangeGet(position, bytes.byteLength));
    });
  }

  async #barrier(options?: WaitOptions): Promise<void> {
    if (this.#team.barrierTry()) return;
    const timeoutMs = nativeTimeout(options, this.#timeoutMs);
    const outcome = await this.#native.operations.run(() => this.#team.barrierWatch(timeoutMs), options?.signal);
    if (outcome.status === 0) {
      this.#team.barrierLeave();
      return;
    }
    const awaited = [...this.#team.missing()];
    const arrived = this.size - awaited.length;
    throw waitError('barrier', outcome, { awaited, timeoutMs, progress: `${arrived} of ${this.size} ranks arrived` });
  }

  #queue<T>(body: () => Promise<T>): Promise<T> {
    this.#queued++;
    const run = this.#tail.then(body).finally(() => {
      this.#queued--;
    });
    this.#tail = run.catch(() => {});
    return run;
  }
}

/** Throws `EP_MISMATCH` naming the members whose blob differs from this rank's. */
export function checkAgreement(
  where: string,
  team: ShmTeam,
  blobs: readonly Uint8Array[],
  describe: (blob: Uint8Array) => string,
): void {
  const own = describe(blobs[team.position]!);
  const odd = blobs.flatMap((blob, position) => {
    const theirs = describe(blob);
    return theirs === own ? [] : [`rank ${team.ranks[position]}: ${theirs}`];
  });
  if (odd.length === 0) return;
  throw new EpError('EP_MISMATCH', `${where}: ranks differ; this rank: ${own}; ${odd.slice(0, 8).join('; ')}`, {
    context: {
      own,
      odd: blobs.flatMap((blob, position) => (describe(blob) === own ? [] : [team.ranks[position]!])),
    },
  });
}
