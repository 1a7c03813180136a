/** The recorded key-value plans of the original, run by the kernel: what each rank has after each leg, and the gradient as it comes back, replica by replica. */
import { readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { describe, expect, it } from 'vitest';
import { runRanks, valuesOf } from './ranks.js';

const folder = fileURLToPath(new URL('../../packages/plan/test/goldens/data/', import.meta.url));
const files = readdirSync(folder).filter((name) => name.startsWith('kv_'));

interface Golden {
  readonly inputs: { readonly mlp_seq_len: readonly (readonly number[])[] };
  readonly token_movement: {
    readonly q_recv: readonly (readonly number[])[];
    readonly k_recv: readonly (readonly number[])[];
    readonly q_reverse_recv: readonly (readonly number[])[];
    /** Rank, replica, token. */
    readonly k_reverse_recv_replica_major: readonly (readonly (readonly number[])[])[];
  };
  readonly kv_grad_reduction: { readonly num_replicas_per_token: readonly (readonly number[])[] };
}

interface Received {
  readonly q: readonly number[];
  readonly kv: readonly number[];
  readonly o: readonly number[];
  readonly dKv: readonly number[];
  /** The gradient of each token over the replicas of the mask. */
  readonly summed: readonly number[];
}

it('there are four of them', () => {
  expect(files).toHaveLength(4);
});

describe.each(files)('%s', (name) => {
  const file = folder + name;
  const { inputs, token_movement, kv_grad_reduction } = JSON.parse(readFileSync(file, 'utf8')) as Golden;
  const worldSize = inputs.mlp_seq_len.length;

  it.each([
    ['the fast executor', {}],
    ['the simt executor', { executor: { lanes: 8, warpLanes: 4, seed: 11 }, blocks: 2 }],
  ])('moves every token as recorded on %s, and the mask finds the replicas that came', async (_, options) => {
    const reports = await runRanks('golden', worldSize, 'threads', { data: { file, options } });
    const ranks = valuesOf<Received>(reports);
    expect(ranks.map(({ q }) => q)).toEqual(token_movement.q_recv);
    expect(ranks.map(({ kv }) => kv)).toEqual(token_movement.k_recv);
    expect(ranks.map(({ o }) => o)).toEqual(token_movement.q_reverse_recv);
    const recorded = token_movement.k_reverse_recv_replica_major;
    expect(ranks.map(({ dKv }) => dKv)).toEqual(recorded.map((replicas) => replicas.flat()));
    // What went out comes back once for each replica: the token's own id, as often as it has replicas.
    const counts = kv_grad_reduction.num_replicas_per_token;
    expect(ranks.map(({ summed }) => summed)).toEqual(
      counts.map((row, rank) => row.map((count, token) => count * (1000 * rank + token + 1))),
    );
    expect(counts.flat().some((count) => count > 1)).toBe(true);
  });
});
