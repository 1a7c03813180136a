/** Send work requests as values. */
import type { Violation } from '@ep/native/wire';

/** Size of every entry of a send queue. The wide one is for queue pairs with inline writes, or with more than 32 inline bytes in a send. */
export type WqeBytes = 64 | 128;

/** What every work request begins with. */
export interface WqeHead {
  /** Comes back in the completion. 16 bits, or 64 where the device offers them. */
  readonly requestId: bigint;
  /** Of slot s, counted from 0: bit log2(depth) of s. */
  readonly phase: 0 | 1;
  /** Queue pair at the peer. */
  readonly qpn: number;
  /** The peer, by an address handle of the sender's address vector. */
  readonly ah: number;
  readonly qkey: number;
  /** Whether a completion is written. */
  readonly completion: boolean;
  /** Two bits; bit 0: many small messages in a burst. */
  readonly hints?: number;
}

export interface RemoteAddress {
  readonly address: bigint;
  readonly rkey: number;
}

export interface DataSegment {
  readonly address: bigint;
  /** 24 bits. */
  readonly lkey: number;
  readonly byteLength: number;
}

/** Bytes that travel: from memory (two segments of a send, one of a write), or within the request itself. A message without bytes has a segment of length 0, or none. */
export type Payload = { readonly segments: readonly DataSegment[] } | { readonly inline: Uint8Array };

export type WqeBody =
  | { readonly op: 'send'; readonly payload: Payload; readonly imm?: number }
  | { readonly op: 'write'; readonly remote: RemoteAddress; readonly payload: Payload; readonly imm?: number }
  | { readonly op: 'read'; readonly remote: RemoteAddress; readonly into: readonly DataSegment[] };

export type Wqe = WqeHead & WqeBody;

export interface DecodedWqe {
  /** Undefined where the bytes are too broken to say. */
  readonly wqe: Wqe | undefined;
  readonly opcode: number;
  readonly byteLength: WqeBytes;
  readonly violations: readonly Violation[];
}
