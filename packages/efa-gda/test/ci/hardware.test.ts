/**
 * The suites through the path by which EFA is reached: dlopen, versioned symbols, the structs and error conventions of libfabric. Behind them is a software EFA, which nobody tells
 * that a doorbell rang, and which wakes nobody.
 */
import { describeGin, describeTransport } from '@ep/conformance';
import { expect, it } from 'vitest';
import { driverParameters, peerMapping } from '../../src/peer-mapping.js';
import { hardware } from '../shim-provider.mjs';

const common = {
  provider: { module: new URL('../shim-provider.mjs', import.meta.url).href, name: 'hardware' },
  name: 'efa-gda:hardware (shim)',
  worlds: [2, 3],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
} as const;

describeTransport('efa-gda (hardware, over the shim)', {
  ...common,
  otherConfig: { ranksOnHost: 99 },
  expected: new URL('../shim-conformance.expected.json', import.meta.url),
});

describeGin('efa-gda (hardware, over the shim), GIN contexts', {
  ...common,
  expected: new URL('../shim-gin-conformance.expected.json', import.meta.url),
});

it('says of a device whether GPUs may map its doorbells', async () => {
  expect(await hardware.probe()).toMatchObject({
    available: true,
    devices: [{ detail: { peerMapping: peerMapping(driverParameters()) } }],
  });
});
