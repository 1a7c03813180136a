/** Tokens to experts on other hosts and back, in both modes, bit by bit as the oracle has it: each rank compares its own part. */
import { tensor } from '@ep/core';
import { openMoeBuffer } from '@ep/cuda-kernels';
import { generateRouting, generateWeights, planMoe, rankReceives, rankTopk, spreadExperts } from '@ep/plan/moe';
import { moeCombine, moeDispatch } from '@ep/plan/reference';

const [hidden, topK, calls] = [96, 3, 5];
/** For whoever is late: experts over such a network have no other limit. */
const PATIENCE_MS = 60_000;

function same(found, expected, what) {
  if (found.length !== expected.length)
    throw new Error(`${what}: ${found.length} elements, expected ${expected.length}`);
  for (let i = 0; i < expected.length; i++)
    if (!Object.is(found[i], expected[i])) throw new Error(`${what}[${i}]: found ${found[i]}, expected ${expected[i]}`);
}

/** Of a rank and a call, unlike those of others. */
const rowsOf = (tokens, of, call) =>
  Float32Array.from({ length: tokens * hidden }, (_, i) => (((i * 7 + of * 31 + call * 13) % 509) - 254.5) / 8);

/** What the experts of a rank make of what came there: not the same everywhere. */
const worked = (rows, of) => rows.map((value, i) => (value + 1) * (((i + of) % 13) - 6.25));

/** Rows of a tensor, packed. */
function packed({ data, shape, strides }) {
  const rows = shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
  const stride = strides?.at(-2) ?? hidden;
  const out = new Float32Array(rows * hidden);
  for (let row = 0; row < rows; row++) out.set(data.subarray(row * stride, row * stride + hidden), row * hidden);
  return out;
}

export async function experts({ transport, rank, worldSize }) {
  const kinds = [];
  for (const mode of ['low-latency', 'high-throughput']) {
    const count = 2 * worldSize + 1;
    const map = spreadExperts(count, worldSize);
    const tokens = Array.from({ length: worldSize }, (_, of) => [17, 0, 32, 5][of % 4]);
    const maxTokens = Math.max(...tokens);
    const popularity = { kind: 'zipf', exponent: 0.8 };
    const routing = generateRouting({
      ...{ worldSize, experts: count, topK, tokens, popularity },
      ...{ emptyShare: 0.1, seed: 5 },
    });
    const all = generateWeights(routing, 5);
    const weights = tokens.map((_, of) =>
      all.slice(routing.tokenOffsets[of] * topK, routing.tokenOffsets[of + 1] * topK),
    );
    const plan = planMoe(routing, map, mode === 'low-latency' ? { mode, maxTokens } : { mode, alignment: 4 });
    const { recvCount, sourceRank, sourceToken } = rankReceives(plan, rank);
    const buffer = await openMoeBuffer(transport, {
      ...{ mode, experts: map, maxTokens, topK, hidden, dtype: 'f32', timeoutMs: PATIENCE_MS },
      ...(mode === 'high-throughput' && { alignment: 4 }),
    });
    kinds.push(buffer.routes().map(({ via }) => via));
    for (let call = 0; call < calls; call++) {
      const what = `${mode}, call ${call}, rank ${rank}`;
      const x = tokens.map((own, of) => rowsOf(own, of, call));
      const arrived = moeDispatch(plan, x, hidden);
      const received = await buffer.dispatch(tensor('f32', [tokens[rank], hidden], x[rank]), rankTopk(routing, rank));
      same(received.counts, recvCount, `${what}: counts`);
      const rows = packed(received.x);
      for (const [row, source] of sourceRank.entries()) {
        // Of low latency what no token wrote is undefined.
        if (source < 0 && mode === 'low-latency') continue;
        const at = [row * hidden, (row + 1) * hidden];
        same(rows.subarray(...at), arrived[rank].subarray(...at), `${what}: row ${row} (rank ${source})`);
        if (source >= 0) same([received.sourceToken[row]], [sourceToken[row]], `${what}: token of row ${row}`);
      }
      const y = worked(rows, rank);
      const { y: mixed } = await buffer.combine(tensor('f32', [y.length / hidden, hidden], y), received.handle, {
        weights: weights[rank],
      });
      const results = arrived.map((one, of) => worked(one, of));
      const expected = moeCombine(plan, results, { hidden, precision: 'f32', weights });
      same(mixed.data, expected[rank], `${what}: tokens`);
    }
    await buffer.close();
  }
  return kinds;
}
