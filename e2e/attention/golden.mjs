// Recorded plans of the original, run by the kernel.
import { readFile } from 'node:fs/promises';
import { tensor } from '@ep/core';
import { leaseBytesFor, openDispatcher } from '@ep/cuda-kernels';
import { fromPaddedAttention, planAttention, replicaMask } from '@ep/plan';
import { specsOf } from './plans.mjs';

/** What the kernel makes of a recorded plan: its rows after each leg, of one token id each; the gradient in its unreduced form, replica by replica. */
async function golden({ transport, rank, data }) {
  const { inputs } = JSON.parse(await readFile(data.file, 'utf8'));
  const { shards, serverRank } = fromPaddedAttention({
    seqLen: inputs.mlp_seq_len,
    numSeqs: inputs.mlp_num_seqs,
    qDispatch: inputs.mlp_q_dispatch,
    kvToQMapping: inputs.kv_to_q_mapping,
    kvToQRank: inputs.kv_to_q_rank,
    kvContextSize: inputs.kv_context_size,
    qToNumKvSeq: inputs.q_to_num_kv_seq,
    qToNumKvToken: inputs.q_to_num_kv_token,
  });
  const plan = planAttention(shards, serverRank);
  const specs = specsOf(plan, { dtype: 'i32', qRow: 1, kvRow: 1 });
  const leaseBytes = Math.max(...Object.values(specs).map(leaseBytesFor));
  const dispatcher = await openDispatcher(transport, { leaseBytes, chunkBytes: 64, ...data.options });
  const { forward, output, dense } = await dispatcher.bind(specs);
  const column = (values) => tensor('i32', [values.length, 1], Int32Array.from(values));
  const received = async (call, sources) => {
    const lease = await call.run(sources);
    const rows = Object.fromEntries(Object.entries(lease.tensors).map(([name, { data: found }]) => [name, [...found]]));
    lease.release();
    return rows;
  };
  const ids = (rows) => column(Array.from({ length: rows }, (_, i) => 1000 * rank + i + 1));
  const there = await received(forward, { q: ids(plan.fwdQ.sendTokens[rank]), kv: ids(plan.fwdKv.sendTokens[rank]) });
  const { o } = await received(output, { o: column(there.q) });
  const { dKv } = await received(dense, { dKv: column(there.kv) });
  await dispatcher.close();
  return { ...there, o, dKv, summed: sumMasked(plan, rank, dKv) };
}

/** Of each of this rank's tokens the sum over the replicas that the mask says exist. */
function sumMasked(plan, rank, replicaMajor) {
  const { shardOffsets, lengths } = plan.shards;
  const { replicas } = plan.fwdKv;
  const mask = replicaMask(plan);
  const tokens = replicaMajor.length / replicas;
  const sums = Array(tokens).fill(0);
  let token = 0;
  for (let g = shardOffsets[rank]; g < shardOffsets[rank + 1]; g++) {
    for (const end = token + lengths[g]; token < end; token++) {
      for (let c = 0; c < replicas; c++) if (mask[g * replicas + c]) sums[token] += replicaMajor[c * tokens + token];
    }
  }
  return sums;
}

/** By name, as the tests call them. */
export const goldenScenarios = { golden };
