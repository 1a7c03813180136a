/** The cases of GIN contexts over contexts that are broken, where a rank that fails leaves the others waiting, every case over a network, and those by the path of hardware, over which nobody is woken. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/ci/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
