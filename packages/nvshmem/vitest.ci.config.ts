/** Every case over libfabric's TCP, whose timeouts make it slow, and on a stand-in for GPUs; the largest world. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/worlds/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
