import { copyFile } from 'node:fs/promises';
import { defineConfig } from 'tsup';

export default defineConfig({
  entry: {
    index: 'src/index.ts',
    trace: 'src/recorder/trace.ts',
    'bench/collectives': 'bench/collectives.ts',
    'bench/rank': 'bench/rank.ts',
  },
  format: 'esm',
  target: 'node20',
  dts: {
    entry: { index: 'src/index.ts', trace: 'src/recorder/trace.ts', 'bench/collectives': 'bench/collectives.ts' },
  },
  sourcemap: true,
  // Each entry on its own: the benchmark finds its rank program beside itself.
  splitting: false,
  clean: true,
  // The programs of other languages that the benchmark compiles or starts; it finds them beside itself.
  onSuccess: async () => {
    for (const name of ['open_mpi.c', 'gloo.py']) await copyFile(`bench/${name}`, `dist/bench/${name}`);
  },
});
