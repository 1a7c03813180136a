import { parseArgs } from 'node:util';
import { benchPlan, planBenchText } from './plan.js';

const { values } = parseArgs({ options: { json: { type: 'boolean', default: false } } });
const report = benchPlan();
process.stdout.write(values.json ? `${JSON.stringify(report)}\n` : planBenchText(report));
