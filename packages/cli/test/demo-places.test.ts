/** The demo of attention on other transports, and in memory that is not the host's: the same rows, and as exactly, as over shared memory. */
import { fileURLToPath } from 'node:url';
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';
import { demo } from './small-demo.js';

// The kernels of a GPU on host threads: everything above them is what runs there.
const standIn = fileURLToPath(new URL('../../../native/build/Release/libep_cuda_host.so', import.meta.url));

describe('ep demo attention', () => {
  it.each([
    ['ibgda', 'processes', 3],
    ['ibgda', 'threads', 2],
    ['efa', 'processes', 3],
    ['efa', 'threads', 2],
    ['mixed', 'processes', 3],
  ] as const)('passes over queue pairs of a software NIC, %s, as %s', async (transport, mode, ranks) => {
    const threads = mode === 'threads' ? ['--threads'] : [];
    const report = await demo(['attention', '-n', String(ranks), '--transport', transport, ...threads]);
    expect(report).toMatchObject({ pass: true, ranks, mode, transport });
    // The same rows, and as exactly, as over shared memory.
    const { bytes, errors } = await demo(['-n', String(ranks), ...threads]);
    expect(report.bytes).toEqual(bytes);
    expect(report.errors).toEqual(errors);
  });

  it.for([
    ['processes', 3],
    ['threads', 2],
  ] as const)('passes over libfabric on the loopback interface, as %s', async ([mode, ranks], context) => {
    const probe = await nvshmem.fabric.probe({ address: '127.0.0.1' });
    if (!probe.available) context.skip(probe.reason);
    const threads = mode === 'threads' ? ['--threads'] : [];
    const report = await demo(['attention', '-n', String(ranks), '--transport', 'fabric', ...threads]);
    expect(report).toMatchObject({ pass: true, ranks, mode, transport: 'fabric' });
    const { bytes, errors } = await demo(['-n', String(ranks), ...threads]);
    expect(report.bytes).toEqual(bytes);
    expect(report.errors).toEqual(errors);
  });

  it.each([
    [1, 'bf16'],
    [3, 'f32'],
  ] as const)('passes on %i ranks in %s, whose kernels run on a stand-in for a GPU', async (ranks, dtype) => {
    const job = ['attention', '-n', String(ranks), '--dtype', dtype];
    const report = await demo([...job, '--device', 'cuda'], { EP_CUDA_PATH: standIn });
    expect(report).toMatchObject({ pass: true, ranks, dtype, mode: 'threads', device: 'cuda', transport: 'cuda' });
    const all = [...Array(ranks).keys()];
    const shown = { gpu: 0, name: 'kernels on host threads (for tests)', ranks: all, processes: [all] };
    expect(report.gpus).toEqual([shown]);
    // The plan does not know where its rows lie.
    const { bytes } = await demo([...job, '--threads']);
    expect(report.bytes).toEqual(bytes);
  });
});
