import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { driverParameters, peerMapping } from '../src/peer-mapping.js';

const parameters = (dwords: string) => `EnableMSI: 1\nRegistryDwords: "${dwords}"\nRegistryDwordsPerDevice: ""\n`;

describe('whether the NVIDIA driver lets GPUs map doorbells', () => {
  it.each(['PeerMappingOverride=1;', 'PeerMappingOverride=1', 'RMNumaOnlining=0; PeerMappingOverride=0x1;'])(
    'allowed by %s',
    (dwords) => expect(peerMapping(parameters(dwords))).toBe('allowed'),
  );

  it.each(['', 'PeerMappingOverride=0;', 'PeerMappingOverride=10;', 'NoPeerMappingOverride=1;'])(
    'not by "%s"',
    (dwords) => expect(peerMapping(parameters(dwords))).toMatch(/NVreg_RegistryDwords="PeerMappingOverride=1;"/),
  );

  it('is not a question where there is no driver', () => {
    expect(peerMapping(undefined)).toBe('no NVIDIA driver');
    expect(driverParameters('/proc/driver/of-nobody/params')).toBeUndefined();
  });

  it('is read from the options of the driver', () => {
    const folder = mkdtempSync(join(tmpdir(), 'ep-driver-'));
    try {
      writeFileSync(join(folder, 'params'), parameters('PeerMappingOverride=1;'));
      expect(peerMapping(driverParameters(join(folder, 'params')))).toBe('allowed');
    } finally {
      rmSync(folder, { recursive: true });
    }
  });
});
