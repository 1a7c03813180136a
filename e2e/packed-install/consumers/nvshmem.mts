// A world of one rank: it allocates symmetric memory, puts to itself with a signal, and waits for it.
import { memoryStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';

const probe = await nvshmem.shm.probe();
if (!probe.available) throw new Error(`shared memory is not available: ${probe.reason}`);

const member = { rank: 0, worldSize: 1, store: memoryStore() };
const transport = await nvshmem.shm.open(member, { signal: AbortSignal.timeout(20_000) });
const memory = await transport.allocate({ byteLength: 4096, signalSlots: 2 });
memory.view('i32', 0, 4).set([1, 2, 3, 4]);
const endpoint = await transport.connect(0);
await endpoint.put(memory.local(0, 16), memory.remote(0, 1024, 16), { signal: { slot: 1, op: 'add', value: 5n } });
const seen = await memory.signals.until(1, { cmp: 'ge', value: 5n }, { timeoutMs: 10_000 });
const arrived = memory.view('i32', 1024, 4);
if (seen !== 5n || arrived.join() !== '1,2,3,4') throw new Error(`signal ${seen}, data ${arrived}`);

await transport.close();
if (arrived.length !== 0) throw new Error('a view is still attached after close');
console.log('used');
