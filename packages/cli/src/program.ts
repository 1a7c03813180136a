/** The command line. */
import { readFileSync } from 'node:fs';
import { Command, CommanderError } from 'commander';
import { benchCommand } from './bench/command.js';
import { demoCommand } from './demo/command.js';
import { doctorCommand } from './doctor/command.js';
import { CommandExit, failureReport, failureText, jsonText, usageReport } from './failure.js';
import { planCommand } from './plan/command.js';
import { runCommand } from './run/command.js';
import { traceCommand } from './trace/command.js';
import { wqeCommand } from './wqe/command.js';

/** Status of a command line that could not be understood. */
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
  }
  return program;
}

/** `ep --json` alone fails with a help text as its message, and other messages begin with what the object says anyway. */
const usageMessage = ({ code, message }: CommanderError): string =>
  code === 'commander.help' ? 'no command given; ep --help lists them' : message.replace(/^error: /, '');

/** Runs one command line and resolves with the exit status. Never throws, never exits. */
export async function main(args: readonly string[]): Promise<number> {
  // Everything behind `--` belongs to the program that `ep run` starts.
  const own = args.slice(0, args.includes('--') ? args.indexOf('--') : args.length);
  const json = own.includes('--json');
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
    return 1;
  }
}
