/** The steps of a collective set-up: what one rank could not do, all ranks hear of. */
import { type EpCode, EpError, formatRanks, isEpError, type Rank, type WaitOptions } from '@ep/core';
import { GATHER_BYTES, type Gathering } from './team.js';

export interface SetUpStep {
  /** The call, for messages. */
  readonly where: string;
  /** What the ranks do, as in "rank 3 could not ...". */
  readonly what: string;
  /** What it means where another rank failed. */
  readonly code: EpCode;
}

/** Positions of the members that reported nothing but zeros: each step reports its failure so. */
const failedRanks = (world: Gathering, blobs: readonly Uint8Array[]): Rank[] =>
  blobs.flatMap((blob, position) => (blob.every((byte) => byte === 0) ? [world.ranks[position]!] : []));

/** Every member's bytes, as many as a description has. */
async function gather(world: Gathering, blob: Uint8Array, options: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]> {
  const parts: Uint8Array<ArrayBuffer>[][] = [];
  for (let at = 0; at === 0 || at < blob.byteLength; at += GATHER_BYTES) {
    parts.push(await world.allGather(blob.subarray(at, at + GATHER_BYTES), options));
  }
  if (parts.length === 1) return parts[0]!;
  return Array.from(world.ranks, (_, position) => {
    const whole = new Uint8Array(blob.byteLength);
    for (const [i, part] of parts.entries()) whole.set(part[position]!, i * GATHER_BYTES);
    return whole;
  });
}

/**
 * Collective: reports how a step of this rank went, and resolves with what all ranks reported, of one length and not all zeros where it went well. Throws
 * this rank's `failure`, or one that names the ranks where it failed.
 */
export async function reportStep(
  world: Gathering,
  step: SetUpStep,
  blob: Uint8Array,
  failure: unknown,
  options: WaitOptions,
): Promise<Uint8Array<ArrayBuffer>[]> {
  const blobs = await gather(world, blob, options);
  if (failure !== undefined) throw failure;
  const ranks = failedRanks(world, blobs);
  if (ranks.length === 0) return blobs;
  throw new EpError(step.code, `${step.where}: ${formatRanks(ranks)} could not ${step.what}`, { context: { ranks } });
}

/**
 * Collective: a step that may fail on one rank alone. Ends when all have taken it. Where `body` failed here, that is what this rejects with; where it failed elsewhere,
 * an error names those ranks, and what was made here is handed to `undo`.
 */
export async function together<T>(
  world: Gathering,
  step: SetUpStep,
  limits: WaitOptions,
  body: () => T | Promise<T>,
  undo: (made: T) => void = () => {},
): Promise<T> {
  let made: { readonly value: T } | undefined;
  let failure: unknown;
  try {
    made = { value: await body() };
  } catch (error) {
    failure = error;
    // The others' time is up, too, or soon: they are not to be waited for once more.
    if (limits.signal?.aborted === true || (isEpError(error) && error.code === 'EP_TIMEOUT')) throw error;
  }
  try {
    await reportStep(world, step, Uint8Array.of(made === undefined ? 0 : 1), failure, limits);
  } catch (error) {
    if (made === undefined) throw failure;
    undo(made.value);
    throw error;
  }
  return made!.value;
}
