/** Every operation, over ordinary loops. */
import { createStorage, DTYPES, type DType, decode, encode, tensor } from '@ep/core';
import { describe, expect, test } from 'vitest';
import { openWorld } from './world.js';

const f32 = (...values: number[]): Float32Array => Float32Array.from(values);

describe.each([1, 2, 3, 5])('%i ranks', (size) => {
  const ranks = Array.from({ length: size }, (_, rank) => rank);
  const total = ranks.reduce((sum, rank) => sum + rank + 1, 0);

  test('broadcast gives all ranks the elements of the root', async () => {
    const { each } = await openWorld(size);
    for (const root of ranks) {
      await each(async (group, rank) => {
        const data = f32(rank, -rank);
        await group.broadcast(data, { root });
        expect(data).toEqual(f32(root, -root));
      });
    }
  });

  test('allReduce reduces in place, and says whose data is in it', async () => {
    const { each } = await openWorld(size);
    await each(async (group, rank) => {
      const data = f32(rank + 1, 10 * (rank + 1));
      const work = group.allReduce(data);
      await work;
      expect(data).toEqual(f32(total, 10 * total));
      expect(work).toMatchObject({
        op: 'allReduce',
        sequence: 1,
        status: 'done',
        contributors: ranks,
        failedRanks: [],
      });
    });
  });

  test('reduce changes the tensor of the root only', async () => {
    const { each } = await openWorld(size);
    const root = size - 1;
    await each(async (group, rank) => {
      const data = f32(rank + 1);
      await group.reduce(data, { root });
      expect(data).toEqual(f32(rank === root ? total : rank + 1));
    });
  });

  test('allGather and allGatherIntoTensor bring all inputs to all ranks', async () => {
    const { each } = await openWorld(size);
    await each(async (group, rank) => {
      const outputs = ranks.map(() => f32(0, 0));
      const whole = new Float32Array(2 * size);
      await group.allGather(outputs, f32(rank, 7));
      await group.allGatherIntoTensor(whole, f32(rank, 7));
      expect(outputs).toEqual(ranks.map((one) => f32(one, 7)));
      expect([...whole]).toEqual(ranks.flatMap((one) => [one, 7]));
    });
  });

  test('gather brings them to the root, scatter takes them from it', async () => {
    const { each } = await openWorld(size);
    const root = Math.floor(size / 2);
    await each(async (group, rank) => {
      const list = rank === root ? ranks.map(() => f32(0)) : undefined;
      await group.gather(f32(rank + 1), { root, ...(list && { outputs: list }) });
      if (list) expect(list).toEqual(ranks.map((one) => f32(one + 1)));
      const output = f32(0);
      await group.scatter(output, { root, ...(list && { inputs: list }) });
      expect(output).toEqual(f32(rank + 1));
    });
  });

  test('reduceScatter and reduceScatterTensor give each rank the reduction of its part', async () => {
    const { each } = await openWorld(size);
    await each(async (group, rank) => {
      const [listed, parted] = [f32(0), f32(0)];
      await group.reduceScatter(
        listed,
        ranks.map((part) => f32((rank + 1) * 10 ** part)),
      );
      await group.reduceScatterTensor(parted, f32(...ranks.map((part) => (rank + 1) * 10 ** part)), { op: 'max' });
      expect(listed).toEqual(f32(total * 10 ** rank));
      expect(parted).toEqual(f32(size * 10 ** rank));
    });
  });

  test('allToAll exchanges parts of any lengths', async () => {
    const { each } = await openWorld(size);
    await each(async (group, rank) => {
      // What rank a sends to b has a + b elements of value 10 a + b.
      const outputs = ranks.map((from) => new Int32Array(from + rank));
      await group.allToAll(
        outputs,
        ranks.map((to) => new Int32Array(rank + to).fill(10 * rank + to)),
      );
      expect(outputs).toEqual(ranks.map((from) => new Int32Array(from + rank).fill(10 * from + rank)));
    });
  });

  test('allToAllSingle exchanges rows, equal parts and uneven ones', async () => {
    const { each } = await openWorld(size);
    await each(async (group, rank) => {
      const equal = new Int32Array(2 * size);
      await group.allToAllSingle(
        equal,
        Int32Array.from({ length: 2 * size }, (_, i) => 100 * rank + i),
      );
      expect([...equal]).toEqual(ranks.flatMap((from) => [100 * from + 2 * rank, 100 * from + 2 * rank + 1]));

      // Rank a sends b + 1 rows of 3 to rank b.
      const inputSplits = ranks.map((to) => to + 1);
      const outputSplits = ranks.map(() => rank + 1);
      const input = tensor('i32', [total, 3], new Int32Array(3 * total).fill(rank));
      const output = tensor('i32', [size * (rank + 1), 3]);
      await group.allToAllSingle(output, input, { inputSplits, outputSplits });
      expect([...output.data]).toEqual(ranks.flatMap((from) => new Array<number>(3 * (rank + 1)).fill(from)));
    });
  });

  test('barrier ends when the last rank has come, not before', async () => {
    const { groups } = await openWorld(size);
    const works = groups.slice(1).map((group) => group.barrier());
    await new Promise((resolve) => setTimeout(resolve, 5));
    expect(works.map(({ status }) => status)).toEqual(works.map(() => 'pending'));
    await groups[0]!.barrier();
    await Promise.all(works);
    expect(works.map(({ contributors }) => contributors)).toEqual(works.map(() => ranks));
  });
});

describe('dtypes', () => {
  const bitsOf = (dtype: DType, seed: number): Uint8Array =>
    Uint8Array.from({ length: 8 * createStorage(dtype, 1).BYTES_PER_ELEMENT }, (_, i) => (i * 37 + seed * 101) & 0xff);

  test.each(DTYPES)('%s is moved bit by bit', async (dtype) => {
    const { each } = await openWorld(2);
    await each(async (group, rank) => {
      const [input, output] = [tensor(dtype, [2, 4]), tensor(dtype, [4, 4])];
      new Uint8Array(input.data.buffer).set(bitsOf(dtype, rank));
      await group.allGatherIntoTensor(output, input);
      const found = new Uint8Array(output.data.buffer);
      expect(found).toEqual(Uint8Array.from([...bitsOf(dtype, 0), ...bitsOf(dtype, 1)]));
    });
  });

  test.each(['f16', 'bf16'] as const)('%s is summed in f32 and rounded once', async (dtype) => {
    const { each } = await openWorld(3);
    // 1 + e + e rounds to 1 in two roundings to the format, and to more in one.
    const e = dtype === 'f16' ? 2 ** -11 : 2 ** -8;
    await each(async (group, rank) => {
      const data = tensor(dtype, [1], encode(dtype, [rank === 0 ? 1 : e]));
      await group.allReduce(data);
      expect(decode(dtype, data.data)[0]).toBe(1 + 2 * e);
    });
  });

  test.each([
    ['sum', [3, 4, 250], 1],
    ['product', [3, 4, 250], 184],
    ['min', [3, 4, 250], 3],
    ['max', [3, 4, 250], 250],
    ['band', [3, 7, 250], 2],
    ['bor', [3, 4, 250], 255],
    ['bxor', [3, 4, 250], 253],
  ] as const)('%s of u8', async (op, values, expected) => {
    const { each } = await openWorld(3);
    const results = await each(async (group, rank) => {
      const data = tensor('u8', [1], Uint8Array.of(values[rank]!));
      await group.allReduce(data, { op });
      return data.data[0];
    });
    expect(results).toEqual([expected, expected, expected]);
  });

  test('avg divides once, premul-sum scales before, min and max know NaN and -0', async () => {
    const { each } = await openWorld(3);
    const { NaN: nan } = Number;
    await each(async (group, rank) => {
      const [avg, scaled, min, max] = [
        f32(rank),
        f32(rank),
        f32(rank === 1 ? -0 : 0, rank),
        f32(rank === 1 ? 0 : -0, rank === 0 ? nan : 1),
      ];
      await group.allReduce(avg, { op: 'avg' });
      await group.allReduce(scaled, { op: { op: 'premul-sum', factor: 0.5 } });
      await group.allReduce(min, { op: 'min' });
      await group.allReduce(max, { op: 'max' });
      expect(avg).toEqual(f32(1));
      expect(scaled).toEqual(f32(1.5));
      expect(min).toEqual(f32(-0, 0));
      expect(max).toEqual(f32(0, nan));
    });
  });
});

describe('tensors', () => {
  test('allocate gives zeroed tensors that all operations take', async () => {
    const { each } = await openWorld(2);
    await each(async (group, rank) => {
      const data = group.allocate('bf16', 3);
      expect(data).toMatchObject({ dtype: 'bf16', shape: [3] });
      expect([...data.data]).toEqual([0, 0, 0]);
      data.data.set(encode('bf16', [1, 2, rank]));
      await group.allReduce(data);
      expect([...decode('bf16', data.data)]).toEqual([2, 4, 1]);
    });
  });

  test('elements behind the tensor in its storage are not touched', async () => {
    const { each } = await openWorld(2);
    await each(async (group) => {
      const storage = f32(1, 1, 1, 9);
      await group.allReduce(tensor('f32', [3], storage));
      expect(storage).toEqual(f32(2, 2, 2, 9));
    });
  });

  test('a hand-written tensor may change between calls', async () => {
    const { each } = await openWorld(2);
    await each(async (group) => {
      const data = { dtype: 'f32' as const, shape: [1], data: f32(1, 1) };
      await group.allReduce(data);
      data.shape = [2];
      await group.allReduce(data);
      expect(data.data).toEqual(f32(4, 2));
    });
  });

  test('empty tensors take part', async () => {
    const { each } = await openWorld(3);
    await each(async (group) => {
      const work = group.allReduce(new Float32Array(0));
      await work;
      expect(work.contributors).toEqual([0, 1, 2]);
    });
  });
});

describe('allReduceCoalesced', () => {
  test('reduces tensors of several dtypes and sizes as one operation', async () => {
    const { each } = await openWorld(3);
    const costs = await each(async (group, rank) => {
      const small = Array.from({ length: 20 }, (_, i) => new Float32Array(i).fill(rank));
      const large = new Float32Array(10_000).fill(rank + 1);
      const ints = Int32Array.of(rank, 5);
      const work = group.allReduceCoalesced([...small, large, ints], { op: 'sum' });
      await work;
      for (const [i, one] of small.entries()) expect(one).toEqual(new Float32Array(i).fill(3));
      expect(large).toEqual(new Float32Array(10_000).fill(6));
      expect(ints).toEqual(Int32Array.of(3, 15));
      expect(work).toMatchObject({ op: 'allReduceCoalesced', sequence: 1, contributors: [0, 1, 2] });
      const next = group.barrier();
      await next;
      expect(next.sequence).toBe(4);
      return group.trace()['all-reduce']?.calls;
    });
    expect(costs).toEqual([3, 3, 3]);
  });
});
