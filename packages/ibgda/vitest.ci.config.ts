/** Every case over a network, where waiting for those that fall silent takes its time, and by the path of hardware, over which nobody is woken. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/worlds/**/*.test.ts'],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
