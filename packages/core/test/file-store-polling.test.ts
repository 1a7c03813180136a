/** The file store where inotify is not to be had, or says nothing. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, vi } from 'vitest';
import { openFileStore } from '../src/index.js';

const mode = vi.hoisted(() => ({ watch: 'throws' as 'throws' | 'silent' }));
vi.mock('node:fs', async (original) => {
  const fs = await original<typeof import('node:fs')>();
  return {
    ...fs,
    watch: () => {
      if (mode.watch === 'throws') throw Object.assign(new Error('too many instances'), { code: 'EMFILE' });
      return { on() {}, close() {} };
    },
  };
});

it.each(['throws', 'silent'] as const)('waits end although watching %s', async (watch) => {
  mode.watch = watch;
  const directory = mkdtempSync(join(tmpdir(), 'ep-store-'));
  const [a, b] = [await openFileStore(join(directory, 'store')), await openFileStore(join(directory, 'store'))];
  for (let i = 0; i < 4; i++) {
    const wait = a.get(`k${i}`, { timeoutMs: 5000 });
    await new Promise((resolve) => setTimeout(resolve, 30));
    await b.set(`k${i}`, Uint8Array.of(i));
    expect([...(await wait)]).toEqual([i]);
  }
  await expect(a.get('never', { timeoutMs: 20 })).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
  await Promise.all([a.close(), b.close()]);
  rmSync(directory, { recursive: true });
});
