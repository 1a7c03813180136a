/** The command line. */
import { readFileSync } from 'node:fs';
import { Command, CommanderError } from 'commander';
import { benchCommand } from './bench/command.js';
import { demoCommand } from './demo/command.js';
import { doctorCommand } from './doctor/command.js';
import { CommandExit, failureReport, failureText, jsonText } from './failure.js';
import { planCommand } from './plan/command.js';
import { runCommand } from './run/command.js';

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
  for (const command of [demoCommand(), runCommand(), planCommand(), benchCommand(), doctorCommand()]) {
    program.addCommand(command.copyInheritedSettings(program));
  }
  return program;
}

/** Runs one command line and resolves with the exit status. Never throws, never exits. */
export async function main(args: readonly string[]): Promise<number> {
  const program = createProgram();
  for (const command of [program, ...program.commands]) command.exitOverride();
  try {
    await program.parseAsync(args, { from: 'user' });
    return 0;
  } catch (error) {
    if (error instanceof CommandExit) return error.status;
    if (error instanceof CommanderError) return error.exitCode === 0 ? 0 : usageStatus;
    // Everything behind `--` belongs to the program that `ep run` starts.
    const own = args.slice(0, args.includes('--') ? args.indexOf('--') : args.length);
    if (own.includes('--json')) process.stdout.write(`${jsonText(failureReport(error))}\n`);
    else process.stderr.write(failureText(error));
    return 1;
  }
}
