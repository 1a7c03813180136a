// The cases of NVIDIA's NVSHMEM: on a GPU, where several PEs take turns on one (without MPS), and over the stand-ins.
import assert from 'node:assert/strict';
import { runRanks, valuesOf } from './ranks.mjs';

const limits = { mode: /** @type {const} */ ('processes'), timeoutMs: 100_000 };

/**
 * @param {boolean} spread PEs take the GPUs in turn
 * @returns {readonly import('./cases.mjs').Case[]}
 */
export function nvshmemCases(spread) {
  const data = { nvshmem: true, spread };
  return [
    ...[1, 2].flatMap((pes) => [
      {
        name: `NVSHMEM, ${pes} PEs: puts, signals, words, gets and barriers on streams`,
        run: async () => {
          const values = valuesOf(await runRanks('nvshmemOperations', pes, { data, ...limits }));
          return values.map(({ byTurns, ms }) => `${ms} ms${byTurns ? ' by turns' : ''}`).join(', ');
        },
      },
      {
        name: `NVSHMEM, ${pes} PEs: parts of the heap are free again, and what does not fit is refused`,
        run: async () => {
          const values = valuesOf(await runRanks('nvshmemHeap', pes, { data, ...limits }));
          assert.deepEqual(values, Array(pes).fill('EP_MEMORY_LIMIT'));
        },
      },
      {
        name: `NVSHMEM, ${pes} PEs: attention dispatch over its heap against the oracle`,
        run: async () => {
          const plans = { seeds: [100, 101, 102], dtype: 'f32', qRow: 33, kvRow: 17 };
          const values = valuesOf(await runRanks('oracle', pes, { data: { ...data, ...plans }, ...limits }));
          for (const { compared, pending } of values)
            assert.deepEqual({ compared, pending }, { compared: 3, pending: 0 });
        },
      },
    ]),
    {
      name: 'NVSHMEM: a rank that does not come to a barrier is named',
      run: async () => {
        const absent = { ...data, absent: 1, late: 1500 };
        const [[code, message], late] = valuesOf(await runRanks('nvshmemAbsent', 2, { data: absent, ...limits }));
        assert.equal(code, 'EP_TIMEOUT');
        assert.match(message, /rank 1\b/);
        assert.equal(late, 'late');
      },
    },
    {
      name: 'NVSHMEM: waits end when a rank is killed, and say so',
      run: async () => {
        const reports = await runRanks('nvshmemLost', 2, { data: { ...data, victim: 1 }, kill: 1, ...limits });
        const [{ codes, failed }] = valuesOf(reports.filter(({ rank }) => rank !== 1));
        assert.deepEqual(codes, ['EP_PEER_LOST', 'EP_PEER_LOST', 'EP_PEER_LOST']);
        assert.ok(failed);
      },
    },
    {
      name: 'NVSHMEM: ranks that share a process are refused',
      run: async () => {
        const reports = await runRanks('nvshmemHeap', 2, { data, mode: 'threads', timeoutMs: 60_000 });
        for (const { error } of reports) assert.equal(error?.code, 'EP_UNSUPPORTED', error?.message);
      },
    },
  ];
}
