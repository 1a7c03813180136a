/** Stand-ins for CUDA: its driver, and the kernels' library. Import this before anything opens GPUs. */
import { fileURLToPath } from 'node:url';

const built = (name: string): string =>
  fileURLToPath(new URL(`../../../native/build/Release/${name}`, import.meta.url));

process.env.EP_CUDA_PATH = built('libep_cuda_host.so');

export const cuda = built('libep_cuda_driver.so');

/** Runs `body` while these calls of the driver fail, or these features are missing (`dmabuf`, `gpudirect`). */
export async function failing<T>(calls: readonly string[], body: () => Promise<T>): Promise<T> {
  process.env.EP_CUDA_HOST_FAILING = calls.join(',');
  try {
    return await body();
  } finally {
    delete process.env.EP_CUDA_HOST_FAILING;
  }
}
