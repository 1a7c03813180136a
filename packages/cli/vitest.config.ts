import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    // Suites start processes and wait for them: beside each other they would time each other out.
    fileParallelism: false,
    testTimeout: 60_000,
  },
});
