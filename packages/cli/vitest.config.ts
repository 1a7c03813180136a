import { configDefaults, defineConfig } from 'vitest/config';
import { slowSuites } from './vitest.ci.config.js';

export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    exclude: [...configDefaults.exclude, ...slowSuites],
    // Suites start processes and wait for them: beside each other they would time each other out.
    fileParallelism: false,
    testTimeout: 60_000,
  },
});
