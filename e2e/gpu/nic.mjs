// Kernels of a GPU that post to queue pairs themselves: dispatches between ranks whose parts only a NIC reaches.
import assert from 'node:assert/strict';
import { fileURLToPath } from 'node:url';
import { prefixStore } from '@ep/core';
import { leaseBytesFor, openDeviceDispatcher, symmetricTensor, writeTensor } from '@ep/cuda-kernels';
import { ibgda } from '@ep/ibgda';
import { movePlan } from '@ep/plan/reference';
import { randomPlan } from '../attention/plans.mjs';
import { allRows, expectSame } from './tensors.mjs';

const driver = fileURLToPath(new URL('../../native/build/Release/libep_cuda_driver.so', import.meta.url));

/** By a software NIC, which moves the bytes of the very requests that the kernels write. */
async function nicDispatch({ store, device, rank, worldSize, data }) {
  const libraries = device.facts.runsOn === 'cuda' ? {} : { cuda: driver };
  const transport = await ibgda.soft.open(
    { rank, worldSize, store: prefixStore(store, 'nic') },
    { signal: new AbortController().signal, config: { device: device.index, depth: 128, libraries } },
  );
  const stream = device.stream();
  try {
    return await dispatched({ transport, stream, rank, worldSize, data });
  } finally {
    await stream.close();
    await transport.close();
  }
}

async function dispatched({ transport, stream, rank, worldSize, data }) {
  const rowElements = 33;
  for (const seed of data.seeds) {
    const plan = randomPlan(seed, worldSize);
    const specs = [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [rowElements] }];
    const dispatcher = await openDeviceDispatcher(transport, {
      stream,
      leaseBytes: leaseBytesFor(specs),
      leases: 2,
      chunkBytes: 200 + 64 * (seed % 5),
      blocks: 3,
      lanes: 64,
    });
    const { forward } = await dispatcher.bind({ forward: specs });
    const rows = plan.fwdQ.sendTokens[rank];
    // Collective: where the NIC reads.
    const sources = await transport.allocate({
      byteLength: Math.max(1, ...plan.fwdQ.sendTokens) * rowElements * 4,
      signalSlots: 0,
      space: 'device',
    });
    const q = symmetricTensor(sources, 'f32', [rows, rowElements]);
    for (let call = 0; call < 6; call++) {
      const all = allRows(plan.fwdQ.sendTokens, rowElements, 'f32', seed + call);
      await writeTensor(all[rank], q);
      const lease = await forward.run({ q });
      await expectSame(lease.tensors.q, movePlan(plan.fwdQ, all, rowElements)[rank], `seed ${seed}, call ${call}`);
      lease.release();
    }
    // A memory that is closed takes its keys away: all releases have to have landed.
    await stream.synchronize();
    await transport.barrier();
    await dispatcher.close();
    await sources.close();
  }
  const { kernels, placement, fallbacks } = transport.port;
  const { doorbells, requests } = transport.counts();
  assert.equal(transport.kernelFailure(), undefined);
  assert.deepEqual(transport.violations(), []);
  return { kernels, placement, fallbacks: fallbacks.length, requests, doorbells };
}

export const nicScenarios = { nicDispatch };
