/** What somebody without types gets from `open` of any transport that forgot something. */
import { memoryStore } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';

const providers = [nvshmem.shm, nvshmem.cuda, nvshmem.fabric, ...Object.values(ibgda), ...Object.values(efaGda)];
const member = { rank: 0, worldSize: 1, store: memoryStore() };
const options = { signal: new AbortController().signal };
const odd: readonly (readonly [string, readonly unknown[]])[] = [
  ['nothing', []],
  ['no options', [member]],
  ['null options', [member, null]],
  ['a member without store', [{ rank: 0, worldSize: 1 }, options]],
  ['a rank beyond the world', [{ ...member, rank: 1 }, options]],
  ['a rank that is text', [{ ...member, rank: '0' }, options]],
  ['a signal that is none', [member, { signal: {} }]],
  ['a negative time', [member, { ...options, timeoutMs: -1 }]],
  ['a configuration that is a number', [member, { ...options, config: 1 }]],
];

describe.each(providers.map((provider) => [provider.name, provider] as const))('%s', (name, provider) => {
  it.each(odd)('refuses %s', async (_, args) => {
    const open = provider.open as (...args: readonly unknown[]) => Promise<unknown>;
    await expect((async () => open(...args))()).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringContaining(name),
    });
  });
});
