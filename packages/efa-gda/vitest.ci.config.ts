/** The cases of GIN contexts over contexts that are broken, where a rank that fails leaves the others waiting, and every case over a network: each takes a second or two. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/ci/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
