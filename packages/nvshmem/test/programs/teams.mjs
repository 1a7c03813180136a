/** Teams, and every collective over the world and over teams, against plain formulas. */
import assert from 'node:assert/strict';
import { codeOf, runShmem } from './rank.mjs';

/** What element i of a PE's source is. */
const at = (pe, i) => ((pe * 31 + i * 7) % 23) - 5;

/** Math.min takes no bigints. */
function lesser(a, b) {
  if (a < b) return a;
  return b;
}

/** Rounds in which each member reads what the next one wrote before it came to `meet`, and overwrites only after another meeting. */
async function meetings(shmem, team, meet) {
  const ranks = [...team.ranks];
  const mine = await shmem.calloc('i32', 64);
  const next = ranks[(team.myPe + 1) % ranks.length];
  const read = new Int32Array(64);
  for (let round = 1; round <= 40; round++) {
    mine.local.fill(round * 100 + shmem.myPe());
    await meet();
    shmem.get(read, mine, next);
    assert.deepEqual(read, new Int32Array(64).fill(round * 100 + next), `round ${round}`);
    await meet();
  }
  await shmem.free(mine);
}

async function everything(shmem, team) {
  const n = team.nPes;
  const ranks = [...team.ranks];
  for (const dtype of ['i32', 'f64', 'u8', 'i64']) {
    const element = dtype === 'i64' ? (v) => BigInt(v) : dtype === 'u8' ? (v) => v & 255 : (v) => v;
    const count = 5;
    // The heap is the world's: teams of one size make the same objects.
    const source = await shmem.calloc(dtype, 64 * 8);
    const dest = await shmem.calloc(dtype, 64 * 8);
    const fill = () =>
      source.local.forEach((_, i, all) => {
        all[i] = element(at(shmem.myPe(), i));
      });
    const clear = () => dest.local.fill(element(99));
    const got = (length) => [...dest.local.subarray(0, length)];
    const member = (j) => ranks[j];
    fill();

    for (let root = 0; root < n; root++) {
      clear();
      await shmem.broadcast(team, dest, source, count, root);
      assert.deepEqual(got(count + 1), [
        ...Array.from({ length: count }, (_, i) => element(at(member(root), i))),
        element(99),
      ]);
    }
    clear();
    await shmem.fcollect(team, dest, source, count);
    assert.deepEqual(
      got(n * count),
      Array.from({ length: n * count }, (_, i) => element(at(member(Math.floor(i / count)), i % count))),
    );

    clear();
    const total = await shmem.collect(team, dest, source, team.myPe % 4);
    const expected = ranks.flatMap((pe, j) => Array.from({ length: j % 4 }, (_, i) => element(at(pe, i))));
    assert.equal(total, expected.length);
    assert.deepEqual(got(total + 1), [...expected, element(99)]);

    clear();
    await shmem.alltoall(team, dest, source, count);
    assert.deepEqual(
      got(n * count),
      Array.from({ length: n * count }, (_, i) =>
        element(at(member(Math.floor(i / count)), team.myPe * count + (i % count))),
      ),
    );

    clear();
    await shmem.alltoalls(team, dest, source, 3, 2, 2);
    const strided = Array.from({ length: 6 * n }, () => element(99));
    for (let j = 0; j < n; j++) {
      for (let k = 0; k < 2; k++) strided[(j * 2 + k) * 3] = element(at(member(j), (team.myPe * 2 + k) * 2));
    }
    assert.deepEqual(got(6 * n), strided);

    const folds = {
      sum: (a, b) => a + b,
      prod: (a, b) => a * b,
      min: (a, b) => lesser(a, b),
      max: (a, b) => (lesser(a, b) === a ? b : a),
    };
    if (dtype !== 'f64') Object.assign(folds, { and: (a, b) => a & b, or: (a, b) => a | b, xor: (a, b) => a ^ b });
    for (const [name, fold] of Object.entries(folds)) {
      clear();
      await shmem[`${name}Reduce`](team, dest, source, count);
      const wrap = {
        i32: (v) => Number(BigInt.asIntN(32, v)),
        u8: (v) => Number(BigInt.asUintN(8, v)),
        i64: (v) => BigInt.asIntN(64, v),
      }[dtype];
      const want = Array.from({ length: count }, (_, i) => {
        const values = ranks.map((pe) => element(at(pe, i)));
        return wrap ? wrap(values.map((v) => BigInt(v)).reduce(fold)) : values.reduce(fold);
      });
      assert.deepEqual(got(count + 1), [...want, element(99)], `${name} of ${dtype}`);
    }
    // In place.
    await shmem.sumReduce(team, source, source, 1);
    assert.equal(
      Number(source.local[0]),
      dtype === 'u8'
        ? ranks.reduce((s, pe) => s + (at(pe, 0) & 255), 0) & 255
        : ranks.reduce((s, pe) => s + at(pe, 0), 0),
    );
    await team.sync();
    await shmem.free(dest);
    await shmem.free(source);
  }
}

await runShmem(async (shmem) => {
  const me = shmem.myPe();
  const size = shmem.nPes();
  const world = shmem.teamWorld;
  assert.deepEqual([world.myPe, world.nPes, shmem.teamShared.nPes], [me, size, size]);
  await everything(shmem, world);

  // 32-bit products exceed what a double holds exactly.
  const factor = await shmem.malloc('i32', 1);
  factor.local[0] = 2147483629;
  await shmem.prodReduce(world, factor, factor, 1);
  assert.equal(factor.local[0], Number(BigInt.asIntN(32, 2147483629n ** BigInt(size))));
  const nan = await shmem.malloc('f64', 1);
  nan.local[0] = me === 0 ? Number.NaN : me;
  await shmem.maxReduce(world, nan, nan, 1);
  assert.ok(Number.isNaN(nan.local[0]));

  const even = await world.splitStrided(0, 2, Math.ceil(size / 2));
  assert.equal(even === undefined, me % 2 === 1);
  const backwards = await world.splitStrided(size - 1, -1, size);
  assert.equal(backwards.myPe, size - 1 - me);
  assert.equal(backwards.translatePe(0, world), size - 1);
  assert.equal(world.translatePe(me, backwards), size - 1 - me);
  if (even) {
    assert.equal(even.myPe, me / 2);
    if (size > 1) assert.equal(world.translatePe(1, even), -1);
    await even.sync();
  }
  await everything(shmem, backwards);
  await meetings(shmem, world, () => shmem.syncAll());
  await meetings(shmem, backwards, () => shmem.sync(backwards));

  const { x, y } = await world.split2d(2);
  assert.deepEqual(
    [...x.ranks],
    [me - (me % 2), me - (me % 2) + 1].filter((pe) => pe < size),
  );
  assert.deepEqual(
    [...y.ranks],
    Array.from({ length: size }, (_, pe) => pe).filter((pe) => pe % 2 === me % 2),
  );
  for (let i = 0; i < 50; i++) {
    await x.sync();
    await y.sync();
  }
  const s = await shmem.calloc('i32', 1);
  const d = await shmem.calloc('i32', 1);
  s.local[0] = me + 1;
  await shmem.sumReduce(y, d, s, 1);
  assert.equal(
    d.local[0],
    [...y.ranks].reduce((sum, pe) => sum + pe + 1, 0),
  );

  // A PE of the other row may be through its sum already: nobody writes to d before all have looked at it.
  await shmem.barrierAll();
  // A context counts PEs as its team does.
  const context = backwards.createContext();
  context.p(d, 100 + me, 0);
  context.quiet();
  await shmem.barrierAll();
  if (me === size - 1) assert.ok(d.local[0] >= 100);
  assert.equal(await codeOf(() => context.p(d, 1, size)), 'EP_INVALID_ARGUMENT');

  if (size > 1) {
    const odd = (body) => assert.rejects(body(), { code: 'EP_MISMATCH' });
    await odd(() => shmem.broadcast(world, d, s, 1, me === 0 ? 0 : 1));
    await odd(() => shmem.sumReduce(world, d, s, me === 0 ? 1 : 0));
    await odd(() => (me === 0 ? shmem.sumReduce(world, d, s, 1) : shmem.maxReduce(world, d, s, 1)));
    await odd(() => world.splitStrided(0, 1, me === 0 ? 1 : 2));
    await odd(() => (me === 0 ? world.split2d(1) : shmem.fcollect(world, d, s, 0)));
  }
  for (const wrong of [
    () => shmem.broadcast(world, d, s, 1, size),
    () => shmem.broadcast(world, d, s, -1, 0),
    () => shmem.andReduce(world, nan, nan, 1),
    () => world.splitStrided(0, 1, size + 1),
    () => world.splitStrided(0, 0, 2),
    () => world.splitStrided(-1, 1, 1),
    () => world.split2d(0),
    () => world.translatePe(size, world),
    () => shmem.broadcast({}, d, s, 1, 0),
  ]) {
    if (size > 1) assert.equal(await codeOf(wrong), 'EP_INVALID_ARGUMENT', String(wrong));
  }
  assert.equal(await codeOf(() => shmem.broadcast(world, d, s, 2, 0)), 'EP_CAPACITY');

  await world.sync();
  for (const team of [x, y, backwards, even]) {
    await team?.destroy();
    await team?.destroy();
  }
  assert.equal(await codeOf(() => x.sync()), 'EP_CLOSED');
  assert.equal(await codeOf(() => context.p(d, 1, 0)), 'EP_CLOSED');
  await world.destroy();
  await world.sync();
});
