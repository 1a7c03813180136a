import { describe, expect, it } from 'vitest';
import { LONGEST_RUN_MS, loopIsDue, turnLoopIfDue } from '../src/loop.js';

const busy = (ms: number): void => {
  for (const end = performance.now() + ms; performance.now() < end; );
};

describe('turns of the event loop', () => {
  it('are due after some milliseconds without one, and not again right after', async () => {
    await new Promise((resolve) => setImmediate(resolve));
    expect(loopIsDue()).toBe(false);
    busy(2 * LONGEST_RUN_MS);
    expect(loopIsDue()).toBe(true);
    await turnLoopIfDue();
    await new Promise((resolve) => setImmediate(resolve));
    expect(loopIsDue()).toBe(false);
  });

  it('let a timer fire in the middle of a chain of awaits that never leaves the microtasks', async () => {
    let fired = false;
    setTimeout(() => {
      fired = true;
    }, 5);
    const end = performance.now() + 5_000;
    while (!fired && performance.now() < end) await turnLoopIfDue();
    expect(fired).toBe(true);
  });
});
