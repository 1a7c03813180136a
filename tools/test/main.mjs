// node tools/test/main.mjs default|ci|full [--only TEXT] [--until TIME] [--list]: runs the lane's steps in order, each with its time
// limit, and ends with one line that adds up all tests. Logs and results are written to .cache/test-results/.
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { formatTime, Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals } from '../process.mjs';
import { resultsDir } from '../workspace.mjs';
import { runSteps, selectSteps } from './runner.mjs';
import { lanes, stepsOf } from './steps.mjs';
import { formatTotals, sum } from './totals.mjs';

/**
 * @typedef {import('./steps.mjs').Lane} Lane
 * @typedef {import('./runner.mjs').StepResult} StepResult
 */

/** Of one step: what CI keeps of a run is its end. */
const shownFailures = 12;

const usage = `usage: node tools/test/main.mjs ${lanes.join('|')} [--only TEXT] [--until TIME] [--list]

--only TEXT   only the steps whose name contains TEXT (steps that prepare them run as well)
--until TIME  steps that do not usually end before TIME (seconds since 1970) are left out, by name, and counted as skipped
--list        names the steps and ends`;

/**
 * @param {readonly string[]} args
 * @returns {{ lane: Lane, only: string | undefined, until: number | undefined, list: boolean }}
 */
function parseArguments(args) {
  const rest = [...args];
  const lane = lanes.find((name) => name === rest[0]);
  if (lane === undefined) throw new ToolError(`expected a lane, found ${JSON.stringify(rest[0] ?? '')}\n${usage}`);
  rest.shift();
  let only;
  let until;
  let list = false;
  for (let flag = rest.shift(); flag !== undefined; flag = rest.shift()) {
    if (flag === '--list') list = true;
    else if (flag === '--only' && rest[0] !== undefined) only = rest.shift();
    else if (flag === '--until' && /^\d+$/.test(rest[0] ?? '')) until = Number(rest.shift()) * 1000;
    else throw new ToolError(`test does not know ${JSON.stringify(flag)}\n${usage}`);
  }
  return { lane, only, until, list };
}

/**
 * @param {Lane} lane
 * @param {readonly StepResult[]} results
 * @param {Progress} progress
 * @returns {number} exit status
 */
function summarise(lane, results, progress) {
  const totals = sum(results);
  mkdirSync(resultsDir, { recursive: true });
  writeFileSync(join(resultsDir, `${lane}.json`), `${JSON.stringify({ lane, totals, steps: results }, null, 2)}\n`);
  progress.line('');
  for (const result of results) {
    if (result.leftOut !== undefined) {
      progress.line(`LEFT OUT            ${result.name}: ${result.leftOut}`);
      continue;
    }
    progress.line(
      `${result.ok ? 'ok  ' : 'FAIL'}  ${formatTime(result.ms).padStart(12)}  ${result.name}: ${formatTotals(result)}`,
    );
    for (const test of result.secondTries ?? []) progress.line(`      passed at its second try: ${test}`);
    if (result.ok) continue;
    if (result.problem !== undefined) progress.line(`      ${result.problem}`);
    const failures = result.failures ?? [];
    for (const failure of failures.slice(0, shownFailures)) progress.line(`      ${failure}`);
    if (failures.length > shownFailures) progress.line(`      and ${failures.length - shownFailures} more`);
  }
  progress.line('');
  // The last line is a contract: CI and people read the totals from it.
  progress.line(formatTotals(totals));
  return totals.failed === 0 && totals.passed > 0 && results.every((result) => result.ok) ? 0 : 1;
}

await runMain(async () => {
  const { lane, only, until, list } = parseArguments(process.argv.slice(2));
  const steps = selectSteps(stepsOf(lane), only);
  const progress = new Progress();
  if (list) {
    for (const step of steps) progress.line(`${step.name} (at most ${step.minutes} min): ${step.command.join(' ')}`);
    return 0;
  }
  exitOnSignals(() => progress.line('interrupted'));
  return summarise(lane, await runSteps(steps, progress, until), progress);
});
