/** As many PEs as a world may have. */
import { expect, it } from 'vitest';
import { runRanks } from '../ranks.js';

it('128 PEs as threads', async () => {
  expect(await runRanks('threads', 128, 'many')).toEqual(new Array(128).fill((128 * 127) / 2));
});
