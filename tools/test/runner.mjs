// Runs test steps one after the other and keeps what came of each.
import { rmSync } from 'node:fs';
import { join, relative } from 'node:path';
import { formatTime, ToolError } from '../console.mjs';
import { run } from '../process.mjs';
import { resultsDir, root, toolEnvironment } from '../workspace.mjs';
import { failedTests, secondTries } from './failures.mjs';
import { formatTotals, stepTotals } from './totals.mjs';

/**
 * @typedef {import('../console.mjs').Progress} Progress
 * @typedef {import('./steps.mjs').Step} Step
 * @typedef {import('./totals.mjs').Totals} Totals
 * @typedef {Totals & { name: string, ok: boolean, ms: number, problem?: string, leftOut?: string, failures?: string[],
 *   secondTries?: string[] }} StepResult
 */

/**
 * The steps to run for --only: those named and those they need, in the table's order.
 * @param {readonly Step[]} steps
 * @param {string | undefined} only
 */
export function selectSteps(steps, only) {
  if (only === undefined) return steps;
  const names = new Set(steps.filter((step) => step.name.includes(only)).map((step) => step.name));
  for (const step of [...steps].reverse()) {
    if (names.has(step.name) && step.needs !== undefined) names.add(step.needs);
  }
  if (names.size === 0) throw new ToolError(`no step's name contains ${JSON.stringify(only)}; --list names them`);
  return steps.filter((step) => names.has(step.name));
}

/** @param {string} name */
const logPath = (name) => join(resultsDir, `${name.replace(/[^a-z0-9]+/gi, '-')}.log`);

/**
 * @param {Step} step
 * @param {(detail: string) => void} report
 * @returns {Promise<StepResult & { output: string }>}
 */
export async function runStep(step, report) {
  // A report left by an earlier run must not be read as this one's.
  for (const file of step.report?.files ?? []) rmSync(file, { force: true });
  const [command = '', ...args] = step.command;
  const result = await run(command, args, {
    cwd: step.cwd ?? root,
    env: toolEnvironment({ ...step.env, CI: '1', NO_COLOR: '1' }),
    limitMs: step.minutes * 60_000,
    log: logPath(step.name),
    onLine: report,
  });
  const ended = result.code === 0 && !result.timedOut;
  const totals = stepTotals(step.report, ended);
  const counted = step.counts === false ? { ...totals, passed: 0 } : totals;
  const problem = result.timedOut
    ? `ended after its limit of ${step.minutes} min`
    : ended
      ? totals.problem
      : (totals.problem ?? `status ${result.code}`);
  const ok = ended && totals.failed === 0;
  const again = secondTries(step.report, result.output);
  return {
    name: step.name,
    ok,
    ms: Math.round(result.ms),
    ...counted,
    ...(problem ? { problem } : {}),
    ...(ok ? {} : { failures: failedTests(step.report) }),
    ...(again.length === 0 ? {} : { secondTries: again }),
    output: result.output,
  };
}

/** @param {Step} step */
const usualMs = (step) => (step.usual ?? 1) * 60_000;

/**
 * A step and those that it prepares, of which the longest.
 * @param {Step} step
 * @param {readonly Step[]} steps
 * @returns {number}
 */
const wholeMs = (step, steps) =>
  usualMs(step) + Math.max(0, ...steps.filter(({ needs }) => needs === step.name).map((one) => wholeMs(one, steps)));

/**
 * Why a step is not begun now, if it is not: CI ends a run that lasts too long as if nothing of it had passed.
 * @param {Step} step
 * @param {readonly Step[]} steps of the lane
 * @param {readonly StepResult[]} earlier how much slower than usual they were, the others will be
 * @param {number} leftMs
 * @returns {string | undefined}
 */
export function leftOut(step, steps, earlier, leftMs) {
  if (earlier.some(({ name, leftOut: why }) => name === step.needs && why !== undefined)) return `so was ${step.needs}`;
  // Of those that are known to take minutes.
  const timed = steps.flatMap((one) => {
    const result = earlier.find(({ name, leftOut: why }) => name === one.name && why === undefined);
    return result === undefined || one.usual === undefined ? [] : [{ ms: result.ms, usualMs: usualMs(one) }];
  });
  const pace = timed.reduce((sum, { ms }) => sum + ms, 0) / timed.reduce((sum, one) => sum + one.usualMs, 0);
  const ms = wholeMs(step, steps) * Math.max(1, pace || 0);
  if (ms <= leftMs) return undefined;
  return `${formatTime(ms)} are expected, ${formatTime(Math.max(0, leftMs))} are left`;
}

/**
 * @param {readonly Step[]} steps
 * @param {Progress} progress
 * @param {number} [until] ms since 1970
 * @returns {Promise<StepResult[]>}
 */
export async function runSteps(steps, progress, until = Number.POSITIVE_INFINITY) {
  /** @type {StepResult[]} */
  const results = [];
  for (const step of steps) {
    const why = leftOut(step, steps, results, until - Date.now());
    if (why !== undefined) {
      progress.line(`LEFT OUT ${step.name}: ${why}`);
      results.push({ name: step.name, ok: true, ms: 0, passed: 0, failed: 0, skipped: 1, leftOut: why });
      continue;
    }
    if (step.needs !== undefined && !results.some((earlier) => earlier.name === step.needs && earlier.ok)) {
      const problem = `not run: ${step.needs} failed`;
      progress.line(`FAIL  ${step.name}: ${problem}`);
      results.push({ name: step.name, ok: false, ms: 0, passed: 0, failed: 1, skipped: 0, problem });
      continue;
    }
    await progress
      .step(step.name, async (report) => {
        const { output, ...result } = await runStep(step, report);
        results.push(result);
        if (result.ok) return step.counts === false ? '' : formatTotals(result);
        progress.line(output.trimEnd().slice(-16_000));
        throw new ToolError(`${step.name}: ${result.problem ?? formatTotals(result)}`);
      })
      .catch((error) => {
        if (!(error instanceof ToolError)) throw error;
        progress.line(`      ${error.message} (log: ${relative(root, logPath(step.name))})`);
      });
  }
  return results;
}
