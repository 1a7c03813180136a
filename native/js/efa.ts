/** The addon's part in endpoints of EFA: native/napi/bind_efa.cpp. */
import type { NativeHostMemory, NativeHostStream, NativeSymmetricMemory, OperationId } from './binding.js';
import type { NativeNicNetwork } from './ibgda.js';
import type { NicRequests } from './ranks/nic-endpoint.js';

export interface NativeEfaOptions {
  /** Queue pairs that kernels use. */
  readonly queuePairs: number;
  /** Work requests of each send queue: a power of two. */
  readonly depth: number;
  /** Values travel within a request where the NIC can, which makes requests of 128 bytes. */
  readonly inlineValues: boolean;
  /** By libfabric; the software NIC otherwise. */
  readonly hardware: boolean;
  /** libfabric, by its path or as the loader finds it. */
  readonly library: string;
  /** Its name, "" for any. */
  readonly device: string;
  readonly seed: number;
  /** Events that the software NIC keeps for `trace()`. */
  readonly traceEvents: number;
  /** Completion counters that the software NIC has. */
  readonly maxCounters: number;
  /** Bytes in which messages land at the software NIC: a multiple of 8. */
  readonly fragmentBytes: number;
  /** As `NativeIbgdaOptions.network`. */
  readonly network?: NativeNicNetwork;
}

/** How a queue pair broke. */
export interface NativeEfaFailure {
  /** `EP_STATUS_*` */
  readonly status: number;
  /** `EP_EFA_STATUS_*` of the completion; 0: none came. */
  readonly efaStatus: number;
  readonly qpn: number;
  /** Number of the request that failed. */
  readonly wqe: number;
  readonly remoteAddress: bigint;
  /** Whom it was for; -1: several. */
  readonly peer: number;
}

export interface NativeEfaDevice {
  readonly name: string;
  readonly depth: number;
  readonly wqeBytes: number;
  /** Requests that may be written and not rung. */
  readonly maxBatch: number;
  readonly maxMessageBytes: number;
  /** Completion counters that are left. */
  readonly counters: number;
  /** How values of up to 8 bytes travel. */
  readonly values: 'inline' | 'staged';
}

export interface SoftEfaCounts {
  readonly doorbells: number;
  readonly requests: number;
  readonly completions: number;
  readonly bytes: number;
  /** Requests, doorbells and stores that broke a rule. */
  readonly violations: number;
}

export interface NativeEfaNic extends NicRequests {
  device(): NativeEfaDevice;
  /** For `connect` on the others. */
  address(): Uint8Array<ArrayBuffer>;
  /** Of all ranks, by rank; keys of both directions where the NIC is on a network. No peer may be posted to before all ranks have returned from it. */
  connect(addresses: readonly Uint8Array[], keys?: readonly Uint8Array[]): void;
  /** Signal slots that memories may still take: each is a counter and an endpoint of the device. */
  signalSlotsLeft(): number;
  /** Length of what `addMemory` returns. */
  partBytes(signalSlots: number): number;
  /** Length of `NativeEfaGin.address`. */
  ginAddressBytes(signals: number): number;
  /** Registers this rank's part and makes what its signals arrive at; for `route` on the others. */
  addMemory(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  /** Connects the memory through this NIC. Empty for ranks that are not here. */
  route(memory: NativeSymmetricMemory, parts: readonly Uint8Array[]): void;
  /**
   * Makes all endpoints, keys and counters anew, for memories that there are, too, of which all parts are to be routed again; then `address` and `connect` as at first. Requests that
   * had not ended are over. No kernel may run.
   */
  renew(): void;
  /** As `addMemory` has told it, or `renew` changed it. */
  ownPart(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  /** One rank's part alone, of a memory that was routed, also if `renew` came since; nobody is reached in it before then. Nothing may be under way to that rank in it. */
  replacePart(memory: NativeSymmetricMemory, peer: number, part: Uint8Array): void;
  removeMemory(memory: NativeSymmetricMemory): void;
  failure(peer: number): NativeEfaFailure | undefined;
  /** Of the queue pair of kernels that broke first. */
  kernelFailure(): NativeEfaFailure | undefined;
  counts(): SoftEfaCounts;
  /** What was wrong with requests: one sentence each. */
  violations(): readonly string[];
  /** One JSON object a line. */
  trace(format: 'jsonl' | 'chrome'): string;
  /** Replaces the script of faults: see native/nic/efa/faults.hpp. */
  setFaults(script: string): void;
  close(): void;
}

/** A context of the GIN facade (native/include/ep/device/efa_gin.h) on such a NIC. */
export interface NativeEfaGin {
  /** For `connect` on the others; of one length on all ranks whose contexts are alike. */
  address(): Uint8Array<ArrayBuffer>;
  /** Of all ranks, by rank. No kernel may use the context before. */
  connect(addresses: readonly Uint8Array[], keys?: readonly Uint8Array[]): void;
  /** Bytes of an `ep_efa_memory` that names this context: what the facade's calls take. */
  memory(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  readSignal(id: number): bigint;
  readCounter(id: number): bigint;
  /**
   * Carries out `count` steps (`ep_gin_step`, one behind the other in `steps`) as a kernel of one block, by the way of sharing of the context; what they found stands in them. `memory`
   * is of all of their puts and gets. HAZARD: of a context that is not shared by the device, one program at a time.
   */
  program(
    stream: NativeHostStream,
    memory: NativeSymmetricMemory,
    steps: NativeHostMemory,
    count: number,
    timeoutMs: number,
  ): OperationId;
  close(): void;
}

/** What one poster did for its puts. */
export interface NativePutCounts {
  readonly puts: number;
  readonly doorbells: number;
  /** Of 8 bytes, stored to the ring. */
  readonly words: number;
  /** Around stores to the device. */
  readonly registerFences: number;
  readonly systemFences: number;
}
