/** Ranges of a ring: never two in one place, and all of it there again when all were given back. */
import fc from 'fast-check';
import { expect, test } from 'vitest';
import { Ring, ringBytesOf } from '../../src/device/ring.js';

interface Held {
  readonly begin: number;
  readonly end: number;
}

const steps = fc.array(fc.record({ bytes: fc.integer({ min: 1, max: 5000 }), gives: fc.boolean(), which: fc.nat() }), {
  maxLength: 200,
});

test('ranges lie in the ring, apart, and come back in any order', () => {
  fc.assert(
    fc.property(fc.integer({ min: 1, max: 20_000 }), steps, (byteLength, taken) => {
      const bytes = ringBytesOf(byteLength, 1);
      const ring = new Ring(bytes);
      const held: Held[] = [];
      for (const { bytes: asked, gives, which } of taken) {
        if (gives && held.length > 0) {
          ring.giveBack(held.splice(which % held.length, 1)[0]!.begin);
          continue;
        }
        const length = Math.min(asked, ring.most);
        const begin = ring.take(length);
        if (begin === undefined) {
          expect(held.length).toBeGreaterThan(0);
          continue;
        }
        const end = begin + length;
        expect(begin % 256).toBe(0);
        expect(end).toBeLessThanOrEqual(bytes);
        for (const one of held) expect(end <= one.begin || begin >= one.end).toBe(true);
        held.push({ begin, end });
      }
      for (const { begin } of held) ring.giveBack(begin);
      // One is filled while the other is read.
      expect([ring.take(ring.most), ring.take(ring.most)]).not.toContain(undefined);
    }),
  );
});

test('rings have room for two ranges, however many share the memory', () => {
  expect(ringBytesOf(2 ** 20, 4)).toBe(2 ** 18);
  expect(ringBytesOf(100, 64)).toBe(512);
});
