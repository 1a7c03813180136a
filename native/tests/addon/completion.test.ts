// How JS hears that native work has ended: one wake-up for all that ended while JS was busy, and a process that lives for as long as something is pending.
import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';
import { native } from '../../js/native.js';
import { nativeError } from '../../js/operations.js';

it('tells of everything that ended meanwhile in one wake-up', async () => {
  const { binding } = native();
  const rank = new binding.RankContext(0, 1, 1);
  rank.connect(rank.handle());
  const memory = new binding.SymmetricMemory(rank, 64, 1);
  memory.connect(memory.handle());
  let wakes: (readonly number[])[] = [];
  // In the place of `Operations`, which would not tell how often it was called.
  binding.configure((ids) => wakes.push(Array.from(ids).filter((_, i) => i % 4 === 0)), nativeError);
  const count = 32;
  const blocked = new Int32Array(new SharedArrayBuffer(4));
  // Again where a busy machine did not let all of them end while this thread was blocked.
  for (let tries = 0; tries < 5 && wakes.length !== 1; tries++) {
    wakes = [];
    const started = Array.from({ length: count }, () => memory.waitWatch(0, 5, 1n, 1));
    Atomics.wait(blocked, 0, 0, 300);
    expect(wakes).toEqual([]);
    await expect.poll(() => wakes.flat().length, { timeout: 10_000 }).toBe(count);
    expect(wakes.flat().sort((a, b) => a - b)).toEqual(started);
  }
  expect(wakes.length).toBe(1);
  memory.release();
  rank.close();
});

it('keeps the process alive while a top-level await is pending, and no longer', () => {
  const addon = fileURLToPath(new URL('../../dist/index.js', import.meta.url));
  const program = `
    import { native } from ${JSON.stringify(addon)};
    const { binding, operations } = native();
    const rank = new binding.RankContext(0, 1, 1);
    rank.connect(rank.handle());
    const memory = new binding.SymmetricMemory(rank, 64, 1);
    memory.connect(memory.handle());
    // Nothing else of this process is pending: no timer, no handle.
    const { status } = await operations.run(() => memory.waitWatch(0, 5, 1n, 200));
    console.log('ended with status', status);`;
  const { status, stdout, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', program], {
    encoding: 'utf8',
    timeout: 60_000,
  });
  // Node gives 13 where nothing keeps it that could settle the await; null: it had to be killed, since something still kept it.
  expect({ status, stdout, stderr }).toEqual({ status: 0, stdout: 'ended with status 2\n', stderr: '' });
});
