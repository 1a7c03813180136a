/** The symmetric heap: places agree, mismatches name the PEs, and nothing is lost by either. */
import assert from 'node:assert/strict';
import { prefixStore } from '@ep/core';
import { shmemInit } from '@ep/nvshmem';
import { codeOf, generator, runShmem } from './rank.mjs';

await runShmem(async (shmem, { store, rank, worldSize, args }) => {
  const size = shmem.nPes();
  const me = shmem.myPe();
  const random = generator(args.seed);
  const alive = [];
  for (let step = 0; step < args.steps; step++) {
    if (alive.length > 0 && random.below(3) === 0) {
      const [array] = alive.splice(random.below(alive.length), 1);
      await shmem.free(array);
    } else {
      const dtype = ['u8', 'f64', 'i32'][random.below(3)];
      const length = random.below(300);
      const alignment = 2 ** random.below(13);
      const form = random.below(3);
      const array =
        form === 0
          ? await shmem.malloc(dtype, length)
          : form === 1
            ? await shmem.calloc(dtype, length)
            : await shmem.align(alignment, dtype, length);
      if (form === 1) assert.ok(array.local.every((value) => value === 0));
      if (form === 2) assert.equal(array.byteOffset % alignment, 0);
      if (form === 2 && length > 0) assert.equal(array.local.byteOffset % alignment, 0);
      for (const other of alive) {
        const apart =
          other.byteOffset + other.byteLength <= array.byteOffset ||
          array.byteOffset + array.byteLength <= other.byteOffset;
        assert.ok(apart, 'objects overlap');
      }
      array.local.fill(step % 100);
      array.mark = step % 100;
      alive.push(array);
    }
    for (const array of alive)
      assert.ok(
        array.local.every((value) => value === array.mark),
        'somebody wrote over it',
      );
  }
  while (alive.length > 0) await shmem.free(alive.pop());

  // The whole heap is one range again.
  const all = await shmem.malloc('u8', args.heapBytes);
  await assert.rejects(shmem.malloc('u8', 1), {
    code: 'EP_MEMORY_LIMIT',
    message: /largest free range has 0; raise heapBytes/,
  });
  await shmem.free(all);
  await assert.rejects(shmem.malloc('u8', args.heapBytes + 1), { code: 'EP_MEMORY_LIMIT' });

  if (size > 1) {
    const last = size - 1;
    const differ = async (body) => {
      try {
        await body();
      } catch (error) {
        assert.equal(error.code, 'EP_MISMATCH');
        assert.deepEqual(error.context.odd, me === last ? Array.from({ length: last }, (_, pe) => pe) : [last]);
        assert.match(error.message, me === last ? /rank 0/ : new RegExp(`rank ${last}`));
        return;
      }
      assert.fail('a mismatch was not noticed');
    };
    await differ(() => shmem.malloc('f64', me === last ? 11 : 10));
    await differ(() => (me === last ? shmem.calloc('f64', 10) : shmem.malloc('f64', 10)));
    await differ(() => (me === last ? shmem.align(256, 'f64', 10) : shmem.align(128, 'f64', 10)));
    const a = await shmem.malloc('u8', 100);
    const b = await shmem.malloc('u8', 100);
    // Another order.
    await differ(() => shmem.free(me === last ? b : a));
    await differ(() => (me === last ? shmem.malloc('u8', 100) : shmem.free(a)));
    // After all that the heaps still agree, and nothing was freed.
    a.local.fill(1);
    const c = await shmem.malloc('u8', 100);
    assert.ok(c.byteOffset > b.byteOffset);
    await shmem.free(b);
    await shmem.free(a);
    await shmem.free(c);
    // Two at a time, in one order everywhere.
    const pair = await Promise.all([shmem.malloc('u8', 100), shmem.malloc('f64', 100)]);
    assert.deepEqual(
      pair.map((array) => array.byteOffset),
      [0, 128],
    );
    await Promise.all(pair.map((array) => shmem.free(array)));
  }

  const array = await shmem.malloc('f64', 8);
  assert.equal(await codeOf(() => shmem.free(array.subarray(1))), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.free(array.subarray(0, 2))), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.free({})), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.malloc('f64', -1)), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.malloc('f64', 1.5)), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.malloc('f128', 1)), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.align(48, 'f64', 1)), 'EP_INVALID_ARGUMENT');
  await shmem.free(array);
  assert.equal(await codeOf(() => shmem.free(array)), 'EP_CLOSED');
  assert.equal(await codeOf(() => shmem.put(array, new Float64Array(1), 0)), 'EP_CLOSED');
  assert.equal(await codeOf(() => shmem.g(array, 0)), 'EP_CLOSED');

  // A pointer into another heap.
  const other = await shmemInit({ rank, worldSize, store: prefixStore(store, 'other') }, { heapBytes: 4096 });
  const foreign = await other.malloc('f64', 8);
  assert.equal(await codeOf(() => shmem.put(foreign, new Float64Array(1), 0)), 'EP_INVALID_ARGUMENT');
  assert.equal(await codeOf(() => shmem.free(foreign)), 'EP_INVALID_ARGUMENT');
  await other.finalize();
}, 1 << 18);
