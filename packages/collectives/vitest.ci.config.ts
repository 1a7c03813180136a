/** Ranks that are processes, the engine over transports and on devices, ranks that are killed, ranks that come and go, and calls that native code carries over libfabric, which takes its time to open. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/{worlds,failure,elastic,members,device}/**/*.test.ts', 'test/portable/carried.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
