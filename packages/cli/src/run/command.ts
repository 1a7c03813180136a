/** `ep run`: ranks of this host, alone or as a part of a job on several, with prefixed output. */
import { Argument, Command, Option } from 'commander';
import pc from 'picocolors';
import { CommandExit, jsonText } from '../failure.js';
import { hostList, integerOption, nodeCount, rendezvousAddress } from '../options.js';
import { watchOutput } from '../output.js';
import { stopStatus } from '../stop.js';
import {
  exitCodeOf,
  type LaunchEvent,
  type LaunchOptions,
  launchRanks,
  mostLocalRanks,
  type RankExit,
} from './launch.js';
import { runNode } from './node-job.js';
import type { NodeSpec } from './node-records.js';
import type { Rendezvous } from './nodes.js';

const FORWARDED = ['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT'] as const;

/** Told apart by hue; red is left for failures. */
const HUES = [pc.cyan, pc.green, pc.yellow, pc.magenta, pc.blue] as const;

interface RunFlags {
  readonly ranks?: number;
  readonly hosts?: readonly NodeSpec[];
  readonly nodes?: { readonly least: number; readonly most: number };
  readonly rdzv?: Rendezvous;
  readonly nodeRank?: number;
  readonly maxRestarts: number;
  readonly joinTimeout: number;
  readonly lastCall: number;
  readonly keepGoing?: boolean;
  readonly grace: number;
  readonly json?: boolean;
}

export function runCommand(): Command {
  return new Command('run')
    .description(
      'start ranks of a program on this host or on several, each with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, EP_STORE, … set',
    )
    .addOption(new Option('-n, --ranks <count>', 'how many on this host').argParser(integerOption(1, mostLocalRanks)))
    .addOption(
      new Option(
        '--hosts <list>',
        'hosts and their ranks, for example a:4,b:4; run the same command on each of them',
      ).argParser(hostList(mostLocalRanks)),
    )
    .addOption(new Option('--nodes <count>', 'how many hosts, or least:most, each with --ranks').argParser(nodeCount))
    .addOption(
      new Option('--rdzv <host:port>', 'where the hosts meet; the one that has the address holds the store').argParser(
        rendezvousAddress,
      ),
    )
    .addOption(
      new Option('--node-rank <number>', 'which of the hosts this is, where names and addresses do not say').argParser(
        integerOption(0, 65_535),
      ),
    )
    .addOption(
      new Option('--max-restarts <count>', 'how often all ranks are started again when one fails or a host is lost')
        .argParser(integerOption(0, 1_000_000))
        .default(0),
    )
    .addOption(
      new Option('--join-timeout <seconds>', 'how long hosts wait for each other')
        .argParser(integerOption(1, 86_400))
        .default(300),
    )
    .addOption(
      new Option('--last-call <seconds>', 'with least:most, how long more hosts may come once there are enough')
        .argParser(integerOption(0, 3600))
        .default(10),
    )
    .option('-k, --keep-going', 'let the other ranks go on when one fails')
    .addOption(
      new Option('--grace <seconds>', 'from SIGTERM to SIGKILL').argParser(integerOption(0, 86_400)).default(5),
    )
    .option('--json', 'one JSON event per line: start, line, exit, end')
    .addArgument(new Argument('<program>', 'program and its arguments, after --'))
    .addArgument(new Argument('[args...]'))
    .passThroughOptions()
    .action(async (program: string, args: string[], flags: RunFlags, command: Command) => {
      const refuse = (why: string): never => command.error(`error: ${why}`);
      if (program === '') refuse('say which program to run, after --');
      const several = severalNodes(flags, refuse);
      const status = await runRanks({ program, args, ...flags }, several);
      if (status !== 0) throw new CommandExit(status);
    });
}

async function runRanks(
  flags: RunFlags & { readonly program: string; readonly args: readonly string[] },
  several: ReturnType<typeof severalNodes>,
): Promise<number> {
  const stop = new AbortController();
  const onSignal = (signal: NodeJS.Signals): void => stop.abort(signal);
  for (const signal of FORWARDED) process.on(signal, onSignal);
  const ranks = new Map<number, number>();
  // To the ranks alone: their children would end of it.
  const onDump = (): void => {
    for (const pid of ranks.values()) tellToDump(pid);
  };
  // Elsewhere SIGUSR2 has no meaning but the end.
  const dumps = (process.env.EP_TRACE_DIR ?? '') !== '';
  if (dumps) process.on('SIGUSR2', onDump);
  const unwatch = watchOutput((lost) => stop.abort(lost));
  const print = flags.json === true ? printJson : printPrefixed;
  try {
    const common = {
      program: flags.program,
      args: flags.args,
      graceMs: flags.grace * 1000,
      onEvent: (event: LaunchEvent) => {
        if (event.event === 'start') ranks.set(event.rank, event.pid);
        else if (event.event === 'exit') ranks.delete(event.rank);
        print(event);
      },
      signal: stop.signal,
    };
    if (several !== undefined) {
      const onNote = (text: string): void => {
        if (flags.json === true) process.stdout.write(`${jsonText({ event: 'note', text })}\n`);
        else process.stderr.write(`ep run: ${text}\n`);
      };
      const code = await runNode({ ...common, ...several, onNote }).catch((error: unknown) => {
        if (!stop.signal.aborted) throw error;
        return stopStatus(stop.signal.reason);
      });
      if (flags.json === true) process.stdout.write(`${jsonText({ event: 'end', code })}\n`);
      return code;
    }
    const options: LaunchOptions = { ...common, ranks: flags.ranks!, keepGoing: flags.keepGoing === true };
    const result = await launchRanks(options);
    // A rank may answer a signal with status 0; who asked for the stop must still see that it was one.
    const code = stop.signal.aborted ? stopStatus(stop.signal.reason) : result.code;
    if (flags.json === true) process.stdout.write(`${jsonText({ event: 'end', code })}\n`);
    else if (!stop.signal.aborted && result.failed !== undefined) {
      process.stderr.write(
        `ep run: ${describeExit(result.failed)}${flags.keepGoing ? '' : '; the other ranks were stopped'}\n`,
      );
    }
    return code;
  } finally {
    for (const signal of FORWARDED) process.off(signal, onSignal);
    process.off('SIGUSR2', onDump);
    unwatch();
  }
}

/** Undefined: this host alone. `refuse`: for options that do not fit together. */
function severalNodes(flags: RunFlags, refuse: (why: string) => never) {
  const { hosts, nodes, rdzv, ranks, nodeRank, maxRestarts } = flags;
  if (hosts === undefined && nodes === undefined && rdzv === undefined) {
    if (nodeRank !== undefined || maxRestarts !== 0)
      refuse('--node-rank and --max-restarts are of jobs with --hosts or --nodes');
    return ranks === undefined ? refuse('say how many ranks with -n, or on which hosts with --hosts') : undefined;
  }
  if (rdzv === undefined) return refuse('--hosts and --nodes need --rdzv <host:port>, the same on all hosts');
  if ((hosts === undefined) === (nodes === undefined)) return refuse('give either --hosts, or --nodes and -n');
  if (hosts !== undefined && ranks !== undefined) refuse('--hosts says how many ranks each host has: leave out -n');
  if (hosts === undefined && ranks === undefined) refuse('--nodes needs -n, the ranks of this host');
  if (flags.keepGoing === true) refuse('--keep-going is of one host');
  const most = hosts?.length ?? nodes!.most;
  if (nodeRank !== undefined && nodeRank >= most) refuse(`--node-rank ${nodeRank} is not one of ${most} hosts`);
  if (nodeRank !== undefined && nodes !== undefined && nodes.least !== nodes.most)
    refuse('--node-rank is of a job whose number of hosts is fixed');
  return {
    rdzv,
    least: hosts?.length ?? nodes!.least,
    most,
    maxRestarts,
    joinMs: flags.joinTimeout * 1000,
    lastCallMs: flags.lastCall * 1000,
    ...(ranks !== undefined && { ranks }),
    ...(hosts !== undefined && { hosts }),
    ...(nodeRank !== undefined && { nodeRank }),
  };
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
