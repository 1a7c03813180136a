/** Every case over libfabric's TCP: its timeouts make it slow. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/worlds/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
