/** `ep wqe decode`: bytes of mlx5 and EFA queues, and traces of the software NIC, for people. */
import { Argument, Command, Option } from 'commander';
import { CommandExit, jsonText, misused, UsageError } from '../failure.js';
import { integerOption } from '../options.js';
import { efaFormats, efaReport } from './efa.js';
import { readInput } from './input.js';
import { mlx5Formats, mlx5Report } from './mlx5.js';
import type { Report } from './report.js';

const nics = ['mlx5', 'efa'] as const;
const formats = ['wqe', 'cqe', 'receive', 'command', 'trace'] as const;
type Format = (typeof formats)[number];

interface DecodeFlags {
  readonly nic: (typeof nics)[number];
  readonly as?: Format;
  readonly entryBytes?: number;
  readonly file?: string;
  readonly json?: boolean;
}

function oneOf<T extends Format>(offered: readonly T[], format: Format, nic: string): T {
  const found = offered.find((one) => one === format);
  if (found !== undefined) return found;
  throw misused('--as', { where: `wqe decode --nic ${nic}`, expected: offered.join(', '), found: format });
}

function report(text: string, { nic, as, entryBytes }: DecodeFlags): Report {
  const isTrace = text.trimStart().startsWith('{');
  const format = as ?? (isTrace ? 'trace' : 'wqe');
  if (nic === 'efa') return efaReport(text, oneOf(efaFormats, format, nic), entryBytes);
  if (entryBytes !== undefined) {
    throw new UsageError('--entry-bytes is for --nic efa: bytes of mlx5 queues say how long they are');
  }
  return mlx5Report(text, oneOf(mlx5Formats, format, nic));
}

export function wqeCommand(): Command {
  const decode = new Command('decode')
    .description('say what bytes of queues mean; status 1 if some break their format')
    .addArgument(new Argument('[hex...]', 'the bytes, in hexadecimal; --file otherwise'))
    .addOption(new Option('--file <path>', 'read them from a file, or from standard input (-)'))
    .addOption(
      new Option('--nic <kind>', 'whose bytes they are').choices(nics).default('mlx5' satisfies DecodeFlags['nic']),
    )
    .addOption(
      new Option('--as <format>', 'what they are (default: trace if it begins with {, else wqe)').choices(formats),
    )
    .addOption(
      new Option(
        '--entry-bytes <n>',
        'size of an entry of an EFA queue (default: 64 of requests, 16 of completions)',
      ).argParser(integerOption(8, 128)),
    )
    .option('--json', 'as one JSON object')
    .action((words: string[], flags: DecodeFlags) => {
      if ((words.length === 0) === (flags.file === undefined)) {
        throw new UsageError('expected either hexadecimal digits or --file');
      }
      const text = flags.file === undefined ? words.join(' ') : readInput(flags.file);
      const { lines, items, broken } = report(text, flags);
      process.stdout.write(flags.json === true ? `${jsonText({ broken, items })}\n` : `${lines.join('\n')}\n`);
      if (broken) throw new CommandExit(1);
    });
  return new Command('wqe').description('bytes of mlx5 and EFA queues').addCommand(decode);
}
