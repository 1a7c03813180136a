import { configDefaults, defineConfig } from 'vitest/config';

// Slow suites run in CI (vitest.ci.config.ts), and with everything else in full.
const full = process.env.EP_TEST_FULL === '1';

export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    exclude: full ? configDefaults.exclude : [...configDefaults.exclude, 'test/worlds/**'],
    // Each suite runs ranks that wait on each other: beside another suite they would wait on its cores.
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
