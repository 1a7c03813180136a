/** Jobs of several nodes on this host: each starts launchers, which start ranks. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/nodes/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
  },
});
