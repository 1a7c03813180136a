// What a PE of NVSHMEM does in its cases.
import assert from 'node:assert/strict';

const LENGTHS = [1, 3, 16, 1000, 4096, 300_001];
const SIGNAL = { cmp: 'ge' };

const byteOf = (rank, length, at) => (rank * 31 + length * 7 + at * 13) & 255;
const pattern = (rank, length) => Uint8Array.from({ length }, (_, at) => byteOf(rank, length, at));

async function readBack(memory, offset, length) {
  const bytes = new Uint8Array(length);
  await memory.read(memory.local(offset, length), bytes);
  return bytes;
}

/** Puts with and without signals, words, gets, adds and sets, from each rank to the next, on device memory; then NVSHMEM's barrier on a stream. */
async function nvshmemOperations({ transport, device, rank, worldSize }) {
  const [next, previous] = [(rank + 1) % worldSize, (rank + worldSize - 1) % worldSize];
  const byteLength = 2 * 2 ** 20;
  const half = byteLength / 2;
  const memory = await transport.allocate({ byteLength, signalSlots: 8, space: 'device' });
  const endpoint = await transport.connect(next);
  const begin = performance.now();
  let arrivals = 0n;
  for (const length of LENGTHS) {
    for (const offset of [0, 5]) {
      await memory.write(pattern(rank, length), memory.local(offset, length));
      const to = memory.remote(next, half + offset, length);
      await endpoint.put(memory.local(offset, length), to, { signal: { slot: 0, op: 'inc' } });
      arrivals += 1n;
      await memory.signals.until(0, { ...SIGNAL, value: arrivals });
      assert.deepEqual(
        await readBack(memory, half + offset, length),
        pattern(previous, length),
        `${length}, ${offset}`,
      );
      // Nobody overwrites what the next one has yet to look at.
      await transport.barrier();
    }
  }
  // Of a rank's own bytes, read by the one before it.
  await memory.write(pattern(rank, 4096), memory.local(0, 4096));
  await transport.barrier();
  await endpoint.get(memory.remote(next, 0, 4096), memory.local(half, 4096));
  assert.deepEqual(await readBack(memory, half, 4096), pattern(next, 4096));
  await transport.barrier();
  for (const width of [1, 2, 4, 8]) {
    for (const offset of [64, 65]) {
      const value = BigInt.asUintN(8 * width, 0x1122334455667788n + BigInt(rank));
      await endpoint.putValue(memory.remote(next, half + offset, width), value, {
        signal: { slot: 1, op: 'add', value: 3n },
      });
      await endpoint.flush();
      await transport.barrier();
      const expected = BigInt.asUintN(8 * width, 0x1122334455667788n + BigInt(previous));
      const found = await readBack(memory, half + offset, width);
      assert.equal(
        found.reduceRight((sum, byte) => (sum << 8n) | BigInt(byte), 0n),
        expected,
        `${width} bytes at ${offset}`,
      );
      await transport.barrier();
    }
  }
  assert.equal(memory.signals.peek(1), 24n);
  await endpoint.signal(memory, { slot: 2, op: 'set', value: 77n });
  await memory.signals.until(2, { cmp: 'eq', value: 77n });
  const stream = device.stream();
  for (let round = 0; round < 3; round++) await transport.barrierOn(stream);
  await stream.close();
  await transport.barrier();
  await memory.close();
  return { byTurns: transport.byTurns, ms: Math.round(performance.now() - begin) };
}

/** What is free again is found again, on all ranks alike, and what does not fit is refused on all of them. */
async function nvshmemHeap({ transport }) {
  const sizes = [4096, 100_000, 1, 2 ** 20];
  for (let round = 0; round < 20; round++) {
    const memories = [];
    for (const byteLength of sizes) {
      memories.push(await transport.allocate({ byteLength, signalSlots: 2, space: 'device' }));
    }
    await transport.barrier();
    for (const memory of round % 2 ? memories : memories.reverse()) await memory.close();
  }
  const tooMuch = transport.allocate({ byteLength: 2 ** 40, signalSlots: 1, space: 'device' });
  const code = await tooMuch.then(
    () => 'allocated',
    (error) => error.code,
  );
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 1, space: 'device' });
  await memory.close();
  return code;
}

/** A rank that does not come to the barrier on a stream is named, and NVSHMEM never began it. */
async function nvshmemAbsent({ transport, device, rank, data }) {
  if (rank === data.absent) {
    await new Promise((resolve) => setTimeout(resolve, data.late));
    return 'late';
  }
  const stream = device.stream();
  const error = await transport.barrierOn(stream, { timeoutMs: 300 }).then(
    () => undefined,
    (reason) => reason,
  );
  await stream.close();
  return [error?.code, error?.message];
}

/** One is killed while the others wait for it: by signal and by barrier. */
async function nvshmemLost({ transport, device, rank, ready, data }) {
  const memory = await transport.allocate({ byteLength: 4096, signalSlots: 2, space: 'device' });
  await transport.barrier();
  if (rank === data.victim) {
    ready();
    await new Promise((resolve) => setTimeout(resolve, 60_000));
  }
  const codes = [];
  const note = (promise) =>
    promise.then(
      () => codes.push('done'),
      (error) => codes.push(error.code),
    );
  await note(memory.signals.until(0, { ...SIGNAL, value: 1n }, { timeoutMs: 30_000 }));
  const stream = device.stream();
  await note(transport.barrierOn(stream, { timeoutMs: 30_000 }));
  await note((await transport.connect(data.victim)).flush());
  await stream.close();
  // To oneself it goes on.
  const own = await transport.connect(rank);
  await own.put(memory.local(0, 64), memory.remote(rank, 64, 64));
  await own.flush();
  return { codes, failed: transport.failed.aborted };
}

/** Heaps that are not mapped: what the host starts goes through, and kernels of ours get no handle. */
async function nvshmemApart({ transport, rank, worldSize }) {
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 1, space: 'device' });
  const next = (rank + 1) % worldSize;
  const endpoint = await transport.connect(next);
  await memory.write(Uint8Array.of(1 + rank), memory.local(0, 1));
  await endpoint.put(memory.local(0, 1), memory.remote(next, 1, 1), { signal: { slot: 0, op: 'inc' } });
  await memory.signals.until(0, { ...SIGNAL, value: 1n });
  const [from] = await readBack(memory, 1, 1);
  let code = 'a handle';
  try {
    transport.device(memory);
  } catch (error) {
    code = error.code;
  }
  await transport.barrier();
  await memory.close();
  return [from, code, transport.byTurns];
}

export const nvshmemScenarios = { nvshmemApart, nvshmemOperations, nvshmemHeap, nvshmemAbsent, nvshmemLost };
