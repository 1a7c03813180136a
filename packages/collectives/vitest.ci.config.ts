/** Ranks that are processes, the engine over transports, and ranks that are killed. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/{worlds,failure}/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
