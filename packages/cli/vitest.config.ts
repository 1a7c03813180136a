import { configDefaults, defineConfig } from 'vitest/config';

// Slow suites run in CI (vitest.ci.config.ts).

export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    exclude: [...configDefaults.exclude, 'test/nodes/**'],
    // Suites start processes and wait for them: beside each other they would time each other out.
    fileParallelism: false,
    testTimeout: 60_000,
  },
});
