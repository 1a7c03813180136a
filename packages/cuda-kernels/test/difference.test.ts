import { EpError } from '@ep/core';
import { expect, it } from 'vitest';
import { compareLines, refusal } from '../src/difference.js';

/** What each rank is told; every rank takes part in every round, or this never ends. */
async function compare(lines: readonly (readonly string[])[], wheres: readonly string[] = []) {
  const worldSize = lines.length;
  const rounds: { records: Uint8Array[]; release: () => void; full: Promise<void> }[] = [];
  const roundOf = (n: number) => {
    if (rounds[n] === undefined) {
      let release = (): void => {};
      const full = new Promise<void>((resolve) => {
        release = resolve;
      });
      rounds[n] = { records: [], release, full };
    }
    return rounds[n];
  };
  const errors = await Promise.all(
    lines.map(async (own, rank) => {
      let n = 0;
      try {
        await compareLines(wheres[rank] ?? 'bind', own, rank, async (record) => {
          expect(record.byteLength).toBe(64);
          const { records, release, full } = roundOf(n++);
          records[rank] = record;
          if (records.filter(Boolean).length === worldSize) release();
          await full;
          return records;
        });
        return undefined;
      } catch (error) {
        expect(error).toBeInstanceOf(EpError);
        const { code, message, context } = error as EpError;
        return { code, message, ranks: context.ranks };
      }
    }),
  );
  return { errors, rounds: rounds.length };
}

const many = Array.from({ length: 60 }, (_, i) => `fact ${i} is ${i * i}`);

it('costs one round where all say the same', async () => {
  expect(await compare([many, many, many])).toEqual({ errors: [undefined, undefined, undefined], rounds: 1 });
});

it('names the odd rank and the one line that differs, as expected and as found, on every rank', async () => {
  for (const at of [0, 1, 31, 58, 59]) {
    const other = many.with(at, 'fact is another');
    const { errors, rounds } = await compare([many, other, many]);
    expect(rounds).toBeLessThan(12);
    for (const error of errors) {
      expect(error).toEqual({
        code: 'EP_MISMATCH',
        ranks: [1],
        message: `bind: rank 1 of 3 differ: expected "fact ${at} is ${at * at}" as on the others, found "fact is another" on rank 1`,
      });
    }
  }
});

it('tells a line that is missing, and where nobody is in the majority', async () => {
  const { errors } = await compare([['a', 'b'], ['a']]);
  expect(errors.map((error) => error?.ranks)).toEqual([[1], [0]]);
  expect(errors[0]?.message).toBe('bind: ranks differ: found "b" on rank 0, nothing on rank 1');
});

it('passes the reason of a rank that refused on, and tells two different calls apart', async () => {
  const { errors } = await compare([many, many, refusal(new Error('bind q: dtype must be one'))]);
  expect(errors[0]?.message).toBe('bind: refused by rank 2 (bind q: dtype must be one)');
  const calls = await compare([many, many, many], ['bind', 'openDispatcher', 'bind']);
  expect(calls.errors[0]?.message).toContain(
    'expected "call: bind" as on the others, found "call: openDispatcher" on rank 1',
  );
});

it('cuts a long line, and keeps characters whole', async () => {
  const { errors } = await compare([[`${'é'.repeat(200)}`], ['short'], ['short']]);
  expect(errors[1]?.message).toContain(`found "${'é'.repeat(128)}" on rank 0`);
});
