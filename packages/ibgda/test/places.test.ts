/** Queue pairs between ranks of which not all are there at first. */
import { describePlaces, type PlacedProvider } from '@ep/conformance';
import { memoryStore } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { ibgda } from '../src/index.js';

describePlaces('ibgda:soft', () => ibgda.soft);
describePlaces(
  'ibgda:hardware (shim)',
  async () => ((await import('./shim-provider.mjs' as string)) as { readonly hardware: PlacedProvider }).hardware,
);

describe('activeRanks', () => {
  it('is refused where nobody can come later, and of ranks that bring connection data themselves', async () => {
    await using store = memoryStore();
    const { signal } = new AbortController();
    const refused = {
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/activeRanks.*absent/),
    };
    const member = { rank: 0, worldSize: 2, store };
    const activeRanks = [0];
    for (const more of [{ network: { address: '127.0.0.1', secret: 'none' } }, { device: 0 }] as const) {
      const opening = async () => ibgda.soft.open(member, { signal, config: { activeRanks, ...more } });
      await expect(opening()).rejects.toMatchObject(refused);
    }
    const exchanging = { rank: 0, worldSize: 2, exchange: async () => [] };
    const opening = async () => ibgda.soft.open(exchanging, { signal, config: { activeRanks } });
    await expect(opening()).rejects.toMatchObject(refused);
  });
});
