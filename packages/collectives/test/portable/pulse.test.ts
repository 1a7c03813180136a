/** When an engine looks, holds its thread, and lets waits begin: by a clock and an event loop of the test's. */
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Pulse } from '../../src/portable/pulse.js';

let now = 0;
let turns: (() => void)[] = [];

beforeEach(() => {
  // What was never seen was not seen for long.
  now = 1000;
  turns = [];
  vi.spyOn(performance, 'now').mockImplementation(() => now);
  vi.stubGlobal('setImmediate', (turn: () => void) => turns.push(turn));
});
afterEach(() => {
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

/** Turns of the loop, and what follows from each. */
async function loop(count: number): Promise<void> {
  for (let i = 0; i < count; i++) {
    for (const turn of turns.splice(0)) turn();
    await Promise.resolve();
    await Promise.resolve();
  }
}

/** A pulse over a list of what looks find, nothing after its end; a hold takes `heldMs`. */
function pulseOf(found: boolean[], heldMs = 0) {
  const counts = { looks: 0, holds: 0, quiet: 0 };
  const pulse = new Pulse({
    look: () => {
      counts.looks++;
      return found.shift() ?? false;
    },
    hold: () => {
      counts.holds++;
      now += heldMs;
    },
    onError: (error) => {
      throw error;
    },
  });
  const wait = (): void => {
    void pulse.quiet().then(() => {
      counts.quiet++;
    });
  };
  return { pulse, counts, wait };
}

it('holds the thread between looks that find nothing, until it is quiet; then lets waits begin one by one', async () => {
  const { pulse, counts, wait } = pulseOf([true, false, true], 0.2);
  expect(pulse.look()).toBe(true);
  wait();
  wait();
  await loop(1);
  // Nothing, a hold, something.
  expect(counts).toEqual({ looks: 3, holds: 1, quiet: 0 });
  await loop(2);
  expect(counts).toEqual({ looks: 7, holds: 3, quiet: 0 });
  await loop(1);
  expect(counts).toEqual({ looks: 9, holds: 4, quiet: 1 });
  await loop(1);
  expect(counts).toEqual({ looks: 10, holds: 4, quiet: 2 });
  await loop(1);
  expect(counts.looks, 'it looks for nobody').toBe(10);
});

it('holds nothing up while another one looks on the same thread', async () => {
  const pulses = [pulseOf([true]), pulseOf([true])];
  for (const { pulse, wait } of pulses) {
    pulse.look();
    wait();
  }
  await loop(3);
  expect(pulses.map(({ counts }) => counts.holds)).toEqual([0, 0]);
  now += 1;
  await loop(2);
  expect(pulses.map(({ counts }) => counts.quiet)).toEqual([1, 1]);
  const alone = pulseOf([true]);
  alone.pulse.look();
  alone.wait();
  await loop(1);
  expect(alone.counts.holds).toBe(1);
  now += 1;
  await loop(1);
});

it('lets a wait begin every 50 ms however much there is to see', async () => {
  const { counts, wait } = pulseOf(Array(100).fill(true));
  wait();
  await loop(5);
  expect(counts.quiet).toBe(0);
  now += 51;
  await loop(1);
  expect(counts.quiet).toBe(1);
});

it('tells of errors, of looks and of holds', async () => {
  const errors: string[] = [];
  let looks = 0;
  const pulse = new Pulse({
    look: () => {
      if (looks++ === 0) return true;
      throw new Error('look');
    },
    hold: () => {
      throw new Error('hold');
    },
    onError: (error) => errors.push((error as Error).message),
  });
  pulse.look();
  void pulse.quiet();
  await loop(1);
  expect(errors).toEqual(['look', 'hold', 'look']);
  now += 1;
  await loop(1);
});

it('looks lately unless it has just begun a look; a rank that is stopped in one, or behind it, looks again', () => {
  const stops = [0, 0, 5];
  let looks = 0;
  const pulse = new Pulse({
    look: () => {
      looks++;
      now += stops.shift() ?? 0;
      return false;
    },
    hold: () => {},
    onError: (error) => {
      throw error;
    },
  });
  pulse.lookLately();
  now += 0.2;
  pulse.lookLately();
  expect(looks).toBe(1);
  now += 0.1;
  pulse.lookLately();
  now += 7;
  // Stopped in this one.
  pulse.lookLately();
  expect(looks).toBe(3);
  pulse.lookLately();
  expect(looks).toBe(4);
});
