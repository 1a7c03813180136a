/** The backing `hardware` as tests have it: its libraries are the shim, behind which is a software NIC. Ranks import this. */
import { fileURLToPath } from 'node:url';
import { ibgda } from '@ep/ibgda';
import { native } from '@ep/native';

/** Built beside the addon. */
const shim = fileURLToPath(new URL('../../../native/build/Release/libep_verbs_shim.so', import.meta.url));
const libraries = { ibverbs: shim, mlx5: shim };

native().binding.attachVerbsShim(shim, {
  backing: 'soft',
  qpsPerPeer: 1,
  depth: 2,
  collapsed: true,
  ackTimeout: 1,
  devices: '',
  gpu: '',
  ethernet: true,
  seed: 1,
  traceEvents: 0,
});

const over = (config) => ({ ...config, libraries: { ...config?.libraries, ...libraries } });

export const hardware = {
  name: ibgda.hardware.name,
  probe: (config) => ibgda.hardware.probe(over(config)),
  open: (member, options) => ibgda.hardware.open(member, { ...options, config: over(options.config) }),
  rejoin: (member, options) => ibgda.hardware.rejoin(member, { ...options, config: over(options.config) }),
};
