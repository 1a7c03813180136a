/** `ep bench`: the packages' benchmarks on a machine that is known to be idle, or marked as busy. */
import { fileURLToPath } from 'node:url';
import { type EpCode, EpError, ERROR_TABLE } from '@ep/core';
import { Argument, Command, Option } from 'commander';
import pc from 'picocolors';
import { describeMachine } from '../doctor/machine.js';
import { type FailureReport, jsonText, UsageError } from '../failure.js';
import { byteCount, integerOption, listOption } from '../options.js';
import { launchIn, mostLocalRanks } from '../run/launch.js';
import { withScratch } from '../run/scratch.js';
import { untilStopped } from '../stop.js';
import { type BenchOptions, type BenchResult, benchFilters, progressMark } from './bench.js';
import { causeAmong } from './cause.js';
import { busyFraction, type MachineLoad, watchLoad } from './idle.js';
import { type BenchName, benchNames, loadBench } from './registry.js';
import { type BenchReport, reportText } from './report.js';

/** Built beside the entry point; see tsup.config.ts. */
const childProgram = new URL('./bench-child.js', import.meta.url);

const watchMs = 1000;

interface BenchFlags {
  readonly repeats?: number;
  readonly quick?: boolean;
  readonly json?: boolean;
  readonly ranks?: readonly number[];
  readonly sizes?: readonly number[];
  readonly ops?: readonly string[];
}

export function benchCommand(): Command {
  return new Command('bench')
    .description('run benchmarks: verified, against a peer or a physical limit measured in the same run')
    .addArgument(new Argument('<name>', 'which').choices([...benchNames, 'all']))
    .addOption(new Option('--repeats <count>', 'measured runs of each case').argParser(integerOption(1, 10_000)))
    .option('--quick', 'small sizes, to see that it works')
    .addOption(
      new Option('--ranks <list>', 'only these numbers of ranks (moe, collectives)').argParser(
        listOption(integerOption(1, mostLocalRanks)),
      ),
    )
    .addOption(
      new Option('--sizes <list>', 'only these bytes, as 8,16KB,64MB (collectives)').argParser(listOption(byteCount)),
    )
    .addOption(new Option('--ops <list>', 'only these operations (collectives)').argParser(listOption((name) => name)))
    .option('--json', 'the report as one JSON object')
    .action(async (name: BenchName | 'all', flags: BenchFlags) => {
      const report = await runBenches(name, flags);
      process.stdout.write(flags.json === true ? `${jsonText(report)}\n` : reportText(report));
    });
}

async function runBenches(name: BenchName | 'all', flags: BenchFlags): Promise<BenchReport> {
  const options: BenchOptions = {
    quick: flags.quick === true,
    ...(flags.repeats === undefined ? {} : { repeats: flags.repeats }),
    ...Object.fromEntries(benchFilters.flatMap((one) => (flags[one] === undefined ? [] : [[one, flags[one]]]))),
  };
  const available: BenchName[] = [];
  const unavailable: BenchReport['unavailable'][number][] = [];
  for (const wanted of name === 'all' ? benchNames : [name]) {
    const loaded = await loadBench(wanted);
    if (loaded.available) {
      for (const filter of benchFilters) {
        if (flags[filter] === undefined || loaded.bench.filters?.includes(filter)) continue;
        const why = name === 'all' ? `: ${wanted} has none` : '';
        throw new UsageError(`bench ${name} takes no --${filter}${why}`, { name: wanted });
      }
      loaded.bench.check?.(options);
      available.push(wanted);
    } else unavailable.push({ name: wanted, reason: loaded.reason });
  }
  if (name !== 'all' && unavailable[0] !== undefined) {
    throw new EpError('EP_UNAVAILABLE', `bench ${name}: ${unavailable[0].reason}`, { context: { name } });
  }
  return untilStopped('bench', async (signal) => {
    const before = await watchLoad(watchMs, signal);
    warnIfBusy(before);
    const results: BenchResult[] = [];
    for (const one of available) results.push(await runInChild(one, options, signal));
    const after = await watchLoad(watchMs / 2, signal);
    return {
      date: new Date().toISOString(),
      machine: describeMachine(),
      busy: before.busy || after.busy,
      quick: options.quick,
      load: { before, after },
      results,
      unavailable,
    };
  });
}

async function runInChild(name: BenchName, options: BenchOptions, signal: AbortSignal): Promise<BenchResult> {
  let answer: { readonly result: BenchResult } | FailureReport | undefined;
  const said: string[] = [];
  // What a benchmark and the programs it starts leave behind when they are killed lies in the folder that goes with the job.
  const { exits } = await withScratch('ep-bench-', (scratch) =>
    launchIn(scratch, {
      ranks: 1,
      env: { TMPDIR: scratch.folder },
      program: process.execPath,
      args: [fileURLToPath(childProgram), name, JSON.stringify(options)],
      graceMs: 1000,
      signal,
      onEvent: (event) => {
        if (event.event !== 'line') return;
        if (event.stream === 'stdout' && /^\{"(?:result|error)":/.test(event.text)) {
          answer = JSON.parse(event.text) as typeof answer;
        } else if (event.text.startsWith(progressMark)) showProgress(event.text);
        else said.push(event.text);
      },
    }),
  );
  showProgress('');
  signal.throwIfAborted();
  if (answer !== undefined && 'result' in answer) return answer.result;
  if (answer !== undefined) {
    const { code, message } = answer.error;
    const cause = causeAmong(said);
    throw new EpError(
      Object.hasOwn(ERROR_TABLE, code) ? (code as EpCode) : 'EP_ABORTED',
      `bench ${name}: ${message}${cause === undefined ? '' : ` (${cause})`}`,
    );
  }
  const how = exits[0]?.signal ?? `status ${exits[0]?.code}`;
  throw new EpError(
    'EP_ABORTED',
    `bench ${name} ended with ${how} and without a result: ${said.slice(-10).join('\n')}`,
  );
}

/** In one line that the next one overwrites, where somebody looks on. */
function showProgress(text: string): void {
  if (process.stderr.isTTY) process.stderr.write(`\r\x1b[K${text}`);
}

function warnIfBusy(load: MachineLoad): void {
  if (!load.busy) return;
  const cores = load.cores.map((fraction) => `${Math.round(fraction * 100)} %`).join(', ');
  process.stderr.write(
    `${pc.bold(pc.yellow('WARNING: THIS MACHINE IS BUSY'))}: cores at ${cores}, idle is below ${busyFraction * 100} %. The result is marked busy; do not quote it.\n`,
  );
}
