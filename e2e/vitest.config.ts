import { configDefaults, defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    // The folders below are packages of their own.
    exclude: [...configDefaults.exclude, 'packed-install/**', 'internal-library/**'],
    // Each suite waits on its own ranks; side by side they would wait on each other's cores.
    fileParallelism: false,
    testTimeout: 60_000,
  },
});
