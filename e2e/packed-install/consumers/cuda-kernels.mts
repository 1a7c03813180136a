// A world of one rank: one document of four tokens goes through the dispatch of an attention step and comes back; then its tokens go to experts and back.
import { memoryStore, type Tensor, tensor } from '@ep/core';
import { attentionLeaseBytes, bindAttention, openDispatcher, openMoeBuffer } from '@ep/cuda-kernels';
import { nvshmem } from '@ep/nvshmem';
import { planAttention } from '@ep/plan';
import { generateRouting, rankTopk } from '@ep/plan/moe';

const document = { documents: 1, document: Int32Array.of(0), position: Int32Array.of(0) };
const shards = { worldSize: 1, shardOffsets: Int32Array.of(0, 1), lengths: Int32Array.of(4), ...document };
const plan = planAttention(shards, Int32Array.of(0));
const shape = { queryHeads: 2, kvHeads: 1, headDim: 8, dtype: 'f32' } as const;

const signal = AbortSignal.timeout(20_000);
const transport = await nvshmem.shm.open({ rank: 0, worldSize: 1, store: memoryStore() }, { signal });
const dispatcher = await openDispatcher(transport, { leaseBytes: attentionLeaseBytes(plan, shape), signal });
const step = await bindAttention(dispatcher, plan, shape);

const rows = (heads: number, first: number): Tensor<'f32'> =>
  tensor(
    'f32',
    [4, heads, shape.headDim],
    Float32Array.from({ length: 4 * heads * shape.headDim }, (_, i) => first + i),
  );
const sent = { q: rows(2, 0), k: rows(1, 1000), v: rows(1, 2000) };
const lease = await step.queryKeyValue(sent, { signal });
for (const [name, tensorSent] of Object.entries(sent)) {
  const found = lease.tensors[name as keyof typeof sent].data;
  if (found.length !== tensorSent.data.length || found.some((value, i) => value !== tensorSent.data[i])) {
    throw new Error(`${name} arrived as ${found}`);
  }
}
lease.release();
await dispatcher.close();

const popularity = { kind: 'uniform' } as const;
const routing = generateRouting({ worldSize: 1, experts: 3, topK: 2, tokens: 4, popularity, seed: 1 });
const x = tensor('f32', [4, 8], sent.k.data);
const experts = await openMoeBuffer(transport, {
  mode: 'low-latency',
  experts: 3,
  maxTokens: 4,
  topK: 2,
  hidden: 8,
  dtype: 'f32',
  signal,
});
const there = await experts.dispatch(x, rankTopk(routing, 0));
const { y } = await experts.combine(there.x, there.handle, { weights: new Float32Array(8).fill(0.5) });
if (y.data.some((value, i) => value !== x.data[i])) throw new Error(`tokens came back as ${y.data}`);
await experts.close();
await transport.close();
console.log('used');
