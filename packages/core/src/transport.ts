/**
 * The Transport family: what a transport can do is one type parameter, so that handing a transport to an algorithm which needs more
 * than it offers does not compile.
 *
 * `Transport<C>` is contravariant in `C` (members are function-typed, because methods would be checked bivariantly): a transport that
 * offers more is accepted where less is needed, never the other way round.
 */
import type { DType, Storage } from './dtype.js';
import { checkInteger, checkObject, type EpCode, invalid } from './errors.js';
import { MOST_WORLD_SIZE } from './ranks.js';
import type { RoundMaker } from './rounds.js';
import type { AbortOptions, Closeable } from './scope.js';
import type { Store } from './store.js';
import { checkSignal, checkTimeout } from './waiting.js';
import type { Work } from './work.js';

/**
 * One capability that an algorithm may need and a transport may offer.
 *
 * - `bundled`: a signal that became visible means that *its own* put has landed (every transport offers it).
 * - `prior`: a visible signal means that every earlier put to that peer has landed.
 * - `inc`, `add`, `set`: what a signal may do to its slot (plus 1, plus n, overwrite).
 * - `get`: one-sided reads. `atomics`: fetching read-modify-write on remote words.
 * - `load-store`: peers' memory is mapped here; kernels may use plain loads and stores.
 */
export type Need = 'bundled' | 'prior' | 'inc' | 'add' | 'set' | 'get' | 'atomics' | 'load-store';

/** The signal orders and operations among the needs. */
export type SignalOrder = Extract<Need, 'bundled' | 'prior'>;
export type SignalOp = Extract<Need, 'inc' | 'add' | 'set'>;

/** A rank is not a size, a slot is not a rank: both are branded so that they cannot be swapped silently. */
export type Rank = number & { readonly __rank?: never };
export type SlotId = number & { readonly __slot?: never };

/** What a transport turned out to be able to do, checked at run time at set-up. Sizes in bytes. */
export interface Capabilities {
  readonly needs: ReadonlySet<Need>;
  /** Largest single put or get in bytes; larger ones are chunked by the transport. */
  readonly maxMessageBytes: number;
  /** How many bytes each put should carry where a transfer is split into several, in view of what a put costs beside its bytes; absent: no preference. */
  readonly chunkBytes?: number;
  /** Most signal slots that one allocation may have. */
  readonly maxSignalSlots: number;
  /** Who may start an operation: JS (`host`) and kernels (`device`). */
  readonly initiators: ReadonlySet<'host' | 'device'>;
  /** Where `allocate` can put memory: on the host alone unless given. What lies on a device is reached by kernels, and by `read` and `write` of a rank's own part. */
  readonly spaces?: ReadonlySet<'host' | 'device'>;
}

export interface DeviceInfo {
  readonly name: string;
  readonly detail: Readonly<Record<string, string | number | boolean>>;
}

/** Probing never throws: absence is data. `remedy` says what the user can do about it. */
export type Probe =
  | { readonly available: true; readonly capabilities: Capabilities; readonly devices: readonly DeviceInfo[] }
  | {
      readonly available: false;
      readonly code: EpCode;
      readonly reason: string;
      readonly remedy?: string;
      readonly cause?: unknown;
    };

/** Who joins: this rank of so many, and the store through which ranks find each other. */
export interface Member {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly store: Store;
}

export interface OpenOptions<Config extends object = object> {
  readonly signal: AbortSignal;
  readonly config?: Config;
  /** How long to wait for the other ranks; the configuration's, where absent. */
  readonly timeoutMs?: number;
}

/** What every provider's `open` looks at first; `most`: ranks that it takes. Throws `EP_INVALID_ARGUMENT`. */
export function checkOpening(member: Member, options: OpenOptions, where: string, most = MOST_WORLD_SIZE): void {
  checkObject(member, 'member', 'an object with rank, worldSize and store', where);
  checkOpeningOf(member, options, where, most);
  checkObject(member.store, 'store', 'a Store', where);
}

/** The same where ranks find each other by other means than a store, which the provider looks at. Throws `EP_INVALID_ARGUMENT`. */
export function checkOpeningOf(
  member: Omit<Member, 'store'>,
  options: OpenOptions,
  where: string,
  most = MOST_WORLD_SIZE,
): void {
  checkObject(member, 'member', 'an object with rank and worldSize', where);
  checkInteger(member.worldSize, 'worldSize', where, 1, most);
  checkInteger(member.rank, 'rank', where, 0, member.worldSize - 1);
  checkObject(options, 'options', 'an object with signal', where);
  checkSignal(options.signal, where);
  checkTimeout(options.timeoutMs, where);
  if (options.config !== undefined) checkObject(options.config, 'config', 'an object', where);
}

export interface TransportProvider<in C extends Need, Config extends object = object> {
  /** `family:backing`, for example `nvshmem:shm`. */
  readonly name: string;
  probe(config?: Config): Promise<Probe>;
  /** Collective. Rejects with `EP_RENDEZVOUS` naming the odd rank when versions, ABI or configuration differ. */
  open(member: Member, options: OpenOptions<Config>): Promise<Transport<C>>;
}

/** Where one rank's part of a symmetric memory lies in this process: its bytes, and its signal words. */
export interface PartAddresses {
  readonly bytes: bigint;
  readonly signals: bigint;
}

export interface AllocateOptions extends AbortOptions {
  /** Bytes of every rank's part; all ranks must ask for the same. */
  readonly byteLength: number;
  /** 64-bit signal words of every rank's part. */
  readonly signalSlots: number;
  readonly space?: 'host' | 'device';
  /** How long to wait for the other ranks. */
  readonly timeoutMs?: number;
  /**
   * Registers the bytes and signal words of a memory that another transport of this rank allocated, with the same sizes, instead of making new ones: so several transports
   * reach one memory (`compose`). What peers send by this transport wakes who waits on either memory. Rejects with `EP_UNSUPPORTED` where the transport cannot.
   */
  readonly over?: SymmetricMemory;
  /**
   * Instead of `over`, on a rank that has come to no such memory, because of this: it takes part in the call, so that the others hear of it instead of waiting for this rank, and rejects with it.
   */
  readonly overFailure?: unknown;
  /**
   * With `over`: the ranks that kernels store to, because that memory maps them; this transport's device handle reaches them so, this rank too, and all others as it does
   * otherwise. Both ranks of a pair say the same: `EP_MISMATCH` on all ranks where they do not.
   */
  readonly near?: readonly Rank[];
}

/** How one rank reaches another. */
export interface Route {
  readonly peer: Rank;
  /** Name of the transport. */
  readonly via: string;
}

/** What a rank tells the others in `Transport.renew`. */
export interface RankSaid {
  /** It had nothing of the memory before. */
  readonly isNew: boolean;
  readonly facts: Uint8Array;
}

/** Sizes are those that the memory was allocated with; so are `over`, which was renewed before, and `near`. */
export interface RenewOptions
  extends Pick<AllocateOptions, 'byteLength' | 'signalSlots' | 'over' | 'near' | 'signal' | 'timeoutMs'> {
  /** What this rank has of the memory; undefined on a rank that is new. */
  readonly memory?: SymmetricMemory;
  /** Told to all; at most 1024 bytes. */
  readonly facts: Uint8Array;
  /** Runs before anything is mapped, given what each rank that is here said. What it throws fails the call on all ranks. */
  readonly check: (said: ReadonlyMap<Rank, RankSaid>) => void;
  /** Runs when this rank has mapped all parts, and before any rank returns: the others write nothing yet. What it throws fails the call on all ranks. */
  readonly settle: (memory: SymmetricMemory, said: ReadonlyMap<Rank, RankSaid>) => void;
}

/** What ranks have of memory beside processes that come later, into empty places or those of dead ones: one pair of ranks at a time, and while others use it. */
export interface Succession {
  /** Names the world: the same on all ranks that are ever in it, and another name than any other world has. */
  readonly world: string;
  /** This process came later than the world was opened. */
  readonly isNew: boolean;
  /** Names the process in a rank's place; another name once others have come. Empty for a place in which nobody is. */
  readonly lifeOf: (rank: Rank) => string;
  /** Calls `listener` before others come in the places of these ranks, of which nothing is to be expected any more. Returns what ends that. */
  readonly onReplace: (listener: (ranks: readonly Rank[]) => void) => () => void;
  /** What `replace` needs on other ranks of this rank's part of a memory. */
  readonly part: (memory: SymmetricMemory) => Uint8Array;
  /** Of a process that is new, and not collective: its part of memory that the others have, zeroed. What is put to a peer before `replace` is lost, or refused. */
  readonly inherit: (
    size: Pick<AllocateOptions, 'byteLength' | 'signalSlots' | 'over' | 'near'>,
  ) => Promise<SymmetricMemory>;
  /**
   * From now on the peer's part is this one, at the addresses of the one before. Nothing may be under way to that peer in it. Throws `EP_BUSY` while a thread of this process
   * that had the part before is closing, and `EP_PEER_LOST` if that part is gone.
   */
  readonly replace: (memory: SymmetricMemory, peer: Rank, part: Uint8Array) => void;
  /** Absent where those who stay reach each other as before when others come. */
  readonly generations?: Generations;
}

/**
 * Where ways to all ranks are made anew when others come, as on an EFA: a generation ends, and nobody is reached in any memory before its part was told again, which all ranks do by
 * `Succession.part` and `reconnect`, this rank's own too.
 */
export interface Generations {
  /** Names the ways as they are: the same on all ranks that are here, and another name once others have come. */
  readonly current: () => string;
  /** From now on `user` is asked to pause while they change, and at once if they are changing. Returns what ends that. */
  readonly onChange: (user: Pausing) => () => void;
  /** As `replace`, for a peer in whose place the same process is as before. */
  readonly reconnect: (memory: SymmetricMemory, peer: Rank, part: Uint8Array) => void;
}

/** What uses ways that are about to be made anew. */
export interface Pausing {
  /**
   * Puts nothing from now on. Resolves when all has landed that it had put, but to ranks that are lost. Where it rejects, others are let in on no rank; it pauses on, until a
   * later call lets them in.
   */
  readonly pause: (limits: WaitOptions) => Promise<void>;
  /** The ways are new. */
  readonly resume: () => void;
}

export interface Transport<in C extends Need> extends Closeable {
  readonly name: string;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** For each rank the lowest one of those with which it shares a host's memory. Absent where they all do, or nobody knows. */
  readonly hosts?: readonly Rank[];
  /** Fires when device-initiated operations can no longer succeed: they have no call that could reject. */
  readonly failed: AbortSignal;
  /** Collective: every rank calls it in the same order with the same sizes; a mismatch names the ranks that differ. */
  readonly allocate: (options: AllocateOptions) => Promise<SymmetricMemory>;
  /** Registers memory that the caller owns; rejects with `EP_UNSUPPORTED` and what to do instead where that is not possible. */
  readonly adopt: (memory: { readonly address: bigint; readonly byteLength: number }) => Promise<AdoptedMemory>;
  /**
   * Collective over the ranks that are here after some have come later: those that have the memory keep it, at its addresses, and see the newcomers' parts
   * in it from then on; newcomers get theirs, zeroed. Nothing may be under way in it. Absent where a transport cannot let ranks in anew.
   */
  readonly renew?: (options: RenewOptions) => Promise<SymmetricMemory>;
  /**
   * `'all'`: what any rank sent before ranks were let in, and had not landed, never does, and ways to all ranks are new; so users of memory may begin again in it, also where a death
   * has left calls undone. Otherwise that holds for the ranks that were replaced, and the others go on.
   */
  readonly renews?: 'all';
  /** Whether nobody is in a rank's place: nobody has come there yet, or whoever was there has gone for good. Absent where all places are taken from the beginning on. */
  readonly isEmpty?: (rank: Rank) => boolean;
  /** As `renew`, for memory whose users agree on who uses it. Absent where a transport cannot let ranks in anew. */
  readonly succession?: Succession;
  /** Short exchanges among groups of ranks. The same on all ranks: there, or absent. */
  readonly rounds?: RoundMaker;
  /**
   * Resolves with those of these ranks that are cut off: they died or closed, and nothing that they had under way lands in this rank's memory any more, bytes or signals. Those that live are
   * left alone, and so is this rank. Not collective: what is under way to other ranks is theirs to cut off. Absent where a transport cannot promise that before ranks are let in anew.
   */
  readonly fence?: (ranks: readonly Rank[]) => Promise<readonly Rank[]>;
  readonly connect: (peer: Rank, options?: AbortOptions) => Promise<Endpoint<C>>;
  /** One row for each rank; absent where all are reached alike. */
  readonly routes?: () => readonly Route[];
  /** What a kernel needs to use this transport with a memory of it. */
  readonly device: (memory: SymmetricMemory) => DeviceHandle<C>;
}

/** A run of bytes in this rank's part of a symmetric memory or in adopted memory. */
export interface Region {
  readonly memory: SymmetricMemory | AdoptedMemory;
  readonly byteOffset: number;
  readonly byteLength: number;
}

/** A run of bytes in a peer's part; bounds were checked when it was made, by `SymmetricMemory.remote`. */
export interface RemoteRegion {
  readonly memory: SymmetricMemory;
  readonly peer: Rank;
  readonly byteOffset: number;
  readonly byteLength: number;
}

export interface AdoptedMemory extends Closeable {
  readonly address: bigint;
  readonly byteLength: number;
}

/** Symmetric memory: the same size on every rank, registered from birth to `close()`. */
export interface SymmetricMemory extends Closeable {
  readonly byteLength: number;
  readonly space: 'host' | 'device';
  readonly signals: SignalPad;
  /** For `adopt` of other transports; absent where the memory has no addresses in this process. */
  readonly addresses?: PartAddresses;
  /** This rank's bytes as a region for `put` and `get`. Bounds-checked. */
  local(byteOffset: number, byteLength: number): Region;
  /** A peer's bytes. Bounds-checked once, here. */
  remote(peer: Rank, byteOffset: number, byteLength: number): RemoteRegion;
  /** Host space only. `length` in elements. Detached by `close()`, so that use after close is inert instead of a crash. */
  view<D extends DType>(dtype: D, byteOffset: number, length: number): Storage[D];
  /** Copies out of, or into, this rank's part in any space. */
  read(from: Region, into: Uint8Array): Promise<void>;
  write(from: Uint8Array, into: Region): Promise<void>;
}

export type Comparison = 'eq' | 'ne' | 'lt' | 'le' | 'gt' | 'ge';

export interface WaitOptions extends AbortOptions {
  /** Ends with `EP_TIMEOUT`, which names `peers` that had not delivered. */
  readonly timeoutMs?: number;
  /** The ranks whose death ends this wait with `EP_PEER_LOST`. All ranks unless given. */
  readonly peers?: readonly Rank[];
}

/** A word of a signal pad, and what it was when somebody looked last. */
export interface SeenWord {
  readonly slot: SlotId;
  readonly value: bigint;
}

/**
 * 64-bit words that peers add to. Values are monotonic (a running count or an epoch); a "reset" is an offset kept by the reader: memory
 * that a peer or a NIC writes is never zeroed under it.
 */
export interface SignalPad {
  readonly slots: number;
  peek(slot: SlotId): bigint;
  /** Unsigned comparison. Resolves with the value seen. Rejects with `EP_TIMEOUT`, `EP_PEER_LOST`, `EP_CLOSED` or the caller's `signal.reason`. */
  until(
    slot: SlotId,
    test: { readonly cmp: Comparison; readonly value: bigint },
    options?: WaitOptions,
  ): Promise<bigint>;
  /**
   * Holds this thread, as the begin of a wait may, for a millisecond at most, unless one of the words is not what it was seen as; whether one is. For who looks at the words of
   * several peers in turn and finds nothing: a wait would be for one of them. Absent where waits do not hold the thread.
   */
  readonly hold?: (seen: readonly SeenWord[]) => boolean;
}

export interface SignalUpdate<C extends Need> {
  readonly slot: SlotId;
  readonly op: C & SignalOp;
  /** The addend of `add`, the value of `set`; absent for `inc`. */
  readonly value?: bigint;
  /** `bundled` unless given. */
  readonly order?: C & SignalOrder;
}

export type Request<C extends Need> =
  | { readonly kind: 'put'; readonly from: Region; readonly to: RemoteRegion; readonly signal?: SignalUpdate<C> }
  | { readonly kind: 'put-value'; readonly to: RemoteRegion; readonly value: bigint; readonly signal?: SignalUpdate<C> }
  | { readonly kind: 'signal'; readonly memory: SymmetricMemory; readonly signal: SignalUpdate<C> };

/**
 * A connection to one peer. Operations from JS are for bootstrap, control and tests: per-token work is done by kernels, which use the
 * `DeviceHandle`.
 *
 * A Work of this interface is done when the source may be reused; `flush()` resolves when everything before it has landed at the peer.
 */
export interface Endpoint<in C extends Need> extends Closeable {
  readonly peer: Rank;
  readonly put: (from: Region, to: RemoteRegion, options?: { readonly signal?: SignalUpdate<C> }) => Work;
  /** Writes one little-endian word of `to.byteLength` (1, 2, 4 or 8) bytes. */
  readonly putValue: (to: RemoteRegion, value: bigint, options?: { readonly signal?: SignalUpdate<C> }) => Work;
  readonly signal: (memory: SymmetricMemory, update: SignalUpdate<C>) => Work;
  /** Needs `get`: rejects with `EP_UNSUPPORTED` on a transport without it. */
  readonly get: (from: RemoteRegion, to: Region) => Work;
  /**
   * Adds to a word of 8 bytes, at a multiple of 8, of the peer, modulo 2^64; resolves with what it was. Atomic against `fetchAdd` and `compareSwap` of all ranks through this transport, this
   * rank's own on itself too; against puts, signals and processors only where the transport says so. In no order with other requests: whatever is to come behind it awaits it. Absent on a
   * transport without `atomics`, or rejects there with `EP_UNSUPPORTED` and the reason.
   */
  readonly fetchAdd?: (to: RemoteRegion, add: bigint) => Work<bigint>;
  /** Stores `swap` in such a word if it is `compare`; resolves with what it was either way. */
  readonly compareSwap?: (to: RemoteRegion, compare: bigint, swap: bigint) => Work<bigint>;
  /** Several requests in one crossing into native code; one status per request, none is lost when another fails. */
  readonly submit: (batch: readonly Request<C>[]) => readonly Work[];
  /**
   * One request of whose end nobody hears: for a caller who learns by other means that its source is free. Absent but where a request that was taken fails only with its peer,
   * which is lost from then on, so that waits on it end. Throws what `submit` would have told at once.
   */
  readonly post?: (request: Request<C>) => void;
  readonly flush: (options?: WaitOptions) => Promise<void>;
}

/** Bytes that a kernel reads (a versioned C struct, see `native/include/ep/abi`). A handle of another ABI version is refused. */
export interface DeviceHandle<in C extends Need> {
  readonly kind: string;
  readonly abi: string;
  readonly bytes: Uint8Array;
  /** Phantom member that carries `C` contravariantly: never present at run time. */
  readonly __needs?: (need: C) => void;
}

/** Narrows a transport by a capability found at run time. */
export function offers<C extends Need, N extends Need>(
  transport: Transport<C>,
  need: N,
): transport is Transport<C | N> & Transport<C> {
  const needs = transport?.capabilities?.needs;
  if (typeof needs?.has !== 'function') {
    throw invalid('transport', { where: 'offers', expected: 'a transport', found: transport });
  }
  return needs.has(need);
}
