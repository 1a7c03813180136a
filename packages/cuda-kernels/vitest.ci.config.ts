/** Ranks of a buffer for experts that are lost or killed, and that come and go; the suite of transports over composed ones. */
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: [
      'test/elastic/**/*.test.ts',
      'test/moe/{dead,lost,port,released}.test.ts',
      'test/mixed/conformance.test.ts',
    ],
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 60_000,
  },
});
