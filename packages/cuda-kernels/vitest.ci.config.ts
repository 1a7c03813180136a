/** Ranks of a buffer for experts that come and go. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/elastic/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
