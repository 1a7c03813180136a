import { checkInteger } from '../check.js';
import { invalidArgument, shown } from '../error.js';

/**
 * How the channels of a token travel. `f8e4m3+…`: e4m3 with one scale per 128 channels, fp32 or a power of two in a byte (UE8M0).
 * `logfmt10`: 10 bits a channel, and the largest and smallest magnitude of each 128 as a pair of bf16.
 */
export type Payload = 'f32' | 'bf16' | 'f16' | 'f8e4m3+f32' | 'f8e4m3+ue8m0' | 'logfmt10';

/** Channels that share a scale. */
export const scaledChannels = 128;

/** Bytes before the payload of a dispatched row: source rank, token and choice, the rest unused. Also the alignment of rows. */
export const headerBytes = 16;

export const maxHidden = 2 ** 24;

/** Bytes of one token's channels and scales, any hidden size. */
export function payloadBytes(payload: Payload, hidden: number): number {
  checkInteger(hidden, 'hidden', 1, maxHidden);
  const blocks = Math.ceil(hidden / scaledChannels);
  switch (payload) {
    case 'f32':
      return 4 * hidden;
    case 'bf16':
    case 'f16':
      return 2 * hidden;
    case 'f8e4m3+f32':
      return hidden + 4 * blocks;
    case 'f8e4m3+ue8m0':
      return hidden + blocks;
    case 'logfmt10':
      return Math.ceil((10 * hidden) / 8) + 4 * blocks;
    default:
      throw invalidArgument(
        `a payload must be f32, bf16, f16, f8e4m3+f32, f8e4m3+ue8m0 or logfmt10, found ${shown(payload)}`,
        { found: payload },
      );
  }
}

/** Bytes of a row on its way to an expert: header and payload, each a multiple of 16. */
export function messageBytes(payload: Payload, hidden: number): number {
  return headerBytes + alignedRowBytes(payload, hidden);
}

/** Bytes of a row on its way back: its place is known, so it needs no header. A multiple of 16. */
export function alignedRowBytes(payload: Payload, hidden: number): number {
  return Math.ceil(payloadBytes(payload, hidden) / headerBytes) * headerBytes;
}
