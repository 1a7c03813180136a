// A group of one rank in shared memory: it reduces in group memory, and sends to itself.
import { initProcessGroup } from '@ep/collectives';
import { memoryStore } from '@ep/core';

const group = await initProcessGroup({ store: memoryStore(), rank: 0, worldSize: 1, timeoutMs: 20_000 });
const weights = group.allocate('f32', 4);
weights.data.set([1, 2, 3, 4]);
const work = group.allReduce(weights, { op: 'avg' });
await work;
if (work.contributors.join() !== '0' || weights.data.join() !== '1,2,3,4') throw new Error(`reduced ${weights.data}`);

const target = new Int32Array(2);
const sent = group.send(Int32Array.of(7, 8), 0);
const { source, byteLength } = await group.recv(target, 0);
await sent;
if (source !== 0 || byteLength !== 8 || target.join() !== '7,8') throw new Error(`received ${target} of ${source}`);

await group.destroy();
if (weights.data.length !== 0) throw new Error('group memory is still attached after destroy');
console.log('used');
