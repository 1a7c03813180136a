/** All ranks of a transport that share nothing: barrier and all-gather by puts and counted signals. */
import {
  checkInteger,
  EpError,
  formatRanks,
  isEpError,
  linkSignals,
  type Rank,
  type Region,
  type RemoteRegion,
  Resource,
  type WaitOptions,
  type Work,
} from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import type { Liveness } from './liveness.js';
import { RankMemory } from './memory.js';
import { checkLimits, withClosing } from './outcome.js';
import { checkAgreement, GATHER_BYTES, type Gathering, type RankTeam } from './team.js';

/** Number of the call and length of the blob, before each blob: ranks that are at different calls find out instead of reading old bytes. */
const HEADER_BYTES = 16;
const BLOB_BYTES = HEADER_BYTES + GATHER_BYTES;

/** Bytes and signal slots of the memory that a team of so many works in: two sets of blobs, its own and one of each member. */
export function teamMemory(worldSize: number): { readonly byteLength: number; readonly signalSlots: number } {
  return { byteLength: 2 * (1 + worldSize) * BLOB_BYTES, signalSlots: worldSize };
}

/** The team of a world, whichever way its ranks met. */
export type WorldTeam = RankTeam | LinkedTeam;

/** What a team needs of the endpoint to a member: bytes and a count that are seen together. */
export interface TeamEndpoint extends Resource {
  readonly put: (
    from: Region,
    to: RemoteRegion,
    options: { readonly signal: { readonly slot: number; readonly op: 'inc' } },
  ) => Work;
}

export interface LinkedTeamInit {
  readonly rank: Rank;
  readonly worldSize: number;
  /** As `teamMemory` says; closed with the team. */
  readonly memory: RankMemory;
  /** By rank. */
  readonly endpoints: readonly TeamEndpoint[];
  readonly liveness: Liveness;
  readonly timeoutMs: number;
}

/**
 * Each call puts this rank's bytes to every other and counts theirs: worldSize - 1 messages a rank. The sets alternate, so that bytes are written over only when all have left the
 * call before the last. Calls run one after the other. One that was cut off (time, abort, lost member) poisons the team: members no longer agree how many there were.
 */
export class LinkedTeam extends Resource implements Gathering {
  readonly ranks: Int32Array;
  readonly position: number;
  readonly #init: LinkedTeamInit;
  #tail: Promise<unknown> = Promise.resolve();
  #calls = 0;
  #poison: EpError | undefined;

  constructor(init: LinkedTeamInit) {
    super(`team of ${init.worldSize}`);
    this.#init = init;
    this.ranks = Int32Array.from({ length: init.worldSize }, (_, rank) => rank);
    this.position = init.rank;
    this.children.add(init.memory);
    for (const endpoint of init.endpoints) this.children.add(endpoint);
  }

  get size(): number {
    return this.ranks.length;
  }

  /** Rejects with `EP_TIMEOUT` or `EP_PEER_LOST` naming the ranks that have not come. */
  async barrier(options?: WaitOptions): Promise<void> {
    await this.#queue('barrier', new Uint8Array(0), options);
  }

  async allGather(bytes: Uint8Array, options?: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]> {
    checkInteger(bytes.byteLength, 'byteLength', 'allGather', 0, GATHER_BYTES);
    return this.#queue('allGather', bytes, options);
  }

  protected override release(): void {}

  #queue(operation: string, bytes: Uint8Array, options: WaitOptions | undefined): Promise<Uint8Array<ArrayBuffer>[]> {
    const run = this.guard(operation, async () => {
      if (options !== undefined) checkLimits(options, operation, this.size);
      options?.signal?.throwIfAborted();
      await this.#tail;
      this.closing.throwIfAborted();
      if (this.#poison !== undefined) {
        const { code, message, context } = this.#poison;
        throw new EpError(code, `${operation}: ${message}`, { context, cause: this.#poison.cause });
      }
      return withClosing(options, this.closing, (limits) => this.#call(operation, bytes, limits));
    });
    this.#tail = run.catch(() => {});
    return run;
  }

  async #call(operation: string, bytes: Uint8Array, limits: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]> {
    const call = ++this.#calls;
    const blob = new Uint8Array(HEADER_BYTES + bytes.byteLength);
    new Float64Array(blob.buffer, 0, 2).set([call, bytes.byteLength]);
    blob.set(bytes, HEADER_BYTES);
    try {
      await this.#exchange(call, blob, limits);
    } catch (error) {
      const known = this.#named(operation, call, error, limits);
      const context = known instanceof EpError ? known.context : {};
      const why = known instanceof Error ? known.message : String(known);
      const code = isEpError(known) && known.code === 'EP_PEER_LOST' ? 'EP_PEER_LOST' : 'EP_POISONED';
      this.#poison = new EpError(code, `an earlier collective call of this team of ${this.size} was cut off: ${why}`, {
        context,
        cause: known,
      });
      throw known;
    }
    const { memory, rank } = this.#init;
    const blobs = await Promise.all(
      Array.from(this.ranks, async (member) => {
        if (member === rank) return blob;
        const theirs = new Uint8Array(blob.byteLength);
        await memory.read(memory.local(this.#place(call, member), theirs.byteLength), theirs);
        return theirs;
      }),
    );
    checkAgreement('collective call', this, blobs, (theirs) => {
      const [number, byteLength] = new Float64Array(theirs.buffer, theirs.byteOffset, 2);
      return `call ${number} with ${byteLength} bytes`;
    });
    return blobs.map((theirs) => theirs.slice(HEADER_BYTES));
  }

  /** Of a member's blob in a call; the sets of the others' blobs stand behind the two own ones. */
  #place(call: number, member: Rank): number {
    return (2 + (call % 2) * this.size + member) * BLOB_BYTES;
  }

  async #exchange(call: number, blob: Uint8Array, limits: WaitOptions): Promise<void> {
    const { memory, endpoints, rank } = this.#init;
    const own = memory.local((call % 2) * BLOB_BYTES, blob.byteLength);
    await memory.write(blob, own);
    const others = Array.from(this.ranks).filter((member) => member !== rank);
    const seen = (work: Work) => work.then(undefined, () => {}); // the wait for that member says more
    const landed = Promise.all(
      others.map((member) => {
        const to = memory.remote(member, this.#place(call, rank), blob.byteLength);
        return seen(endpoints[member]!.put(own, to, { signal: { slot: rank, op: 'inc' } }));
      }),
    );
    const rest = new AbortController();
    const linked = linkSignals(limits.signal, rest.signal);
    try {
      await Promise.all(
        others.map((member) =>
          memory.signals.until(
            member,
            { cmp: 'ge', value: BigInt(call) },
            { ...limits, signal: linked.signal, peers: [member], timeoutMs: limits.timeoutMs ?? this.#init.timeoutMs },
          ),
        ),
      );
      // HAZARD: a transport may deliver in no order, and members count: bytes of the next call must not be counted for those of this one. Nor may a member that dies behind this
      // call take along what the others still await.
      await this.#within(landed, limits);
    } finally {
      rest.abort(); // of the waits that go on when another has failed
      linked.unlink();
    }
  }

  /** Ends with `work`, or when the call's own limits do. */
  async #within(work: Promise<unknown>, { signal, timeoutMs = this.#init.timeoutMs }: WaitOptions): Promise<void> {
    let timer: NodeJS.Timeout | undefined;
    let stop = (): void => {};
    const over = new Promise<void>((resolve) => {
      stop = resolve;
      if (Number.isFinite(timeoutMs)) timer = setTimeout(resolve, Math.min(timeoutMs, 2 ** 31 - 1));
      signal?.addEventListener('abort', stop);
    });
    await Promise.race([work, over]);
    clearTimeout(timer);
    signal?.removeEventListener('abort', stop);
  }

  /** The same error, with all who have not come. */
  #named(operation: string, call: number, error: unknown, limits: WaitOptions): unknown {
    const { memory, rank, timeoutMs } = this.#init;
    if (!isEpError(error) || (error.code !== 'EP_TIMEOUT' && error.code !== 'EP_PEER_LOST')) return error;
    const awaited = Array.from(this.ranks).filter(
      (member) => member !== rank && memory.signals.peek(member) < BigInt(call),
    );
    const lost = awaited.filter((member) => this.#init.liveness.isDead(member));
    const why =
      error.code === 'EP_TIMEOUT'
        ? `timed out after ${limits.timeoutMs ?? timeoutMs} ms`
        : `${formatRanks(lost.length > 0 ? lost : ((error.context.lost as Rank[] | undefined) ?? []))} died or closed`;
    const arrived = this.size - awaited.length;
    return new EpError(
      error.code,
      `${operation}: ${why}; ${arrived} of ${this.size} ranks arrived; awaited ${formatRanks(awaited)}`,
      { context: { ...error.context, awaited }, cause: error },
    );
  }
}

/** What a team over a NIC is opened with. */
export interface LinkedTeamOpening {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly timeoutMs: number;
  /** Of the size that `teamMemory` says, known to `nic` and routed to the peers. */
  readonly memory: NativeSymmetricMemory;
  readonly nic: { removeMemory(memory: NativeSymmetricMemory): void; close(): void };
  readonly endpoint: (peer: Rank) => TeamEndpoint;
}

/** Collective. The team of a world whose NICs are connected, once all have reached all. Rejects as `barrier` does. */
export async function openLinkedTeam(opening: LinkedTeamOpening, limits: WaitOptions): Promise<LinkedTeam> {
  const { rank, worldSize, context, liveness, timeoutMs, memory, nic, endpoint } = opening;
  const team = new LinkedTeam({
    rank,
    worldSize,
    liveness,
    timeoutMs,
    endpoints: Array.from({ length: worldSize }, (_, peer) => endpoint(peer)),
    memory: new RankMemory({
      rank,
      worldSize,
      context,
      liveness,
      memory,
      ...teamMemory(worldSize),
      timeoutMs,
      onRelease: (native) => nic.removeMemory(native),
    }),
  });
  try {
    // Whether all can really reach all shows here, by name.
    await team.barrier(limits);
  } catch (error) {
    // HAZARD: before the team, whose endpoints wait for what they have sent: to ranks that nothing reaches as long again.
    opening.nic.close();
    await team.close();
    throw error;
  }
  return team;
}
