import { compareOutcome, mandatoryCases, mandatoryStoreCases, storeCases } from '@ep/conformance';
import { transportCases } from '@ep/conformance/cases';
import { renderReport } from '@ep/conformance/report';
import { describe, expect, it } from 'vitest';

describe('committed outcomes', () => {
  const failure = new Error('what the case threw');
  const deviation = { deviation: 'known' } as const;

  it('accept what was committed', () => {
    compareOutcome('a', 'pass', 'pass');
    compareOutcome('a', 'not-applicable', 'not-applicable');
    compareOutcome('a', deviation, 'fail', failure);
  });

  it('throw what the case threw when a pass fails', () => {
    expect(() => compareOutcome('a', 'pass', 'fail', failure)).toThrow(failure);
  });

  it.each([
    ['a deviation that passes', deviation, 'pass'],
    ['a deviation that no longer applies', deviation, 'not-applicable'],
    ['a pass that no longer applies', 'pass', 'not-applicable'],
    ['something inapplicable that passes', 'not-applicable', 'pass'],
  ] as const)('refuse %s', (_, expected, observed) => {
    expect(() => compareOutcome('a', expected, observed)).toThrow(/committed as .*, but it is now/);
  });

  it('refuse a case that was never committed', () => {
    expect(() => compareOutcome('a', undefined, 'pass')).toThrow(/a has no committed outcome/);
  });
});

describe('the report', () => {
  it('has a row for each case, a column for each subject, and the reason of each deviation once', () => {
    const file = (name: string, outcome: 'pass' | { readonly deviation: string }) => ({
      suite: 'transport' as const,
      name,
      modes: ['threads'],
      worlds: [2, 3],
      cases: Object.fromEntries(transportCases.map((one) => [one.id, outcome])),
    });
    const store = { suite: 'store' as const, name: 'plain', cases: {} };
    const text = renderReport([file('b:two', { deviation: 'the reason' }), file('a:one', 'pass'), store]);
    const rows = text.split('\n').filter((line) => line.startsWith('| `'));
    expect(rows.filter((row) => row.endsWith('| yes | no [1] |')).length).toBe(transportCases.length);
    expect(rows.filter((row) => row.endsWith('| not run |')).length).toBe(storeCases.length);
    expect(text.match(/the reason/g)?.length).toBe(1);
    expect(text).toContain(`${transportCases.length} pass, 0 not applicable, 0 deviate`);
    expect(text).not.toContain('Process groups');
  });

  it('takes the sentences of process groups from the files: their cases are those of another package', () => {
    const group = {
      suite: 'group' as const,
      name: 'shm',
      modes: ['threads'],
      worlds: [2],
      sentences: { 'a/case': 'what it says' },
      cases: { 'a/case': 'pass' as const },
    };
    const text = renderReport([group]);
    expect(text).toContain('- `shm`: threads, worlds of 2 ranks');
    expect(text).toContain('| `a/case` | what it says | yes |');
  });
});

describe.each([
  ['transports', transportCases, mandatoryCases],
  ['stores', storeCases, mandatoryStoreCases],
] as const)('the suite of %s', (_, cases, mandatory) => {
  it('has every mandatory case, each with a sentence of its own', () => {
    const ids = cases.map((one) => one.id);
    expect(mandatory.filter((id) => !ids.includes(id))).toEqual([]);
    expect(new Set(cases.map((one) => one.sentence)).size).toBe(ids.length);
  });
});
