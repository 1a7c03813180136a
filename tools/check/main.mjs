// node tools/check/main.mjs [--only NAME]... [--totals FILE]: everything that can be judged without running the product.
import { mkdirSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals } from '../process.mjs';
import { checks } from './checks.mjs';

const usage = `usage: node tools/check/main.mjs [--only NAME]... [--totals FILE]

${checks.map(({ name, what }) => `  ${name.padEnd(10)} ${what}`).join('\n')}`;

/** @param {readonly string[]} args */
function parseArguments(args) {
  /** @type {string[]} */
  const only = [];
  let totals;
  const rest = [...args];
  for (let flag = rest.shift(); flag !== undefined; flag = rest.shift()) {
    const value = rest.shift();
    if (flag === '--only' && checks.some(({ name }) => name === value)) only.push(/** @type {string} */ (value));
    else if (flag === '--totals' && value !== undefined) totals = value;
    else throw new ToolError(`check does not know ${JSON.stringify([flag, value].join(' ').trim())}\n${usage}`);
  }
  return { only, totals };
}

/**
 * @param {readonly import('./checks.mjs').Check[]} selected
 * @returns {Promise<{ passed: number, failed: number, skipped: number }>}
 */
async function runChecks(selected) {
  const progress = new Progress();
  exitOnSignals(() => progress.line('interrupted'));
  let failed = 0;
  for (const check of selected) {
    try {
      await progress.step(`${check.name}: ${check.what}`, async () => {
        const problems = await check.find();
        if (problems.length > 0) throw new ToolError(problems.join('\n'));
      });
    } catch (error) {
      if (!(error instanceof ToolError)) throw error;
      progress.line(error.message);
      failed += 1;
    }
  }
  return { passed: selected.length - failed, failed, skipped: 0 };
}

await runMain(async () => {
  const { only, totals } = parseArguments(process.argv.slice(2));
  const result = await runChecks(only.length === 0 ? checks : checks.filter(({ name }) => only.includes(name)));
  if (totals !== undefined) {
    mkdirSync(dirname(totals), { recursive: true });
    writeFileSync(totals, JSON.stringify(result));
  }
  return result.failed === 0 ? 0 : 1;
});
