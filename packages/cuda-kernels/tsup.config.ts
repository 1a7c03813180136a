import { defineConfig } from 'tsup';

export default defineConfig({
  entry: { index: 'src/index.ts', 'bench/attention': 'bench/attention.ts', 'bench/rank': 'bench/rank.ts' },
  format: 'esm',
  target: 'node20',
  dts: { entry: { index: 'src/index.ts', 'bench/attention': 'bench/attention.ts' } },
  sourcemap: true,
  // Each entry on its own: the benchmark finds its rank program beside itself.
  splitting: false,
  clean: true,
});
