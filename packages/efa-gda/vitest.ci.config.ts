/** The cases of GIN contexts over contexts that are broken: a rank that fails leaves the others waiting, so each takes a second or two. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/ci/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
