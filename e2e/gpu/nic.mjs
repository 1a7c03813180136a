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

/**
 * By a software NIC, which moves the bytes of the very requests that the kernels write. With `controlMemory`, for stand-ins only: by the path of hardware, with queues there.
 */
async function nicDispatch({ store, device, rank, worldSize, data }) {
  const { controlMemory } = data;
  const libraries = device.facts.runsOn === 'cuda' ? {} : { cuda: driver };
  const provider =
    controlMemory === undefined ? ibgda.soft : (await import('../../packages/ibgda/test/shim-provider.mjs')).hardware;
  const transport = await provider.open(
    { rank, worldSize, store: prefixStore(store, 'nic') },
    {
      signal: new AbortController().signal,
      config: { device: device.index, depth: 128, libraries, ...(controlMemory ? { controlMemory } : {}) },
    },
  );
  const stream = device.stream();
  try {
    return await dispatched({ transport, device, stream, rank, worldSize, data });
  } finally {
    await stream.close();
    await transport.close();
  }
}

async function dispatched({ transport, device, stream, rank, worldSize, data }) {
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
    // On a GPU a software NIC reads nothing else; by the path of hardware memory of others goes, too.
    const others = device.allocate(rows * rowElements * 4);
    const shape = [rows, rowElements];
    const tensors = [symmetricTensor(sources, 'f32', shape), others.tensor('f32', shape)];
    for (let call = 0; call < 6; call++) {
      const q = tensors[data.controlMemory === undefined ? 0 : call % 2];
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
    await others.close();
  }
  const { kernels, placement, fallbacks } = transport.port;
  assert.equal(transport.kernelFailure(), undefined);
  if (data.controlMemory !== undefined) return { kernels, placement, fallbacks: fallbacks.length };
  const { doorbells, requests } = transport.counts();
  assert.deepEqual(transport.violations(), []);
  return { kernels, placement, fallbacks: fallbacks.length, requests, doorbells };
}

export const nicScenarios = { nicDispatch };
