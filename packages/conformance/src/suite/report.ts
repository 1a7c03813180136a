/** The support table, made of committed outcomes: docs/transports.md and whoever else shows it. */
import { type TransportCase, transportCases } from '../cases/index.js';
import type { ExpectedFile, Outcome } from './expected.js';

const cell = (outcome: Outcome | undefined, notes: string[]): string => {
  if (outcome === undefined) return 'not run';
  if (outcome === 'pass') return 'yes';
  if (outcome === 'not-applicable') return '–';
  const known = notes.indexOf(outcome.deviation);
  if (known < 0) notes.push(outcome.deviation);
  return `no [${known < 0 ? notes.length : known + 1}]`;
};

const row = (cells: readonly string[]): string => `| ${cells.map((text) => text.replace(/\|/g, '\\|')).join(' | ')} |`;

/** Markdown: one row per case, one column per transport, deviations with their reasons below. */
export function renderReport(files: readonly ExpectedFile[], cases: readonly TransportCase[] = transportCases): string {
  const sorted = [...files].sort((a, b) => (a.transport < b.transport ? -1 : 1));
  const notes: string[] = [];
  const totals = sorted.map((file) => {
    const outcomes = Object.values(file.cases);
    const count = (test: (outcome: Outcome) => boolean): number => outcomes.filter(test).length;
    const deviations = count((outcome) => typeof outcome === 'object');
    return `${count((outcome) => outcome === 'pass')} pass, ${count((outcome) => outcome === 'not-applicable')} not applicable, ${deviations} deviate`;
  });
  const table = [
    row(['case', 'what it says', ...sorted.map((file) => `\`${file.transport}\``)]),
    row(['---', '---', ...sorted.map(() => '---')]),
    ...cases.map((one) =>
      row([`\`${one.id}\``, one.sentence, ...sorted.map((file) => cell(file.cases[one.id], notes))]),
    ),
    row(['', 'in all', ...totals]),
  ];
  const lists = sorted.map(
    (file) => `- \`${file.transport}\`: ${file.modes.join(' and ')}, worlds of ${file.worlds.join(', ')} ranks`,
  );
  return [
    '# Transports',
    '',
    'What each transport does, from the committed outcomes of the conformance suite (`*.expected.json` beside the tests of each package).',
    'A case that changes its column, in either direction, fails CI. yes: passes. –: does not apply, because the transport does not offer what',
    'the case needs. no: a known deviation, with its reason below.',
    '',
    ...lists,
    '',
    ...table,
    '',
    ...(notes.length === 0 ? ['No deviations.'] : notes.map((note, i) => `[${i + 1}] ${note}`)),
    '',
  ].join('\n');
}
