/** Memory limits: refused before allocation on all ranks, no SIGBUS later. Processes only: a limit of a process is one of all its threads. */
import { it } from 'vitest';
import { runRanks } from './ranks.js';

it.each([0, 1])('refuses what does not fit, with the address space of rank %i limited', async (lowered) => {
  await runRanks('processes', 2, 'limits', { lowered });
});
