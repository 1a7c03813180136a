// What a rank of the suites for GPUs does. Each function runs on every rank and returns what is compared.
import assert from 'node:assert/strict';
import { decode } from '@ep/core';
import { leaseBytesFor, openDeviceDispatcher, writeTensor } from '@ep/cuda-kernels';
import { native } from '@ep/native';
import { movePlan, sumReplicas } from '@ep/plan/reference';
import { fullPlan, randomPlan } from '../attention/plans.mjs';
import { coreAttention } from './attention.mjs';
import { attentionGridScenarios } from './attention-grid.mjs';
import { collectiveGridScenarios } from './collective-grid.mjs';
import { collectiveScenarios } from './collectives.mjs';
import { compatScenarios } from './compat.mjs';
import { expertGraphScenarios } from './expert-graphs.mjs';
import { expertGridScenarios } from './expert-grid.mjs';
import { expertLayer } from './expert-layer.mjs';
import {
  experts,
  graphExperts,
  keptGraphExperts,
  killedExperts,
  offeredExperts,
  refusedExperts,
  reopenedExperts,
} from './experts.mjs';
import { graphScenarios } from './graphs.mjs';
import { groupScenarios } from './groups.mjs';
import { messageScenarios } from './messages.mjs';
import { ncclScenarios } from './nccl.mjs';
import { nicScenarios } from './nic.mjs';
import { nvshmemScenarios } from './nvshmem.mjs';
import { recovery } from './recovery.mjs';
import { allRows, expectSame, manyReplays, place, storageOf } from './tensors.mjs';
import { timesScenarios } from './times.mjs';
import { torchScenarios } from './torch.mjs';
import { unitedScenarios } from './united.mjs';
import { unitedTimesScenarios } from './united-times.mjs';

function specsOf(plan, { dtype, qRow, kvRow }) {
  const specs = {
    forward: [
      { name: 'q', plan: plan.fwdQ, dtype, rowShape: [qRow] },
      { name: 'kv', plan: plan.fwdKv, dtype, rowShape: [kvRow] },
    ],
    output: [{ name: 'o', plan: plan.revQ, dtype, rowShape: [qRow] }],
  };
  if (dtype !== 'u8') {
    specs.reduced = [{ name: 'dKv', plan: plan.revKvCompact, dtype, rowShape: [kvRow], reduce: plan.reduction }];
  }
  return specs;
}

/** Random plans against the plain oracle: forward from strided rows of others, back, and summed gradients. */
async function oracle({ transport, device, rank, worldSize, data }) {
  const stream = device.stream();
  let compared = 0;
  for (const seed of data.seeds) {
    const plan = randomPlan(seed, worldSize, { sharing: seed % 2 ? 'each-query' : 'each-server' });
    const { dtype, qRow, kvRow } = data;
    const specs = specsOf(plan, data);
    const dispatcher = await openDeviceDispatcher(transport, {
      stream,
      leaseBytes: Math.max(...Object.values(specs).map(leaseBytesFor)),
      chunkBytes: 64 + 64 * (seed % 7),
      blocks: 2,
      lanes: 32 << (seed % 4),
    });
    const bound = await dispatcher.bind(specs);
    const q = allRows(plan.fwdQ.sendTokens, qRow, dtype, seed);
    const kv = allRows(plan.fwdKv.sendTokens, kvRow, dtype, seed + 1);
    const ownQ = await place(device, dtype, plan.fwdQ.sendTokens[rank], qRow, q[rank], seed % 3);
    const ownKv = await place(device, dtype, plan.fwdKv.sendTokens[rank], kvRow, kv[rank]);
    const there = await bound.forward.run({ q: ownQ.tensor, kv: ownKv.tensor });
    const atServers = movePlan(plan.fwdQ, q, qRow);
    await expectSame(there.tensors.q, atServers[rank], `seed ${seed}: q`);
    await expectSame(there.tensors.kv, movePlan(plan.fwdKv, kv, kvRow)[rank], `seed ${seed}: kv`);
    // Sent back from the lease where it lies.
    const back = await bound.output.run({ o: there.tensors.q });
    await expectSame(back.tensors.o, movePlan(plan.revQ, atServers, qRow)[rank], `seed ${seed}: o`);
    there.release();
    back.release();
    if (bound.reduced) {
      const gradients = allRows(plan.revKv.sendTokens, kvRow, dtype, seed + 2);
      const mine = await place(device, dtype, plan.revKv.sendTokens[rank], kvRow, gradients[rank]);
      const movement = movePlan(plan.revKv, gradients, kvRow);
      const values = dtype === 'f32' ? movement : movement.map((rows) => decode(dtype, rows));
      const sums = sumReplicas(plan.reduction, values, kvRow, 'dense', 'f32')[rank];
      const reduced = await bound.reduced.run({ dKv: mine.tensor });
      await expectSame(reduced.tensors.dKv, storageOf(dtype, Float32Array.from(sums)), `seed ${seed}: gradient`);
      reduced.release();
      await mine.buffer.close();
    }
    await dispatcher.close();
    await ownQ.buffer.close();
    await ownKv.buffer.close();
    compared++;
  }
  await stream.close();
  return { compared, pending: native().binding.leaks().pending };
}

/** A step as a graph: pinned values to the device, a call, the received rows back to pinned memory, the release. New values for every replay. */
async function graph({ transport, device, rank, worldSize, data: { replays = manyReplays(device) } }) {
  const stream = device.stream();
  const plan = fullPlan(worldSize, 9);
  const qRow = 12;
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [qRow] }] };
  const dispatcher = await openDeviceDispatcher(transport, {
    stream,
    leaseBytes: leaseBytesFor(specs.forward),
    leases: 1,
    chunkBytes: 256,
    blocks: 2,
    lanes: 64,
  });
  const { forward } = await dispatcher.bind(specs);
  const [rows, received] = [plan.fwdQ.sendTokens[rank], plan.fwdQ.recvTokens[rank]];
  const own = device.allocate(rows * qRow * 4);
  const q = own.tensor('f32', [rows, qRow]);
  const [from, into] = [device.pinned(rows * qRow * 4), device.pinned(received * qRow * 4)];
  const replay = stream.capture(() => {
    stream.copy(from, q);
    const { lease, done } = forward.enqueue({ q });
    assert.equal(done, undefined);
    stream.copy(lease.tensors.q, into);
    lease.release();
  });
  for (let call = 0; call < replays; call++) {
    const all = allRows(plan.fwdQ.sendTokens, qRow, 'f32', call);
    new Float32Array(from.buffer).set(all[rank]);
    await stream.launch(replay);
    assert.deepEqual(new Float32Array(into.buffer), movePlan(plan.fwdQ, all, qRow)[rank], `replay ${call}`);
  }
  // The same counters serve calls that are launched one by one.
  const all = allRows(plan.fwdQ.sendTokens, qRow, 'f32', 7);
  await writeTensor(all[rank], q);
  const lease = await forward.run({ q });
  await expectSame(lease.tensors.q, movePlan(plan.fwdQ, all, qRow)[rank], 'after the replays');
  lease.release();
  await replay.close();
  await dispatcher.close();
  await stream.close();
  return replays;
}

/** One rank does not come to a call; the others time out and name it; all resynchronise, and correct calls follow. */
async function absent({ transport, device, rank, worldSize }) {
  const stream = device.stream();
  const plan = fullPlan(worldSize, 20);
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [8] }] };
  const dispatcher = await openDeviceDispatcher(transport, {
    stream,
    leaseBytes: leaseBytesFor(specs.forward),
    blocks: 2,
    lanes: 64,
    timeoutMs: 5_000,
  });
  const { forward } = await dispatcher.bind(specs);
  const outcomes = [];
  for (let round = 0; round < worldSize; round++) {
    const all = allRows(plan.fwdQ.sendTokens, 8, 'f32', round);
    const { tensor, buffer } = await place(device, 'f32', plan.fwdQ.sendTokens[rank], 8, all[rank]);
    if (rank === round) {
      outcomes.push('absent');
    } else {
      try {
        await forward.run({ q: tensor }, { timeoutMs: 300 });
        outcomes.push('done');
      } catch (error) {
        outcomes.push(`${error.code} ${error.context.rank} ${error.message.includes('to send its chunks')}`);
        try {
          forward.run({ q: tensor });
        } catch (second) {
          outcomes.push(second.code);
        }
      }
    }
    await dispatcher.resync({ timeoutMs: 20_000 });
    for (let call = 0; call < 5; call++) {
      const lease = await forward.run({ q: tensor });
      await expectSame(lease.tensors.q, movePlan(plan.fwdQ, all, 8)[rank], `round ${round} call ${call}`);
      lease.release();
    }
    await buffer.close();
  }
  const { epoch } = dispatcher;
  await dispatcher.close();
  await stream.close();
  return { outcomes, epoch };
}

/** A rank dies while kernels of the others wait for its rows. */
async function lost({ transport, device, rank, worldSize, data, ready }) {
  const stream = device.stream();
  const plan = fullPlan(worldSize, 20);
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [8] }] };
  const dispatcher = await openDeviceDispatcher(transport, {
    stream,
    leaseBytes: leaseBytesFor(specs.forward),
    blocks: 2,
    lanes: 64,
    timeoutMs: 30_000,
  });
  const { forward } = await dispatcher.bind(specs);
  const { tensor } = await place(
    device,
    'f32',
    plan.fwdQ.sendTokens[rank],
    8,
    new Float32Array(plan.fwdQ.sendTokens[rank] * 8),
  );
  if (rank === data.victim) {
    await ready();
    await new Promise(() => setInterval(() => {}, 1000));
  }
  const began = performance.now();
  const { code } = await forward.run({ q: tensor }).then(
    () => ({ code: 'no error' }),
    (error) => error,
  );
  const ms = performance.now() - began;
  await dispatcher.close();
  await stream.close();
  return { code, ms };
}

/** Wrong calls on one rank. */
async function refused({ transport, device, worldSize }) {
  const stream = device.stream();
  const plan = randomPlan(2, worldSize).fwdQ;
  const options = { stream, leaseBytes: 65_536, blocks: 1, lanes: 32 };
  const dispatcher = await openDeviceDispatcher(transport, options);
  const { forward } = await dispatcher.bind({ forward: [{ name: 'q', plan, dtype: 'f32', rowShape: [4] }] });
  const rows = plan.sendTokens[0];
  const buffer = device.allocate(rows * 16);
  const good = buffer.tensor('f32', [rows, 4]);
  const codes = {};
  const attempt = async (name, body) => {
    try {
      await body();
      codes[name] = 'no error';
    } catch (error) {
      codes[name] = error.code ?? String(error);
    }
  };
  const { address } = good;
  await attempt('missing', () => forward.run({}));
  await attempt('rows', () => forward.run({ q: buffer.tensor('f32', [rows - 1, 4]) }));
  await attempt('hostTensor', () => forward.run({ q: { dtype: 'f32', shape: [rows, 4], data: new Float32Array(4) } }));
  await attempt('noDevice', () => forward.run({ q: { ...good, device: { kind: 'host', index: 0 } } }));
  await attempt('otherDevice', () => forward.run({ q: { ...good, device: { kind: 'cuda', index: 7 } } }));
  await attempt('hostAddress', () => forward.run({ q: { ...good, address: 4096n } }));
  await attempt('strides', () => forward.run({ q: { ...good, strides: [4, 2] } }));
  // 256 is what allocations are rounded to: within it the driver cannot tell.
  await attempt('tooShort', () => forward.run({ q: { ...good, address: address + BigInt(rows * 16 - 4) } }));
  await attempt('tooLarge', () => buffer.tensor('f32', [rows + 1, 4]));
  await attempt('capture', () => stream.capture(() => forward.run({ q: good })));
  await attempt('synchronizeInCapture', () => {
    let inside;
    const graph = stream.capture(() => {
      inside = stream.synchronize();
    });
    return graph.close().then(() => inside);
  });
  const { resident } = dispatcher.shape;
  await attempt('blocks', () => openDeviceDispatcher(transport, { ...options, blocks: resident }));
  await attempt('lanes', () => openDeviceDispatcher(transport, { ...options, lanes: 48 }));
  await attempt('view', () => new Promise((resolve) => resolve(device.allocate(-1))));
  await attempt('good', async () => (await forward.run({ q: good })).release());
  await buffer.close();
  await attempt('closedBuffer', () => forward.run({ q: good }));
  await dispatcher.close();
  await attempt('closed', () => forward.run({ q: good }));
  await stream.close();
  return codes;
}

/** Events order streams, and time them. */
async function streams({ device }) {
  const [first, second] = [device.stream(), device.stream({ highPriority: true })];
  const bytes = 1 << 20;
  const [from, into] = [device.pinned(bytes), device.pinned(bytes)];
  for (let i = 0; i < bytes; i++) from[i] = i * 7;
  const buffer = device.allocate(bytes);
  const whole = buffer.tensor('u8', [bytes]);
  const begin = first.record({ timed: true });
  first.copy(from, whole);
  const end = first.record({ timed: true });
  second.wait(end);
  second.copy(whole, into);
  await second.synchronize();
  assert.deepEqual(into, from);
  assert.ok(end.reached);
  const milliseconds = end.elapsedMs(begin);
  assert.throws(() => second.copy(new Uint8Array(bytes), whole), { code: 'EP_INVALID_ARGUMENT' });
  await Promise.all([begin.close(), end.close(), buffer.close()]);
  await Promise.all([first.close(), second.close()]);
  return milliseconds >= 0;
}

export const scenarios = {
  oracle,
  graph,
  absent,
  lost,
  refused,
  streams,
  coreAttention,
  expertLayer,
  experts,
  refusedExperts,
  reopenedExperts,
  offeredExperts,
  graphExperts,
  keptGraphExperts,
  killedExperts,
  ...recovery,
  ...collectiveScenarios,
  ...attentionGridScenarios,
  ...collectiveGridScenarios,
  ...compatScenarios,
  ...expertGraphScenarios,
  ...expertGridScenarios,
  ...groupScenarios,
  ...graphScenarios,
  ...messageScenarios,
  ...ncclScenarios,
  ...nvshmemScenarios,
  ...nicScenarios,
  ...unitedScenarios,
  ...unitedTimesScenarios,
  ...timesScenarios,
  ...torchScenarios,
};
