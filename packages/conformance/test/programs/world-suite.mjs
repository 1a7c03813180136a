/** Cases that show what a world does with ranks that misbehave. */
const forever = () => new Promise(() => {});

export const cases = [
  { id: 'all-end', body: async (rank) => rank.meet() },
  {
    id: 'one-hangs',
    body: async (rank) => {
      rank.report(`rank ${rank.rank} waits for nothing`);
      if (rank.rank === 1) await forever();
    },
  },
  {
    id: 'one-throws',
    body: async (rank) => {
      await rank.meet();
      if (rank.rank === 1) await rank.store.get('never', { timeoutMs: 0 });
    },
  },
  {
    id: 'one-exits',
    body: async (rank) => {
      if (rank.rank === 1) process.exit(7);
    },
  },
  {
    id: 'one-dies',
    body: async (rank) => {
      if (rank.rank === 1) await rank.die();
    },
  },
  {
    id: 'one-is-busy',
    body: async (rank) => {
      if (rank.rank === 1) {
        void rank.die();
        for (;;);
      }
    },
  },
  {
    id: 'seeded',
    body: async (rank) => {
      const mine = [rank.random(), rank.random()];
      const all = await rank.share(mine);
      if (all.length !== rank.worldSize || all[0][0] === all[1][0]) throw new Error('ranks draw the same numbers');
      if (all[rank.rank][1] !== mine[1]) throw new Error('what was shared is not what arrived');
      if (mine.some((value) => value < 0 || value >= 1)) throw new Error(`out of range: ${mine}`);
    },
  },
];
