import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { keepInput, readCorpus } from '../src/corpus.js';
import { bytesTarget, type FuzzSuite, generator, mutateBytes, mutateText, replay, textTarget } from '../src/index.js';

const corpus = mkdtempSync(join(tmpdir(), 'ep-fuzz-test-'));
afterAll(() => rmSync(corpus, { recursive: true }));

const refusal = (error: unknown): boolean => error instanceof RangeError;

/** Wrong for one length only: what a fuzzer is there to find. */
const careful = bytesTarget('careful', refusal, (bytes) => {
  if (bytes.length > 8) throw new RangeError('longer than 8 bytes');
  if (bytes.length === 3 && bytes[0] === 0x80) throw new TypeError('a slip');
});
const json = textTarget(
  'json',
  (error) => error instanceof SyntaxError,
  (text) => JSON.parse(text),
);
const suite: FuzzSuite = { corpus, targets: [careful, json] };
keepInput(suite, careful, 'zeros', Buffer.alloc(8));
keepInput(suite, careful, 'long', Buffer.alloc(9));
keepInput(suite, json, 'list', Buffer.from('[1, {"a": "é"}]'));

it('replays the corpus, and the same mutations for the same seed', () => {
  expect(readCorpus(suite, careful)).toEqual([Buffer.alloc(9), Buffer.alloc(8)]);
  expect(replay(suite, careful, { mutations: 0, seed: 1 })).toEqual({ used: 1, refused: 1 });
  const run = () => replay(suite, json, { mutations: 500, seed: 3 });
  expect(run()).toEqual(run());
  expect(run().used + run().refused).toBe(501);
  for (const mutate of [mutateBytes, (a: Buffer) => Buffer.from(mutateText(a.toString(), 'x', generator(9)))]) {
    const input = Buffer.from('[1,2]');
    expect(mutate(input, input, generator(9))).toEqual(mutate(input, input, generator(9)));
    expect(input.toString()).toBe('[1,2]');
  }
});

it('finds a slip, and hands over the input that shows it', () => {
  const findings: Buffer[] = [];
  replay(suite, careful, { mutations: 20_000, seed: 5 }, (input) => findings.push(input));
  expect(findings.length).toBeGreaterThan(0);
  for (const input of findings.slice(0, 10)) expect(() => careful.run(input)).toThrow('a slip');
  expect(() => replay(suite, careful, { mutations: 20_000, seed: 5 })).toThrow(/careful: run \d+ of seed 5/);
});

it('refuses a target without inputs', () => {
  keepInput(suite, { ...json, name: 'none' }, 'x', Buffer.alloc(0));
  rmSync(join(corpus, 'none', readdirSync(join(corpus, 'none'))[0]!));
  expect(() => readCorpus(suite, { ...json, name: 'none' })).toThrow('holds no inputs');
});
