// What a rank does in the cases of core attention: the kernels of the GPU against those of the host, on the same rounded inputs.
import assert from 'node:assert/strict';
import { decode, elementBytes, elementCount, encode, tensor, viewStorage } from '@ep/core';
import { attentionBackward, attentionForward, HostStream, readTensor, writeTensor } from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';
import { fillRows } from '../attention/plans.mjs';

/** Groups that share keys, leave rows out, see nothing at first, and are longer than any tile. */
const groups = {
  qRow: Int32Array.of(0, 130, 190, 250),
  qLength: Int32Array.of(100, 37, 50, 0),
  kvRow: Int32Array.of(10, 0, 60, 0),
  kvLength: Int32Array.of(161, 37, 20, 5),
};
const [queryRows, kvRows] = [260, 200];

function hostTensor(dtype, shape) {
  const count = elementCount(shape);
  return tensor(dtype, shape, viewStorage(dtype, allocateHost(Math.max(64, count * elementBytes(dtype))), 0, count));
}

function hostRows(dtype, shape, salt) {
  const made = hostTensor(dtype, shape);
  const [rows, ...row] = shape;
  const values = fillRows(new Float32Array(elementCount(shape)), rows, elementCount(row), salt);
  for (let i = 0; i < values.length; i++) values[i] = Math.sin(values[i] * (1 + salt));
  made.data.set(dtype === 'bf16' ? encode('bf16', values) : values);
  return made;
}

const floatsOf = ({ dtype }, data) => (dtype === 'bf16' ? decode('bf16', data) : data);

/** Norm of the difference over norm of the expected values. */
function relative(found, expected) {
  let [error, norm] = [0, 0];
  for (let i = 0; i < expected.length; i++) {
    if (expected[i] === found[i]) continue; // -Infinity, of queries that see nothing, among others
    error += (found[i] - expected[i]) ** 2;
  }
  for (const value of expected) if (Number.isFinite(value)) norm += value ** 2;
  return Math.sqrt(error / norm);
}

/** Both passes in a graph: replays give the bits of plain calls, of whatever the tensors hold by then. */
async function replayed(stream, attention, there, { q, names }) {
  const read = () => Promise.all(names.map((name) => readTensor(there[name])));
  const plain = async () => {
    await attention.forward(stream, there);
    await attention.backward(stream, there);
    return read();
  };
  assert.throws(() => attention.captureForward(stream, there), { code: 'EP_INVALID_ARGUMENT' });
  let refused;
  const graph = stream.capture(() => {
    attention.captureForward(stream, there);
    attention.captureBackward(stream, there);
    refused = assert.rejects(attention.backward(stream, there), { code: 'EP_INVALID_ARGUMENT' });
  });
  await refused;
  const before = await plain();
  for (let i = 0; i < 3; i++) await stream.launch(graph);
  assert.deepEqual(await read(), before);
  await writeTensor(q, there.q);
  await stream.launch(graph);
  const after = await read();
  assert.notDeepEqual(after, before);
  assert.deepEqual(after, await plain());
  return graph;
}

/** Attention and its gradients, in one dtype and one shape of heads. */
export async function coreAttention({ device, data }) {
  const { dtype, queryHeads, kvHeads, headDim } = data;
  const q = [queryRows, queryHeads, headDim];
  const kv = [kvRows, kvHeads, headDim];
  const inputs = {
    q: hostRows(dtype, q, 1),
    k: hostRows(dtype, kv, 2),
    v: hostRows(dtype, kv, 3),
    dO: hostRows(dtype, q, 4),
  };
  const outputs = {
    ...{ o: hostTensor(dtype, q), lse: hostTensor('f32', [queryRows, queryHeads]) },
    ...{ dQ: hostTensor(dtype, q), dK: hostTensor(dtype, kv), dV: hostTensor(dtype, kv) },
  };
  // Rows that nobody owns stay as they are, on either side.
  for (const name of ['o', 'lse', 'dQ']) outputs[name].data.fill(1);
  const stream = device.stream();
  const attention = device.attention(groups, { dtype, queryRows, kvRows, queryHeads, kvHeads, headDim });
  const there = {};
  for (const [name, { dtype: of, shape, data: values }] of Object.entries({ ...inputs, ...outputs })) {
    there[name] = device.allocate(elementCount(shape) * elementBytes(of)).tensor(of, shape);
    await writeTensor(values, there[name]);
  }
  const host = new HostStream();
  await attentionForward(host, groups, { ...inputs, ...outputs });
  await attentionBackward(host, groups, { ...inputs, ...outputs });
  await attention.forward(stream, there);
  await attention.backward(stream, there);
  const bounds = { f32: 1e-5, bf16: 1e-2 };
  for (const [name, expected] of Object.entries(outputs)) {
    const bytes = await readTensor(there[name]);
    const found = viewStorage(expected.dtype, bytes.buffer, 0, expected.data.length);
    const error = relative(floatsOf(expected, found), floatsOf(expected, expected.data));
    assert.ok(error <= bounds[expected.dtype], `${name}: relative error ${error}`);
  }
  const graph = await replayed(stream, attention, there, {
    q: hostRows(dtype, q, 5).data,
    names: Object.keys(outputs),
  });
  await assert.rejects(attention.forward(stream, { ...there, o: there.q }), { code: 'EP_INVALID_ARGUMENT' });
  await assert.rejects(attention.forward(stream, { ...there, k: there.q }), { code: 'EP_INVALID_ARGUMENT' });
  await attention.close();
  await assert.rejects(attention.forward(stream, there), { code: 'EP_CLOSED' });
  // What it uses stays with it.
  await stream.launch(graph);
  await graph.close();
  await host.close();
  await stream.close();
  return Object.keys(outputs).length;
}
