// A value that travels within its write request, to bytes and back; a byte that breaks the format is named.
import { decodeWqe, dumpWqe, encodeWqe } from '@ep/efa-gda';

const bytes = encodeWqe(
  {
    requestId: 7n,
    phase: 1,
    qpn: 0x22,
    ah: 3,
    qkey: 0x12345678,
    completion: true,
    op: 'write',
    remote: { address: 0x1000n, rkey: 0x99 },
    payload: { inline: Uint8Array.of(0, 0, 0x44, 0x44) },
  },
  128,
);
const found = decodeWqe(bytes);
if (found.wqe?.qpn !== 0x22 || found.violations.length > 0) throw new Error(dumpWqe(bytes).join('\n'));
bytes[3]! &= ~8;
const [violation] = decodeWqe(bytes).violations;
if (violation?.offset !== 3) throw new Error(`found ${JSON.stringify(violation)}`);
console.log('used');
