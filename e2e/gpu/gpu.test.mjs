// The cases for GPUs over the host stand-in for one: everything above native/cuda/table.h is the product. `pnpm test:gpu` runs them on a GPU.
import { fileURLToPath } from 'node:url';
import { beforeAll, describe, it } from 'vitest';
import { cases } from './cases.mjs';

// Ranks inherit the environment.
beforeAll(() => {
  process.env.EP_CUDA_PATH = fileURLToPath(new URL('../../native/build/Release/libep_cuda_host.so', import.meta.url));
});

describe('on host threads in place of a GPU', () => {
  for (const { name, run } of cases) it(name, { timeout: 180_000 }, run);
});
