/** Every wait and test form. PE 0 writes, the others wait; each comparison is awaited from a value for which it does not hold yet. */
import assert from 'node:assert/strict';
import { codeOf, runShmem } from './rank.mjs';

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** cmp: a value that does not hold against 10, then one that does. */
const STEPS = { eq: [9, 10], ne: [10, 9], lt: [10, 9], le: [11, 10], gt: [10, 11], ge: [9, 10] };

await runShmem(async (shmem, { args }) => {
  const me = shmem.myPe();
  const size = shmem.nPes();
  for (const dtype of ['i8', 'u8', 'i16', 'u16', 'i32', 'u32', 'i64', 'u64']) {
    const element = dtype.endsWith('64') ? BigInt : Number;
    const word = await shmem.calloc(dtype, 3);
    for (const [cmp, [no, yes]] of Object.entries(STEPS)) {
      word.local.fill(element(no));
      await shmem.barrierAll();
      if (me === 0) {
        if (args.slow) await pause(5);
        for (let pe = 0; pe < size; pe++) shmem.p(word, element(yes), pe, 1);
      } else {
        const one = word.subarray(1, 2);
        await shmem.waitUntil(one, cmp, element(10));
        assert.equal(shmem.test(one, cmp, element(10)), true);
        assert.equal(shmem.test(word, cmp, element(10)), false);
        assert.equal(one.local[0], element(yes));
      }
      await shmem.barrierAll();
    }
    if (dtype.startsWith('i')) {
      word.local.fill(element(5));
      await shmem.barrierAll();
      shmem.p(word, element(-7), (me + 1) % size);
      // Unsigned, -7 would be far above.
      await shmem.waitUntil(word, 'lt', element(-6));
      await shmem.waitUntil(word, 'eq', element(-7));
      await shmem.barrierAll();
    }
    await shmem.free(word);
  }

  // PE 0 raises the elements one after the other, each when told so.
  const flags = await shmem.calloc('i32', 6);
  const go = await shmem.calloc('u64', 1);
  if (me === 0) {
    for (let i = 0; i < 6; i++) {
      for (let pe = 1; pe < size; pe++) shmem.p(flags, i + 1, pe, i);
      await shmem.signalWaitUntil(go, 'ge', (i + 1) * (size - 1));
    }
  } else {
    const status = new Int32Array(6);
    for (let i = 0; i < 6; i++) {
      assert.equal(await shmem.waitUntilAny(flags, 'ne', 0, { status }), i);
      assert.equal(shmem.testAny(flags, 'ne', 0, { status }), i);
      status[i] = 1;
      const held = Uint32Array.from({ length: i + 1 }, (_, k) => k);
      assert.deepEqual(await shmem.waitUntilSome(flags, 'gt', 0), held);
      assert.deepEqual(shmem.testSome(flags, 'gt', 0), held);
      const values = Int32Array.from({ length: 6 }, (_, k) => k + 1);
      assert.equal(await shmem.waitUntilAnyVector(flags, 'eq', values), 0);
      assert.deepEqual(await shmem.waitUntilSomeVector(flags, 'eq', values), held);
      assert.equal(
        shmem.testAnyVector(
          flags,
          'eq',
          values.map((v) => v + 1),
        ),
        undefined,
      );
      assert.equal(shmem.testAllVector(flags, 'eq', values), i === 5);
      assert.deepEqual(shmem.testSomeVector(flags, 'eq', values), held);
      assert.equal(shmem.testAll(flags, 'gt', 0), i === 5);
      assert.equal(shmem.testAll(flags, 'gt', 0, { status: status.map((v) => 1 - v) }), true);
      const all = i === 4 ? shmem.waitUntilAll(flags, 'gt', 0) : undefined;
      const vector = i === 4 ? shmem.waitUntilAllVector(flags, 'ge', values) : undefined;
      const one = new BigUint64Array([1n]);
      shmem.atomicAdd(go, one[0], 0);
      await all;
      await vector;
    }
    assert.equal(await shmem.waitUntilAny(flags, 'eq', 0, { status }), undefined);
    assert.equal((await shmem.waitUntilSome(flags, 'eq', 0, { status })).length, 0);
    await shmem.waitUntilAll(flags, 'eq', 0, { status });
  }
  await shmem.barrierAll();

  // Data behind a signal, in rounds, without any other synchronisation: whoever sees the signal must see the data.
  const data = await shmem.calloc('f64', 512);
  const arrived = await shmem.calloc('u64', 1);
  const taken = await shmem.calloc('u64', 1);
  const next = (me + 1) % size;
  const previous = (me + size - 1) % size;
  for (let round = 1; round <= args.rounds; round++) {
    shmem.putSignal(data, new Float64Array(512).fill(me * 1e6 + round), arrived, round, 'set', next);
    assert.equal(await shmem.signalWaitUntil(arrived, 'ge', round), BigInt(round));
    assert.equal(shmem.signalFetch(arrived), BigInt(round));
    assert.ok(data.local.every((value) => value === previous * 1e6 + round));
    shmem.atomicSet(taken, BigInt(round), previous);
    await shmem.waitUntil(taken, 'ge', round);
  }
  await shmem.barrierAll();

  const word = await shmem.calloc('i32', 2);
  assert.equal(await codeOf(() => shmem.waitUntil(word, 'eq', 1, { timeoutMs: 5 })), 'EP_TIMEOUT');
  assert.equal(await codeOf(() => shmem.waitUntilSome(word, 'eq', 1, { timeoutMs: 5 })), 'EP_TIMEOUT');
  assert.equal(await codeOf(() => shmem.waitUntilAll(word, 'eq', 1, { timeoutMs: 0 })), 'EP_TIMEOUT');
  const controller = new AbortController();
  const reason = new Error('enough');
  const waiting = shmem.waitUntil(word, 'eq', 1, { signal: controller.signal });
  setTimeout(() => controller.abort(reason), 5);
  await assert.rejects(waiting, (error) => error === reason);
  await assert.rejects(shmem.waitUntil(word, 'eq', 1, { signal: controller.signal }), (error) => error === reason);
  const f64 = await shmem.calloc('f64', 1);
  for (const wrong of [
    () => shmem.waitUntil(f64, 'eq', 1),
    () => shmem.waitUntil(word, 'equal', 1),
    () => shmem.waitUntil(word, 'eq', 1.5),
    () => shmem.waitUntil(word, 'eq', 1, { timeoutMs: -1 }),
    () => shmem.waitUntil(word, 'eq', 1, { timeoutMs: Number.NaN }),
    () => shmem.waitUntil(word, 'eq', 1, { peers: [size] }),
    () => shmem.waitUntilAllVector(word, 'eq', [1]),
    () => shmem.waitUntilAll(word, 'eq', 1, { status: [0] }),
    () => shmem.test(word.subarray(0, 0), 'eq', 1),
  ]) {
    assert.equal(await codeOf(wrong), 'EP_INVALID_ARGUMENT');
  }
  await shmem.barrierAll();

  // What is under way when the library closes ends.
  // Without peers: the others may close first, and then nobody would be left to write.
  const cut = codeOf(() => shmem.waitUntil(word, 'eq', 1, { peers: [] }));
  await pause(2);
  await shmem.finalize();
  assert.match(await cut, /^EP_(CLOSED|ABORTED)$/);
  assert.equal(await codeOf(() => shmem.barrierAll()), 'EP_CLOSED');
  assert.equal(await codeOf(() => shmem.put(word, new Int32Array(1), 0)), 'EP_CLOSED');
  assert.equal(word.local.length, 0, 'views are detached');
  await shmem.close();
});
