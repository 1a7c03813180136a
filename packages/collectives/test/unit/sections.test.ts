/** Sections of device memory: no rank is in two groups that have the same one, whatever groups are opened and closed at the same time. */
import { memoryStore } from '@ep/core';
import fc from 'fast-check';
import { expect, test } from 'vitest';
import { type DeviceSection, DeviceSections } from '../../src/device/sections.js';

const SECTIONS = 3;

const groups = fc.array(fc.record({ ranks: fc.uniqueArray(fc.integer({ min: 0, max: 5 }), { minLength: 1 }) }), {
  minLength: 1,
  maxLength: 12,
});

test('groups with a common member have different sections, and what all members gave back is free', async () => {
  await fc.assert(
    fc.asyncProperty(groups, async (asked) => {
      const store = memoryStore();
      const all = new DeviceSections(store, SECTIONS);
      const held: { readonly section: DeviceSection; readonly ranks: readonly number[] }[] = [];
      const open = async (ranks: readonly number[]): Promise<void> => {
        try {
          held.push({ section: await all.take(`[${ranks}]`, ranks), ranks });
        } catch (error) {
          expect(error).toMatchObject({ code: 'EP_CAPACITY', context: { maxGroups: SECTIONS } });
        }
      };
      await Promise.all(asked.map(({ ranks }) => open(ranks)));
      for (const rank of [0, 1, 2, 3, 4, 5]) {
        const mine = held.filter(({ ranks }) => ranks.includes(rank)).map(({ section }) => section.index);
        expect(new Set(mine).size).toBe(mine.length);
      }
      for (const { section, ranks } of held) await Promise.all(ranks.map(() => all.giveBack(section, ranks.length)));
      const whole = await Promise.all([1, 2, 3].map(() => all.take('all', [0, 1, 2, 3, 4, 5])));
      expect(whole.map(({ index }) => index).sort()).toEqual([0, 1, 2]);
    }),
    { numRuns: 100 },
  );
});

test('a section whose members have not all given it back is not free', async () => {
  const all = new DeviceSections(memoryStore(), 1);
  const section = await all.take('pair', [0, 1]);
  await all.giveBack(section, 2);
  await expect(all.take('again', [1, 2])).rejects.toMatchObject({ code: 'EP_CAPACITY' });
  expect((await all.take('apart', [2, 3])).index).toBe(0);
  await all.giveBack(section, 2);
  expect((await all.take('again', [1, 0])).index).toBe(0);
});
