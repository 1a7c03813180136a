/** Ranks that are processes: the cases over them, and ranks that are killed. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/{processes,failure}/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
