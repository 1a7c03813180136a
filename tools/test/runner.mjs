// Runs test steps one after the other, some of them in a second line beside the first, and keeps what came of each.
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

/** What gives a command the cores only while nobody else wants them. @type {Promise<readonly string[]> | undefined} */
let found;
const idly = () => {
  found ??= findIdly();
  return found;
};
const findIdly = async () => {
  const idle = ['chrt', '--idle', '0'];
  const { code } = await run('chrt', [...idle.slice(1), 'true']);
  return code === 0 ? idle : ['nice', '-n', '19'];
};

/**
 * @param {Step} step
 * @param {(detail: string) => void} report
 * @param {number} [limitMs]
 * @returns {Promise<StepResult & { output: string }>}
 */
export async function runStep(step, report, limitMs = step.minutes * 60_000) {
  // A report left by an earlier run must not be read as this one's.
  for (const file of step.report?.files ?? []) rmSync(file, { force: true });
  const before = step.beside ? await idly() : [];
  const [command = '', ...args] = [...before, ...step.command];
  const result = await run(command, args, {
    cwd: step.cwd ?? root,
    env: toolEnvironment({ ...step.env, CI: '1', NO_COLOR: '1' }),
    limitMs,
    log: logPath(step.name),
    onLine: report,
  });
  const ended = result.code === 0 && !result.timedOut;
  const totals = stepTotals(step.report, ended);
  const counted = step.counts === false ? { ...totals, passed: 0 } : totals;
  const problem = result.timedOut
    ? `ended after its limit of ${limitMs / 60_000} min`
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
 * Of what a step prepares, the longest.
 * @param {Step} step
 * @param {readonly Step[]} steps
 * @returns {number}
 */
const behindMs = (step, steps) =>
  Math.max(0, ...steps.filter(({ needs }) => needs === step.name).map((one) => usualMs(one) + behindMs(one, steps)));

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
  // Of those that are known to take minutes, and had the cores.
  const timed = steps.flatMap((one) => {
    const result = earlier.find(({ name, leftOut: why }) => name === one.name && why === undefined);
    if (result === undefined || one.usual === undefined || one.beside) return [];
    return [{ ms: result.ms, usualMs: usualMs(one) }];
  });
  const pace = timed.reduce((sum, { ms }) => sum + ms, 0) / timed.reduce((sum, one) => sum + one.usualMs, 0);
  const ms = (usualMs(step) + behindMs(step, steps)) * Math.max(1, pace || 0);
  if (ms <= leftMs) return undefined;
  return `${formatTime(ms)} are expected, ${formatTime(Math.max(0, leftMs))} are left`;
}

/** One run of a lane: what has come of its steps, by both lines. */
class Lines {
  /** @type {Map<string, StepResult>} */
  #results = new Map();
  /** @type {Map<string, () => void>} who waits for a step */
  #waiting = new Map();

  /** @param {readonly Step[]} steps @param {Progress} progress @param {number} until ms since 1970 */
  constructor(steps, progress, until) {
    this.steps = steps;
    this.progress = progress;
    this.until = until;
  }

  /** In the table's order. */
  get results() {
    return this.steps.flatMap(({ name }) => this.#results.get(name) ?? []);
  }

  /** @param {StepResult} result */
  #add(result) {
    this.#results.set(result.name, result);
    this.#waiting.get(result.name)?.();
  }

  /** @param {Step} step @param {string} why */
  #leaveOut({ name }, why) {
    this.progress.line(`LEFT OUT ${name}: ${why}`);
    this.#add({ name, ok: true, ms: 0, passed: 0, failed: 0, skipped: 1, leftOut: why });
  }

  /** True: what the step needs has not passed, and it does not run. @param {Step} step */
  #lacks({ name, needs }) {
    if (needs === undefined || this.#results.get(needs)?.ok === true) return false;
    const problem = `not run: ${needs} failed`;
    this.progress.line(`FAIL  ${name}: ${problem}`);
    this.#add({ name, ok: false, ms: 0, passed: 0, failed: 1, skipped: 0, problem });
    return true;
  }

  /** @param {StepResult & { output: string }} result @param {Step} step */
  #end({ output, ...result }, step) {
    this.#add(result);
    if (result.ok) return step.counts === false ? '' : formatTotals(result);
    this.progress.line(output.trimEnd().slice(-16_000));
    throw new ToolError(`${step.name}: ${result.problem ?? formatTotals(result)}`);
  }

  /** @param {string} name */
  async #ended(name) {
    if (this.#results.has(name)) return;
    await this.progress.step(
      `wait for ${name}`,
      () => new Promise((resolve) => this.#waiting.set(name, () => resolve(undefined))),
    );
  }

  /** @param {string} name @param {() => Promise<void>} body */
  async #told(name, body) {
    await body().catch((error) => {
      if (!(error instanceof ToolError)) throw error;
      this.progress.line(`      ${error.message} (log: ${relative(root, logPath(name))})`);
    });
  }

  async first() {
    for (const step of this.steps.filter((one) => !one.beside)) {
      if (this.steps.some(({ name, beside }) => beside && name === step.needs)) await this.#ended(step.needs ?? '');
      const why = leftOut(step, this.steps, this.results, this.until - Date.now());
      if (why !== undefined) this.#leaveOut(step, why);
      else if (!this.#lacks(step)) {
        await this.#told(step.name, () =>
          this.progress.step(step.name, async (report) => this.#end(await runStep(step, report), step)).then(() => {}),
        );
      }
    }
    for (const { name } of this.steps.filter((one) => one.beside)) await this.#ended(name);
  }

  /** Those that run beside the others. */
  async second() {
    for (const step of this.steps.filter((one) => one.beside)) {
      const needed = this.steps.find(({ name }) => name === step.needs);
      // The first line runs it.
      if (needed !== undefined && !needed.beside && !this.#results.has(needed.name)) {
        await new Promise((resolve) => this.#waiting.set(needed.name, () => resolve(undefined)));
      }
      if (needed !== undefined && this.#results.get(needed.name)?.leftOut !== undefined) {
        this.#leaveOut(step, `so was ${needed.name}`);
      } else if (!this.#lacks(step)) await this.#told(step.name, () => this.#beside(step));
    }
  }

  /** @param {Step} step */
  async #beside(step) {
    // HAZARD: how long it takes depends on what the others leave of the cores, so it begins anyway, and ends where what needs it would come too late.
    const leftMs = this.until - Date.now() - behindMs(step, this.steps);
    const limitMs = step.minutes * 60_000;
    if (leftMs <= 0) return this.#leaveOut(step, 'no time is left');
    const result = await runStep(step, () => {}, Math.min(limitMs, leftMs));
    if (!result.ok && leftMs < limitMs && result.ms >= leftMs) {
      return this.#leaveOut(step, `it had not ended after ${formatTime(result.ms)}, and no time is left`);
    }
    const { ok, ms } = result;
    this.progress.line(`${ok ? 'ok  ' : 'FAIL'}  ${step.name} (beside the others, ${formatTime(ms)})`);
    this.#end(result, step);
  }
}

/**
 * @param {readonly Step[]} steps
 * @param {Progress} progress
 * @param {number} [until] ms since 1970
 * @returns {Promise<StepResult[]>} in the order of `steps`
 */
export async function runSteps(steps, progress, until = Number.POSITIVE_INFINITY) {
  const lines = new Lines(steps, progress, until);
  await Promise.all([lines.first(), lines.second()]);
  return lines.results;
}
