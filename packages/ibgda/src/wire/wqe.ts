/** Send work requests as values. */
import type { Violation } from '@ep/native/wire';

/** When the NIC writes a completion. */
export type CompletionMode = 'on-error' | 'on-first-error' | 'always';

/** What every work request begins with. */
export interface WqeHead {
  /** Of its first 64-byte block: how many blocks were posted before it, modulo 2^16. */
  readonly index: number;
  readonly qpn: number;
  readonly completion: CompletionMode;
  /** 0: none, 1: small, 2: fence, 3: strong ordering, 4: fence and small. */
  readonly fence?: number;
  readonly solicited?: boolean;
  readonly signature?: number;
}

export interface RemoteAddress {
  readonly address: bigint;
  readonly rkey: number;
}

/** At most 2^31 - 1 bytes, at least one. */
export interface DataSegment {
  readonly address: bigint;
  readonly lkey: number;
  readonly byteLength: number;
}

/** Bytes that travel: from memory, or within the work request itself. A message without bytes has no segments. */
export type Payload = { readonly segments: readonly DataSegment[] } | { readonly inline: Uint8Array };

/** Addresses of words are multiples of their width. `result` takes the old value. */
interface Atomic {
  readonly remote: RemoteAddress;
  readonly result: DataSegment;
}

export type WqeBody =
  | { readonly op: 'nop' }
  | { readonly op: 'send'; readonly payload: Payload }
  | { readonly op: 'write'; readonly remote: RemoteAddress; readonly payload: Payload }
  | { readonly op: 'write-imm'; readonly remote: RemoteAddress; readonly payload: Payload; readonly imm: number }
  | { readonly op: 'read'; readonly remote: RemoteAddress; readonly into: readonly DataSegment[] }
  | (Atomic & { readonly op: 'fetch-add'; readonly add: bigint })
  | (Atomic & { readonly op: 'compare-swap'; readonly swap: bigint; readonly compare: bigint })
  | (Atomic & {
      readonly op: 'masked-fetch-add';
      readonly width: 4 | 8;
      readonly add: bigint;
      /** A set bit i stops the carry out of bit i. */
      readonly boundary: bigint;
    })
  | (Atomic & {
      readonly op: 'masked-compare-swap';
      readonly width: 4 | 8;
      readonly swap: bigint;
      readonly compare: bigint;
      readonly swapMask: bigint;
      readonly compareMask: bigint;
    });

export type Wqe = WqeHead & WqeBody;

export interface DecodedWqe {
  /** Undefined where the bytes are too broken to say. */
  readonly wqe: Wqe | undefined;
  readonly opcode: number;
  /** Bytes that it says it has: a multiple of 16. */
  readonly byteLength: number;
  readonly violations: readonly Violation[];
}

/** 64-byte blocks that a work request of so many bytes takes in its queue. */
export const wqeBlocks = (byteLength: number): number => Math.max(1, Math.ceil(byteLength / 64));
