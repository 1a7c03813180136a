import type { Capabilities } from '@ep/core';
import { expect, it } from 'vitest';
import { resolveOptions } from '../src/options.js';

const capabilities: Capabilities = {
  needs: new Set(),
  maxMessageBytes: 2 ** 30,
  maxSignalSlots: 1024,
  initiators: new Set(['host']),
};

it('chunks are as long as the caller says, or the transport, or 256 KiB', () => {
  const chunkBytesOf = (asked: object, offered: object): number =>
    resolveOptions(
      { leaseBytes: 4096, ...asked },
      { worldSize: 2, capabilities: { ...capabilities, ...offered } },
      'test',
    ).chunkBytes;
  expect(chunkBytesOf({}, {})).toBe(262_144);
  expect(chunkBytesOf({}, { chunkBytes: 1_048_576 })).toBe(1_048_576);
  expect(chunkBytesOf({ chunkBytes: 100 }, { chunkBytes: 1_048_576 })).toBe(100);
});
