/** The addon's part in queue pairs of mlx5: native/napi/bind_ibgda.cpp. */
import type { NativeSymmetricMemory } from './binding.js';
import type { NativeGpuLibrary, NativeGpuSymmetricMemory } from './gpu.js';
import type { NativeLocal } from './ranks/adopted.js';
import type { NicRequests, PostedRequest } from './ranks/nic-endpoint.js';

/** Where queues of kernels on a GPU may lie: GPU memory by DMA-BUF, GPU memory by its address, page-locked memory of the host. */
export type ControlMemory = 'dma-buf' | 'gpu' | 'host';

export interface NativeIbgdaOptions {
  /** Queue pairs to each peer that kernels use. */
  readonly qpsPerPeer: number;
  /** Work requests of each send queue: a power of two. */
  readonly depth: number;
  /** Completions overwrite each other in one entry; a ring otherwise. */
  readonly collapsed: boolean;
  /** A try waits 4.096 us << ackTimeout. */
  readonly ackTimeout: number;
  /** Which table drives the NIC: the software NIC, libmlx5 (DevX), or plain libibverbs queue pairs that a thread of this process posts to. */
  readonly backing: 'soft' | 'hardware' | 'verbs';
  /** Names for the loader's search, or paths; those that rdma-core installs unless given. */
  readonly libraries?: { readonly ibverbs?: string; readonly mlx5?: string };
  /** Which devices, "" for any: see native/core/ibgda/device_choice.hpp. */
  readonly devices: string;
  readonly gidIndex?: number;
  /** PCI address of the GPU that the device shall be near; "": near the memory that this process is bound to, if it is bound. */
  readonly gpu: string;
  /** A GPU's kernels post, with queues in the first of these places that can be had; `driver` is CUDA's library. The host's kernels unless given. */
  readonly kernels?: {
    readonly library: NativeGpuLibrary;
    readonly device: number;
    readonly controlMemory: readonly ControlMemory[];
    readonly driver: string;
  };
  /** The software NIC's link layer: Ethernet instead of InfiniBand. */
  readonly ethernet: boolean;
  readonly seed: number;
  /** Events that the software NIC keeps for `trace()`. */
  readonly traceEvents: number;
  /** Of the software NIC: it reaches its peers over this network, and the rank is connected by it. Through the memory of this machine unless given. */
  readonly network?: NativeNicNetwork;
}

export interface NativeNicNetwork {
  readonly address: string;
  readonly heartbeatMs: number;
  readonly silenceMs: number;
}

/** How the queue pair to a peer broke. */
export interface NativePairFailure {
  /** `EP_STATUS_*` */
  readonly status: number;
  /** Of the completion; 0: none came. */
  readonly syndrome: number;
  /** Of the failure before, where the completion is of a request that was flushed after it; 0: the NIC did not say. */
  readonly firstSyndrome: number;
  readonly vendorSyndrome: number;
  readonly qpn: number;
  readonly opcode: number;
  readonly index: number;
  readonly rkey: number;
  readonly remoteAddress: bigint;
}

export interface NativeIbgdaPort {
  readonly device: string;
  readonly port: number;
  readonly link: 'infiniband' | 'ethernet';
  readonly gid: string;
  /** From the GPU, or from the memory node, that it was to be near: `same` to `system`; `unknown` if there was none. */
  readonly distance: string;
  /** Devices that would have come before, and why they were not taken. */
  readonly passedOver: readonly string[];
  readonly maxMessageBytes: number;
  /** Fetch-add and compare-and-swap of 8 bytes. */
  readonly atomics: boolean;
  /** It compares and swaps some bits of a word, and the send queues have room for such a request. */
  readonly maskedSwap: boolean;
  /** Whose post besides JS: `host` or `cuda:0`. */
  readonly kernels: string;
  /** Where their rings and completions lie; those of JS lie in host memory. */
  readonly placement: string;
  /** Better places, and why they could not be had. */
  readonly fallbacks: readonly string[];
}

/** What opening a NIC would find. The first thing that is missing, in the order in which they are needed, or `nothing`. */
export interface NativeNicProbe {
  readonly missing:
    | 'nothing'
    | 'library'
    | 'symbol'
    | 'kernel'
    | 'device'
    | 'devx'
    | 'port'
    | 'link'
    | 'gid'
    | 'gpudirect'
    | 'other';
  readonly reason: string;
  readonly remedy: string;
  /** Of what would be used; empty where nothing can be. */
  readonly device: string;
  readonly port: number;
  readonly link: 'infiniband' | 'ethernet';
  readonly gid: string;
  readonly distance: string;
  readonly passedOver: readonly string[];
  /** Where queues could lie, best first. */
  readonly placements: readonly { readonly where: string; readonly possible: boolean; readonly why: string }[];
}

/** Which network card is how far from which GPU and which memory. */
export interface NicTopology {
  /** `mlx5_0` and the like, software devices included. */
  readonly nics: readonly string[];
  /** PCI addresses. */
  readonly gpus: readonly string[];
  /** A table for people: a row for each GPU and each memory node, a column for each card. */
  readonly text: string;
}

export interface SoftNicCounts {
  readonly doorbells: number;
  readonly requests: number;
  readonly completions: number;
  readonly retries: number;
  readonly bytes: number;
  /** Requests that broke a rule of the format. */
  readonly violations: number;
}

export interface NativeIbgdaNic extends NicRequests {
  port(): NativeIbgdaPort;
  /** `ep_ibgda_peer` bytes, for `connect` on the others. */
  connection(): Uint8Array<ArrayBuffer>;
  /** Of all ranks, by rank; empty for ranks that are not here. No peer may post before all ranks have returned from it. */
  connect(connections: readonly Uint8Array[], keys?: readonly Uint8Array[]): void;
  /**
   * For another process in the place of a rank that died: queue pairs to it are made ready for `connectPeer`, with other packet numbers than before in `connection()`. What had not
   * ended on them has failed, and what is posted until then fails.
   */
  resetPeer(peer: number): void;
  /** Ends the queue pairs to a peer that does not live, which take nothing from it any more. False: not yet, ask again. */
  endWay(peer: number): boolean;
  /** After `resetPeer`, of that rank alone: as `connect`. */
  connectPeer(peer: number, connection: Uint8Array): void;
  /** Registers this rank's part; `ep_ibgda_remote` bytes for `route` on the others. */
  addMemory(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  /** Connects the memory through this NIC. */
  route(memory: NativeSymmetricMemory, remotes: readonly Uint8Array[]): void;
  /** Of a memory that was routed: what `addMemory` gave. */
  ownPart(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  /** Of a memory that was routed: a peer's part is another one from now on. */
  replaceRemote(memory: NativeSymmetricMemory, peer: number, remote: Uint8Array): void;
  removeMemory(memory: NativeSymmetricMemory): void;
  /** This rank's part of a memory for kernels on the GPU, where their queues lie. */
  deviceMemory(byteLength: number, signalSlots: number): NativeGpuSymmetricMemory;
  /** As `addMemory`. */
  addDeviceMemory(memory: NativeGpuSymmetricMemory): Uint8Array<ArrayBuffer>;
  /** As `route`; `handles` are the parts' own, concatenated. */
  routeDevice(memory: NativeGpuSymmetricMemory, handles: Uint8Array, remotes: readonly Uint8Array[]): void;
  removeDeviceMemory(memory: NativeGpuSymmetricMemory): void;
  /** An aligned word of 8 bytes at the peer; its old value lands in `target`. */
  fetchAdd(
    memory: NativeSymmetricMemory,
    peer: number,
    byteOffset: number,
    target: NativeLocal,
    targetOffset: number,
    add: bigint,
  ): PostedRequest;
  compareSwap(
    memory: NativeSymmetricMemory,
    peer: number,
    byteOffset: number,
    target: NativeLocal,
    targetOffset: number,
    compare: bigint,
    swap: bigint,
    /** Both or none: of the whole word. */
    compareMask?: bigint,
    swapMask?: bigint,
  ): PostedRequest;
  failure(peer: number): NativePairFailure | undefined;
  /** Of the queue pair of kernels that broke first. */
  kernelFailure(): (NativePairFailure & { readonly peer: number }) | undefined;
  counts(): SoftNicCounts;
  /** What was wrong with requests: one sentence each. */
  violations(): readonly string[];
  /** One JSON object a line, or a file of the Trace Event Format. */
  trace(format: 'jsonl' | 'chrome'): string;
  /** Replaces the script of faults: see native/nic/mlx5/faults.hpp. */
  setFaults(script: string): void;
  close(): void;
}

/** A way to post WQEs (native/include/ep/device/mlx5_post.h), and by whom a queue pair is shared. */
export interface NativePostWay {
  readonly name: string;
  readonly sharing: string;
  /** By several posters; otherwise each has a queue pair of its own. */
  readonly shared: boolean;
}

/** Of the software NIC, in time of its thread. */
export interface NativeNicSpeed {
  /** 8-byte inline writes. */
  readonly requestsPerSecond: number;
  /** Of 64 KiB writes. */
  readonly bytesPerSecond: number;
  /** What the same thread copies between the same memories. */
  readonly copyPerSecond: number;
}
