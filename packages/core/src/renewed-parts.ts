/** How ranks come back into a composed transport. Each of its transports has let them in by itself (`readmit`); then the memories are renewed, one part after the other. */
import { ComposedMemory } from './composed-memory.js';
import { EpError } from './errors.js';
import { formatRanks } from './ranks.js';
import { CloseScope } from './scope.js';
import type {
  AllocateOptions,
  Generations,
  Rank,
  RankSaid,
  RenewOptions,
  Succession,
  SymmetricMemory,
  Transport,
} from './transport.js';

/** A composed transport, as far as memory of it comes to ranks that are new. */
export interface Renewing {
  readonly name: string;
  readonly members: readonly Transport<never>[];
  /** What the part of the member at this place lies over, given the parts of those before it. */
  readonly over: (index: number, parts: readonly SymmetricMemory[]) => Pick<AllocateOptions, 'over' | 'near'>;
  readonly compose: (parts: readonly SymmetricMemory[]) => ComposedMemory;
}

const NOTHING = new Uint8Array(0);
const LENGTH_BYTES = 4;

function composedBy(name: string, memory: SymmetricMemory, where: string): ComposedMemory {
  if (memory instanceof ComposedMemory) return memory;
  throw new EpError('EP_INVALID_ARGUMENT', `${where}: the memory belongs to another transport than ${name}`);
}

/** Throws, on all ranks alike, where ranks were let into one of the transports and not into another. */
function checkAlike(
  first: ReadonlyMap<Rank, RankSaid>,
  said: ReadonlyMap<Rank, RankSaid>,
  names: readonly [string, string],
): void {
  const newOf = (of: ReadonlyMap<Rank, RankSaid>) => [...of].flatMap(([rank, { isNew }]) => (isNew ? [rank] : []));
  const odd = [...new Set([...first.keys(), ...said.keys()])].filter(
    (rank) => first.get(rank)?.isNew !== said.get(rank)?.isNew,
  );
  if (odd.length === 0) return;
  const [one, other] = [first, said].map((of) => `${formatRanks([...of.keys()])} (new: ${formatRanks(newOf(of))})`);
  throw new EpError(
    'EP_MISMATCH',
    `renew: ${names[0]} has ${one}, ${names[1]} has ${other}: each of the composed transports lets in the same ranks`,
    { context: { odd } },
  );
}

/**
 * Collective. The first member's ranks hear what all say, before anything is mapped, and the last one's settle when all parts are there. What fails in between leaves newcomers mapped
 * by some of the members, to which nobody writes: a later call maps others there.
 */
export async function renewParts(
  { name, members, over, compose }: Renewing,
  options: RenewOptions,
): Promise<ComposedMemory> {
  const { memory, facts, check, settle, timeoutMs, signal, byteLength, signalSlots } = options;
  const known = memory === undefined ? undefined : composedBy(name, memory, 'renew');
  const begin = performance.now();
  await using undo = new CloseScope();
  const parts: SymmetricMemory[] = [];
  let first: ReadonlyMap<Rank, RankSaid> | undefined;
  let composed = known;
  for (const [index, member] of members.entries()) {
    const part = await member.renew!({
      ...{ byteLength, signalSlots, ...over(index, parts) },
      ...(known && { memory: known.member(index) }),
      ...(signal && { signal }),
      ...(timeoutMs !== undefined && { timeoutMs: Math.max(1, timeoutMs - (performance.now() - begin)) }),
      facts: index === 0 ? facts : NOTHING,
      check: (said) => {
        if (first !== undefined) return checkAlike(first, said, [members[0]!.name, member.name]);
        first = said;
        check(said);
      },
      settle: (made) => {
        if (index < members.length - 1) return;
        if (composed === undefined) {
          composed = compose([...parts, made]);
          undo.add(composed);
        }
        settle(composed, first!);
      },
    });
    if (known === undefined) undo.add(part);
    parts.push(part);
  }
  for (const part of parts) undo.remove(part);
  undo.remove(composed!);
  return composed!;
}

/** Each with its length before it. */
function joinBytes(parts: readonly Uint8Array[]): Uint8Array {
  const joined = new Uint8Array(parts.reduce((sum, { byteLength }) => sum + LENGTH_BYTES + byteLength, 0));
  const view = new DataView(joined.buffer);
  let at = 0;
  for (const part of parts) {
    view.setUint32(at, part.byteLength, true);
    joined.set(part, at + LENGTH_BYTES);
    at += LENGTH_BYTES + part.byteLength;
  }
  return joined;
}

/** Throws `EP_MISMATCH` for what is not so many parts. */
function splitBytes(joined: Uint8Array, count: number): readonly Uint8Array[] {
  const view = new DataView(joined.buffer, joined.byteOffset, joined.byteLength);
  const parts: Uint8Array[] = [];
  let at = 0;
  while (at + LENGTH_BYTES <= joined.byteLength) {
    const end = at + LENGTH_BYTES + view.getUint32(at, true);
    if (end > joined.byteLength) break;
    parts.push(joined.slice(at + LENGTH_BYTES, end));
    at = end;
  }
  if (parts.length === count && at === joined.byteLength) return parts;
  throw new EpError('EP_MISMATCH', `replace: ${joined.byteLength} bytes are no parts of ${count} composed transports`);
}

/** Those of the members that have any; undefined where none has. */
function composeGenerations(name: string, all: readonly Succession[]): Generations | undefined {
  const some = all.flatMap(({ generations }, index) => (generations === undefined ? [] : [{ generations, index }]));
  if (some.length === 0) return undefined;
  return {
    current: () => some.map(({ generations }) => generations.current()).join('+'),
    onChange: (user) => {
      const ends = some.map(({ generations }) => generations.onChange(user));
      return () => {
        for (const end of ends) end();
      };
    },
    // HAZARD: what the others map stays: a peer that is a thread of this process would never let go of it.
    reconnect: (memory, peer, joined) => {
      const composed = composedBy(name, memory, 'reconnect');
      const parts = splitBytes(joined, all.length);
      for (const { generations, index } of some) generations.reconnect(composed.member(index), peer, parts[index]!);
    },
  };
}

/** Undefined where one of the members has none. */
export function composeSuccession(renewing: Renewing): Succession | undefined {
  const { name, members, over, compose } = renewing;
  const all = members.flatMap(({ succession }) => (succession === undefined ? [] : [succession]));
  if (all.length < members.length) return undefined;
  const generations = composeGenerations(name, all);
  return {
    ...(generations && { generations }),
    world: all.map(({ world }) => world).join('+'),
    isNew: all.some(({ isNew }) => isNew),
    lifeOf: (rank) => {
      const lives = all.map(({ lifeOf }) => lifeOf(rank));
      return lives.includes('') ? '' : lives.join('+');
    },
    onReplace: (listener) => {
      const ends = all.map(({ onReplace }) => onReplace(listener));
      return () => {
        for (const end of ends) end();
      };
    },
    part: (memory) => {
      const composed = composedBy(name, memory, 'part');
      return joinBytes(all.map(({ part }, index) => part(composed.member(index))));
    },
    inherit: async (size) => {
      await using undo = new CloseScope();
      const parts: SymmetricMemory[] = [];
      for (const [index, { inherit }] of all.entries()) {
        parts.push(undo.add(await inherit({ ...size, ...over(index, parts) })));
      }
      const composed = compose(parts);
      for (const part of parts) undo.remove(part);
      return composed;
    },
    replace: (memory, peer, joined) => {
      const composed = composedBy(name, memory, 'replace');
      for (const [index, part] of splitBytes(joined, all.length).entries())
        all[index]!.replace(composed.member(index), peer, part);
    },
  };
}
