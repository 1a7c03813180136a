/** A rank that is stopped is not dead. */
import { describe, expect, it } from 'vitest';
import { bundleProgram } from '../bundle.js';
import type { BackendName } from './protocol.js';
import { runStraggler } from './straggler.js';

const program = await bundleProgram('straggler-rank');
const backends: readonly BackendName[] = ['shm', 'nvshmem'];

describe.each(backends)('process groups over %s', (backend) => {
  it.each([0, 2])('name rank %i of 3 that is stopped, at the deadline; all go on in another group', async (stopped) => {
    const ends = await runStraggler(program, { backend, worldSize: 3, stopped, busy: true, stoppedMs: 0 });
    const others = ends.flatMap((end, rank) => (rank === stopped || end === undefined ? [] : [end]));
    expect(others.length).toBe(2);
    // The first deadline that passes may end the others' call too.
    expect(others.map((end) => end.code)).toContain('EP_TIMEOUT');
    for (const { code, message, awaited } of others) {
      expect(['EP_TIMEOUT', 'EP_ABORTED']).toContain(code);
      expect(message).toMatch(new RegExp(`\\b${stopped}\\b`));
      if (code === 'EP_TIMEOUT') expect(awaited).toEqual([stopped]);
    }
    // It finds the operation given up, whenever it comes.
    expect(['EP_ABORTED', 'EP_POISONED', 'EP_TIMEOUT']).toContain(ends[stopped]?.code);
  });

  it('keep a rank that was stopped while nobody called', async () => {
    await runStraggler(program, { backend, worldSize: 3, stopped: 1, busy: false, stoppedMs: 1_500 });
  });
});
