// Over the stand-in for a GPU: everything above the kernels' launch is the product, and the kernels are the same source.
import { fileURLToPath } from 'node:url';
import { describeDevice } from '../conformance/matrices.js';

process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);

describeDevice();
