// How many tests a step ran, read from what its runner wrote. A report that is missing or makes no sense is a failure,
// never zero failures: a runner that crashed before its first test must not look green.
import { existsSync, readFileSync } from 'node:fs';

/** @typedef {{ passed: number, failed: number, skipped: number }} Totals */

/**
 * @param {readonly Totals[]} all
 * @returns {Totals}
 */
export const sum = (all) =>
  all.reduce(
    (left, right) => ({
      passed: left.passed + right.passed,
      failed: left.failed + right.failed,
      skipped: left.skipped + right.skipped,
    }),
    { passed: 0, failed: 0, skipped: 0 },
  );

/** @param {Totals} totals */
export const formatTotals = ({ passed, failed, skipped }) =>
  `${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`;

/**
 * @param {unknown} value
 * @param {string} what
 * @returns {number}
 */
function count(value, what) {
  const number = typeof value === 'string' && value !== '' ? Number(value) : value;
  if (typeof number !== 'number' || !Number.isSafeInteger(number) || number < 0) {
    throw new Error(`test report: ${what} should be a count, found ${JSON.stringify(value)}`);
  }
  return number;
}

/**
 * Vitest's JSON report. Files that failed outside a test (an import error, a failing hook) are failures too.
 * @param {string} text
 * @returns {Totals}
 */
export function vitestTotals(text) {
  const report = JSON.parse(text);
  /** @type {readonly { status: string, assertionResults: readonly { status: string }[] }[]} */
  const files = report.testResults;
  const brokenFiles = files.filter(
    (file) => file.status === 'failed' && !file.assertionResults.some((test) => test.status === 'failed'),
  ).length;
  return {
    passed: count(report.numPassedTests, 'numPassedTests'),
    failed: count(report.numFailedTests, 'numFailedTests') + brokenFiles,
    skipped: count(report.numPendingTests, 'numPendingTests') + count(report.numTodoTests, 'numTodoTests'),
  };
}

/**
 * CTest's JUnit report.
 * @param {string} text
 * @returns {Totals}
 */
export function junitTotals(text) {
  const suite = /<testsuite\b[^>]*>/.exec(text)?.[0];
  if (suite === undefined) throw new Error('test report: expected a <testsuite>, found none');
  const attribute = (/** @type {string} */ name) => count(new RegExp(`\\b${name}="(\\d+)"`).exec(suite)?.[1], name);
  const failed = attribute('failures');
  const skipped = attribute('skipped') + attribute('disabled');
  return { passed: count(attribute('tests') - failed - skipped, 'tests - failures - skipped'), failed, skipped };
}

/**
 * The report of our own tools: the totals themselves.
 * @param {string} text
 * @returns {Totals}
 */
export function plainTotals(text) {
  const report = JSON.parse(text);
  return {
    passed: count(report.passed, 'passed'),
    failed: count(report.failed, 'failed'),
    skipped: count(report.skipped, 'skipped'),
  };
}

const readers = { vitest: vitestTotals, junit: junitTotals, plain: plainTotals };

/**
 * @param {{ format: keyof typeof readers, files: readonly string[] } | undefined} report undefined: the step is one test
 * @param {boolean} ended whether the command itself ended with status 0, in time
 * @returns {Totals & { problem?: string }}
 */
export function stepTotals(report, ended) {
  if (report === undefined) return { passed: ended ? 1 : 0, failed: ended ? 0 : 1, skipped: 0 };
  try {
    const missing = report.files.find((file) => !existsSync(file));
    if (missing !== undefined) throw new Error(`test report: the runner wrote no ${missing}`);
    const totals = sum(report.files.map((file) => readers[report.format](readFileSync(file, 'utf8'))));
    if (totals.passed + totals.failed === 0) return { ...totals, failed: 1, problem: 'no test ran' };
    if (!ended && totals.failed === 0) {
      return { ...totals, failed: 1, problem: 'the runner failed although no test did' };
    }
    return totals;
  } catch (error) {
    return { passed: 0, failed: 1, skipped: 0, problem: error instanceof Error ? error.message : String(error) };
  }
}
