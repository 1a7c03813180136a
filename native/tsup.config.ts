import { defineConfig } from 'tsup';

export default defineConfig({
  entry: { index: 'js/index.ts', abi: 'js/abi.gen.ts', ranks: 'js/ranks/index.ts', wire: 'js/wire/index.ts' },
  format: 'esm',
  target: 'node20',
  dts: true,
  sourcemap: true,
  clean: true,
});
