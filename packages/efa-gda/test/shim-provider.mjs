/** The backing `hardware` as tests have it: its libfabric is the shim, behind which is a software EFA. Ranks import this. */
import { fileURLToPath } from 'node:url';
import { efaGda } from '@ep/efa-gda';
import { native } from '@ep/native';

/** Built beside the addon. */
export const library = fileURLToPath(new URL('../../../native/build/Release/libep_fabric_shim.so', import.meta.url));

native().binding.attachFabricShim(library, {
  queuePairs: 1,
  depth: 2,
  inlineValues: true,
  hardware: false,
  library: '',
  device: '',
  seed: 1,
  traceEvents: 0,
  maxCounters: 1024,
  fragmentBytes: 4096,
});

export const hardware = {
  name: efaGda.hardware.name,
  probe: (config) => efaGda.hardware.probe({ ...config, library }),
  open: (member, options) => efaGda.hardware.open(member, { ...options, config: { ...options.config, library } }),
  rejoin: (member, options) => efaGda.hardware.rejoin(member, { ...options, config: { ...options.config, library } }),
};
