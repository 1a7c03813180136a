import { defineConfig } from 'tsup';

export default defineConfig({
  entry: {
    index: 'src/index.ts',
    'moe/index': 'src/moe/index.ts',
    'reference/index': 'src/reference/index.ts',
    bench: 'bench/plan.ts',
  },
  format: 'esm',
  target: 'node20',
  dts: true,
  sourcemap: true,
  clean: true,
});
