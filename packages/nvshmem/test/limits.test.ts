/** Memory limits: refused before allocation on all ranks, no SIGBUS later. Processes only: a limit of a process is one of all its threads. */
import { it } from 'vitest';
import { runRanks } from './ranks.js';

it.each([0, 1])('refuses what does not fit, with the address space of rank %i limited', async (lowered) => {
  await runRanks('processes', 2, 'limits', { lowered });
});

it('refuses what a NIC could not pin, before anything is allocated', async () => {
  // Who has CAP_IPC_LOCK has no limit: root must go without it.
  const without = process.getuid?.() === 0 ? ['setpriv', '--bounding-set=-ipc_lock', '--inh-caps=-ipc_lock'] : [];
  await runRanks('processes', 2, 'pinned', {}, [...without, 'prlimit', `--memlock=${2 ** 20}:${2 ** 20}`]);
});
