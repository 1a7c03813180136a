import { defineConfig } from 'tsup';

export default defineConfig({
  entry: ['src/index.ts', 'src/gin-putvalue.ts'],
  format: 'esm',
  target: 'node20',
  dts: true,
  sourcemap: true,
  clean: true,
});
