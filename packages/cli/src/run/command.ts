/** `ep run`: local ranks with prefixed output. */
import { constants } from 'node:os';
import { Argument, Command, Option } from 'commander';
import pc from 'picocolors';
import { CommandExit, jsonText } from '../failure.js';
import { integerOption } from '../options.js';
import {
  exitCodeOf,
  type LaunchEvent,
  type LaunchOptions,
  launchRanks,
  mostLocalRanks,
  type RankExit,
} from './launch.js';

const FORWARDED = ['SIGINT', 'SIGTERM', 'SIGHUP'] as const;

/** Told apart by hue; red is left for failures. */
const HUES = [pc.cyan, pc.green, pc.yellow, pc.magenta, pc.blue] as const;

interface RunFlags {
  readonly ranks: number;
  readonly keepGoing?: boolean;
  readonly grace: number;
  readonly json?: boolean;
}

export function runCommand(): Command {
  return new Command('run')
    .description(
      'start N local ranks of a program, each with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, EP_STORE, … set',
    )
    .addOption(
      new Option('-n, --ranks <count>', 'how many').argParser(integerOption(1, mostLocalRanks)).makeOptionMandatory(),
    )
    .option('-k, --keep-going', 'let the other ranks go on when one fails')
    .addOption(
      new Option('--grace <seconds>', 'from SIGTERM to SIGKILL').argParser(integerOption(0, 86_400)).default(5),
    )
    .option('--json', 'one JSON event per line: start, line, exit, end')
    .addArgument(new Argument('<program>', 'program and its arguments, after --'))
    .addArgument(new Argument('[args...]'))
    .passThroughOptions()
    .action(async (program: string, args: string[], flags: RunFlags) => {
      const status = await runRanks({ program, args, ...flags });
      if (status !== 0) throw new CommandExit(status);
    });
}

async function runRanks(
  flags: RunFlags & { readonly program: string; readonly args: readonly string[] },
): Promise<number> {
  const stop = new AbortController();
  let told: NodeJS.Signals | undefined;
  const onSignal = (signal: NodeJS.Signals): void => {
    told ??= signal;
    stop.abort(signal);
  };
  // The reader has gone (`ep run … | head`): nobody wants the rest.
  const onOutputError = (error: NodeJS.ErrnoException): void => {
    if (error.code === 'EPIPE') stop.abort('SIGTERM');
    told ??= 'SIGPIPE';
  };
  for (const signal of FORWARDED) process.on(signal, onSignal);
  const ranks = new Map<number, number>();
  // To the ranks alone: their children would end of it.
  const onDump = (): void => {
    for (const pid of ranks.values()) tellToDump(pid);
  };
  // Elsewhere SIGUSR2 has no meaning but the end.
  const dumps = (process.env.EP_TRACE_DIR ?? '') !== '';
  if (dumps) process.on('SIGUSR2', onDump);
  process.stdout.on('error', onOutputError);
  const print = flags.json === true ? printJson : printPrefixed;
  try {
    const options: LaunchOptions = {
      ranks: flags.ranks,
      program: flags.program,
      args: flags.args,
      keepGoing: flags.keepGoing === true,
      graceMs: flags.grace * 1000,
      onEvent: (event) => {
        if (event.event === 'start') ranks.set(event.rank, event.pid);
        else if (event.event === 'exit') ranks.delete(event.rank);
        print(event);
      },
      signal: stop.signal,
    };
    const result = await launchRanks(options);
    // A rank may answer a signal with status 0; who asked for the stop must still see that it was one.
    const code = told === undefined ? result.code : 128 + constants.signals[told];
    if (flags.json === true) process.stdout.write(`${jsonText({ event: 'end', code })}\n`);
    else if (told === undefined && result.failed !== undefined) {
      process.stderr.write(
        `ep run: ${describeExit(result.failed)}${flags.keepGoing ? '' : '; the other ranks were stopped'}\n`,
      );
    }
    return code;
  } finally {
    for (const signal of FORWARDED) process.off(signal, onSignal);
    process.off('SIGUSR2', onDump);
    process.stdout.off('error', onOutputError);
  }
}

function tellToDump(pid: number): void {
  try {
    process.kill(pid, 'SIGUSR2');
  } catch {
    // ESRCH: it has ended, and its output is still being read.
  }
}

function describeExit(exit: RankExit): string {
  return exit.signal === null
    ? `rank ${exit.rank} ended with status ${exit.code}`
    : `rank ${exit.rank} was ended by ${exit.signal} (status ${exitCodeOf(exit)})`;
}

function printJson(event: LaunchEvent): void {
  process.stdout.write(`${jsonText(event)}\n`);
}

function printPrefixed(event: LaunchEvent): void {
  if (event.event !== 'line') return;
  const to = event.stream === 'stdout' ? process.stdout : process.stderr;
  const prefix = `[rank ${event.rank}]`;
  const hue = HUES[event.rank % HUES.length]!;
  to.write(`${to.isTTY === true && pc.isColorSupported ? hue(prefix) : prefix} ${event.text}\n`);
}
