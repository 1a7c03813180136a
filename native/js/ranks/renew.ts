/** Memory that ranks share with those that have come in the place of dead ones. */
import { EpError, invalid, type Rank, type RankSaid, type RenewOptions, type WaitOptions } from '@ep/core';
import { segmentHandleLayout } from '../abi.gen.js';
import type { NativeSymmetricMemory } from '../binding.js';
import { native } from '../native.js';
import { type Allocator, byRank, rankMemoryOf } from './allocate.js';
import { reportStep } from './gather.js';
import { RankMemory } from './memory.js';
import type { Size } from './memory-limits.js';

const HANDLE_BYTES = segmentHandleLayout.byteLength;
/** Most bytes that a rank may tell the others. */
const FACTS_BYTES = 1024;
/** Is it here, is it new, length of what it tells. */
const HEAD_BYTES = 8;

function format(isNew: boolean, handle: Uint8Array, facts: Uint8Array): Uint8Array {
  const blob = new Uint8Array(HEAD_BYTES + HANDLE_BYTES + FACTS_BYTES);
  blob.set([1, isNew ? 1 : 0, facts.byteLength & 0xff, facts.byteLength >> 8]);
  blob.set(handle, HEAD_BYTES);
  blob.set(facts, HEAD_BYTES + HANDLE_BYTES);
  return blob;
}

function parse(blob: Uint8Array<ArrayBuffer>): RankSaid & { readonly handle: Uint8Array<ArrayBuffer> } {
  const facts = HEAD_BYTES + HANDLE_BYTES;
  return {
    isNew: blob[1] === 1,
    handle: blob.slice(HEAD_BYTES, facts),
    facts: blob.slice(facts, facts + (blob[2]! | (blob[3]! << 8))),
  };
}

/** Of one rank; see `Succession.inherit`. Peers' parts are stand-ins. */
export function inheritMemory(allocator: Allocator, size: Size): RankMemory {
  const { rank, worldSize, context, reach } = allocator;
  const made = new (native().binding.SymmetricMemory)(context, size.byteLength, size.signalSlots);
  try {
    const none = new Uint8Array(0);
    reach.connect(
      made,
      Array.from({ length: worldSize }, (_, peer) => (peer === rank ? made.handle() : none)),
    );
    return rankMemoryOf(allocator, size, made);
  } catch (error) {
    made.release();
    throw error;
  }
}

/** Collective over the ranks that are here; see `Transport.renew`. Of parts that all ranks map. */
export async function renewMemory(
  allocator: Allocator,
  size: Size,
  renewal: Pick<RenewOptions, 'memory' | 'facts' | 'check' | 'settle'>,
  options: WaitOptions,
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
  const held = known?.nativeMemory(where);
  let made: NativeSymmetricMemory | undefined;
  let failure: unknown;
  let blob = new Uint8Array(HEAD_BYTES + HANDLE_BYTES + FACTS_BYTES);
  try {
    made =
      held === undefined
        ? new (native().binding.SymmetricMemory)(context, size.byteLength, size.signalSlots)
        : undefined;
    blob = Uint8Array.from(format(held === undefined, (held ?? made!).handle(), facts));
  } catch (error) {
    failure = error;
  }
  let memory: RankMemory | undefined;
  try {
    const step = (what: string) => ({ where, what, code: 'EP_MEMORY_LIMIT' }) as const;
    const blobs = await reportStep(world, step(`make its part of ${size.byteLength} bytes`), blob, failure, options);
    const said = new Map(blobs.map((bytes, position) => [world.ranks[position]! as Rank, parse(bytes)]));
    try {
      check(said);
      if (held !== undefined) {
        for (const [one, { isNew, handle }] of said) if (isNew) held.replace(one, handle);
      } else {
        const handles = [...said.values()].map(({ handle }) => handle);
        reach.connect(made!, byRank(world, worldSize, handles));
        memory = rankMemoryOf(allocator, size, made!);
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
    else made?.release();
    throw error;
  }
}
