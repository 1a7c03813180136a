// An abort is not a deadline: it must reach a watcher that sleeps, not wait for the end of its slice (2 ms).
import { expect, it } from 'vitest';
import { native } from '../../js/native.js';

it('ends a watch at once', async () => {
  const { binding, operations } = native();
  const rank = new binding.RankContext(0, 1, 1);
  rank.connect(rank.handle());
  const memory = new binding.SymmetricMemory(rank, 64, 1);
  memory.connect(memory.handle());
  const took: number[] = [];
  for (let i = 0; i < 40; i++) {
    const abort = new AbortController();
    const ended = operations.run(() => memory.waitWatch(0, 5, 1n, -1), abort.signal);
    // Long enough that the watcher sleeps, and short of its slice.
    for (const end = performance.now() + 0.4; performance.now() < end; );
    const begin = performance.now();
    abort.abort(new Error('enough'));
    await expect(ended).rejects.toThrow('enough');
    took.push(performance.now() - begin);
  }
  // Not the median: on a busy machine the watcher's thread may have to wait for a core, but hardly three times out of four.
  took.sort((a, b) => a - b);
  expect(took[10]).toBeLessThan(0.8);
  memory.release();
  rank.close();
});

it('does not stand for what had ended before', async () => {
  const { binding, operations } = native();
  const rank = new binding.RankContext(0, 1, 1);
  rank.connect(rank.handle());
  const memory = new binding.SymmetricMemory(rank, 64, 1);
  memory.connect(memory.handle());
  const abort = new AbortController();
  const ended = operations.run(() => memory.waitWatch(0, 5, 1n, 1), abort.signal);
  // It ends by its deadline while this thread, which has not heard of that yet, goes on to abort it.
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 500);
  abort.abort(new Error('too late'));
  expect(await ended).toMatchObject({ status: 2 });
  memory.release();
  rank.close();
});
