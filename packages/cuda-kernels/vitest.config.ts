import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    // Ranks wait on each other: beside other suites they would time each other out.
    fileParallelism: false,
    testTimeout: 60_000,
  },
});
