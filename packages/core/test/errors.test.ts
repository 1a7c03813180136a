import { describe, expect, it } from 'vitest';
import { checkInteger, type EpCode, EpError, ERROR_TABLE, invalid, isEpError } from '../src/errors.js';
import { formatRanks } from '../src/ranks.js';

describe('errors', () => {
  it('take their scope from the table', () => {
    for (const [code, { scope }] of Object.entries(ERROR_TABLE)) {
      expect(new EpError(code as EpCode, 'x').scope).toBe(scope);
    }
  });

  it('leave what their remedies go on with', () => {
    // A rank that was taken out of a group joins it again, over the transport that it has.
    expect(new EpError('EP_EVICTED', 'x').scope).toBe('operation');
  });

  it('keep context, cause and native status', () => {
    const cause = new Error('deep');
    const error = new EpError('EP_SYSTEM', 'mmap failed', {
      context: { bytes: 7 },
      cause,
      native: { status: 3, name: 'ENOMEM', errno: 12 },
    });
    expect(error).toMatchObject({ code: 'EP_SYSTEM', context: { bytes: 7 }, cause, native: { errno: 12 } });
    expect('cause' in new EpError('EP_CLOSED', 'x')).toBe(false);
  });

  it('are known by their brand, whichever copy made them', () => {
    const foreign = Object.assign(new Error('x'), { code: 'EP_BUSY', [Symbol.for('@ep/error')]: true });
    expect([new EpError('EP_BUSY', 'x'), foreign].every(isEpError)).toBe(true);
    expect([new Error('x'), null, 'EP_BUSY', { code: 'EP_BUSY' }].some(isEpError)).toBe(false);
  });

  it.each<[unknown, string]>([
    [-1, '-1'],
    [7n, '7n'],
    ['a"b', '"a\\"b"'],
    ['x'.repeat(100), `"${'x'.repeat(80)}…"`],
    [undefined, 'undefined'],
    [null, 'null'],
    [new Float32Array(3), 'Float32Array of 12 bytes'],
    [[1, 'a', {}], '[1, "a", …]'],
    [Array.from({ length: 100 }, () => 0), '[0, 0, 0, 0, 0, 0, 0, 0, … 100 in all]'],
    [new Map(), 'an object of Map'],
    [Object.create(null), 'an object of no class'],
    [() => 1, 'a function'],
  ])('show %o in short', (value, text) => {
    const error = invalid('thing', { where: 'here', expected: 'other', found: value });
    expect(error.message).toBe(`here: thing must be other, found ${text}`);
    expect(error.context).toEqual({ where: 'here', what: 'thing', expected: 'other', found: text });
  });

  it('check integers', () => {
    expect(checkInteger(3, 'n', 'f', 0, 3)).toBe(3);
    for (const bad of [4, -1, 1.5, Number.NaN, '3', 3n, undefined]) {
      expect(() => checkInteger(bad, 'n', 'f', 0, 3)).toThrow(/^f: n must be an integer from 0 to 3, found /);
    }
    expect(() => checkInteger(2 ** 53, 'n', 'f')).toThrow(/a safe integer of at least 0/);
  });
});

describe('formatRanks', () => {
  it('folds runs', () => {
    expect(formatRanks([])).toBe('no rank');
    expect(formatRanks([3])).toBe('rank 3');
    expect(formatRanks([5, 0, 2, 1, 1])).toBe('ranks 0-2, 5');
  });
  it('cuts what nobody would read', () => {
    const even = Array.from({ length: 64 }, (_, i) => 2 * i);
    expect(formatRanks(even)).toBe('ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, … (64 in all)');
  });
});
