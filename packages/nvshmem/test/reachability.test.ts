import { EpError, memoryStore } from '@ep/core';
import type { NativeFabricNic } from '@ep/native';
import { describe, expect, it } from 'vitest';
import { addressText, ofMissingRanks } from '../src/fabric/reachability.js';
import { nvshmem } from '../src/index.js';

const probe = await nvshmem.fabric.probe();
const missing = probe.available ? '' : ` (skipped: ${probe.reason})`;

/** sockaddr_in. */
const endpointOf = (address: string, port: number): Uint8Array =>
  Uint8Array.from([2, 0, port >> 8, port & 255, ...address.split('.').map(Number), ...new Array(8).fill(0)]);

describe('why ranks do not reach each other', () => {
  it.skipIf(missing)(`names an address that no interface has, and those that there are${missing}`, async () => {
    const open = nvshmem.fabric.open(
      { rank: 0, worldSize: 1, store: memoryStore() },
      { signal: new AbortController().signal, config: { provider: 'tcp;ofi_rxm', address: '203.0.113.9' } },
    );
    await expect(open).rejects.toThrow(
      /no interface of this host has the address 203\.0\.113\.9; there are 127\.0\.0\.1 \(lo\)/,
    );
  });

  it('reads addresses of IPv4, and no others', () => {
    const endpoint = endpointOf('10.0.0.7', 29_501);
    expect(addressText(endpoint)).toBe('10.0.0.7 port 29501');
    expect(addressText(endpoint.subarray(0, 15))).toBeUndefined();
    expect(addressText(endpoint.with(0, 10))).toBeUndefined();
  });

  it('says from where to where, and what the network said', () => {
    const endpoints = ['127.0.0.1', '10.0.0.8', '10.0.0.9', '10.0.0.10'].map((address) => endpointOf(address, 7));
    const failure = (peer: number) => (peer === 1 ? { status: 4, text: 'rank 1: connection refused' } : undefined);
    const reach = { rank: 0, nic: { failure } as unknown as NativeFabricNic, endpoints };
    const late = new EpError('EP_TIMEOUT', 'barrier: timed out', { context: { awaited: [1, 2] } });
    expect(ofMissingRanks(late, reach)).toMatchObject({
      code: 'EP_TIMEOUT',
      context: { awaited: [1, 2] },
      cause: late,
      message:
        'barrier: timed out; rank 1 from 127.0.0.1 (lo) to 10.0.0.8 port 7: connection refused; ' +
        'rank 2 from 127.0.0.1 (lo) to 10.0.0.9 port 7: nothing was refused, and nothing was heard from there',
    });
    const gone = endpoints.map((endpoint, rank) => (rank === 0 ? endpointOf('203.0.113.9', 7) : endpoint));
    const text = /from 203\.0\.113\.9 \(of no interface that is up\) to 10\.0\.0\.8/;
    expect((ofMissingRanks(late, { ...reach, endpoints: gone }) as EpError).message).toMatch(text);
    const other = new EpError('EP_MISMATCH', 'x');
    expect(ofMissingRanks(other, reach)).toBe(other);
  });
});
