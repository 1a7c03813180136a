// A world of one rank over the software EFA: it puts to itself with a signal and waits for it. Then a value that travels within its write request, to bytes and back.
import { memoryStore } from '@ep/core';
import { decodeWqe, dumpWqe, efaGda, encodeWqe } from '@ep/efa-gda';

const probe = await efaGda.soft.probe();
if (!probe.available) throw new Error(`the software EFA is not available: ${probe.reason}`);
const hardware = await efaGda.hardware.probe();
if (!hardware.available && hardware.reason === '') throw new Error('the probe of the hardware gives no reason');

const member = { rank: 0, worldSize: 1, store: memoryStore() };
const transport = await efaGda.soft.open(member, { signal: AbortSignal.timeout(20_000), config: { seed: 3 } });
const memory = await transport.allocate({ byteLength: 4096, signalSlots: 2 });
memory.view('i32', 0, 4).set([1, 2, 3, 4]);
const endpoint = await transport.connect(0);
await endpoint.put(memory.local(0, 16), memory.remote(0, 1024, 16), { signal: { slot: 1, op: 'add', value: 5n } });
const seen = await memory.signals.until(1, { cmp: 'ge', value: 5n }, { timeoutMs: 10_000 });
const arrived = memory.view('i32', 1024, 4);
if (seen !== 5n || arrived.join() !== '1,2,3,4') throw new Error(`signal ${seen}, data ${arrived}`);
if (transport.violations().length > 0) throw new Error(transport.violations().join());
await transport.close();

const bytes = encodeWqe(
  {
    requestId: 7n,
    phase: 1,
    qpn: 0x22,
    ah: 3,
    qkey: 0x12345678,
    completion: true,
    op: 'write',
    remote: { address: 0x1000n, rkey: 0x99 },
    payload: { inline: Uint8Array.of(0, 0, 0x44, 0x44) },
  },
  128,
);
const found = decodeWqe(bytes);
if (found.wqe?.qpn !== 0x22 || found.violations.length > 0) throw new Error(dumpWqe(bytes).join('\n'));
bytes[3]! &= ~8;
const [violation] = decodeWqe(bytes).violations;
if (violation?.offset !== 3) throw new Error(`found ${JSON.stringify(violation)}`);
console.log('used');
