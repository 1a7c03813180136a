/** Ranks that come into places in which nobody is yet, and are killed on their way. */
import { describe, expect, it } from 'vitest';
import { RANK_KINDS, runRanks, startRanks } from '../ranks.js';

describe.each(RANK_KINDS)('ranks as %s', (kind) => {
  it('come one after the other into a world that begins with two', async () => {
    await runRanks(kind, 6, 'places', { first: 2 });
  });

  it('are killed at any moment on their way, and the next one comes', async () => {
    // Ranks 3 to 8 of the test come into place 3 one after the other.
    const ranks = startRanks(kind, 9, 'places-killed', { stay: 3 });
    for (let comer = 3; comer < 8; comer++) {
      await ranks.noted(comer, 1);
      await new Promise((resolve) => setTimeout(resolve, [0, 2, 8, 30, 80][comer - 3]));
      ranks.kill(comer);
    }
    const ends = await ranks.ends;
    for (const [rank, end] of ends.entries()) {
      if (rank >= 3 && rank < 8) continue;
      expect(end.error?.message ?? end.value, `rank ${rank}`).toBe('done');
    }
  });
});
