// What a process finds of GPUs, as one line of JSON.
import { CudaDevice, cudaDevices } from '@ep/cuda-kernels';
import { nvshmem } from '@ep/nvshmem';

const opened = (/** @type {number} */ index) => {
  try {
    void new CudaDevice(index).close();
    return 'opened';
  } catch (error) {
    return /** @type {{ code?: string }} */ (error).code;
  }
};

const devices = cudaDevices().map(({ name, unusable }, index) => ({ name, unusable, opened: opened(index) }));
const probe = await nvshmem.cuda.probe();
const spaces = probe.available ? [...(probe.capabilities.spaces ?? [])] : [];
console.log(JSON.stringify({ devices, available: probe.available, spaces }));
