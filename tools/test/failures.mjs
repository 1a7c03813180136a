// Which tests of a step failed, and which passed at their second try only, and how, a line each: whoever sees only the
// end of a long run reads them there.
import { existsSync, readFileSync } from 'node:fs';

/** Of a message, as much as a line holds. @param {string | undefined} text */
const firstLines = (text) =>
  (text ?? '')
    .split('\n')
    .map((line) => line.trim())
    .filter((line) => line !== '')
    .slice(0, 3)
    .join(' | ')
    .slice(0, 400);

/** @param {string} text Vitest's JSON report @returns {string[]} */
function failedOfVitest(text) {
  /** @type {{ testResults: readonly { name?: string, status: string, message?: string, assertionResults: readonly { status: string, fullName?: string, failureMessages?: readonly string[] }[] }[] }} */
  const report = JSON.parse(text);
  return report.testResults.flatMap((file) => {
    const failed = file.assertionResults.filter((test) => test.status === 'failed');
    if (failed.length === 0) return file.status === 'failed' ? [`${file.name}: ${firstLines(file.message)}`] : [];
    return failed.map((test) => `${test.fullName?.trim()}: ${firstLines(test.failureMessages?.[0])}`);
  });
}

/** @param {string} text CTest's JUnit report @returns {string[]} */
function failedOfJunit(text) {
  const cases = text.matchAll(/<testcase name="([^"]*)"[^>]*?status="fail"[^>]*>([\s\S]*?)<\/testcase>/g);
  return [...cases].map(([, name, body]) => {
    const output = /<system-out>([\s\S]*?)<\/system-out>/.exec(body ?? '')?.[1] ?? '';
    const said = output.split('\n').filter((line) => /failed|ERROR|SUMMARY|runtime error/.test(line));
    return `${name}: ${firstLines(said.join('\n'))}`;
  });
}

/**
 * @param {import('./steps.mjs').Step['report']} report
 * @returns {string[]} empty where the step's runner keeps no names, or wrote nothing that can be read
 */
export function failedTests(report) {
  if (report === undefined || report.format === 'plain') return [];
  const read = report.format === 'vitest' ? failedOfVitest : failedOfJunit;
  return report.files.filter(existsSync).flatMap((file) => {
    try {
      return read(readFileSync(file, 'utf8'));
    } catch {
      return []; // the step's problem says that its report makes no sense
    }
  });
}

/** @param {string} text Vitest's JSON report: a test that passed keeps what its earlier tries said @returns {string[]} */
function secondOfVitest(text) {
  /** @type {{ testResults: readonly { assertionResults: readonly { status: string, fullName?: string, failureMessages?: readonly string[] }[] }[] }} */
  const report = JSON.parse(text);
  return report.testResults
    .flatMap((file) => file.assertionResults)
    .filter((test) => test.status === 'passed' && (test.failureMessages?.length ?? 0) > 0)
    .map((test) => `${test.fullName?.trim()}: ${firstLines(test.failureMessages?.[0])}`);
}

/** @param {string} output what CTest printed: its report keeps the last try of a test only @returns {string[]} */
function secondOfCtest(output) {
  const tries = [...output.matchAll(/^ *(?:\d+\/\d+)? *Test +#\d+: (\S+) [ .]*(?:(Passed)|\*\*\*(\S+))/gm)];
  const passed = new Set(tries.filter(([, , ended]) => ended !== undefined).map(([, name]) => name));
  return tries
    .filter(([, name, , how]) => how !== undefined && passed.has(name))
    .map(([, name, , how]) => `${name}: ${how}`);
}

/**
 * The tests that failed at first and passed when they were tried again. They count as passed; their names are printed,
 * for each of them is a defect, of the test or of what it tests, that nobody has found yet.
 * @param {import('./steps.mjs').Step['report']} report
 * @param {string} output what the step printed
 * @returns {string[]}
 */
export function secondTries(report, output) {
  if (report === undefined || report.format === 'plain') return [];
  if (report.format === 'junit') return secondOfCtest(output);
  return report.files.filter(existsSync).flatMap((file) => {
    try {
      return secondOfVitest(readFileSync(file, 'utf8'));
    } catch {
      return []; // the step's problem says that its report makes no sense
    }
  });
}
