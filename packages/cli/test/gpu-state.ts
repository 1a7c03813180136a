/** A GPU and its driver as `ep doctor` finds them where nothing is missing. */
import type { GpuFacts } from '@ep/native';
import type { GpuDriver } from '../src/doctor/gpu-driver.js';

const PCI = '0000:84:00.0';

export const gpuOf = (changed: Partial<GpuFacts> = {}): GpuFacts => ({
  name: 'NVIDIA H200',
  pci: PCI,
  runsOn: 'cuda',
  compute: '9.0',
  memoryBytes: 139 * 2 ** 30,
  l2Bytes: 50 * 2 ** 20,
  multiprocessors: 132,
  clockKhz: 1_980_000,
  copyEngines: 3,
  driver: '13.0',
  runtime: '13.0',
  cooperative: true,
  ipc: true,
  gpudirect: true,
  hostAtomics: false,
  exclusive: false,
  peers: [],
  ...changed,
});

export const workingDriver: GpuDriver = {
  cards: [PCI],
  module: '580.159.04',
  open: true,
  nodes: [{ path: '/dev/nvidia0' }, { path: '/dev/nvidiactl' }],
  library: { loaded: true, version: '13.0', gpus: [{ pci: PCI, dmabuf: true, gpudirect: true }] },
  peermem: true,
  kernel: '6.1.0-32-amd64',
};
