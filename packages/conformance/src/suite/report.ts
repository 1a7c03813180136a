/** The support table, made of committed outcomes: docs/transports.md and whoever else shows it. */
import { transportCases } from '../cases/index.js';
import { ginCases } from '../gin/index.js';
import { storeCases } from '../stores/cases.js';
import type { ExpectedFile, Outcome, Suite } from './expected.js';

const cell = (outcome: Outcome | undefined, notes: string[]): string => {
  if (outcome === undefined) return 'not run';
  if (outcome === 'pass') return 'yes';
  if (outcome === 'not-applicable') return '–';
  const known = notes.indexOf(outcome.deviation);
  if (known < 0) notes.push(outcome.deviation);
  return `no [${known < 0 ? notes.length : known + 1}]`;
};

const row = (cells: readonly string[]): string => `| ${cells.map((text) => text.replace(/\|/g, '\\|')).join(' | ')} |`;

/** Rows of one suite: a case each, a column for each subject. Reasons of deviations are added to `notes`. */
function renderTable(
  files: readonly ExpectedFile[],
  cases: readonly { readonly id: string; readonly sentence: string }[],
  notes: string[],
): readonly string[] {
  const totals = files.map((file) => {
    const outcomes = Object.values(file.cases);
    const count = (test: (outcome: Outcome) => boolean): number => outcomes.filter(test).length;
    const deviations = count((outcome) => typeof outcome === 'object');
    return `${count((outcome) => outcome === 'pass')} pass, ${count((outcome) => outcome === 'not-applicable')} not applicable, ${deviations} deviate`;
  });
  return [
    row(['case', 'what it says', ...files.map((file) => `\`${file.name}\``)]),
    row(['---', '---', ...files.map(() => '---')]),
    ...cases.map((one) =>
      row([`\`${one.id}\``, one.sentence, ...files.map((file) => cell(file.cases[one.id], notes))]),
    ),
    row(['', 'in all', ...totals]),
  ];
}

const worldsOf = (files: readonly ExpectedFile[]): readonly string[] =>
  files.map((file) => `- \`${file.name}\`: ${file.modes?.join(' and ')}, worlds of ${file.worlds?.join(', ')} ranks`);

/** Markdown: one table for each suite, deviations with their reasons below. */
export function renderReport(files: readonly ExpectedFile[]): string {
  const of = (suite: Suite): ExpectedFile[] =>
    files.filter((file) => file.suite === suite).sort((a, b) => (a.name < b.name ? -1 : 1));
  const notes: string[] = [];
  const matrix = worldsOf(of('transport'));
  const transports = renderTable(of('transport'), transportCases, notes);
  const stores = renderTable(of('store'), storeCases, notes);
  const groupFiles = of('group');
  const sentences = Object.entries(
    Object.assign({}, ...groupFiles.map((file) => file.sentences)) as Record<string, string>,
  );
  const groupCases = sentences.map(([id, sentence]) => ({ id, sentence }));
  const groups =
    groupFiles.length === 0
      ? []
      : ['## Process groups', '', ...worldsOf(groupFiles), '', ...renderTable(groupFiles, groupCases, notes), ''];
  const ginFiles = of('gin');
  const gins =
    ginFiles.length === 0
      ? []
      : ['## GIN contexts', '', ...worldsOf(ginFiles), '', ...renderTable(ginFiles, ginCases, notes), ''];
  return [
    '# Transports and stores',
    '',
    'What each of them does, from the committed outcomes of the conformance suites (`*.expected.json` beside the tests of each package).',
    'A case that changes its column, in either direction, fails CI. yes: passes. –: does not apply, because the transport does not offer',
    'what the case needs. no: a known deviation, with its reason at the end.',
    '',
    '## Transports',
    '',
    ...matrix,
    '',
    ...transports,
    '',
    '## Stores',
    '',
    ...stores,
    '',
    ...groups,
    ...gins,
    ...(notes.length === 0 ? ['No deviations.'] : notes.map((note, i) => `[${i + 1}] ${note}`)),
    '',
  ].join('\n');
}
