import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { processStart, withLock } from './lock.mjs';

/** @type {string} */
let dir;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'ep-lock-'));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

/** @param {string} body a program; `lock` and `counter` are paths, withLock is imported */
const start = (body) =>
  spawn(
    process.execPath,
    [
      '--input-type=module',
      '-e',
      `import { withLock } from ${JSON.stringify(new URL('./lock.mjs', import.meta.url).href)};
       import { readFileSync, writeFileSync } from 'node:fs';
       import { setTimeout as sleep } from 'node:timers/promises';
       const lock = ${JSON.stringify(join(dir, 'lock'))}, counter = ${JSON.stringify(join(dir, 'counter'))};
       ${body}`,
    ],
    { stdio: ['ignore', 'pipe', 'inherit'] },
  );

test('processes that start at once hold the lock one after the other', async () => {
  writeFileSync(join(dir, 'counter'), '0');
  const rounds = 5;
  const children = Array.from({ length: 4 }, () =>
    start(`for (let round = 0; round < ${rounds}; round++) await withLock(lock, async () => {
      const seen = Number(readFileSync(counter, 'utf8'));
      await sleep(5);
      writeFileSync(counter, String(seen + 1));
    }, { pollMs: 5 });`),
  );
  const codes = await Promise.all(children.map(async (child) => (await once(child, 'exit'))[0]));
  expect(codes).toEqual([0, 0, 0, 0]);
  expect(readFileSync(join(dir, 'counter'), 'utf8')).toBe(String(4 * rounds));
  expect(readdirSync(join(dir, 'lock'))).toEqual([]);
}, 30_000);

test('a holder that was killed does not keep the lock', async () => {
  const holder = start(`await withLock(lock, async () => { console.log('held'); await sleep(60_000); });`);
  await once(/** @type {NonNullable<typeof holder.stdout>} */ (holder.stdout), 'data');
  /** @type {number[]} */
  const waitedFor = [];
  const taken = withLock(join(dir, 'lock'), async () => 'taken', { pollMs: 5, onWait: (pid) => waitedFor.push(pid) });
  setTimeout(() => holder.kill('SIGKILL'), 100);
  expect(await taken).toBe('taken');
  expect(waitedFor).toEqual([holder.pid]);
}, 30_000);

test('a claim whose pid was reused by another process is stale', async () => {
  mkdirSync(join(dir, 'lock'));
  const start = Number(processStart(process.ppid));
  writeFileSync(join(dir, 'lock', `${process.ppid}-${start - 1}`), '');
  expect(await withLock(join(dir, 'lock'), async () => 'taken')).toBe('taken');
});

test('the lock is free again after the body failed', async () => {
  const failing = withLock(join(dir, 'lock'), async () => {
    throw new Error('body');
  });
  await expect(failing).rejects.toThrow('body');
  expect(readdirSync(join(dir, 'lock'))).toEqual([]);
});
