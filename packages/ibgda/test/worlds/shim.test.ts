/**
 * The suite through the path by which hardware is reached: dlopen, versioned symbols, the structs and error conventions of libibverbs and libmlx5. Behind them is
 * a software NIC on Ethernet, which nobody tells that a doorbell rang.
 */
import { describeTransport } from '@ep/conformance';

describeTransport('ibgda (hardware, over the shim)', {
  provider: { module: new URL('../shim-provider.mjs', import.meta.url).href, name: 'hardware' },
  name: 'ibgda:hardware (shim)',
  otherConfig: { qpsPerPeer: 3 },
  worlds: [2, 3],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
  expected: new URL('../conformance-shim.expected.json', import.meta.url),
});
