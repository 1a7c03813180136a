import { parseArgs } from 'node:util';
import { benchMoe, moeBenchText } from './moe.js';
import { benchPlan, planBenchText } from './plan.js';

const { values } = parseArgs({ options: { json: { type: 'boolean', default: false } } });
const plan = benchPlan();
const moe = benchMoe();
process.stdout.write(
  values.json ? `${JSON.stringify(plan)}\n${JSON.stringify(moe)}\n` : planBenchText(plan) + moeBenchText(moe),
);
