/** The transport's own promises: refusals that agree, failures that leave nothing, and every way to close. */
import { describe, it } from 'vitest';
import { RANK_KINDS, runRanks } from './ranks.js';

describe.each(RANK_KINDS)('ranks as %s', (kind) => {
  it.each([1, 2, 3])('allocates, moves, refuses and closes, %i ranks', async (size) => {
    await runRanks(kind, size, 'transport');
  });
});
