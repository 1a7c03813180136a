import { defineConfig } from 'tsup';

export default defineConfig({
  entry: {
    index: 'src/index.ts',
    'demo-rank': 'src/demo/rank.ts',
    'demo-moe-rank': 'src/demo-moe/rank.ts',
    'bench-child': 'src/bench/child.ts',
    'bench-fabric-rank': 'src/bench-fabric/rank.ts',
    'bench-fabric-groups-rank': 'src/bench-fabric/groups-rank.ts',
    'bench-moe-rank': 'src/bench-moe/rank.ts',
  },
  format: 'esm',
  target: 'node20',
  dts: { entry: { index: 'src/index.ts' } },
  sourcemap: true,
  clean: true,
});
