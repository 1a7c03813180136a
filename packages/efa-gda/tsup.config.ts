import { defineConfig } from 'tsup';

export default defineConfig({
  entry: { index: 'src/index.ts', 'gin-putvalue': 'src/gin-putvalue.ts', 'bench/efa': 'bench/efa.ts' },
  format: 'esm',
  target: 'node20',
  dts: true,
  sourcemap: true,
  clean: true,
});
