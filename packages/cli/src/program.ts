/** The command line. */
import { readFileSync } from 'node:fs';
import { Command, CommanderError } from 'commander';
import { benchCommand } from './bench/command.js';
import { demoCommand } from './demo/command.js';
import { doctorCommand } from './doctor/command.js';
import { CommandExit, failureReport, failureText, jsonText, UsageError, usageReport } from './failure.js';
import { type OutputLost, outputWritten, watchOutput } from './output.js';
import { planCommand } from './plan/command.js';
import { runCommand } from './run/command.js';
import { traceCommand } from './trace/command.js';
import { wqeCommand } from './wqe/command.js';

/** Status of a command line that was not understood. */
const usageStatus = 2;

function version(): string {
  const manifest: unknown = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8'));
  return String((manifest as { readonly version?: unknown }).version);
}

export function createProgram(): Command {
  const program = new Command('ep')
    .description('plan, run, check and measure data movement between ranks')
    .version(version())
    .enablePositionalOptions()
    .showHelpAfterError('(ep --help lists commands; ep <command> --help their options)');
  for (const command of [
    demoCommand(),
    runCommand(),
    planCommand(),
    traceCommand(),
    wqeCommand(),
    benchCommand(),
    doctorCommand(),
  ]) {
    program.addCommand(command.copyInheritedSettings(program));
    for (const inner of command.commands) inner.copyInheritedSettings(command);
    if (command.commands.length > 0) withHelp(command);
  }
  return withHelp(program);
}

/** The library's own `help` shows the general help for a command that there is none of, as if all were well. */
function withHelp(of: Command): Command {
  const help = new Command('help')
    .copyInheritedSettings(of)
    .description('display help for command')
    .argument('[command]')
    .helpOption(false)
    .allowUnknownOption()
    .allowExcessArguments()
    .action((name?: string) => {
      const found = name === undefined ? of : of.commands.find((one) => one.name() === name);
      if (found === undefined) of.error(`error: unknown command '${name}'`, { code: 'commander.unknownCommand' });
      else found.help();
    });
  return of.helpCommand(false).addCommand(help);
}

/** `ep --json` alone fails with a help text as its message, and other messages begin with what the object says anyway. */
const usageMessage = ({ code, message }: CommanderError): string =>
  code === 'commander.help' ? 'no command given; ep --help lists them' : message.replace(/^error: /, '');

/** Runs one command line and resolves with the exit status, once what it wrote has gone out. Never throws, never exits. */
export async function main(args: readonly string[]): Promise<number> {
  // Everything behind `--` belongs to the program that `ep run` starts.
  const own = args.slice(0, args.includes('--') ? args.indexOf('--') : args.length);
  const json = own.includes('--json');
  let lost: OutputLost | undefined;
  const unwatch = watchOutput((what) => {
    lost = what;
  });
  try {
    const status = await runCommandLine(args, json);
    await outputWritten();
    // A signal that came before was asked for; its status says more.
    if (lost === undefined || status > 128) return status;
    tellLost(lost, json);
    await outputWritten();
    return lost.status;
  } finally {
    unwatch();
  }
}

/** On the stream that is left. */
function tellLost({ stream, error }: OutputLost, json: boolean): void {
  if (error === undefined) return;
  if (stream === 'stdout') process.stderr.write(failureText(error));
  else if (json) process.stdout.write(`${jsonText(failureReport(error))}\n`);
}

async function runCommandLine(args: readonly string[], json: boolean): Promise<number> {
  const program = createProgram();
  for (const command of [program, ...program.commands.flatMap((one) => [one, ...one.commands])]) {
    command.exitOverride();
    // Programs get one object instead of the text; help that was asked for stays text.
    if (json) command.configureOutput({ writeErr: () => {} });
  }
  try {
    await program.parseAsync(args, { from: 'user' });
    return 0;
  } catch (error) {
    if (error instanceof CommandExit) return error.status;
    if (error instanceof CommanderError) {
      if (error.exitCode === 0) return 0;
      if (json) process.stdout.write(`${jsonText(usageReport(usageMessage(error), error.code))}\n`);
      return usageStatus;
    }
    if (json) process.stdout.write(`${jsonText(failureReport(error))}\n`);
    else process.stderr.write(failureText(error));
    return error instanceof UsageError ? usageStatus : 1;
  }
}
