/** The group that callers hold. */
import {
  type AbortOptions,
  checkInteger,
  type DType,
  EpError,
  formatRanks,
  invalid,
  prefixStore,
  type Rank,
  type Store,
  type Tensor,
  tensor,
  type Work,
} from '@ep/core';
import type { GpuQueue } from '@ep/native';
import type { ElasticInit, EngineFactory } from './backends.js';
import { checkBatch, checkOptions, checkRank, checkTag } from './checks.js';
import { Collectives, type GroupParts } from './collectives.js';
import { admit, elasticOf, evict, grow, shareMade, survey } from './elastic.js';
import type { GroupEngine, PeerState, RecvEnd } from './engine.js';
import type { CallLimits } from './lane.js';
import { agreeOnColors, agreeOnMembers, checkColor, checkMembers, checkRanks } from './members.js';
import { allGatherObject, broadcastObject, gatherObject } from './objects.js';
import { dtypeOf, messageData } from './operands.js';
import type {
  CallOptions,
  MessageOp,
  MessageOptions,
  NewGroupOptions,
  Operand,
  RootOptions,
  SplitGroupOptions,
} from './options.js';
import type { FlightRecorder } from './recorder/recorder.js';

/** What the groups of one `initProcessGroup` share. */
export interface World {
  readonly factory: EngineFactory;
  readonly store: Store;
  readonly recorder: FlightRecorder;
  readonly evicts: boolean;
  readonly ranksOnHost?: number;
}

/** A group to be opened on this rank. */
export interface Membership {
  readonly name: string;
  /** A name that no other group of the store has had, the same on all members. */
  readonly id: string;
  readonly rank: Rank;
  /** World rank of each member. */
  readonly ranks: readonly Rank[];
  /** For opening it, and for every call that gives none. */
  readonly timeoutMs: number;
  /** Ends the opening. */
  readonly signal?: AbortSignal | undefined;
  /** All members from the beginning to the end unless given. */
  readonly elastic?: ElasticInit;
  /** Members that open it; all of them unless given. */
  readonly active?: readonly Rank[] | undefined;
  /** Members that are known to be lost by now. */
  readonly lost?: (() => readonly Rank[]) | undefined;
  /** Of calls on tensors of a GPU; that of the first group unless given. */
  readonly stream?: GpuQueue | undefined;
  /** Runs when the group has been closed, with the members that took part until then. */
  readonly release?: (active: readonly Rank[]) => Promise<void>;
}

/** What the members of one group have for it alone. */
interface Own extends GroupParts {
  readonly engine: GroupEngine;
  readonly world: World;
  readonly stream: GpuQueue | undefined;
  readonly release: () => Promise<void>;
}

/**
 * c10d's process group. All ranks that calls name are ranks of this group, 0 .. size - 1; `ranks` says who they are in the world.
 *
 * Every collective operation is called by all ranks, in one order, with the same dtype, counts, root and reduction. Calls return at once; operations run one
 * after the other, and arrays belong to an operation until it has ended. What is wrong with arguments is thrown by the call itself, before anything
 * has moved.
 *
 * A failure that nobody waited for is thrown, once, by the next call or by `destroy()`.
 */
export class ProcessGroup extends Collectives {
  readonly #id: string;
  readonly #world: World;
  readonly #engine: GroupEngine;
  readonly #release: () => Promise<void>;
  readonly #stream: GpuQueue | undefined;
  readonly #cut = new AbortController();
  /** Groups that were made from this one, on any of its ranks. */
  #made = 0;

  /** Through `initProcessGroup`, `newGroup` or `split` only. */
  constructor(own: Own) {
    super(own);
    this.#id = own.id;
    this.#world = own.world;
    this.#engine = own.engine;
    this.#release = own.release;
    this.#stream = own.stream;
  }

  /** `shm`, `nccl` or the name of the transport. */
  get backend(): string {
    return this.#engine.name;
  }

  /** Grows by one with every change of `activeRanks` or `size`. */
  get epoch(): number {
    return this.#engine.view().epoch;
  }

  /** Members that take part, ascending, as agreed by those who do. */
  get activeRanks(): readonly Rank[] {
    return this.#engine.view().active;
  }

  /**
   * Fires once, with the error of the first operation that failed, whether or not somebody looked at it. After `EP_PEER_LOST` the group works on with those
   * who are left; after `EP_TIMEOUT`, `EP_ABORTED` or `EP_MISMATCH` it is poisoned until `deactivate()`.
   */
  get failed(): AbortSignal {
    return this.lane.failed;
  }

  /**
   * Collective over the members. What all of them agree that these ranks are: `absent`; `connected`, there and alone; `joining`, waiting to be taken in;
   * `active`. All ranks up to `maxGroupSize` may be asked for. Only looks: to be called again until what is awaited has come.
   */
  peerState(ranks: readonly Rank[], options?: CallOptions): Work<readonly PeerState[]> {
    const op = 'peerState';
    this.enter(op);
    checkRanks(ranks, op, elasticOf(this.#engine, op).capacity);
    const asked = [...ranks];
    return survey(this.lane, op, this.limits(op, options), (states) => asked.map((rank) => states[rank]!));
  }

  /** Collective over the members. How many ranks all of them are connected to, taking part or not. */
  numSyncedRanks(options?: CallOptions): Work<number> {
    const op = 'numSyncedRanks';
    this.enter(op);
    return survey(this.lane, op, this.limits(op, options), (states) => states.filter((one) => one !== 'absent').length);
  }

  /**
   * Collective over the members but `ranks`, which may call it, too, so that their earlier calls end as everybody's; they are waited for 0.1 s at most. Takes them
   * out: what they still do has no effect, and their calls end with `EP_EVICTED`. Also ends what poisons the group: all members go on from this call, however
   * many each has made before, and earlier ones that had not ended anywhere fail. With no ranks it does only that. A member that still makes another call gets
   * `EP_ABORTED` from it, and makes this one then. To be awaited before the next call.
   */
  deactivate(ranks: readonly Rank[], options?: CallOptions): Work {
    const op = 'deactivate';
    this.enter(op);
    checkRanks(ranks, op, this.size);
    return evict(this.lane, op, [...ranks], this.limits(op, options));
  }

  /**
   * Collective over the members. Takes ranks in that wait in `joinGroup()`: new ones, others in the place of ranks that died, or ranks that come back. Throws
   * `EP_NOT_READY`, on all members alike, if one of them does not wait. Groups that were made from this one keep their members: make them anew. To be awaited before
   * the next call.
   */
  async recoverRanks(ranks: readonly Rank[], options?: CallOptions): Promise<void> {
    const op = 'recoverRanks';
    this.enter(op);
    checkRanks(ranks, op, this.size);
    this.#made = await admit(this.lane, op, [...ranks], () => this.#made, this.limits(op, options));
  }

  /** Collective over the members. The group has `size` ranks from then on; those that are new are not there until they are taken in. To be awaited before the next call. */
  extendGroupSizeTo(size: number, options?: CallOptions): Work {
    const op = 'extendGroupSizeTo';
    this.enter(op);
    checkInteger(size, 'size', op, this.size, elasticOf(this.#engine, op).capacity);
    return grow(this.lane, op, size, this.limits(op, options));
  }

  /**
   * Of a rank that takes no part, because it came later (`isExtension`) or was taken out: waits until the members call `recoverRanks` with it. Calls that it has under
   * way end first; while it waits, others throw `EP_BUSY`. Afterwards it makes the calls that they make. Its group memory stays.
   */
  async joinGroup(options?: CallOptions): Promise<void> {
    const op = 'joinGroup';
    this.checkOpen(op);
    const elastic = elasticOf(this.#engine, op);
    const { active } = this.#engine.view();
    if (active.includes(this.rank) && active.some((rank) => rank !== this.rank)) {
      const expected = 'one that takes no part; who was taken out learns it from the next call';
      throw invalid('rank', { where: op, expected, found: this.rank });
    }
    const limits = this.limits(op, options);
    await this.lane.join(op, elastic, limits, async (run) => {
      this.#made = await shareMade(run, 0, limits);
    });
  }

  /** What this rank has written, by kind of operation. */
  trace(): ReturnType<GroupEngine['trace']> {
    return this.#engine.trace();
  }

  /** Members whose connection is up, and what keeps the others. */
  connections(): ReturnType<GroupEngine['connections']> {
    return this.#engine.connections();
  }

  /** The last calls of this rank in this group and all others that came from one `initProcessGroup`. */
  flightRecorder(): FlightRecorder {
    return this.#world.recorder;
  }

  /** Zeroed elements in memory that peers read and write in place. Lives as long as the group. */
  allocate<D extends DType>(dtype: D, length: number): Tensor<D> {
    this.checkOpen('allocate');
    return tensor(dtype, [length], this.#engine.allocate(dtype, length));
  }

  /** Ends when the tensor may be changed again. `peer` may be this rank. */
  send(source: Operand, peer: Rank, options?: MessageOptions): Work {
    const op = 'send';
    this.enter(op);
    return this.#send(op, source, peer, options);
  }

  /** Takes the next message of `peer` with this tag; it may be shorter than the tensor. */
  recv(target: Operand, peer: Rank, options?: MessageOptions): Work<RecvEnd> {
    const op = 'recv';
    this.enter(op);
    return this.#recv(op, target, checkRank(peer, 'peer', op, this.size), options);
  }

  /** Takes the next message with this tag, whoever sent it. */
  recvAnySource(target: Operand, options?: MessageOptions): Work<RecvEnd> {
    const op = 'recvAnySource';
    this.enter(op);
    return this.#recv(op, target, -1, options);
  }

  /** Posts all messages at once, so that no order among them can block. None is posted if one is refused. */
  batchIsendIrecv(ops: readonly MessageOp[], options?: CallOptions): readonly (Work | Work<RecvEnd>)[] {
    const where = 'batchIsendIrecv';
    this.enter(where);
    checkBatch(ops, where, this.#engine);
    this.limits(where, options);
    const post = () =>
      ops.map(({ op, tensor: operand, peer = -1, tag = 0 }) => {
        const limits = { ...options, tag };
        return op === 'send' ? this.#send(where, operand, peer, limits) : this.#recv(where, operand, peer, limits);
      });
    return this.#engine.grouped === undefined ? post() : this.#engine.grouped(post);
  }

  /** The root's value on all ranks, each with a structured clone of it; on the root the value itself. The others pass undefined. */
  broadcastObject<T>(value: T | undefined, options: RootOptions): Work<T> {
    const op = 'broadcastObject';
    this.enter(op);
    const root = checkRank(options?.root, 'root', op, this.size);
    return broadcastObject<T>(this.lane, op, value, root, this.limits(op, options));
  }

  /** The values of all ranks, by rank, on the root (undefined for a rank that was lost); undefined on the others. */
  gatherObject<T>(value: T, options: RootOptions): Work<readonly (T | undefined)[] | undefined> {
    const op = 'gatherObject';
    this.enter(op);
    const root = checkRank(options?.root, 'root', op, this.size);
    return gatherObject<T>(this.lane, op, value, root, this.limits(op, options));
  }

  /** The values of all ranks, by rank; undefined for a rank that was lost. */
  allGatherObject<T>(value: T, options?: CallOptions): Work<readonly (T | undefined)[]> {
    const op = 'allGatherObject';
    this.enter(op);
    return allGatherObject<T>(this.lane, op, value, this.limits(op, options));
  }

  /**
   * Collective over this group, also for the ranks that are not named. A group of `ranks`, in that order: the first becomes rank 0. Undefined where this
   * rank is not among them. Members that take no part in this group take none in the new one. `timeoutMs` is also that of the group's calls, this group's unless given. Closed with this group, if not before. Throws
   * `EP_MISMATCH` on all ranks, naming who gave another list.
   */
  async newGroup(ranks: readonly Rank[], options: NewGroupOptions = {}): Promise<ProcessGroup | undefined> {
    const op = 'newGroup';
    this.enter(op);
    checkMembers(ranks, op, this.size);
    const limits = this.limits(op, options);
    const { name } = options;
    if (name !== undefined && typeof name !== 'string')
      throw invalid('name', { where: op, expected: 'a string', found: name });
    const stream = this.#streamOf(op, options);
    const agreed = await agreeOnMembers(this.lane, op, { ranks, label: name, made: ++this.#made }, limits);
    const { made, contributors } = agreed;
    this.#made = Math.max(this.#made, made);
    const label = name ?? `${made}`;
    const named = { name: `${this.name}/${label}`, id: `${this.#id}/${made}`, stream };
    return this.#open(op, { ranks, contributors }, named, limits);
  }

  /**
   * Collective over this group. A group for each colour, an integer of at least 0: its ranks by ascending `key` (0 unless given), those of equal key by
   * their rank here. Undefined on ranks that give no colour. As `newGroup` otherwise.
   */
  async split(color: number | undefined, key = 0, options: SplitGroupOptions = {}): Promise<ProcessGroup | undefined> {
    const op = 'split';
    this.enter(op);
    checkColor(color, key, op);
    const limits = this.limits(op, options);
    const stream = this.#streamOf(op, options);
    const { made, ranks } = await agreeOnColors(this.lane, op, { color, key, made: ++this.#made }, limits);
    this.#made = Math.max(this.#made, made);
    const part = `${made}.${color}`;
    const named = { name: `${this.name}/${part}`, id: `${this.#id}/${part}`, stream };
    return this.#open(op, { ranks, contributors: ranks ?? [] }, named, limits);
  }

  /** `signal` cuts off operations under way, which are otherwise awaited; receives are not awaited. Groups made from this one are closed before. */
  override close(options: AbortOptions = {}): Promise<void> {
    checkOptions(options, 'close');
    const { signal } = options;
    if (signal === undefined) return super.close();
    const cut = (): void => this.#cut.abort(signal.reason);
    if (signal.aborted) cut();
    else signal.addEventListener('abort', cut, { once: true });
    return super.close(options).finally(() => signal.removeEventListener('abort', cut));
  }

  /** c10d's name of `close()`. */
  destroy(options?: AbortOptions): Promise<void> {
    return this.close(options);
  }

  protected override async release(): Promise<void> {
    try {
      await this.lane.close(this.#cut.signal);
    } finally {
      await this.#release();
    }
  }

  #send(op: string, source: Operand, peer: Rank, options: MessageOptions | undefined): Work {
    checkRank(peer, 'peer', op, this.size);
    const data = messageData(source, op, this.#engine);
    const tag = checkTag(options?.tag, op);
    return this.lane.send(op, { peer, tag, data, ...this.limits(op, options) }, dtypeOf(source));
  }

  #recv(op: string, target: Operand, peer: Rank, options: MessageOptions | undefined): Work<RecvEnd> {
    const data = messageData(target, op, this.#engine);
    const tag = checkTag(options?.tag, op);
    return this.lane.recv(op, { peer, tag, data, ...this.limits(op, options) }, dtypeOf(target));
  }

  #streamOf(op: string, { stream }: SplitGroupOptions): GpuQueue | undefined {
    if (stream === undefined || this.#engine.device !== undefined) return stream ?? this.#stream;
    throw invalid('stream', { where: op, expected: 'absent: the group has no device', found: stream });
  }

  async #open(
    op: string,
    { ranks, contributors }: { readonly ranks: readonly Rank[] | undefined; readonly contributors: readonly Rank[] },
    named: Pick<Membership, 'name' | 'id' | 'stream'>,
    limits: CallLimits,
  ): Promise<ProcessGroup | undefined> {
    const rank = ranks?.indexOf(this.rank) ?? -1;
    if (ranks === undefined || rank < 0) return undefined;
    this.checkOpen(op);
    const worldRanks = ranks.map((member) => this.ranks[member]!);
    // HAZARD: the same on all members, because it is what the call that all have completed says; what this rank knows of losses by now is not.
    const active = [...ranks.keys()].filter((member) => contributors.includes(ranks[member]!));
    if (this.#engine.device !== undefined && active.length < ranks.length) {
      const lost = ranks.filter((member) => !contributors.includes(member));
      throw new EpError(
        'EP_PEER_LOST',
        `${op}: ${formatRanks(lost)} died or left: all members of a group with a device open it`,
        {
          context: { lost },
        },
      );
    }
    const lost = (): readonly Rank[] => {
      if (this.#engine.closed) return [];
      const seen = this.#engine.connections();
      return [...ranks.keys()].filter((member) => seen[ranks[member]!]?.state === 'lost');
    };
    // Nothing is kept of one that is closed before this one.
    const release = async (): Promise<void> => void this.children.remove(group);
    const group = await openGroup(this.#world, { ...named, ...limits, rank, ranks: worldRanks, active, lost, release });
    try {
      this.checkOpen(op);
      return this.children.add(group);
    } catch (error) {
      // This group was closed in the meantime.
      await group.close();
      throw error;
    }
  }
}

/** Opens this rank's side of a group; who its members are has been agreed. Where that fails, `release` stays the caller's to call. */
export async function openGroup(world: World, membership: Membership): Promise<ProcessGroup> {
  const { name, id, rank, ranks, timeoutMs, signal, elastic, stream, lost } = membership;
  const { active = [...ranks.keys()] } = membership;
  const { factory, recorder, ranksOnHost } = world;
  const store = prefixStore(world.store, `ep/group/${id}`);
  let leaveRecorder: (() => void) | undefined;
  const tidyUp = async (): Promise<void> => {
    leaveRecorder?.();
    await store.close();
  };
  let opened: GroupEngine | undefined;
  try {
    const engine = await factory({
      store,
      root: world.store,
      rank,
      size: ranks.length,
      ranks,
      name: id,
      timeoutMs,
      ...(ranksOnHost !== undefined && { ranksOnHost }),
      ...(signal && { signal }),
      ...(stream && { stream }),
      elastic: elastic ?? { capacity: ranks.length, active, joins: false, evicts: world.evicts },
      ...(lost && { lost }),
    });
    opened = engine;
    leaveRecorder = recorder.openGroup({ name: id, ranks, rank, view: () => engine.view() });
    const release = async (): Promise<void> => {
      await tidyUp();
      await membership.release?.(engine.view().active);
    };
    return new ProcessGroup({ name, id, ranks, engine, recorder, timeoutMs, world, stream, release });
  } catch (error) {
    await opened?.close();
    await tidyUp();
    throw error;
  }
}
