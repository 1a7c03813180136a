/** The addon's part in the backing `fabric`: native/napi/bind_fabric.cpp. */
import type { NativeOperand, NativeSymmetricMemory } from './binding.js';
import type { NicAtomics } from './ranks/atomic-endpoint.js';

export interface FabricQuery {
  /** As dlopen takes it. */
  readonly library: string;
  /** As libfabric calls it, `tcp;ofi_rxm`; "": the first of the policy that is there. */
  readonly provider: string;
  /** Of the interface to bind to; "": the provider's choice. */
  readonly address: string;
  /** Ordinal of the GPU whose memory is to be registered; -1: none. */
  readonly gpu: number;
}

export interface NativeFabricOptions extends FabricQuery {
  /** CUDA's driver, as dlopen takes it. */
  readonly cuda: string;
  /** A peer hears from this rank at least so often. */
  readonly heartbeatMs: number;
  /** A peer that is not heard for so long is dead. */
  readonly silenceMs: number;
  /** Requests that kernels may have posted and the engine not taken: a power of two. */
  readonly ringCapacity: number;
}

/** What was chosen. */
export interface FabricOffer {
  readonly provider: string;
  /** The device or network interface. */
  readonly domain: string;
  /** Of libfabric. */
  readonly version: string;
  readonly maxMessageBytes: number;
  /** That an arrival can carry; 4 are used. */
  readonly dataBytes: number;
  /** Of a memory's key, which nobody guesses if there are 8; 0: the provider makes them. */
  readonly keyBytes: number;
  /** Why no memory of the GPU that was named can be registered; "" where it may be tried. */
  readonly noGpu: string;
  /** Why there are no atomics, of this rank's or of which other one; "" where there are: they have been tried. */
  readonly noAtomics: string;
}

/** Why nothing reaches a peer any more. */
export interface NativeFabricFailure {
  /** `EP_STATUS_*` */
  readonly status: number;
  readonly text: string;
}

export interface FabricCounts {
  /** Requests that this rank made. */
  readonly requests: number;
  /** Requests of others that it carried out. */
  readonly applied: number;
  readonly writes: number;
  readonly atomics: number;
  readonly messages: number;
  /** Times the provider had no room. */
  readonly full: number;
  /** Messages that came and no rank of this world had sent. */
  readonly refused: number;
  /** Bytes of this rank that its peers may write and read now. */
  readonly registered: number;
  /** Connections that tell of the end of a process on another host at once, and stand now. */
  readonly lines: number;
  /** Of `applied`, those that a thread carried out which waited or posted, in the progress thread's stead. */
  readonly carried: number;
}

export interface NativeFabricNic extends NicAtomics {
  offer(): FabricOffer;
  /** For `connect` on the others. */
  address(): Uint8Array<ArrayBuffer>;
  /** Before `connect`: what `handle()` of every rank's context said, in one array. Of how many this rank sees the end in shared memory, because they are on this host. */
  witness(handles: Uint8Array): number;
  /** Before `connect`: from here on ranks of other hosts can make connections that tell of the end of a process. Where this rank listens, for `setLines` on the others. */
  listen(): Uint8Array<ArrayBuffer>;
  /** After `listen` and before `connect`. By rank: where it listens, and 1 where it is on another host; both of a pair say the same. */
  setLines(places: readonly Uint8Array[], far: Uint8Array): void;
  /** Of all ranks, by rank; the keys are 16 bytes for what is said to the rank and 16 for what it says. */
  connect(addresses: readonly Uint8Array[], keys: readonly Uint8Array[]): void;
  /** Length of what `addMemory` returns. */
  partBytes(): number;
  /** Registers this rank's part; for `route` on the others. With `gpu`, a number of `gpuMemory`, its bytes are those, and the memory has none of its own. */
  addMemory(memory: NativeSymmetricMemory, gpu?: number): Uint8Array<ArrayBuffer>;
  /** New memory of the GPU, zeroed: a number, as `adopt` gives, which `disown` takes. */
  gpuMemory(byteLength: number): number;
  gpuAddress(memory: number): bigint;
  /** The thread waits for the copy. */
  gpuWrite(memory: number, byteOffset: number, bytes: Uint8Array): void;
  gpuRead(memory: number, byteOffset: number, into: Uint8Array): void;
  /** Connects the memory through the fabric. */
  route(memory: NativeSymmetricMemory, parts: readonly Uint8Array[]): void;
  /** Its bytes stay until nothing is under way to them. */
  removeMemory(memory: NativeSymmetricMemory): void;
  requestTry(peer: number, request: number, patiently: boolean): number;
  /** Also after `close()`. */
  failure(peer: number): NativeFabricFailure | undefined;
  counts(): FabricCounts;
  /** What a kernel's request or a peer did wrong first; "" if nothing. */
  violation(): string;
  close(): void;
}

/** Of a memory for the rounds of some groups. */
export interface NativeRoundsSize {
  readonly byteLength: number;
  readonly signalSlots: number;
  readonly mostMembers: number;
  /** That a member says in a round. */
  readonly mostBytes: number;
  /** Of a member in what `NativeFabricRounds.look` fills. */
  readonly entryBytes: number;
}

/** `native/core/rounds.hpp`, of one member. */
export interface NativeFabricRounds {
  /** What `look` says, after `mostMs` milliseconds at most, 0 to 10. */
  enter(round: number, said: Uint8Array, mostMs: number, into: Uint8Array): boolean;
  /**
   * As `enter` of `head` with `given` behind it. 0: the round has not come, 1: it has, and `into` is filled, 2: and all have said the same head. Then what all give, as long as `output`, is folded into that, if
   * there is one: it does not overlap `into`.
   */
  exchange(
    round: number,
    head: Uint8Array,
    given: ArrayBufferView | undefined,
    mostMs: number,
    into: Uint8Array,
    ...fold: [] | [type: number, reduction: number, factor: number, output: ArrayBufferView]
  ): 0 | 1 | 2;
  /** The round is there: `into` has `entryBytes` of each member, the length of what it said in 4 of them, and from the ninth on what it said. */
  look(round: number, into: Uint8Array): boolean;
  close(): void;
}

/** `number` grows from call to call. `kind`: `carried_kind` of carrier.hpp. `root`: a member, of a kind that has one. */
export type NativeCarriedCall = [
  number: number,
  kind: number,
  type: number,
  reduction: number,
  factor: number,
  longest: number,
  root: number,
];

/** `native/core/carrier.hpp`, of one member. */
export interface NativeFabricCarrier {
  begin(...call: NativeCarriedCall): void;
  /**
   * Begins a call that others may not make, and says `head` of it in the round of its number, as `NativeFabricRounds.exchange` does. What of it needs no more than this rank's arrays is done meanwhile; once all have
   * said the same, goes on as `carry`. 0: the round has not come, 1: it has, and not all have said the same head, 2: all have, 3: and the call is over.
   */
  join(
    rounds: NativeFabricRounds,
    head: Uint8Array,
    roundMs: number,
    mostMs: number,
    into: Uint8Array,
    ...rest: [...NativeCarriedCall, inputs: readonly NodeJS.TypedArray[], outputs: readonly NodeJS.TypedArray[]]
  ): 0 | 1 | 2 | 3;
  /** The longest array of all, of the call that `join` has begun with another. */
  lengthen(longest: number): void;
  /** After `mostMs` milliseconds at most, 0 to 10. 0: the call is over, 1: it has moved, 2: it has not. */
  carry(inputs: readonly NodeJS.TypedArray[], outputs: readonly NodeJS.TypedArray[], mostMs: number): 0 | 1 | 2;
  sent(): number;
  close(): void;
}

/** Two ranks over libfabric with nothing of ours between. Both make the same calls in the same order; each holds its thread, and throws where time is up or bytes are wrong. */
export interface NativeFabricLink {
  /** For `connect` on the other. */
  description(): Uint8Array<ArrayBuffer>;
  connect(description: Uint8Array): void;
  /** A write of 8 bytes there and one back, polled for: nanoseconds of a round, as f64, into each of `samples`. `first` on one of the two. */
  pingPong(first: boolean, samples: NativeOperand, timeoutMs: number): void;
  /**
   * Writes `sends` messages of `byteLength`, at most `window` under way, while `receives` of the other's arrive. Seconds until both have all. They come from, and go to, `places` of the memory one after the
   * other. `turn`: no two in a row alike.
   */
  stream(
    sends: number,
    receives: number,
    byteLength: number,
    window: number,
    places: number,
    turn: number,
    timeoutMs: number,
  ): number;
  close(): void;
}
