import { expect, it } from 'vitest';
import { runRanks } from './ranks.js';

it('refuses every odd argument of every public function with an EpError, and hangs at none', {
  timeout: 120_000,
}, async () => {
  const [report] = (await runRanks('threads', 1, 'misuse')) as readonly {
    readonly wrong: readonly string[];
    readonly missed: readonly string[];
    readonly calls: number;
  }[];
  expect(report!.missed).toEqual([]);
  expect(report!.wrong).toEqual([]);
  expect(report!.calls).toBeGreaterThan(2500);
});
