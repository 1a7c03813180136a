/**
 * The suite over whichever RDMA device this machine has. Mostly it has none, and all is skipped: then e2e/verbs-guest runs the same cases against the same
 * outcomes in a guest that has two.
 */
import { describeTransport } from '@ep/conformance';

describeTransport('ibgda (verbs)', {
  provider: { module: '@ep/ibgda', name: 'ibgda.verbs' },
  otherConfig: { qpsPerPeer: 3 },
  worlds: [2, 3],
  modes: ['processes'],
  expected: new URL('./conformance-verbs.expected.json', import.meta.url),
});
