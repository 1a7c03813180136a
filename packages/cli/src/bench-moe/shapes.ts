/** What `ep bench moe` measures: shapes, the routing of each, and the memory that its ranks take. */
import {
  bufferSizes,
  type ExpertMap,
  generateRouting,
  type MoeForm,
  type MoePlan,
  type Payload,
  planMoe,
  scaledChannels,
  spreadExperts,
  type TokenRouting,
} from '@ep/plan/moe';
import type { BenchOptions } from '../bench/bench.js';
import { type MoeShape, moeTransports } from './task.js';

/** The choices of every rank: equal on all of them, and in the program of Open MPI. */
const ROUTING_SEED = 7;
/** Of a process, besides what a shape needs: the runtime, its heap, queues of a software NIC, what rows are compared with. */
const PROCESS_BYTES = 192 * 2 ** 20;
/** What fp8 is measured with. */
export const QUANTISED = 'f8e4m3+f32';

type Size = Pick<MoeShape, 'mode' | 'tokens'>;

/** In the order in which they run. Quick ones show that it works, over each NIC on the fewest ranks. */
export function shapesOf({ quick, repeats, ranks = [2, 4] }: BenchOptions): MoeShape[] {
  const model = quick ? { hidden: 256, experts: 16, topK: 4 } : { hidden: 7168, experts: 256, topK: 8 };
  const sizes: readonly Size[] = quick
    ? [
        { mode: 'low-latency', tokens: 16 },
        { mode: 'high-throughput', tokens: 16 },
      ]
    : [
        { mode: 'low-latency', tokens: 128 },
        { mode: 'high-throughput', tokens: 128 },
        { mode: 'high-throughput', tokens: 4096 },
      ];
  return moeTransports.flatMap((transport) => {
    const stores = transport === 'shm';
    return (quick && !stores ? ranks.slice(0, 1) : ranks).flatMap((worldSize) =>
      sizes.map(({ mode, tokens }): MoeShape => {
        const many = tokens > 1000;
        const loops = stores && mode === 'low-latency' && worldSize === 2;
        return {
          ...{ ...model, transport, worldSize, mode, tokens },
          repeats: repeats ?? (quick ? 3 : stores ? (many ? 7 : 25) : many ? 3 : 9),
          steps: loops ? (quick ? 200 : 4000) : 0,
        };
      }),
    );
  });
}

const formOf = ({ mode, tokens }: Size): MoeForm => (mode === 'low-latency' ? { mode, maxTokens: tokens } : { mode });

export interface PlannedShape {
  readonly map: ExpertMap;
  readonly routing: TokenRouting;
  readonly plan: MoePlan;
  /** By rank: rows that a dispatch brings there. */
  readonly rows: readonly number[];
}

export function planShape(shape: MoeShape): PlannedShape {
  const { worldSize, experts, topK, tokens } = shape;
  const map = spreadExperts(experts, worldSize);
  const popularity = { kind: 'uniform' } as const;
  const routing = generateRouting({ worldSize, experts, topK, tokens, popularity, seed: ROUTING_SEED });
  const plan = planMoe(routing, map, formOf(shape));
  const rows = Array.from({ length: worldSize }, (_, rank) => {
    const [first, end] = [map.rankOffsets[rank]!, map.rankOffsets[rank + 1]!];
    return plan.placement.count.subarray(first * worldSize, end * worldSize).reduce((sum, count) => sum + count, 0);
  });
  return { map, routing, plan, rows };
}

/** Bytes that all ranks of a shape take at once: their buffers, what they send and receive, and what the other contenders need. */
export function bytesOf(shape: MoeShape): number {
  const { transport, worldSize, mode, tokens, hidden, topK } = shape;
  const { map, plan, rows } = planShape(shape);
  const row = 2 * hidden;
  const most = Math.max(...rows);
  const recvRows = Math.max(...plan.placement.recvRows);
  const buffer = (dispatch: Payload): number =>
    bufferSizes({
      ...{ design: mode, experts: map, maxTokens: tokens, topK, hidden, dispatch, combine: 'bf16', calls: 1 },
      ...(mode === 'high-throughput' ? { recvRows } : {}),
      staged: dispatch !== 'bf16',
      zeroCopy: dispatch === 'bf16' && transport === 'shm',
    }).totalBytes;
  // Low latency packs rows into tensors of their own; scales are apart in either mode.
  const tensors = mode === 'low-latency' ? recvRows * (row + hidden) : 0;
  const scales = recvRows * Math.ceil(hidden / scaledChannels) * 4;
  const x = 3 * tokens * row;
  const packed = transport === 'shm' ? tokens * topK * row : 0;
  return (
    worldSize * (buffer('bf16') + buffer(QUANTISED) + tensors + scales + x + packed + 2 * most * row + PROCESS_BYTES)
  );
}

/** `high-throughput, 4096 tokens, 4 ranks, over efa`, for people. */
export const shapeText = ({ mode, tokens, worldSize, transport }: MoeShape): string =>
  `${mode}, ${tokens} tokens, ${worldSize} ranks, over ${transport}`;
