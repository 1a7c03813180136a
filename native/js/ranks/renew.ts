/** Memory that ranks share with those that have come in the place of dead ones. */
import { EpError, invalid, type Rank, type RankSaid, type RenewOptions, type WaitOptions } from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { native } from '../native.js';
import { type Allocator, byRank, isReconnected, type RenewableReach, rankMemoryOf } from './allocate.js';
import { reportStep } from './gather.js';
import { RankMemory } from './memory.js';
import type { Size } from './memory-limits.js';
import { checkNear, formatNear, type Over } from './over.js';

/** Most bytes that a rank may tell the others. */
const FACTS_BYTES = 1024;
/** Is it here, is it new, length of what it tells. */
const HEAD_BYTES = 8;

export interface Renewer extends Allocator {
  readonly reach: RenewableReach;
}

interface PartSaid extends RankSaid {
  /** Whom it stores to, a byte for each rank. */
  readonly near: Uint8Array<ArrayBuffer>;
  /** `Reach.describe` of its part. */
  readonly description: Uint8Array<ArrayBuffer>;
}

/** Alike for ranks that have the memory and those that are new: what each tells has one length. */
class Sayings {
  readonly byteLength: number;
  readonly #descriptionAt: number;
  readonly #factsAt: number;

  constructor(worldSize: number, descriptionBytes: number) {
    this.#descriptionAt = HEAD_BYTES + worldSize;
    this.#factsAt = this.#descriptionAt + descriptionBytes;
    this.byteLength = this.#factsAt + FACTS_BYTES;
  }

  format({ isNew, near, description, facts }: PartSaid): Uint8Array {
    const blob = new Uint8Array(this.byteLength);
    blob.set([1, isNew ? 1 : 0, facts.byteLength & 0xff, facts.byteLength >> 8]);
    blob.set(near, HEAD_BYTES);
    blob.set(description, this.#descriptionAt);
    blob.set(facts, this.#factsAt);
    return blob;
  }

  parse(blob: Uint8Array<ArrayBuffer>): PartSaid {
    return {
      isNew: blob[1] === 1,
      near: blob.slice(HEAD_BYTES, this.#descriptionAt),
      description: blob.slice(this.#descriptionAt, this.#factsAt),
      facts: blob.slice(this.#factsAt, this.#factsAt + (blob[2]! | (blob[3]! << 8))),
    };
  }
}

function makePart(context: NativeRankContext, size: Size, over: Over | undefined): NativeSymmetricMemory {
  const { SymmetricMemory } = native().binding;
  return over === undefined
    ? new SymmetricMemory(context, size.byteLength, size.signalSlots)
    : new SymmetricMemory(over.memory, Int32Array.from(over.near));
}

/** Of one rank; see `Succession.inherit`. Peers' parts are stand-ins. */
export function inheritMemory(allocator: Allocator, size: Size, over?: Over): RankMemory {
  const { rank, worldSize, context, reach } = allocator;
  const made = makePart(context, size, over);
  try {
    const none = new Uint8Array(0);
    const own = reach.describe(made);
    reach.connect(
      made,
      Array.from({ length: worldSize }, (_, peer) => (peer === rank ? own : none)),
    );
    return rankMemoryOf(allocator, size, made, over !== undefined);
  } catch (error) {
    reach.release(made);
    made.release();
    throw error;
  }
}

/** Collective over the ranks that are here; see `Transport.renew`. */
export async function renewMemory(
  allocator: Renewer,
  size: Size,
  renewal: Pick<RenewOptions, 'memory' | 'facts' | 'check' | 'settle'>,
  options: WaitOptions,
  over?: Over,
): Promise<RankMemory> {
  const where = 'renew';
  const { worldSize, context, world, reach, liveness } = allocator;
  const { memory: known, facts, check, settle } = renewal;
  if (facts.byteLength > FACTS_BYTES) {
    throw invalid('facts', { where, expected: `at most ${FACTS_BYTES} bytes`, found: facts.byteLength });
  }
  if (known !== undefined && !(known instanceof RankMemory && known.context === context)) {
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the memory belongs to another transport`);
  }
  if (known !== undefined && known.isOver !== (over !== undefined)) {
    const expected = known.isOver ? 'the memory that this one is over' : 'absent: this memory is over no other';
    throw invalid('over', { where, expected, found: over === undefined ? undefined : 'a memory' });
  }
  const held = known?.nativeMemory(where);
  const near = formatNear(over?.near ?? [], worldSize);
  const sayings = new Sayings(worldSize, reach.byteLength(size.signalSlots));
  let made: NativeSymmetricMemory | undefined;
  let failure: unknown;
  let blob: Uint8Array = new Uint8Array(sayings.byteLength);
  try {
    made = held === undefined ? makePart(context, size, over) : undefined;
    const description = held === undefined ? reach.describe(made!) : reach.described(held);
    blob = sayings.format({ isNew: held === undefined, near, description: Uint8Array.from(description), facts });
  } catch (error) {
    failure = error;
  }
  let memory: RankMemory | undefined;
  try {
    const step = (what: string) => ({ where, what, code: 'EP_MEMORY_LIMIT' }) as const;
    const blobs = await reportStep(world, step(`make its part of ${size.byteLength} bytes`), blob, failure, options);
    const said = new Map(blobs.map((bytes, position) => [world.ranks[position]! as Rank, sayings.parse(bytes)]));
    try {
      checkNear(
        world,
        [...said.values()].map((one) => one.near),
      );
      check(said);
      const descriptions = () =>
        byRank(
          world,
          worldSize,
          [...said.values()].map(({ description }) => description),
        );
      if (held !== undefined && isReconnected(reach)) {
        reach.reconnect(held, descriptions());
      } else if (held !== undefined) {
        for (const [one, { isNew, description }] of said) if (isNew) reach.replace(held, one, description);
      } else {
        reach.connect(made!, descriptions());
        memory = rankMemoryOf(allocator, size, made!, over !== undefined);
      }
      settle(memory ?? known!, said);
    } catch (error) {
      failure = error;
    }
    const report = Uint8Array.of(failure === undefined ? 1 : 0);
    const last = { where, what: 'take part', code: 'EP_TRANSPORT_FAILED' } as const;
    await reportStep(world, last, report, failure, options).catch((error: unknown) => {
      throw liveness.notice(error);
    });
    return memory ?? (known as RankMemory);
  } catch (error) {
    if (memory !== undefined) await memory.close();
    else if (made !== undefined) {
      reach.release(made);
      made.release();
    }
    throw error;
  }
}
