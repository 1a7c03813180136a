/**
 * Collectives of a team. All arguments are symmetric; members compare them first, and those that differ are named (`EP_MISMATCH`) before anything
 * is written. Then everybody reads what it needs from the others' memory, and a last barrier says that the sources may change again.
 */
import { checkInteger, createStorage, DTYPES, type DType, invalid, type Rank, type WaitOptions } from '@ep/core';
import { checkAgreement } from '@ep/native/ranks';
import { checkFits, checkSymmetric, type Space } from './space.js';
import type { AnySymmetric, SymmetricArray } from './symmetric.js';
import { Team } from './teams.js';

const CALLS = [
  'broadcast',
  'fcollect',
  'collect',
  'alltoall',
  'alltoalls',
  'sumReduce',
  'prodReduce',
  'minReduce',
  'maxReduce',
  'andReduce',
  'orReduce',
  'xorReduce',
] as const;
type Call = (typeof CALLS)[number];

export type IntegerDType = 'i8' | 'u8' | 'i16' | 'u16' | 'i32' | 'u32' | 'i64' | 'u64';
export type ReducedDType = IntegerDType | 'f32' | 'f64';

interface Indexed {
  [index: number]: number | bigint;
}

type Fold = (into: Indexed, from: Indexed, count: number) => void;

/** Written once for numbers and bigints: both have these operators, but no type says so. */
const fold =
  (combine: (a: number, b: number) => number): Fold =>
  (into, from, count) => {
    for (let i = 0; i < count; i++) into[i] = combine(into[i] as number, from[i] as number);
  };

const FOLDS: Readonly<Record<string, Fold>> = {
  sumReduce: fold((a, b) => a + b),
  // Products of 32-bit integers exceed what a number holds exactly: their low bits come from imul.
  prodReduce: fold((a, b) => a * b),
  // A NaN compares false with everything: it is kept once it is there, and taken when it comes.
  minReduce: fold((a, b) => (b < a || Number.isNaN(b) ? b : a)),
  maxReduce: fold((a, b) => (b > a || Number.isNaN(b) ? b : a)),
  andReduce: fold((a, b) => a & b),
  orReduce: fold((a, b) => a | b),
  xorReduce: fold((a, b) => a ^ b),
};
const prodOfWords = fold(Math.imul);

const REDUCED: readonly string[] = ['i8', 'u8', 'i16', 'u16', 'i32', 'u32', 'i64', 'u64', 'f32', 'f64'];
const isFloat = (dtype: DType): boolean => dtype === 'f32' || dtype === 'f64';

function describe(bytes: Uint8Array): string {
  const numbers = new Float64Array(bytes.buffer, bytes.byteOffset, 8);
  const [call, dtype, dest, source, count, root, destStride, sourceStride] = numbers;
  const strides = destStride === 1 && sourceStride === 1 ? '' : `, strides ${destStride} and ${sourceStride}`;
  const from = root! >= 0 ? ` from PE ${root}` : '';
  const length = count! >= 0 ? `${count} ` : '';
  return `${CALLS[call!]} of ${length}${DTYPES[dtype!]}${from}, heap offsets ${dest} and ${source}${strides}`;
}

interface Arguments {
  readonly call: Call;
  readonly team: Team;
  readonly dest: AnySymmetric;
  readonly source: AnySymmetric;
  /** Elements; -1 where members may differ. */
  readonly count: number;
  readonly root?: Rank;
  readonly strides?: readonly [dest: number, source: number];
}

function checkTeam(team: unknown, where: string): void {
  if (!(team instanceof Team)) throw invalid('team', { where, expected: 'a team', found: team });
}

export function collectives(space: Space, worldTeam: Team) {
  const { native, rank } = space;

  function check(call: Call, team: Team, dest: AnySymmetric, source: AnySymmetric, count: number): void {
    checkTeam(team, call);
    checkInteger(count, 'count', call);
    for (const array of [dest, source]) checkSymmetric(space, array, call);
    if (dest.dtype !== source.dtype) {
      throw invalid('dest', { where: call, expected: `of ${source.dtype}, as the source is`, found: dest.dtype });
    }
  }

  /** Compares the call among the members. It is a barrier too: every member's source is ready when it returns. */
  async function agree(args: Arguments, options?: WaitOptions): Promise<void> {
    const { call, team, dest, source, count, root = -1, strides = [1, 1] } = args;
    const numbers = [CALLS.indexOf(call), DTYPES.indexOf(dest.dtype), dest.byteOffset, source.byteOffset, count, root];
    const blob = new Uint8Array(new Float64Array([...numbers, ...strides]).buffer);
    checkAgreement(call, team.native, await team.native.allGather(blob, options), describe);
  }

  /** Copies `count` elements of a member's part of the heap into this PE's. */
  function pull(member: Rank, from: AnySymmetric, at: number, to: AnySymmetric, into: number, count: number): void {
    const width = from.bytesPerElement;
    const source = from.byteOffset + at * width;
    const dest = to.byteOffset + into * width;
    if (member !== rank || source !== dest) native.get(member, source, native, dest, count * width);
  }

  async function alltoall(
    call: 'alltoall' | 'alltoalls',
    args: Omit<Arguments, 'call' | 'root'>,
    options?: WaitOptions,
  ): Promise<void> {
    const { team, dest, source, count, strides = [1, 1] } = args;
    check(call, team, dest, source, count);
    const [destStride, sourceStride] = strides;
    checkInteger(destStride, 'destStride', call, 1);
    checkInteger(sourceStride, 'sourceStride', call, 1);
    const blocks = team.nPes * count;
    const span = (stride: number): number => (blocks === 0 ? 0 : (blocks - 1) * stride + 1);
    checkFits(span(destStride), dest.length, call);
    checkFits(span(sourceStride), source.length, `${call}: source`);
    await agree({ call, ...args }, options);
    const { ranks } = team.native;
    const contiguous = destStride === 1 && sourceStride === 1;
    for (const [j, member] of ranks.entries()) {
      if (contiguous) {
        pull(member, source, team.myPe * count, dest, j * count, count);
        continue;
      }
      const from = source.on(member) as Indexed;
      const to = dest.local as Indexed;
      for (let k = 0; k < count; k++) {
        to[(j * count + k) * destStride] = from[(team.myPe * count + k) * sourceStride]!;
      }
    }
    await team.sync(options);
  }

  async function reduce(
    call: Call,
    team: Team,
    dest: AnySymmetric,
    source: AnySymmetric,
    count: number,
    options?: WaitOptions,
  ): Promise<void> {
    check(call, team, dest, source, count);
    const bitwise = call === 'andReduce' || call === 'orReduce' || call === 'xorReduce';
    if (!REDUCED.includes(dest.dtype) || (bitwise && isFloat(dest.dtype))) {
      const expected = bitwise ? 'an integer type' : `one of ${REDUCED.join(', ')}`;
      throw invalid('dtype', { where: call, expected, found: dest.dtype });
    }
    checkFits(count, dest.length, call);
    checkFits(count, source.length, `${call}: source`);
    await agree({ call, team, dest, source, count }, options);
    const words = call === 'prodReduce' && (dest.dtype === 'i32' || dest.dtype === 'u32');
    const step = words ? prodOfWords : FOLDS[call]!;
    // In member order on every PE, so that rounding is the same everywhere; apart from `dest`, which may be `source`.
    const sum = createStorage(dest.dtype, count);
    const [first, ...others] = [...team.native.ranks].map((member) => source.on(member).subarray(0, count));
    (sum as Float64Array).set(first as Float64Array);
    for (const part of others) step(sum as Indexed, part as Indexed, count);
    await team.sync(options);
    (dest.local as Float64Array).set(sum as Float64Array);
  }

  const reduction = (call: Call) =>
    function reduceOp<D extends ReducedDType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      count: number,
      options?: WaitOptions,
    ): Promise<void> {
      return reduce(call, team, dest, source, count, options);
    };
  const bitReduction = (call: Call) =>
    function reduceBits<D extends IntegerDType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      count: number,
      options?: WaitOptions,
    ): Promise<void> {
      return reduce(call, team, dest, source, count, options);
    };

  return {
    /** `quiet()`, then a barrier of all PEs. */
    barrierAll(options?: WaitOptions): Promise<void> {
      native.fence();
      return worldTeam.sync(options);
    },
    /** Barrier of all PEs. */
    syncAll(options?: WaitOptions): Promise<void> {
      return worldTeam.sync(options);
    },
    /** Barrier of a team. */
    async sync(team: Team, options?: WaitOptions): Promise<void> {
      checkTeam(team, 'sync');
      return team.sync(options);
    },

    /** `count` elements of `root`'s source to every member's `dest`, the root's too. */
    async broadcast<D extends DType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      count: number,
      root: Rank,
      options?: WaitOptions,
    ): Promise<void> {
      check('broadcast', team, dest, source, count);
      checkInteger(root, 'root', 'broadcast', 0, team.nPes - 1);
      checkFits(count, dest.length, 'broadcast');
      checkFits(count, source.length, 'broadcast: source');
      await agree({ call: 'broadcast', team, dest, source, count, root }, options);
      pull(team.native.ranks[root]!, source, 0, dest, 0, count);
      await team.sync(options);
    },

    /** The members' sources of `count` elements each, one after the other in team order. */
    async fcollect<D extends DType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      count: number,
      options?: WaitOptions,
    ): Promise<void> {
      check('fcollect', team, dest, source, count);
      checkFits(count * team.nPes, dest.length, 'fcollect');
      checkFits(count, source.length, 'fcollect: source');
      await agree({ call: 'fcollect', team, dest, source, count }, options);
      for (const [j, member] of team.native.ranks.entries()) pull(member, source, 0, dest, j * count, count);
      await team.sync(options);
    },

    /** As `fcollect`, with a count of each member's own. Resolves with the number of elements in all. */
    async collect<D extends DType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      count: number,
      options?: WaitOptions,
    ): Promise<number> {
      check('collect', team, dest, source, count);
      checkFits(count, source.length, 'collect: source');
      await agree({ call: 'collect', team, dest, source, count: -1 }, options);
      const blobs = await team.native.allGather(new Uint8Array(new Float64Array([count]).buffer), options);
      const counts = blobs.map((bytes) => new Float64Array(bytes.buffer)[0]!);
      const total = counts.reduce((sum, each) => sum + each, 0);
      // Every member sees the same total and the same length, so all refuse or none.
      checkFits(total, dest.length, 'collect');
      let at = 0;
      for (const [j, member] of team.native.ranks.entries()) {
        pull(member, source, 0, dest, at, counts[j]!);
        at += counts[j]!;
      }
      await team.sync(options);
      return total;
    },

    /** Block j of member i's source, `count` elements, becomes block i of member j's `dest`. */
    alltoall<D extends DType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      count: number,
      options?: WaitOptions,
    ): Promise<void> {
      return alltoall('alltoall', { team, dest, source, count }, options);
    },

    /** As `alltoall`, with elements every `destStride` and `sourceStride` apart. */
    alltoalls<D extends DType>(
      team: Team,
      dest: SymmetricArray<D>,
      source: SymmetricArray<D>,
      destStride: number,
      sourceStride: number,
      count: number,
      options?: WaitOptions,
    ): Promise<void> {
      return alltoall('alltoalls', { team, dest, source, count, strides: [destStride, sourceStride] }, options);
    },

    /** Element by element over the members' sources, in team order, bitwise the same on every PE; `dest` may be `source`. Integers wrap. */
    sumReduce: reduction('sumReduce'),
    prodReduce: reduction('prodReduce'),
    /** A NaN wins. */
    minReduce: reduction('minReduce'),
    /** A NaN wins. */
    maxReduce: reduction('maxReduce'),
    andReduce: bitReduction('andReduce'),
    orReduce: bitReduction('orReduce'),
    xorReduce: bitReduction('xorReduce'),
  };
}
