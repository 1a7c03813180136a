import { describe, expect, it } from 'vitest';
import { balance, homeLayout, packDocuments, planAttention, serverLayout, shardsOfDocuments } from '../../src/index.js';
import {
  type AttentionShape,
  attentionBackward,
  attentionForward,
  movePlan,
  sumReplicas,
} from '../../src/reference/index.js';

function numbers(length: number, seed: number): Float64Array {
  let x = seed;
  return Float64Array.from({ length }, () => {
    x = (Math.imul(x, 1664525) + 1013904223) | 0;
    return x / 2 ** 31;
  });
}

const shape: AttentionShape = { queries: 4, keys: 6, heads: 4, kvHeads: 2, headDim: 3 };
const q = numbers(4 * 12, 1);
const k = numbers(6 * 6, 2);
const v = numbers(6 * 6, 3);
const dOut = numbers(4 * 12, 4);

describe('reference attention', () => {
  it('one key gives its value; equal scores give the mean of what is seen', () => {
    const one = { queries: 1, keys: 1, heads: 2, kvHeads: 1, headDim: 2 };
    expect([...attentionForward(one, [1, 2, 3, 4], [5, 6], [7, 8]).out]).toEqual([7, 8, 7, 8]);
    const flat = { queries: 2, keys: 3, heads: 1, kvHeads: 1, headDim: 1 };
    const { out, logSumExp } = attentionForward(flat, [0, 0], [1, 2, 3], [3, 5, 10]);
    expect(out[0]).toBeCloseTo(4, 12);
    expect(out[1]).toBeCloseTo(6, 12);
    expect(logSumExp[1]).toBeCloseTo(Math.log(3), 12);
  });

  it('gradients agree with finite differences of the forward pass', () => {
    const loss = (qs: Float64Array, ks: Float64Array, vs: Float64Array) =>
      attentionForward(shape, qs, ks, vs).out.reduce((sum, o, i) => sum + o * dOut[i]!, 0);
    const { dq, dk, dv } = attentionBackward(shape, q, k, v, dOut);
    const step = 1e-5;
    const slope = (which: 0 | 1 | 2, i: number) => {
      const at = (delta: number) => {
        const inputs = [q.slice(), k.slice(), v.slice()] as const;
        inputs[which][i]! += delta;
        return loss(...inputs);
      };
      return (at(step) - at(-step)) / (2 * step);
    };
    (
      [
        [0, dq],
        [1, dk],
        [2, dv],
      ] as const
    ).forEach(([which, gradient]) => {
      gradient.forEach((g, i) => {
        expect(g).toBeCloseTo(slope(which, i), 7);
      });
    });
  });
});

describe.each(['each-query', 'each-server'] as const)(
  'a planned step, %s, equals attention over whole documents',
  (sharing) => {
    const lengths = [37, 5, 0, 12, 1];
    const [heads, kvHeads, headDim] = [4, 2, 3] as const;
    const qRow = heads * headDim;
    const kvRow = kvHeads * headDim;
    const { shards: packed } = shardsOfDocuments(
      packDocuments(Int32Array.from(lengths), Int32Array.of(20, 20, 15), 'head-tail'),
    );
    const { shards, serverRank } = balance(packed, { qRowBytes: qRow, kvRowBytes: 2 * kvRow, sharing });
    const plan = planAttention(shards, serverRank, { sharing });

    // Whole documents, and where each of their rows lives.
    const whole = lengths.map((n, d) => ({
      q: numbers(n * qRow, 10 + d),
      k: numbers(n * kvRow, 20 + d),
      v: numbers(n * kvRow, 30 + d),
      dOut: numbers(n * qRow, 40 + d),
    }));
    const home = (pick: 'q' | 'k' | 'v' | 'dOut', row: number) =>
      Array.from({ length: shards.worldSize }, (_, r) => {
        const parts: number[] = [];
        for (let g = shards.shardOffsets[r]!; g < shards.shardOffsets[r + 1]!; g++) {
          const d = shards.document[g]!;
          let start = 0;
          shards.document.forEach((other, h) => {
            if (other === d && shards.position[h]! < shards.position[g]!) start += shards.lengths[h]!;
          });
          parts.push(...whole[d]![pick].subarray(start * row, (start + shards.lengths[g]!) * row));
        }
        return Float64Array.from(parts);
      });
    const atServer = {
      q: movePlan(plan.fwdQ, home('q', qRow), qRow),
      dOut: movePlan(plan.fwdQ, home('dOut', qRow), qRow),
      k: movePlan(plan.fwdKv, home('k', kvRow), kvRow),
      v: movePlan(plan.fwdKv, home('v', kvRow), kvRow),
    };

    it('outputs and all three gradients', () => {
      const out = atServer.q.map((t) => new Float64Array(t.length));
      const dq = atServer.q.map((t) => new Float64Array(t.length));
      const dk = atServer.k.map((t) => new Float64Array(t.length));
      const dv = atServer.v.map((t) => new Float64Array(t.length));
      for (let t = 0; t < shards.worldSize; t++) {
        const server = serverLayout(plan.layout, t);
        for (let group = 0; group < server.groups; group++) {
          const [q0, q1] = [server.cuSeqlensQ[group]! * qRow, server.cuSeqlensQ[group + 1]! * qRow];
          const [kv0, kv1] = [
            server.kvStart[group]! * kvRow,
            (server.kvStart[group]! + server.kvLength[group]!) * kvRow,
          ];
          const s = { queries: (q1 - q0) / qRow, keys: server.kvLength[group]!, heads, kvHeads, headDim };
          const args = [
            atServer.q[t]!.subarray(q0, q1),
            atServer.k[t]!.subarray(kv0, kv1),
            atServer.v[t]!.subarray(kv0, kv1),
          ] as const;
          out[t]!.set(attentionForward(s, ...args).out, q0);
          const back = attentionBackward(s, ...args, atServer.dOut[t]!.subarray(q0, q1));
          dq[t]!.set(back.dq, q0);
          // Groups may share rows of keys and values, so gradients add up.
          back.dk.forEach((x, i) => {
            dk[t]![kv0 + i]! += x;
          });
          back.dv.forEach((x, i) => {
            dv[t]![kv0 + i]! += x;
          });
        }
      }
      const outHome = movePlan(plan.revQ, out, qRow);
      const dqHome = movePlan(plan.revQ, dq, qRow);
      const dkHome = sumReplicas(plan.reduction, movePlan(plan.revKv, dk, kvRow), kvRow, 'dense', 'f64');
      const dvHome = sumReplicas(plan.reduction, movePlan(plan.revKvCompact, dv, kvRow), kvRow, 'compact', 'f64');
      const row = new Int32Array(shards.worldSize);
      for (let g = 0; g < shards.lengths.length; g++) {
        const r = shards.shardOffsets.findLastIndex((o) => o <= g);
        const d = shards.document[g]!;
        const s = { queries: lengths[d]!, keys: lengths[d]!, heads, kvHeads, headDim };
        const { q: wq, k: wk, v: wv, dOut: wd } = whole[d]!;
        const expectedOut = attentionForward(s, wq, wk, wv).out;
        const expected = attentionBackward(s, wq, wk, wv, wd);
        let start = 0;
        shards.document.forEach((other, h) => {
          if (other === d && shards.position[h]! < shards.position[g]!) start += shards.lengths[h]!;
        });
        for (const [found, want, width] of [
          [outHome, expectedOut, qRow],
          [dqHome, expected.dq, qRow],
          [dkHome, expected.dk, kvRow],
          [dvHome, expected.dv, kvRow],
        ] as const) {
          for (let i = 0; i < shards.lengths[g]! * width; i++)
            expect(found[r]![row[r]! * width + i]).toBeCloseTo(want[start * width + i]!, 10);
        }
        row[r]! += shards.lengths[g]!;
      }
    });
  },
);

describe('home layout', () => {
  // Documents of 7, 5, 4 and 0 tokens on ranks of 6, 0 and 10: the first one is on two ranks, and continues where it was cut.
  const { shards } = shardsOfDocuments(packDocuments(Int32Array.of(7, 5, 4, 0), Int32Array.of(6, 0, 10)));

  it('gives every row of every rank the position of its token in its document', () => {
    const positions = [0, 1, 2].map((rank) => {
      const { shards: count, cuSeqlens, begin } = homeLayout(shards, rank);
      expect(cuSeqlens[0]).toBe(0);
      return Array.from({ length: count }, (_, s) =>
        Array.from({ length: cuSeqlens[s + 1]! - cuSeqlens[s]! }, (_, i) => begin[s]! + i),
      ).flat();
    });
    expect(positions).toEqual([[0, 1, 2, 3, 4, 5], [], [6, 0, 1, 2, 3, 4, 0, 1, 2, 3]]);
  });

  it('has what packed sequences of one rank take, also of one without any', () => {
    const first = homeLayout(shards, 0);
    expect([[...first.cuSeqlens], first.maxSeqlen, [...first.begin]]).toEqual([[0, 6], 6, [0]]);
    expect(homeLayout(shards, 1)).toEqual({
      shards: 0,
      cuSeqlens: Int32Array.of(0),
      maxSeqlen: 0,
      begin: new Int32Array(0),
    });
    expect(homeLayout(shards, 2).maxSeqlen).toBe(5);
  });
});
