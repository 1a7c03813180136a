import { defineConfig } from 'vitest/config';

/** Jobs of several nodes on this host, whose launchers start ranks, and commands that run for seconds, once more with each option. */
export const slowSuites = ['test/nodes/**/*.test.ts', 'test/bench.test.ts', 'test/demo.test.ts', 'test/demo-*.test.ts'];

export default defineConfig({
  test: {
    include: slowSuites,
    fileParallelism: false,
    testTimeout: 120_000,
  },
});
