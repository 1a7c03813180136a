// Memory of another library: a process of PyTorch shares a tensor of its own, ranks open it, adopt it, send from it and write there; see torch-peer.py.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { dlpackTensor } from '@ep/core';
import { leaseBytesFor, openDeviceDispatcher, viewTensor } from '@ep/cuda-kernels';
import { movePlan } from '@ep/plan/reference';
import { fillRows, fullPlan } from '../attention/plans.mjs';
import { expectSame } from './tensors.mjs';

const ROW = 8;

/** Commands to a process, one at a time; it prints one line for each. */
class Peer {
  #child;
  #lines;
  #complaints = '';

  constructor([program, ...args], env = {}) {
    this.#child = spawn(program, args, { env: { ...process.env, ...env } });
    this.#lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();
    this.ended = once(this.#child, 'exit');
    this.#child.stdin.on('error', () => {}); // it has died: the next answer says so
    this.#child.stderr.on('data', (chunk) => {
      this.#complaints += chunk;
    });
  }

  async ask(what, fields = {}) {
    this.#child.stdin.write(`${JSON.stringify({ do: what, ...fields })}\n`);
    const { value, done } = await this.#lines.next();
    if (done) throw new Error(`the peer ended at ${what}:\n${this.#complaints}`);
    const answer = JSON.parse(value);
    if (answer.error !== undefined) throw new Error(`the peer could not ${what}: ${answer.error}`);
    return answer;
  }

  async end() {
    this.#child.stdin.end();
    const [code, signal] = await this.ended;
    assert.equal(code, 0, `the peer ended with ${signal ?? code}:\n${this.#complaints}`);
  }

  async kill() {
    this.#child.kill('SIGKILL');
    await this.ended;
  }
}

const bytesOf = (values) => new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
const fromHex = (text) => new Uint8Array(Buffer.from(text, 'hex'));
const valuesOf = (rows, rank, salt) => fillRows(new Float32Array(rows * ROW), rank, ROW, salt);

/** What a peer shares, opened here: the buffer, and the tensor in it as the fields of its capsule say. */
function open(device, shared) {
  const buffer = device.openIpc(fromHex(shared.handle));
  assert.ok(buffer.byteLength >= shared.offset + shared.bytes, `${buffer.byteLength} bytes were opened`);
  const { data, ...fields } = shared.tensor;
  const tensor = dlpackTensor({
    ...fields,
    data: buffer.address + BigInt(shared.offset + data),
    device: { type: fields.device.type, id: device.index },
  });
  return { buffer, tensor, byteOffset: Number(tensor.address - buffer.address) };
}

/** Dispatches from the peer's memory, by address and as part of the opened buffer; copies what came into the peer's memory. */
async function dispatched({ transport, device, rank, worldSize }, { buffer, tensor, byteOffset }, plan, salt) {
  const stream = device.stream();
  const specs = { forward: [{ name: 'q', plan, dtype: 'f32', rowShape: [ROW] }] };
  const dispatcher = await openDeviceDispatcher(transport, {
    stream,
    leaseBytes: leaseBytesFor(specs.forward),
    leases: 1,
    blocks: 2,
    lanes: 64,
    timeoutMs: 20_000,
  });
  const { forward } = await dispatcher.bind(specs);
  const sent = [...Array(worldSize).keys()].map((from) => valuesOf(plan.sendTokens[from], from, salt));
  const expected = movePlan(plan, sent, ROW)[rank];
  const rows = Math.min(plan.sendTokens[rank], plan.recvTokens[rank]);
  const own = buffer.tensor('f32', tensor.shape, byteOffset);
  for (const [form, q] of Object.entries({ tensor, own })) {
    const lease = await forward.run({ q });
    await expectSame(lease.tensors.q, expected, `from the peer's memory (${form})`);
    if (q === own) {
      stream.copy(viewTensor(lease.tensors.q, [rows, ROW]), viewTensor(own, [rows, ROW]));
      await stream.synchronize();
    }
    lease.release();
  }
  await transport.barrier();
  await dispatcher.close();
  await stream.close();
  const values = valuesOf(plan.sendTokens[rank], rank, salt);
  values.set(expected.subarray(0, rows * ROW));
  return values;
}

/** Both sides write and read, then close in order: nobody has anything left. */
async function torchMemory(start) {
  const { transport, device, rank, worldSize, data } = start;
  const plan = fullPlan(worldSize, 20).fwdQ;
  const rows = plan.sendTokens[rank];
  const peer = new Peer(data.peer);
  try {
    const shared = await peer.ask('share', { rows, columns: ROW, rank, salt: 1 });
    const opened = open(device, shared);
    const { buffer, tensor } = opened;
    assert.deepEqual([tensor.dtype, tensor.shape, tensor.byteLength], ['f32', [rows, ROW], rows * ROW * 4]);
    const memory = await transport.allocate({ byteLength: 256, signalSlots: 0, space: 'device' });
    const adopted = await transport.adopt(tensor);
    const region = adopted.region(0, tensor.byteLength);
    const found = new Uint8Array(tensor.byteLength);
    const check = async (values, what) => {
      const expected = bytesOf(values);
      await memory.read(region, found);
      assert.deepEqual(found, expected, `${what}, read here`);
      assert.deepEqual(fromHex((await peer.ask('bytes')).bytes), expected, `${what}, read by the peer`);
    };
    await check(valuesOf(rows, rank, 1), 'what the peer wrote');
    await memory.write(bytesOf(valuesOf(rows, rank, 2)), region);
    await check(valuesOf(rows, rank, 2), 'what was written here');
    await peer.ask('fill', { rank, salt: 3 });
    await check(valuesOf(rows, rank, 3), 'what the peer wrote over that');
    await check(await dispatched(start, opened, plan, 3), 'what a dispatch brought');
    await adopted.close();
    await memory.close();
    await buffer.close();
    await buffer.unmapped();
    const { left } = await peer.ask('release');
    await peer.end();
    return { left, handle: shared.handle.length / 2, apart: opened.byteOffset > 0 };
  } finally {
    await peer.kill();
  }
}

/** The peer is killed while its memory is mapped and adopted. What is read then is its owner's to promise; the rank goes on either way. */
async function torchKilled({ transport, device, rank, data }) {
  const peer = new Peer(data.peer);
  try {
    const shared = await peer.ask('share', { rows: 10, columns: ROW, rank, salt: 1 });
    const { buffer, tensor } = open(device, shared);
    const memory = await transport.allocate({ byteLength: 256, signalSlots: 0, space: 'device' });
    const adopted = await transport.adopt(tensor);
    await peer.kill();
    const found = new Uint8Array(64);
    const outcome = await memory.read(adopted.region(0, 64), found).then(
      () => (Buffer.compare(found, bytesOf(valuesOf(8, rank, 1)).subarray(0, 64)) === 0 ? 'kept' : 'other bytes'),
      (error) => error.code,
    );
    const again = await Promise.resolve()
      .then(() => device.openIpc(fromHex(shared.handle)))
      .then(
        (second) => second.close().then(() => 'opened'),
        (error) => error.code,
      );
    await adopted.close();
    await buffer.close();
    await buffer.unmapped({ timeoutMs: 20_000 });
    const values = Uint8Array.from({ length: 256 }, (_, i) => i + rank);
    const read = new Uint8Array(256);
    await memory.write(values, memory.local(0, 256));
    await memory.read(memory.local(0, 256), read);
    assert.deepEqual(read, values);
    await transport.barrier();
    await memory.close();
    return { outcome, again };
  } finally {
    await peer.kill();
  }
}

/** A peer with expandable segments, which have no handle that is taken here. */
async function torchExpandable({ device, data }) {
  const peer = new Peer(data.peer, { PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True' });
  try {
    const shared = await peer.ask('share', { rows: 10, columns: ROW, rank: 0, salt: 1 }).catch((error) => error);
    if (shared instanceof Error) return { shared: shared.message };
    try {
      await device.openIpc(fromHex(shared.handle)).close();
      return { code: 'no error' };
    } catch (error) {
      return { code: error.code };
    }
  } finally {
    await peer.kill();
  }
}

export const torchScenarios = { torchMemory, torchKilled, torchExpandable };
