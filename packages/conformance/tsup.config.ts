import { defineConfig } from 'tsup';

export default defineConfig({
  // rank-main and store-main are programs; the others are entry points by which it finds providers and suites.
  entry: {
    index: 'src/index.ts',
    'rank-main': 'src/rank-main.ts',
    'store-main': 'src/store-main.ts',
    'cases/index': 'src/cases/index.ts',
    'hostile/index': 'src/hostile/index.ts',
    'decorators/index': 'src/decorators/index.ts',
    'gin/index': 'src/gin/index.ts',
    'naive/index': 'src/naive/index.ts',
    'world/world': 'src/world/world.ts',
    'suite/report': 'src/suite/report.ts',
  },
  format: 'esm',
  target: 'node20',
  dts: true,
  sourcemap: true,
  clean: true,
});
