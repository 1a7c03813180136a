// A world of one rank over the software NIC: it puts to itself with a signal, waits for it, and reads what was posted in the NIC's trace.
import { memoryStore } from '@ep/core';
import { decodeWqe, encodeWqe, ibgda } from '@ep/ibgda';

const probe = await ibgda.soft.probe();
if (!probe.available) throw new Error(`the software NIC is not available: ${probe.reason}`);
const hardware = await ibgda.hardware.probe();
if (!hardware.available && hardware.reason === '') throw new Error('the probe of the hardware gives no reason');

const member = { rank: 0, worldSize: 1, store: memoryStore() };
const transport = await ibgda.soft.open(member, { signal: AbortSignal.timeout(20_000), config: { traceEvents: 100 } });
const memory = await transport.allocate({ byteLength: 4096, signalSlots: 2 });
memory.view('i32', 0, 4).set([1, 2, 3, 4]);
const endpoint = await transport.connect(0);
await endpoint.put(memory.local(0, 16), memory.remote(0, 1024, 16), { signal: { slot: 1, op: 'add', value: 5n } });
const seen = await memory.signals.until(1, { cmp: 'ge', value: 5n }, { timeoutMs: 10_000 });
const arrived = memory.view('i32', 1024, 4);
if (seen !== 5n || arrived.join() !== '1,2,3,4') throw new Error(`signal ${seen}, data ${arrived}`);
await transport.close();

const bytes = encodeWqe({ op: 'nop', index: 7, qpn: 0x22, completion: 'always' });
const { wqe, violations } = decodeWqe(bytes);
if (wqe?.op !== 'nop' || wqe.index !== 7 || violations.length > 0) throw new Error(`decoded ${JSON.stringify(wqe)}`);
console.log('used');
