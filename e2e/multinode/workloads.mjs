/**
 * What ranks do while hosts and links fail under them. Each is opened on all ranks, and then steps are taken: `step(n)` is collective over the ranks that are left, compares
 * all that came, element by element, and throws `EP_PEER_LOST` where it lost a rank instead. `gone` are the ranks that this one knows to be lost, `result()` what all who
 * were left must agree on.
 */
import { initProcessGroup } from '@ep/collectives';
import { prefixStore, tensor } from '@ep/core';
import { leaseBytesFor, openDispatcher, openMoeBuffer } from '@ep/cuda-kernels';
import { spreadExperts } from '@ep/plan/moe';
import { movePlan } from '@ep/plan/reference';
import { fillRows, fullPlan, specsOf } from '../attention/plans.mjs';
import { Training } from '../data-parallel/training.mjs';

/** Of a call that awaits a rank which is late and not lost: longer than any fault that ends. */
const PATIENCE_MS = 60_000;

function same(found, expected, what) {
  if (found.length !== expected.length)
    throw new Error(`${what}: ${found.length} elements, expected ${expected.length}`);
  const at = found.findIndex((value, i) => value !== expected[i]);
  if (at >= 0) throw new Error(`${what}[${at}]: found ${found[at]}, expected ${expected[at]}`);
}

/** Rows of an attention plan from all ranks to all: it ends with the first rank that is lost. */
async function attention({ transport, rank, worldSize }) {
  const plan = fullPlan(worldSize, 20);
  const sizes = { q: 64, kv: 32 };
  const { forward: parts } = specsOf(plan, { dtype: 'f32', qRow: sizes.q, kvRow: sizes.kv });
  const dispatcher = await openDispatcher(transport, {
    leaseBytes: leaseBytesFor(parts),
    chunkBytes: 256,
    timeoutMs: PATIENCE_MS,
  });
  const { forward } = await dispatcher.bind({ forward: parts });
  const rows = (n, tokens, row) =>
    Array.from(tokens, (count, of) => fillRows(new Float32Array(count * row), of, row, n));
  return {
    endsWithLoss: true,
    gone: () => [],
    async step(n) {
      const q = rows(n, plan.fwdQ.sendTokens, sizes.q);
      const kv = rows(n + 1, plan.fwdKv.sendTokens, sizes.kv);
      const lease = await forward.run({
        q: tensor('f32', [plan.fwdQ.sendTokens[rank], sizes.q], q[rank]),
        kv: tensor('f32', [plan.fwdKv.sendTokens[rank], sizes.kv], kv[rank]),
      });
      same(lease.tensors.q.data, movePlan(plan.fwdQ, q, sizes.q)[rank], `call ${n}: q`);
      same(lease.tensors.kv.data, movePlan(plan.fwdKv, kv, sizes.kv)[rank], `call ${n}: kv`);
      lease.release();
    },
    result: () => undefined,
    close: () => dispatcher.close(),
  };
}

/** Tokens to experts on all ranks and back; a rank's experts go with it, over EFA all that are left do. Whole numbers: sums are exact. */
async function experts({ transport, rank, worldSize, data }) {
  const [tokens, topK, hidden, count] = [24, 3, 128, 4 * worldSize];
  const map = spreadExperts(count, worldSize);
  const buffer = await openMoeBuffer(transport, {
    ...{ mode: 'low-latency', experts: map, maxTokens: tokens, topK, hidden, dtype: 'f32' },
    timeoutMs: PATIENCE_MS,
  });
  const rankOf = (expert) => map.rankOffsets.findLastIndex((first) => first <= expert);
  // Three different experts, which go around with the token, the step and the rank.
  const choice = (of, n, token, k) => (of * 5 + n + token * 3 + k * 7) % count;
  const value = (of, n, token, h) => (of * 31 + n * 7 + token * 3 + h) % 251;
  const left = () => ranksWhere(buffer.activeRanks, 1);
  return {
    // There is no call without a rank over EFA.
    endsWithLoss: data.over === 'efa',
    gone: () => [...buffer.losses.keys()].sort((a, b) => a - b),
    async step(n) {
      const active = left();
      const x = Float32Array.from({ length: tokens * hidden }, (_, i) =>
        value(rank, n, Math.floor(i / hidden), i % hidden),
      );
      const choices = Int32Array.from({ length: tokens * topK }, (_, i) =>
        choice(rank, n, Math.floor(i / topK), i % topK),
      );
      const received = await buffer.dispatch(tensor('f32', [tokens, hidden], x), choices);
      const rows = received.x.shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
      const stride = received.x.strides?.at(-2) ?? hidden;
      const y = new Float32Array(rows * hidden);
      for (const [local, filled] of received.counts.entries()) {
        const expert = map.expert[map.rankOffsets[rank] + local];
        for (let row = received.blockStart[local]; row < received.blockStart[local] + filled; row++)
          for (let h = 0; h < hidden; h++) y[row * hidden + h] = received.x.data[row * stride + h] * (expert + 1);
      }
      const weights = Float32Array.from(choices, (_, i) => (i % topK) + 1);
      const combined = await buffer.combine(tensor('f32', [rows, hidden], y), received.handle, { weights });
      const kept = active.filter((other) => combined.lostRanks[other] === 0);
      const expected = Float32Array.from(x, (element, i) => {
        const token = Math.floor(i / hidden);
        let sum = 0;
        for (let k = 0; k < topK; k++) {
          const expert = choices[token * topK + k];
          if (kept.includes(rankOf(expert))) sum += (k + 1) * (expert + 1) * element;
        }
        return sum;
      });
      same(combined.y.data, expected, `step ${n}: tokens`);
    },
    result: left,
    close: () => buffer.close(),
  };
}

const ranksWhere = (mask, value) => Array.from(mask, (_, rank) => rank).filter((rank) => mask[rank] === value);

/** Calls of a process group, small and large enough to go in two levels. */
async function groups({ transport, store, rank, worldSize }) {
  const group = await openGroup(transport, store);
  const large = 20_011;
  const element = (of, n, i) => ((i + n) % 101) * (of + 1);
  const numbers = (length, of, n) => Float32Array.from({ length }, (_, i) => element(of, n, i));
  return {
    endsWithLoss: false,
    gone: () => goneFrom(group),
    async step(n) {
      for (const length of [3, large]) {
        const what = `step ${n}, ${length} elements`;
        const sums = numbers(length, rank, n);
        // Who is lost in a later call has still taken part in this one.
        const took = await contributorsOf(group.allReduce(sums));
        const factor = took.reduce((sum, of) => sum + of + 1, 0);
        same(
          sums,
          Float32Array.from(sums, (_, i) => ((i + n) % 101) * factor),
          `${what}: sum`,
        );
        const all = new Float32Array(worldSize * length);
        for (const of of await contributorsOf(group.allGatherIntoTensor(all, numbers(length, rank, n))))
          same(all.subarray(of * length, (of + 1) * length), numbers(length, of, n), `${what}: gathered of ${of}`);
        const root = took[n % took.length];
        const spread = rank === root ? numbers(length, root, n) : new Float32Array(length);
        await group.broadcast(spread, { root });
        same(spread, numbers(length, root, n), `${what}: from ${root}`);
      }
    },
    result: () => group.activeRanks,
    close: () => group.destroy(),
  };
}

/** The data-parallel training: whoever is left goes on, and the weights have the bits that one process computes alone. */
async function training({ transport, store, rank, data }) {
  const group = await openGroup(transport, store);
  const run = new Training({ rank, hidden: data.hidden, batch: data.batch });
  const slots = run.slotsOf(group);
  return {
    endsWithLoss: false,
    gone: () => goneFrom(group),
    step: () => run.takeStep(group, slots),
    result: () => ({ losses: run.losses, ...run.digests() }),
    close: () => group.destroy(),
  };
}

async function contributorsOf(work) {
  await work;
  return work.contributors;
}

const openGroup = (transport, store) =>
  initProcessGroup({ backend: transport, store: prefixStore(store, 'group'), timeoutMs: PATIENCE_MS });

const goneFrom = (group) => group.ranks.filter((rank) => !group.activeRanks.includes(rank));

export const workloads = { attention, experts, groups, training };
