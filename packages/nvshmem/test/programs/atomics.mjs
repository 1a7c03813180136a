/** Each atomic operation alone against plain arithmetic on bigints; then all PEs at once, where only the invariants are known. */
import assert from 'node:assert/strict';
import { codeOf, generator, runShmem } from './rank.mjs';

const wrap = {
  i32: (v) => Number(BigInt.asIntN(32, v)),
  u32: (v) => Number(BigInt.asUintN(32, v)),
  i64: (v) => BigInt.asIntN(64, v),
  u64: (v) => BigInt.asUintN(64, v),
};
const OPERATIONS = {
  Add: (a, b) => a + b,
  And: (a, b) => a & b,
  Or: (a, b) => a | b,
  Xor: (a, b) => a ^ b,
};

await runShmem(async (shmem, { args }) => {
  const me = shmem.myPe();
  const size = shmem.nPes();
  for (const dtype of ['i32', 'u32', 'i64', 'u64']) {
    // One column for each PE: nobody else touches it, so every step has one outcome.
    const array = await shmem.calloc(dtype, size);
    const random = generator(args.seed + me);
    for (let step = 0; step < args.steps; step++) {
      const pe = random.below(size);
      const before = shmem.atomicFetch(array, pe, me);
      const operand = wrap[dtype]((BigInt(random.next()) << 32n) | BigInt(random.next()));
      const name = Object.keys(OPERATIONS)[random.below(4)];
      let after = wrap[dtype](OPERATIONS[name](BigInt(before), BigInt(operand)));
      switch (random.below(7)) {
        case 0:
          assert.equal(shmem[`atomicFetch${name}`](array, operand, pe, me), before);
          break;
        case 1:
          shmem[`atomic${name}`](array, operand, pe, me);
          break;
        case 2:
          after = operand;
          assert.equal(shmem.atomicSwap(array, operand, pe, me), before);
          break;
        case 3:
          after = operand;
          shmem.atomicSet(array, operand, pe, me);
          break;
        case 4: {
          const condition = step % 2 === 0 ? before : wrap[dtype](BigInt(before) + 1n);
          after = step % 2 === 0 ? operand : before;
          assert.equal(shmem.atomicCompareSwap(array, condition, operand, pe, me), before);
          break;
        }
        case 5:
          after = wrap[dtype](BigInt(before) + 1n);
          assert.equal(shmem.atomicFetchInc(array, pe, me), before);
          break;
        default:
          after = wrap[dtype](BigInt(before) + 1n);
          shmem.atomicInc(array, pe, me);
      }
      assert.equal(shmem.atomicFetch(array, pe, me), after, `${dtype} step ${step}`);
      assert.equal(shmem.g(array, pe, me), after);
    }
    await shmem.barrierAll();

    // Everybody takes tickets from one counter: each number comes once.
    const counter = await shmem.calloc(dtype, 1);
    const taken = await shmem.calloc('u8', args.tickets * size);
    for (let i = 0; i < args.tickets; i++) {
      const ticket = Number(shmem.atomicFetchInc(counter, 0));
      shmem.p(taken, shmem.g(taken, 0, ticket) + 1, 0, ticket);
    }
    await shmem.barrierAll();
    if (me === 0) assert.ok(taken.local.every((count) => count === 1));
    assert.equal(Number(shmem.atomicFetch(counter, 0)), args.tickets * size);

    // A lock out of compare-swap, around a sum that is not atomic.
    const lock = await shmem.calloc(dtype, 1);
    const sum = await shmem.calloc('f64', 1);
    for (let i = 0; i < 50; i++) {
      while (Number(shmem.atomicCompareSwap(lock, 0, me + 1, 0)) !== 0);
      shmem.p(sum, shmem.g(sum, 0) + 1, 0);
      shmem.quiet();
      assert.equal(Number(shmem.atomicSwap(lock, 0, 0)), me + 1);
    }
    await shmem.barrierAll();
    assert.equal(shmem.g(sum, 0), 50 * size);
    await shmem.barrierAll();
    for (const each of [sum, lock, taken, counter, array]) await shmem.free(each);
  }

  for (const dtype of ['f32', 'f64']) {
    const array = await shmem.calloc(dtype, size);
    for (const value of [1.5, -0, Number.POSITIVE_INFINITY, Number.NaN, 3.25]) {
      const pe = (me + 1) % size;
      const before = shmem.atomicFetch(array, pe, me);
      assert.ok(Object.is(shmem.atomicSwap(array, value, pe, me), before));
      assert.ok(Object.is(shmem.g(array, pe, me), value));
      shmem.atomicSet(array, -value, pe, me);
      assert.ok(Object.is(shmem.atomicFetch(array, pe, me), -value));
    }
    assert.equal(await codeOf(() => shmem.atomicAdd(array, 1, 0)), 'EP_INVALID_ARGUMENT');
    await shmem.free(array);
  }
  const i32 = await shmem.calloc('i32', 1);
  const bytes = await shmem.calloc('u8', 8);
  for (const wrong of [
    () => shmem.atomicAdd(i32, 1.5, 0),
    () => shmem.atomicAdd(i32, 2 ** 32, 0),
    () => shmem.atomicAdd(i32, 1n, 0),
    () => shmem.atomicAdd(i32, 1, 0, 1),
    () => shmem.atomicAdd(bytes, 1, 0),
    () => shmem.atomicFetch(i32, size),
  ]) {
    assert.equal(await codeOf(wrong), 'EP_INVALID_ARGUMENT');
  }
  assert.equal(i32.local[0], 0);
});
