// Messages of tensors on a device: whatever their length, tag and order; behind what lies on the stream; and when somebody gives up.
import assert from 'node:assert/strict';
import { setTimeout as delay } from 'node:timers/promises';
import { initProcessGroup } from '@ep/collectives';
import { elementBytes } from '@ep/core';
import { readTensor } from '@ep/cuda-kernels';
import { openGroup } from './collectives.mjs';

/** A ring for each peer has a quarter of that, shared by all: large messages go round it many times. */
const STAGING_BYTES = 2 ** 20;

async function open({ transport, stream, store, rank, worldSize, timeoutMs = 30_000 }) {
  const device = { stream, stagingBytes: STAGING_BYTES };
  return await initProcessGroup({ backend: transport, store, rank, worldSize, timeoutMs, device });
}

const byteOf = (from, to, salt, i) => (from * 31 + to * 17 + salt * 7 + i * 13 + (i >> 8)) & 0xff;
const bytesOf = (from, to, salt, length) => Uint8Array.from({ length }, (_, i) => byteOf(from, to, salt, i));

/** A tensor with the bytes that `from` sends to `to`, put there by a copy that is still on the stream; `shift` bytes behind the beginning of its memory. */
function given(device, stream, dtype, bytes, shift = 0) {
  const buffer = device.allocate(bytes.byteLength + shift + 16);
  const pinned = device.pinned(bytes.byteLength + 16);
  pinned.set(bytes);
  const raw = buffer.tensor('u8', [bytes.byteLength], shift);
  if (bytes.byteLength > 0) stream.copy(pinned.subarray(0, bytes.byteLength), raw);
  return { buffer, tensor: buffer.tensor(dtype, [bytes.byteLength / elementBytes(dtype)], shift) };
}

const blank = (device, dtype, length, shift = 0) => {
  const buffer = device.allocate(length * elementBytes(dtype) + shift + 16);
  return { buffer, tensor: buffer.tensor(dtype, [length], shift) };
};

async function holds(tensor, bytes, what) {
  const found = await readTensor(tensor);
  assert.deepEqual(Buffer.from(found.buffer, found.byteOffset, bytes.byteLength), Buffer.from(bytes), what);
}

const codeOf = async (work) => {
  try {
    await work;
    return 'no error';
  } catch (error) {
    return error.code;
  }
};

/** Everybody to everybody, itself too: all at once, received last first by tag. */
async function messages({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open({ transport, stream, store, rank, worldSize });
  const ranks = Array.from({ length: worldSize }, (_, i) => i);
  const held = [];
  const keep = (one) => {
    held.push(one.buffer);
    return one.tensor;
  };
  const sends = [];
  for (const peer of ranks) {
    for (const [tag, { dtype, length }] of data.messages.entries()) {
      const size = elementBytes(dtype);
      const bytes = bytesOf(rank, peer, tag, length * size);
      sends.push(group.send(keep(given(device, stream, dtype, bytes, tag % 3 === 1 ? size : 0)), peer, { tag }));
    }
  }
  for (const peer of [...ranks].reverse()) {
    for (const [tag, { dtype, length }] of [...data.messages.entries()].reverse()) {
      const size = elementBytes(dtype);
      // Longer than what comes: the rest stays as it is.
      const target = keep(blank(device, dtype, length + 3, tag % 2 === 1 ? size : 0));
      const { source, byteLength } = await group.recv(target, peer, { tag });
      assert.deepEqual([source, byteLength], [peer, length * size]);
      const expected = new Uint8Array((length + 3) * size);
      expected.set(bytesOf(peer, rank, tag, length * size));
      await holds(target, expected, `tag ${tag} of rank ${peer}`);
    }
  }
  await Promise.all(sends);
  const { bytes } = group.trace().send;
  await group.destroy();
  await Promise.all(held.map((buffer) => buffer.close()));
  await stream.close();
  return bytes;
}

/** Messages beside collectives of the same stream; of host and device memory under one tag; and what does not fit. */
async function messageOrder({ transport, device, store, rank, worldSize }) {
  const stream = device.stream();
  const group = await open({ transport, stream, store, rank, worldSize });
  const other = 1 - rank;
  const count = 50_000;
  const [out, into, sum] = [0, 1, 2].map(() => blank(device, 'i32', count));
  const ones = device.pinned(4 * count);
  new Int32Array(ones.buffer, ones.byteOffset, count).fill(rank + 1);
  // Rank 0 posts its messages first, rank 1 its calls; each round sends what the copy before it has put there.
  for (let round = 0; round < 5; round++) {
    const source = Buffer.from(bytesOf(rank, other, round, 4 * count));
    const pinned = device.pinned(4 * count);
    pinned.set(source);
    stream.copy(pinned, out.tensor);
    stream.copy(ones, sum.tensor);
    const message = () => [group.send(out.tensor, other), group.recvAnySource(into.tensor)];
    const call = () => [group.allReduce(sum.tensor)];
    await Promise.all(rank === 0 ? [...message(), ...call()] : [...call(), ...message()]);
    await holds(into.tensor, bytesOf(other, rank, round, 4 * count), `round ${round}`);
    await holds(sum.tensor, new Uint8Array(Int32Array.of(3, 3).buffer), `sum of round ${round}`);
  }
  // One queue for a tag, wherever the bytes lie.
  const host = new Int32Array(count);
  if (rank === 0) {
    const first = group.send(out.tensor, 1);
    await Promise.all([first, group.send(new Int32Array(count).fill(7), 1)]);
  } else {
    await group.recv(into.tensor, 0);
    await group.recv(host, 0);
    assert.equal(host[count - 1], 7);
  }
  const codes = [];
  const both = async (work) => codes.push(await codeOf(work()));
  await both(() => (rank === 0 ? group.send(out.tensor, 1) : group.recv(host, 0)));
  await both(() => (rank === 0 ? group.send(host, 1) : group.recv(into.tensor, 0)));
  const short = out.buffer.tensor('i32', [count - 1]);
  await both(() => (rank === 0 ? group.send(out.tensor, 1) : group.recv(short, 0)));
  // Refused before anything moves: the other rank hears nothing of it.
  await both(async () => group.send({ ...out.tensor, address: 4096n }, other));
  await both(() => (rank === 0 ? group.send(out.tensor, 1) : group.recv(into.tensor, 0)));
  await group.destroy();
  await Promise.all([out, into, sum].map(({ buffer }) => buffer.close()));
  await stream.close();
  return codes;
}

/** Messages whose sender or receiver gives up while bytes are on their way: what they held of the ring is there again for the next ones. */
async function messageCut({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open({ transport, stream, store, rank, worldSize });
  const length = data.bytes;
  const { buffer, tensor } =
    rank === 0 ? given(device, stream, 'u8', bytesOf(0, 1, 0, length)) : blank(device, 'u8', length);
  const first = buffer.tensor('u8', [1]);
  const zero = device.pinned(16).subarray(0, 1);
  const sentBytes = () => group.trace().send?.bytes ?? 0;
  // Some of the bytes have come, or have been sent.
  const underway = async (before) => {
    while (rank === 1 ? (await readTensor(first))[0] === 0 : sentBytes() === before) await delay(0);
  };
  const codes = [];
  for (let round = 0; round < data.rounds; round++) {
    const cut = new AbortController();
    const cutter = round % 2;
    const options = rank === cutter ? { signal: cut.signal } : {};
    const before = sentBytes();
    const work = rank === 0 ? group.send(tensor, 1, options) : group.recv(tensor, 0, options);
    if (rank === cutter) await underway(before);
    cut.abort(new Error('enough'));
    codes.push(
      await work.then(
        () => 'done',
        (error) => error.code ?? error.message,
      ),
    );
    if (rank === 1) stream.copy(zero, first);
    await stream.synchronize();
    await transport.barrier();
  }
  if (rank === 0) await group.send(tensor, 1);
  else await group.recv(tensor, 0);
  await holds(tensor, bytesOf(0, 1, 0, length), 'the last one');
  codes.push(await codeOf(group.recv(tensor, 1 - rank, { timeoutMs: 100 })));
  await transport.barrier();
  await group.destroy();
  await buffer.close();
  await stream.close();
  return codes;
}

/** One rank is killed while messages to it and from it are under way. */
async function messageLost({ transport, device, store, rank, worldSize, data, ready }) {
  const stream = device.stream();
  const group = await open({ transport, stream, store, rank, worldSize, timeoutMs: 60_000 });
  const [out, into] = [blank(device, 'u8', data.bytes), blank(device, 'u8', data.bytes)];
  await group.barrier();
  if (rank === data.victim) {
    group.send(out.tensor, 0).catch(() => {});
    await ready();
    await new Promise(() => {});
  }
  const codes = [
    await codeOf(group.send(out.tensor, data.victim)),
    await codeOf(group.recv(into.tensor, data.victim, { tag: 1 })),
  ];
  const survivors = Array.from({ length: worldSize }, (_, i) => i).filter((one) => one !== data.victim);
  const next = survivors[(survivors.indexOf(rank) + 1) % survivors.length];
  const previous = survivors.at(survivors.indexOf(rank) - 1);
  await Promise.all([group.send(out.tensor, next), group.recv(into.tensor, previous)]);
  await group.destroy().catch(() => {});
  await Promise.all([out.buffer.close(), into.buffer.close()]);
  await stream.close();
  return codes;
}

/** GB/s of one message of each size between two ranks, the median of many; checked. */
async function messageTimes({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream, data.stagingBytes);
  const times = [];
  for (const bytes of data.sizes) {
    const { buffer, tensor } =
      rank === 0 ? given(device, stream, 'u8', bytesOf(0, 1, 0, bytes)) : blank(device, 'u8', bytes);
    const taken = [];
    for (let call = 0; call < data.calls; call++) {
      await group.barrier();
      const began = performance.now();
      if (rank === 0) await group.send(tensor, 1);
      else await group.recv(tensor, 0);
      taken.push(performance.now() - began);
    }
    if (rank === 1) await holds(tensor, bytesOf(0, 1, 0, bytes), `${bytes} bytes`);
    times.push(taken.sort((a, b) => a - b)[taken.length >> 1]);
    await group.barrier();
    await buffer.close();
  }
  await group.destroy();
  await stream.close();
  return times;
}

export const messageScenarios = { messages, messageOrder, messageCut, messageLost, messageTimes };
