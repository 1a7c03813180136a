import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { Progress } from '../console.mjs';
import { failedTests, secondTries } from './failures.mjs';
import { leftOut, runSteps, selectSteps } from './runner.mjs';
import { formatTotals, junitTotals, plainTotals, stepTotals, vitestTotals } from './totals.mjs';

/** @type {string} */
let dir;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'ep-totals-'));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

/** @param {{ passed?: number, failed?: number, pending?: number, todo?: number, files?: unknown[] }} counts */
const vitestReport = ({ passed = 0, failed = 0, pending = 0, todo = 0, files = [] }) =>
  JSON.stringify({
    numPassedTests: passed,
    numFailedTests: failed,
    numPendingTests: pending,
    numTodoTests: todo,
    testResults: files,
  });

describe('readers', () => {
  test('vitest: passed, failed, and skipped with todo', () => {
    const text = vitestReport({ passed: 7, failed: 2, pending: 1, todo: 3, files: [] });
    expect(vitestTotals(text)).toEqual({ passed: 7, failed: 2, skipped: 4 });
  });

  test('vitest: a file that failed before its first test is a failure', () => {
    const files = [
      { status: 'failed', assertionResults: [] },
      { status: 'failed', assertionResults: [{ status: 'failed' }] },
      { status: 'passed', assertionResults: [{ status: 'passed' }] },
    ];
    expect(vitestTotals(vitestReport({ passed: 1, failed: 1, files })).failed).toBe(2);
  });

  test('ctest', () => {
    const text = `<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="Linux-g++"
	tests="9"
	failures="2"
	disabled="1"
	skipped="3"
	hostname=""
>
	<testcase name="a"/>
</testsuite>`;
    expect(junitTotals(text)).toEqual({ passed: 3, failed: 2, skipped: 4 });
  });

  test.each([
    ['vitest', () => vitestTotals('{"numPassedTests": 1, "testResults": []}')],
    ['vitest', () => vitestTotals('{"numPas')],
    ['junit', () => junitTotals('<testsuites/>')],
    ['junit', () => junitTotals('<testsuite tests="1" failures="2" disabled="0" skipped="0">')],
    ['plain', () => plainTotals('{"passed": -1, "failed": 0, "skipped": 0}')],
  ])('%s: a report that makes no sense is refused', (_, read) => {
    expect(read).toThrow();
  });
});

describe('failedTests', () => {
  test('vitest: names and messages, of files that broke before their first test as well', () => {
    const files = [
      { name: 'broken.test.ts', status: 'failed', message: 'no such module\n  at x', assertionResults: [] },
      {
        name: 'a.test.ts',
        status: 'failed',
        assertionResults: [
          { status: 'passed', fullName: ' adds' },
          { status: 'failed', fullName: ' idle costs nothing', failureMessages: ['Error: 21 of 20 ms\n    at body'] },
        ],
      },
    ];
    writeFileSync(join(dir, 'report.json'), vitestReport({ passed: 1, failed: 1, files }));
    expect(failedTests({ format: 'vitest', files: [join(dir, 'report.json'), join(dir, 'missing.json')] })).toEqual([
      'broken.test.ts: no such module | at x',
      'idle costs nothing: Error: 21 of 20 ms | at body',
    ]);
  });

  test('ctest: the lines that say what failed', () => {
    const text = `<testsuite tests="2" failures="1" disabled="0" skipped="0">
	<testcase name="good_test" classname="good_test" time="1" status="run"><system-out>2 passed, 0 failed</system-out></testcase>
	<testcase name="bad_test" classname="bad_test" time="1" status="fail">
		<failure message=""/>
		<system-out>began
bad_test.cpp:58: failed: naps &lt; 500
ended</system-out>
	</testcase>
</testsuite>`;
    writeFileSync(join(dir, 'report.xml'), text);
    expect(failedTests({ format: 'junit', files: [join(dir, 'report.xml')] })).toEqual([
      'bad_test: bad_test.cpp:58: failed: naps &lt; 500',
    ]);
  });

  test('a report that makes no sense names nothing', () => {
    writeFileSync(join(dir, 'report.json'), '{');
    expect(failedTests({ format: 'vitest', files: [join(dir, 'report.json')] })).toEqual([]);
  });
});

describe('secondTries', () => {
  test('vitest: tests that passed and keep what an earlier try said', () => {
    const files = [
      {
        name: 'a.test.ts',
        status: 'failed',
        assertionResults: [
          { status: 'passed', fullName: ' adds', failureMessages: [] },
          { status: 'passed', fullName: ' names who is late', failureMessages: ['Error: nobody\n    at body'] },
          { status: 'failed', fullName: ' idle costs nothing', failureMessages: ['Error: 21 of 20 ms', 'Error: 22'] },
        ],
      },
    ];
    writeFileSync(join(dir, 'report.json'), vitestReport({ passed: 2, failed: 1, files }));
    expect(secondTries({ format: 'vitest', files: [join(dir, 'report.json'), join(dir, 'missing.json')] }, '')).toEqual(
      ['names who is late: Error: nobody | at body'],
    );
  });

  test('ctest: those that passed after they had failed', () => {
    const output = `    Start 1: good_test
1/3 Test #1: good_test ........................   Passed    0.06 sec
    Start 2: late_test
2/3 Test #2: late_test ........................***Failed    0.01 sec

    Start 2: late_test
    Test #2: late_test ........................   Passed    0.01 sec
    Start 3: bad_test
3/3 Test #3: bad_test .........................***Timeout   9.01 sec

    Start 3: bad_test
    Test #3: bad_test .........................***Failed    0.02 sec`;
    expect(secondTries({ format: 'junit', files: [] }, output)).toEqual(['late_test: Failed']);
  });
});

describe('stepTotals', () => {
  const report = () => ({ format: /** @type {const} */ ('vitest'), files: [join(dir, 'report.json')] });
  /** @param {string} text */
  const write = (text) => writeFileSync(join(dir, 'report.json'), text);

  test('no report file: one failure', () => {
    expect(stepTotals(report(), true)).toMatchObject({ passed: 0, failed: 1 });
  });

  test('no test ran: one failure', () => {
    write(vitestReport({ pending: 4 }));
    expect(stepTotals(report(), true)).toMatchObject({ failed: 1, skipped: 4, problem: 'no test ran' });
  });

  test('the runner crashed after all tests had passed: one failure', () => {
    write(vitestReport({ passed: 4 }));
    expect(stepTotals(report(), false)).toMatchObject({ passed: 4, failed: 1 });
  });

  test('failed tests are not counted twice when the runner also fails', () => {
    write(vitestReport({ passed: 4, failed: 2 }));
    expect(stepTotals(report(), false)).toEqual({ passed: 4, failed: 2, skipped: 0 });
  });

  test('several reports add up', () => {
    write(vitestReport({ passed: 4 }));
    writeFileSync(join(dir, 'second.json'), vitestReport({ passed: 1, pending: 1 }));
    const files = [join(dir, 'report.json'), join(dir, 'second.json')];
    expect(stepTotals({ format: 'vitest', files }, true)).toEqual({ passed: 5, failed: 0, skipped: 1 });
  });
});

test('the last line names skips only when there are some', () => {
  expect(formatTotals({ passed: 3, failed: 0, skipped: 0 })).toBe('3 passed, 0 failed');
  expect(formatTotals({ passed: 3, failed: 1, skipped: 2 })).toBe('3 passed, 1 failed, 2 skipped');
});

describe('runSteps', () => {
  /** @type {string[]} */
  const printed = [];
  const quiet = () => new Progress({ write: (text) => printed.push(text) });
  /** @type {Omit<import('./steps.mjs').Step, 'name' | 'command'>} */
  const base = { lanes: ['default'], minutes: 1 };

  test('a step whose preparation failed counts as failed and does not run', async () => {
    const results = await runSteps(
      [
        { ...base, name: 'prepare', command: ['false'], counts: false },
        { ...base, name: 'dependent', command: ['true'], needs: 'prepare' },
        { ...base, name: 'other', command: ['true'] },
      ],
      quiet(),
    );
    expect(results.map(({ name, ok, passed, failed }) => ({ name, ok, passed, failed }))).toEqual([
      { name: 'prepare', ok: false, passed: 0, failed: 1 },
      { name: 'dependent', ok: false, passed: 0, failed: 1 },
      { name: 'other', ok: true, passed: 1, failed: 0 },
    ]);
  });

  test('a report of an earlier run is not read again', async () => {
    const file = join(dir, 'stale.json');
    writeFileSync(file, '{"passed": 5, "failed": 0, "skipped": 0}');
    const [result] = await runSteps(
      [{ ...base, name: 'stale', command: ['true'], report: { format: 'plain', files: [file] } }],
      quiet(),
    );
    expect(result).toMatchObject({ ok: false, passed: 0, failed: 1 });
  });

  test('a step that exceeds its limit is ended and failed', async () => {
    const [result] = await runSteps([{ ...base, name: 'slow', minutes: 0.005, command: ['sleep', '60'] }], quiet());
    expect(result).toMatchObject({ ok: false, failed: 1, problem: 'ended after its limit of 0.005 min' });
  });

  test('--only keeps what a named step needs, through all levels', () => {
    const steps = [
      { ...base, name: 'configure', command: ['true'] },
      { ...base, name: 'build', command: ['true'], needs: 'configure' },
      { ...base, name: 'ctest', command: ['true'], needs: 'build' },
      { ...base, name: 'other', command: ['true'] },
    ];
    expect(selectSteps(steps, 'ctest').map((step) => step.name)).toEqual(['configure', 'build', 'ctest']);
    expect(() => selectSteps(steps, 'nothing like it')).toThrow('no step');
  });

  test('what would not end in time is left out with all that it prepares, by name, and counts as skipped', async () => {
    const steps = [
      { ...base, name: 'first', command: ['true'] },
      { ...base, name: 'build', usual: 6, command: ['false'], counts: false },
      { ...base, name: 'ctest', usual: 8, command: ['false'], needs: 'build' },
      { ...base, name: 'last', command: ['true'] },
    ];
    const results = await runSteps(steps, quiet(), Date.now() + 10 * 60_000);
    expect(results.map(({ name, ok, passed, skipped }) => ({ name, ok, passed, skipped }))).toEqual([
      { name: 'first', ok: true, passed: 1, skipped: 0 },
      { name: 'build', ok: true, passed: 0, skipped: 1 },
      { name: 'ctest', ok: true, passed: 0, skipped: 1 },
      { name: 'last', ok: true, passed: 1, skipped: 0 },
    ]);
    expect(results[1]?.leftOut).toMatch(/^14 min.* are expected, (10|9) min/);
    expect(results[2]?.leftOut).toBe('so was build');
  });

  test('a machine on which steps take twice as long is given less to do', () => {
    const steps = [
      { ...base, name: 'first', usual: 4, command: ['true'] },
      { ...base, name: 'second', usual: 5, command: ['true'] },
    ];
    const first = { name: 'first', ok: true, passed: 1, failed: 0, skipped: 0 };
    const [, second] = steps;
    const left = (/** @type {number} */ minutes) =>
      leftOut(
        /** @type {NonNullable<typeof second>} */ (second),
        steps,
        [{ ...first, ms: minutes * 60_000 }],
        9 * 60_000,
      );
    expect([left(2), left(4)]).toEqual([undefined, undefined]);
    expect(left(8)).toMatch(/^10 min/);
  });

  /** @type {(result: import('./runner.mjs').StepResult) => object} */
  const short = ({ name, ok, passed, failed, skipped }) => ({ name, ok, passed, failed, skipped });

  test('a step beside the others runs while they do, on what they leave; its result has its place', async () => {
    const mark = join(dir, 'mark');
    // Niceness and scheduling policy, of which 5 is SCHED_IDLE.
    const idle = `awk '$19 == 19 || $41 == 5 { idle = 1 } END { exit !idle }' /proc/$$/stat`;
    const results = await runSteps(
      [
        { ...base, name: 'beside', command: ['sh', '-c', `${idle} && touch ${mark}`], beside: true },
        { ...base, name: 'first', command: ['sh', '-c', `until test -e ${mark}; do sleep 0.01; done`] },
      ],
      quiet(),
    );
    const passed = { ok: true, passed: 1, failed: 0, skipped: 0 };
    expect(results.map(short)).toEqual([
      { name: 'beside', ...passed },
      { name: 'first', ...passed },
    ]);
  });

  test('whoever needs a step beside the others waits for it, and fails with it; it waits for what it needs itself', async () => {
    const steps = (/** @type {string} */ build) => [
      { ...base, name: 'first', command: ['touch', join(dir, 'first')], counts: false },
      {
        ...base,
        name: 'build',
        command: ['sh', '-c', `test -e ${join(dir, 'first')} && sleep 0.2 && ${build}`],
        counts: false,
        needs: 'first',
        beside: true,
      },
      { ...base, name: 'ctest', command: ['test', '-e', join(dir, 'built')], needs: 'build' },
    ];
    const passed = await runSteps(steps(`touch ${join(dir, 'built')}`), quiet());
    expect(passed.map(({ ok }) => ok)).toEqual([true, true, true]);
    const failed = await runSteps(steps('false'), quiet());
    expect(failed.map(({ ok }) => ok)).toEqual([true, false, false]);
    expect(failed[2]?.problem).toBe('not run: build failed');
  });

  test('a step beside the others that has not ended in time for what needs it is ended, and both are left out', async () => {
    const steps = [
      { ...base, name: 'build', command: ['sleep', '60'], counts: false, beside: true },
      { ...base, name: 'ctest', usual: 0.01, command: ['true'], needs: 'build' },
    ];
    const results = await runSteps(steps, quiet(), Date.now() + 1500);
    expect(results.map(short)).toEqual([
      { name: 'build', ok: true, passed: 0, failed: 0, skipped: 1 },
      { name: 'ctest', ok: true, passed: 0, failed: 0, skipped: 1 },
    ]);
    expect(results[0]?.leftOut).toMatch(/^it had not ended after (0\.[89]|1\.[0-4])/);
    expect(results[1]?.leftOut).toBe('so was build');
  });
});
