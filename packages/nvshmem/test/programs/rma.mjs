/** Random puts and gets of every form, in phases, against a model of all PEs' memory that every PE computes for itself. */
import assert from 'node:assert/strict';
import { codeOf, generator, runShmem } from './rank.mjs';

const DTYPES = ['u8', 'i16', 'bf16', 'i32', 'u32', 'f32', 'f64', 'i64', 'u64'];
const LENGTH = 60;

await runShmem(async (shmem, { args }) => {
  const me = shmem.myPe();
  const size = shmem.nPes();
  const share = LENGTH; // each PE writes a share of its own in every target, so that phases have one outcome
  for (const dtype of DTYPES) {
    const random = generator(args.seed);
    const big = dtype === 'i64' || dtype === 'u64';
    const array = await shmem.calloc(dtype, share * size);
    const signal = await shmem.calloc('u64', size);
    const Carrier = array.local.constructor;
    const value = () =>
      big ? BigInt(random.next()) * 0x1_0000_0001n : random.next() / (dtype.startsWith('f') ? 7 : 1);
    const model = Array.from({ length: size }, () => new Carrier(share * size));
    const signals = Array.from({ length: size }, () => new BigUint64Array(size));
    for (let phase = 0; phase < args.phases; phase++) {
      for (let writer = 0; writer < size; writer++) {
        for (let op = 0; op < 6; op++) {
          const pe = random.below(size);
          const kind = random.below(5);
          const begin = random.below(share - 12);
          const count = random.below(12);
          const stride = 1 + random.below(3);
          const fits = Math.min(count, Math.floor((share - begin - 1) / stride) + 1, 12);
          const source = Carrier.from({ length: 12 * 2 }, value);
          const at = writer * share + begin;
          const mine = writer === me;
          const target = mine ? array.subarray(at, (writer + 1) * share) : undefined;
          if (kind === 0) {
            model[pe].set(source.subarray(0, count), at);
            if (mine) shmem[op % 2 === 0 ? 'put' : 'putNbi'](target, source.subarray(0, count), pe);
          } else if (kind === 1) {
            model[pe][at] = source[0];
            if (mine) shmem.p(target, source[0], pe);
          } else if (kind === 2) {
            for (let i = 0; i < fits; i++) model[pe][at + i * stride] = source[i * 2];
            if (mine) shmem.iput(target, source, stride, 2, fits, pe);
          } else if (kind === 3) {
            model[pe].set(source.subarray(0, count), at);
            const set = op % 2 === 0;
            signals[pe][writer] = set ? 1000n + BigInt(phase) : signals[pe][writer] + 1n;
            if (mine) {
              const own = signal.subarray(writer, writer + 1);
              const word = set ? 1000 + phase : 1n;
              const form = begin % 2 === 0 ? 'putSignal' : 'putSignalNbi';
              shmem[form](target, source.subarray(0, count), own, word, set ? 'set' : 'add', pe);
            }
          } else {
            model[pe].set(source.subarray(0, count), at);
            if (mine) {
              shmem.ptr(target, pe).set(source.subarray(0, count));
              shmem.quiet();
            }
          }
        }
      }
      await shmem.barrierAll();
      assert.deepEqual(array.local, model[me], `${dtype} in phase ${phase}`);
      assert.deepEqual(signal.local, signals[me]);
      const pe = (me + 1 + phase) % size;
      const whole = new Carrier(share * size + 3);
      shmem.get(whole, array, pe);
      assert.deepEqual(whole.subarray(0, share * size), model[pe]);
      shmem.getNbi(whole.subarray(0, 5), array.subarray(7, 12), pe);
      assert.deepEqual(whole.subarray(0, 5), model[pe].slice(7, 12));
      assert.deepEqual(shmem.g(array, pe, 9), model[pe][9]);
      const strided = new Carrier(31);
      shmem.iget(strided, array.subarray(2), 3, 2, 10, pe);
      for (let i = 0; i < 10; i++) assert.deepEqual(strided[i * 3], model[pe][2 + i * 2]);
      assert.deepEqual(strided[1], new Carrier(1)[0]);
      await shmem.barrierAll();
    }
    // From one symmetric array to another, without ordinary memory in between.
    const copy = await shmem.malloc(dtype, share * size);
    shmem.get(copy, array, (me + 1) % size);
    assert.deepEqual(copy.local, model[(me + 1) % size]);
    await shmem.barrierAll();
    shmem.put(copy, array, (me + 1) % size);
    await shmem.barrierAll();
    assert.deepEqual(copy.local, model[(me + size - 1) % size]);
    await shmem.free(copy);
    await shmem.free(signal);
    await shmem.free(array);
  }

  // A ring that relies on order alone: rows by a put and by plain stores, a fence, then the word that says that they are there. x86 keeps that order
  // without the fence, too; Arm does not.
  const rows = await shmem.calloc('u32', 512);
  const stored = await shmem.calloc('u32', 512);
  const ready = await shmem.calloc('u64', 1);
  const seen = await shmem.calloc('u64', 1);
  const next = (me + 1) % size;
  const previous = (me + size - 1) % size;
  for (let round = 1; round <= 200; round++) {
    shmem.putNbi(
      rows,
      Uint32Array.from({ length: 512 }, (_, i) => round * 1000 + me * 7 + i),
      next,
    );
    shmem.ptr(stored, next).fill(round * 10 + me);
    shmem.fence();
    shmem.p(ready, BigInt(round), next);
    await shmem.signalWaitUntil(ready, 'ge', BigInt(round));
    const expected = Uint32Array.from({ length: 512 }, (_, i) => round * 1000 + previous * 7 + i);
    assert.deepEqual(rows.local, expected, `rows of round ${round}`);
    assert.deepEqual(stored.local, new Uint32Array(512).fill(round * 10 + previous), `stores of round ${round}`);
    // The sender must not write the next round before this one was looked at.
    shmem.p(seen, BigInt(round), previous);
    await shmem.signalWaitUntil(seen, 'ge', BigInt(round));
  }
  for (const array of [rows, stored, ready, seen]) await shmem.free(array);

  const x = await shmem.calloc('i32', 4);
  const before = x.local.slice();
  const gone = new Int32Array(4);
  structuredClone(gone, { transfer: [gone.buffer] });
  const wrong = {
    'too long': [() => shmem.put(x, new Int32Array(5), 0), 'EP_CAPACITY'],
    'too short a target': [() => shmem.get(new Int32Array(3), x, 0), 'EP_CAPACITY'],
    'another type': [() => shmem.put(x, new Float64Array(1), 0), 'EP_INVALID_ARGUMENT'],
    'no typed array': [() => shmem.put(x, [1, 2], 0), 'EP_INVALID_ARGUMENT'],
    'no such PE': [() => shmem.put(x, new Int32Array(1), size), 'EP_INVALID_ARGUMENT'],
    'negative PE': [() => shmem.p(x, 1, -1), 'EP_INVALID_ARGUMENT'],
    'fraction of a PE': [() => shmem.g(x, 0.5), 'EP_INVALID_ARGUMENT'],
    'index outside': [() => shmem.p(x, 1, 0, 4), 'EP_INVALID_ARGUMENT'],
    'bigint for i32': [() => shmem.p(x, 1n, 0), 'EP_INVALID_ARGUMENT'],
    'range outside': [() => x.subarray(3, 5), 'EP_INVALID_ARGUMENT'],
    'stride 0': [() => shmem.iput(x, new Int32Array(4), 0, 1, 2, 0), 'EP_INVALID_ARGUMENT'],
    'strided past the end': [() => shmem.iput(x, new Int32Array(4), 2, 1, 3, 0), 'EP_CAPACITY'],
    'negative count': [() => shmem.iget(new Int32Array(4), x, 1, 1, -1, 0), 'EP_INVALID_ARGUMENT'],
    'detached source': [() => shmem.put(x, gone, 0), 'EP_DETACHED'],
    'detached target': [() => shmem.get(gone, x, 0), 'EP_DETACHED'],
    'signal of another type': [() => shmem.putSignal(x, new Int32Array(1), x, 1, 'set', 0), 'EP_INVALID_ARGUMENT'],
  };
  for (const [what, [body, code]] of Object.entries(wrong)) assert.equal(await codeOf(body), code, what);
  assert.deepEqual(x.local, before, 'a refused call must not write');
  await shmem.free(x);
});
