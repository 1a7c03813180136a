/**
 * The walkthrough on three real ranks: what moves equals the goldens of the original, and docs/walkthrough.md says exactly what is printed.
 * `pnpm --filter @ep/e2e walkthrough --update` rewrites the outputs in the document.
 */
import { readFile } from 'node:fs/promises';
import { beforeAll, describe, expect, it } from 'vitest';
import { fillDocument, page, phasesOf } from './document.js';
import { chunkBytes, makePlans, rowElements } from './example.js';
import type { Facts } from './facts.js';
import { narrate } from './narrate.js';
import { runWalkthrough } from './run.js';

interface Golden {
  readonly outputs: { readonly fwd: { readonly dst_offset: unknown; readonly num_recv_tokens: unknown } };
  readonly token_movement: Readonly<Record<'send' | 'recv' | 'reverse_recv', readonly (readonly number[])[]>>;
}

async function golden(name: string): Promise<Golden> {
  const folder = new URL('../../packages/plan/test/goldens/data/', import.meta.url);
  return JSON.parse(await readFile(new URL(`${name}.json`, folder), 'utf8')) as Golden;
}

let facts: Facts[];
beforeAll(async () => {
  facts = await runWalkthrough();
}, 60_000);

describe('three ranks', () => {
  it('moves queries as the golden does, there and back', async () => {
    const { outputs, token_movement: movement } = await golden('q_seed_walkthrough_q_w3');
    expect([...makePlans().fwdQ.dstOffset]).toEqual((outputs.fwd.dst_offset as number[][]).flat());
    expect(facts.map(({ forward }) => forward.ids.q)).toEqual(movement.recv);
    expect(facts.map(({ output }) => output.ids.o)).toEqual(movement.reverse_recv);
  });

  it('moves keys, values and their gradients as the golden does', async () => {
    const { outputs, token_movement: movement } = await golden('q3d_seed_walkthrough_kv_w3');
    const { fwdKv } = makePlans();
    const offsets = outputs.fwd.dst_offset as number[][][];
    const planned = Array.from(fwdKv.dstOffset, (offset, e) => [fwdKv.replica[e]!, offset] as const);
    const ranks = Array.from(fwdKv.dstOffset, (_, e) => fwdKv.entryOffsets.findLastIndex((first) => first <= e));
    for (const [e, [replica, offset]] of planned.entries()) expect(offset).toBe(offsets[ranks[e]!]![0]![replica]);
    expect(facts.map(({ forward }) => forward.ids.kv)).toEqual(movement.recv);
    expect(facts.map(({ gradients }) => gradients.ids.dKv)).toEqual(movement.reverse_recv);
    const sums = movement.reverse_recv.map((rows) => [0, 1, 2, 3].map((token) => rows[token]! + rows[token + 4]!));
    expect(facts.map(({ summed }) => summed.ids.dKv)).toEqual(sums);
  });

  it('counts one signal for each chunk that the goldens call for', async () => {
    const received = await Promise.all(
      ['q_seed_walkthrough_q_w3', 'q3d_seed_walkthrough_kv_w3'].map(async (name) => {
        const { outputs } = await golden(name);
        return outputs.fwd.num_recv_tokens as number[][];
      }),
    );
    const chunkRows = chunkBytes / (4 * rowElements);
    for (const { rank, forward } of facts) {
      const chunks = [0, 1, 2].map((source) =>
        received.reduce((sum, rows) => sum + rows[rank]![source]! / chunkRows, 0),
      );
      expect(forward.counters.arrivals[0]).toEqual(chunks);
    }
  });

  it('after a rank stayed away, those that needed it say so, and one resync makes the call good again', () => {
    expect(facts.map(({ absence }) => absence.poisoned)).toEqual([false, true, false]);
    expect(facts.map(({ resync }) => resync.epoch)).toEqual([1, 1, 1]);
    expect(facts[0]!.resync.revoked).toBe(true);
    expect(facts.map(({ repeated }) => repeated.ids)).toEqual(facts.map(({ forward }) => forward.ids));
  });
});

it('docs/walkthrough.md holds what was printed, phase by phase', async () => {
  const printed = narrate(facts);
  const document = await readFile(page, 'utf8');
  expect(phasesOf(document)).toEqual(Object.keys(printed));
  expect(document).toBe(fillDocument(document, printed));
});
