/** Ranks that are processes, the engine over transports and on devices, ranks that are killed, and ranks that come and go. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/{worlds,failure,elastic,members,device}/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
