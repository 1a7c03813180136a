import { defineConfig } from 'tsup';

export default defineConfig({
  entry: ['js/index.ts'],
  format: 'esm',
  target: 'node20',
  dts: true,
  sourcemap: true,
  clean: true,
});
