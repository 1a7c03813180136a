/** Runs one benchmark in a process of its own: planning blocks its thread, and whoever stops a benchmark must be able to kill it. */
import { failureReport, jsonText } from '../failure.js';
import { type BenchOptions, progressMark } from './bench.js';
import { type BenchName, loadBench } from './registry.js';

const name = process.argv[2] as BenchName;
const options = JSON.parse(process.argv[3] ?? '{}') as BenchOptions;
const tell = (text: string): void => void process.stderr.write(`${progressMark}${text}\n`);
try {
  const loaded = await loadBench(name);
  if (!loaded.available) throw new Error(loaded.reason);
  process.stdout.write(`${jsonText({ result: await loaded.bench.run(options, tell) })}\n`);
} catch (error) {
  process.stdout.write(`${jsonText(failureReport(error))}\n`);
  process.exitCode = 1;
}
