// The cases of groups over NCCL: on as many GPUs as there are, and over the stand-ins for them and for NCCL.
import assert from 'node:assert/strict';
import { runRanks, valuesOf } from './ranks.mjs';

const limits = { timeoutMs: 120_000 };

/**
 * @param {number} ranks at least 2
 * @param {boolean} real on GPUs, where calls that do not fit together may do anything
 * @returns {readonly import('./cases.mjs').Case[]}
 */
export function ncclCases(ranks, real) {
  const others = Array.from({ length: ranks - 1 }, (_, i) => (i === 0 ? 0 : i + 1));
  /** @param {'threads' | 'processes'} mode @param {object} data */
  const collectives = async (mode, data) => {
    const reports = await runRanks('ncclCollectives', ranks, { mode, data: { nccl: true, ...data }, ...limits });
    const lacking = Array(5).fill('EP_UNSUPPORTED');
    const codes = [...lacking, 'EP_INVALID_ARGUMENT', 'EP_INVALID_ARGUMENT'];
    assert.deepEqual(valuesOf(reports), Array(ranks).fill(codes));
  };
  /** @param {boolean} cold before ranks have connected, or after */
  const absent = async (cold) => {
    const data = { nccl: true, absent: 1, late: 2500, cold };
    const values = valuesOf(await runRanks('ncclAbsent', ranks, { data, ...limits }));
    for (const rank of others) {
      const [[code, awaited], [behind]] = values[rank];
      // Whose time is up first tells the others; all know whom they awaited.
      assert.ok(code === 'EP_TIMEOUT' || code === 'EP_ABORTED', code);
      assert.deepEqual(awaited, [1]);
      assert.equal(behind, 'EP_POISONED');
    }
    assert.ok(others.some((rank) => values[rank][0][0] === 'EP_TIMEOUT'));
    assert.deepEqual(values[1], [['EP_POISONED', undefined]]);
  };
  return [
    {
      name: 'NCCL: collectives give what those in host memory give, and what it has not is refused by name, threads',
      run: () => collectives('threads', { dtypes: ['f32', 'bf16', 'i64', 'u8'], counts: [1, 333, 40_000] }),
    },
    {
      name: 'NCCL: collectives give what those in host memory give, processes',
      run: () => collectives('processes', { dtypes: ['f16', 'f64', 'i8'], counts: [1, 1000] }),
      processes: true,
    },
    {
      name: 'NCCL: calls run in the order of their stream, and nobody waits for ranks that come later',
      run: async () => {
        const posted = valuesOf(await runRanks('ncclOrder', ranks, { data: { nccl: true, rounds: 30 }, ...limits }));
        assert.ok(posted[0] < 250, `rank 0 took ${posted[0]} ms to post its calls`);
      },
    },
    {
      name: 'NCCL: messages, all at once and one after the other',
      run: async () => {
        const data = { nccl: true, lengths: [1, 0, 3001, 200_000] };
        const refused = Array(ranks).fill(['EP_UNSUPPORTED', 'EP_UNSUPPORTED']);
        assert.deepEqual(valuesOf(await runRanks('ncclMessages', ranks, { data, ...limits })), refused);
      },
    },
    { name: 'NCCL: a rank that does not come is named, before ranks have connected', run: () => absent(true) },
    { name: 'NCCL: a rank that does not come is named, and a new group works', run: () => absent(false) },
    {
      name: 'NCCL: a call that is given up ends those behind it, and the others are told by whom',
      run: async () => {
        const [first, ...rest] = valuesOf(await runRanks('ncclCut', ranks, { data: { nccl: true }, ...limits }));
        assert.deepEqual(first, ['enough', 'EP_POISONED']);
        for (const said of rest) assert.deepEqual(said, ['EP_POISONED', undefined]);
      },
    },
    ...(real
      ? []
      : [
          {
            name: 'NCCL: ranks that make different calls are named when these do not end',
            run: async () => {
              const values = valuesOf(await runRanks('ncclMismatch', ranks, { data: { nccl: true }, ...limits }));
              assert.deepEqual(values, Array(ranks).fill(['EP_MISMATCH', [1]]));
            },
          },
        ]),
    {
      name: 'NCCL: calls end when a rank is killed, and say which',
      run: async () => {
        const data = { nccl: true, victim: 1 };
        const reports = await runRanks('ncclLost', ranks, { mode: 'processes', data, kill: 1, ...limits });
        for (const { said, behind, ms } of valuesOf(reports.filter(({ rank }) => rank !== 1))) {
          assert.deepEqual(said, ['EP_PEER_LOST', [1]]);
          assert.equal(behind, 'EP_POISONED');
          assert.ok(ms < 20_000);
        }
      },
      processes: true,
    },
  ];
}

/** @param {number} ranks @returns {readonly import('./cases.mjs').Case[]} */
export const ncclMeasurements = (ranks) => [
  {
    name: `NCCL: all-reduces of ${ranks} processes, timed`,
    run: async () => {
      const sizes = [4096, 65_536, 2 ** 20, 2 ** 24, 2 ** 28];
      const data = { nccl: true, sizes, calls: 20 };
      const [times = []] = valuesOf(await runRanks('ncclTimes', ranks, { mode: 'processes', data, ...limits }));
      return sizes.map((bytes, i) => `${bytes} bytes ${((times[i] ?? 0) * 1000).toFixed(1)} us`).join(', ');
    },
  },
];
