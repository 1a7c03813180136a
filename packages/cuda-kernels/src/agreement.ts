/**
 * Small agreements between ranks over any `Transport<'bundled' | 'add'>`: counted signals only, no assumption about the order in which puts land.
 */
import {
  type Endpoint,
  EpError,
  formatRanks,
  type Region,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import { compareLines, RECORD_BYTES, refusal } from './difference.js';

type Portable = 'bundled' | 'add';

export interface AgreementPlace {
  /** First byte of `agreementBytes(worldSize)` in the memory. */
  readonly byteOffset: number;
  /** First of `agreementSlots(worldSize)` signal slots. */
  readonly slot: number;
}

/** Two sets of records to receive, two records to send from, one announcement word per rank. */
export const agreementBytes = (worldSize: number): number => (2 * worldSize + 2) * RECORD_BYTES + 8 * worldSize;
export const agreementSlots = (worldSize: number): number => 2 * worldSize;

/** Names the ranks that had not done their part when a wait of this rank ended. */
function missingError(error: unknown, where: string, missing: readonly number[]): unknown {
  if (!(error instanceof EpError) || (error.code !== 'EP_TIMEOUT' && error.code !== 'EP_PEER_LOST')) return error;
  return new EpError(error.code, `${where}: ${formatRanks(missing)} did not take part (${error.message})`, {
    context: { ...error.context, awaited: missing },
    cause: error,
  });
}

export class Agreement {
  readonly #rank: number;
  readonly #worldSize: number;
  /** Who takes part. */
  readonly #ranks: readonly number[];
  readonly #memory: SymmetricMemory;
  readonly #endpoints: readonly Endpoint<Portable>[];
  readonly #place: AgreementPlace;
  /** Exchanges of this epoch, and the counters' values at its start: counters are never zeroed, a reset is an offset of the reader. */
  #round = 0;
  readonly #base: BigUint64Array;
  #epoch = 0;
  #tail: Promise<unknown> = Promise.resolve();
  /** The highest epoch that this rank has ever proposed: one that was tried in vain may have been agreed on by others, so it is never used again. */
  #proposed = 0;

  constructor(
    transport: Transport<Portable>,
    memory: SymmetricMemory,
    endpoints: readonly Endpoint<Portable>[],
    place: AgreementPlace,
    ranks: readonly number[] = Array.from({ length: transport.worldSize }, (_, rank) => rank),
  ) {
    this.#rank = transport.rank;
    this.#worldSize = transport.worldSize;
    this.#memory = memory;
    this.#ranks = ranks;
    this.#endpoints = endpoints.filter(({ peer }) => ranks.includes(peer));
    this.#place = place;
    this.#base = new BigUint64Array(transport.worldSize);
  }

  /** Raised by every agreed resync. */
  get epoch(): number {
    return this.#epoch;
  }

  /**
   * Collective: `EP_MISMATCH` on every rank unless all give the same lines, see `compareLines`. `EP_TIMEOUT` or `EP_PEER_LOST` names who did not take
   * part: ranks may then have counted different rounds, and only a resync brings them together.
   */
  same(where: string, lines: readonly string[], options: WaitOptions = {}): Promise<void> {
    // One after the other, with all their rounds: the two sets of records are enough only if nobody starts a second round before it has read the first.
    const run = this.#tail.then(() =>
      compareLines(where, lines, this.#rank, (record) => this.#exchange(where, record, options), this.#ranks),
    );
    this.#tail = run.catch(() => {});
    return run;
  }

  /**
   * `same`, behind what each rank has done alone. A rank that has failed in it takes part: it throws its own reason, and the others are refused with that and its rank instead of
   * waiting for it.
   */
  async conclude(
    where: string,
    refused: { readonly reason: unknown } | undefined,
    lines: readonly string[],
    options: WaitOptions = {},
  ): Promise<void> {
    if (refused === undefined) return this.same(where, lines, options);
    await this.same(where, refusal(refused.reason), options).catch(() => {}); // whatever it says, this rank knows better
    throw refused.reason;
  }

  /** What `open` returns, once all ranks have opened theirs and agree: `conclude`, of one step. */
  async concludeWith<T>(where: string, open: () => T, lines: readonly string[], options: WaitOptions = {}): Promise<T> {
    let opened: T;
    try {
      opened = open();
    } catch (reason) {
      await this.conclude(where, { reason }, lines, options);
      throw reason;
    }
    await this.conclude(where, undefined, lines, options);
    return opened;
  }

  /** Resolves when no exchange is under way. */
  async idle(): Promise<void> {
    await this.#tail;
  }

  async #exchange(where: string, record: Uint8Array, options: WaitOptions): Promise<Uint8Array[]> {
    options.signal?.throwIfAborted();
    const round = ++this.#round;
    // Sets alternate: a fast rank's next record must not land on one that a slow rank still reads.
    const set = round & 1;
    const send = this.#sendRegion(set);
    await this.#memory.write(record, send);
    await Promise.all(
      this.#endpoints.map((endpoint) =>
        endpoint.put(send, this.#memory.remote(endpoint.peer, this.#recordOffset(set, this.#rank), RECORD_BYTES), {
          signal: { slot: this.#place.slot + this.#rank, op: 'add', value: 1n },
        }),
      ),
    );
    const targets = new Map(this.#ranks.map((rank) => [rank, this.#base[rank]! + BigInt(round)]));
    try {
      await this.#until((rank) => this.#place.slot + rank, targets, options);
    } catch (error) {
      const missing = this.#ranks.filter(
        (rank) => this.#memory.signals.peek(this.#place.slot + rank) < targets.get(rank)!,
      );
      throw missingError(error, where, missing);
    }
    return this.#ranks.map((rank) => this.#memory.view('u8', this.#recordOffset(set, rank), RECORD_BYTES).slice());
  }

  /**
   * Agrees with all ranks on a next epoch, from whatever state each is in. `rebase` runs when every rank has stopped sending, so that counters are
   * still, and before any rank goes on.
   */
  async resync(rebase: () => void, options: WaitOptions = {}): Promise<number> {
    let epoch = this.#proposed + 1;
    // A rank that is behind adopts the highest epoch that anyone proposes.
    for (;;) {
      this.#proposed = epoch;
      await this.#announce(epoch, 1, options);
      const highest = await this.#awaitAnnouncements(epoch, 1, options);
      if (highest === epoch) break;
      epoch = highest;
    }
    for (const rank of this.#ranks) this.#base[rank] = this.#memory.signals.peek(this.#place.slot + rank);
    this.#round = 0;
    rebase();
    await this.#announce(epoch, 2, options);
    await this.#awaitAnnouncements(epoch, 2, options);
    this.#epoch = epoch;
    return epoch;
  }

  #recordOffset(set: number, rank: number): number {
    return this.#place.byteOffset + (set * this.#worldSize + rank) * RECORD_BYTES;
  }

  #sendRegion(set: number): Region {
    return this.#memory.local(this.#place.byteOffset + (2 * this.#worldSize + set) * RECORD_BYTES, RECORD_BYTES);
  }

  #wordOffset(rank: number): number {
    return this.#place.byteOffset + (2 * this.#worldSize + 2) * RECORD_BYTES + 8 * rank;
  }

  /** Words of one rank only grow, and each has landed before the next is sent, so that an overtaken put cannot take one back. */
  async #announce(epoch: number, phase: 1 | 2, options: WaitOptions): Promise<void> {
    const word = BigInt(epoch) * 4n + BigInt(phase);
    await Promise.all(
      this.#endpoints.map(async (endpoint) => {
        await endpoint.putValue(this.#memory.remote(endpoint.peer, this.#wordOffset(this.#rank), 8), word, {
          signal: { slot: this.#place.slot + this.#worldSize + this.#rank, op: 'add', value: 1n },
        });
        await endpoint.flush(options);
      }),
    );
  }

  /** Waits until every rank has announced this epoch and phase, or a higher one; the highest epoch seen. */
  async #awaitAnnouncements(epoch: number, phase: 1 | 2, options: WaitOptions): Promise<number> {
    const deadline = options.timeoutMs === undefined ? undefined : performance.now() + options.timeoutMs;
    const wanted = BigInt(epoch) * 4n + BigInt(phase);
    let highest = epoch;
    for (const rank of this.#ranks) {
      const slot = this.#place.slot + this.#worldSize + rank;
      for (;;) {
        const count = this.#memory.signals.peek(slot);
        const word = this.#memory.view('u64', this.#wordOffset(rank), 1)[0]!;
        if (word >= wanted) {
          highest = Math.max(highest, Number(word / 4n));
          break;
        }
        const left = deadline === undefined ? undefined : Math.max(1, deadline - performance.now());
        try {
          await this.#memory.signals.until(
            slot,
            { cmp: 'gt', value: count },
            { ...options, peers: [rank], ...(left === undefined ? {} : { timeoutMs: left }) },
          );
        } catch (error) {
          throw missingError(error, `resync to epoch ${epoch}`, [rank]);
        }
      }
    }
    return highest;
  }

  async #until(
    slotOf: (rank: number) => number,
    targets: ReadonlyMap<number, bigint>,
    options: WaitOptions,
  ): Promise<void> {
    const deadline = options.timeoutMs === undefined ? undefined : performance.now() + options.timeoutMs;
    for (const [rank, value] of targets) {
      const left = deadline === undefined ? undefined : Math.max(1, deadline - performance.now());
      await this.#memory.signals.until(
        slotOf(rank),
        { cmp: 'ge', value },
        { ...options, peers: [rank], ...(left === undefined ? {} : { timeoutMs: left }) },
      );
    }
  }
}
