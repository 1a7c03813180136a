/** Endpoints of ranks of which not all are there at first. */
import { describePlaces } from '@ep/conformance';
import { memoryStore } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { efaGda } from '../src/index.js';

describePlaces('efa-gda:soft', () => efaGda.soft);
describePlaces('efa-gda:hardware (shim)', async () => (await import('./shim-provider.mjs')).hardware);

describe('activeRanks', () => {
  it('is refused over a network, where nobody can come later', async () => {
    await using store = memoryStore();
    const { signal } = new AbortController();
    const config = { activeRanks: [0], network: { address: '127.0.0.1', secret: 'none' } } as const;
    const opening = async () => efaGda.soft.open({ rank: 0, worldSize: 2, store }, { signal, config });
    await expect(opening()).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/activeRanks.*absent/),
    });
  });
});
