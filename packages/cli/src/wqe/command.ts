/** `ep wqe decode`: bytes of mlx5 queues, and traces of the software NIC, for people. */
import { EpError } from '@ep/core';
import {
  decodeCommand,
  decodeCqe,
  decodeWqe,
  dumpCommand,
  dumpCqe,
  dumpWqe,
  splitQueue,
  syndromeName,
  type Violation,
} from '@ep/ibgda';
import { Argument, Command, Option } from 'commander';
import { CommandExit, jsonText } from '../failure.js';
import { parseHex, parseTrace, readInput, type TraceLine } from './input.js';

const CQE_BYTES = 64;

type Format = 'wqe' | 'cqe' | 'command' | 'trace';

interface DecodeFlags {
  readonly as?: Format;
  readonly file?: string;
  readonly json?: boolean;
}

interface Report {
  readonly lines: readonly string[];
  readonly items: readonly object[];
  /** Something breaks its format. */
  readonly broken: boolean;
}

const joined = (reports: readonly Report[]): Report => ({
  lines: reports.flatMap(({ lines }, i) => (i === 0 ? lines : ['', ...lines])),
  items: reports.flatMap(({ items }) => items),
  broken: reports.some(({ broken }) => broken),
});

const breaks = (violations: readonly Violation[]): boolean => violations.length > 0;

function wqeReport(bytes: Uint8Array): Report {
  const wqes = splitQueue(bytes);
  return joined(
    wqes.map(({ at, bytes: rest }) => {
      if (rest.byteLength < 16) {
        throw new EpError('EP_INVALID_ARGUMENT', `${rest.byteLength} bytes are left at byte ${at}: no work request`);
      }
      const decoded = decodeWqe(rest);
      const title = wqes.length === 1 ? [] : [`work request at byte ${at}`];
      return { lines: [...title, ...dumpWqe(rest)], items: [{ at, ...decoded }], broken: breaks(decoded.violations) };
    }),
  );
}

function cqeReport(bytes: Uint8Array): Report {
  if (bytes.byteLength % CQE_BYTES !== 0) {
    const found = `${bytes.byteLength} bytes`;
    throw new EpError('EP_INVALID_ARGUMENT', `expected completions of ${CQE_BYTES} bytes each, found ${found}`);
  }
  const count = bytes.byteLength / CQE_BYTES;
  return joined(
    Array.from({ length: count }, (_, i) => {
      const entry = bytes.subarray(i * CQE_BYTES, (i + 1) * CQE_BYTES);
      const title = count === 1 ? [] : [`completion ${i}`];
      return { lines: [...title, ...dumpCqe(entry)], items: [decodeCqe(entry)], broken: false };
    }),
  );
}

function commandReport(bytes: Uint8Array): Report {
  const command = decodeCommand(bytes);
  return { lines: dumpCommand(bytes), items: [command], broken: breaks(command.violations) };
}

/** `t` relative to the first line; the other fields as they are, but for the bytes. */
function traceTitle({ fields }: TraceLine, origin: number): string {
  const { t, wqe: _, kind, syndrome, ...rest } = fields;
  const time = typeof t === 'number' ? `+${((t - origin) / 1000).toFixed(3)} us  ` : '';
  const failed = typeof syndrome === 'number' && syndrome !== 0 ? `  failed: ${syndromeName(syndrome)}` : '';
  const shown = Object.entries(rest)
    .filter(([name]) => name !== 'end')
    .map(([name, value]) => `${name} ${String(value)}`)
    .join('  ');
  return `${time}${String(kind ?? 'event')}  ${shown}${failed}`;
}

function traceReport(text: string): Report {
  const entries = parseTrace(text);
  const first = entries[0]?.fields.t;
  const origin = typeof first === 'number' ? first : 0;
  return joined(
    entries.map((entry) => {
      const title = traceTitle(entry, origin);
      const failed = entry.fields.kind === 'violation';
      if (entry.wqe === undefined) return { lines: [title], items: [entry.fields], broken: failed };
      const decoded = decodeWqe(entry.wqe);
      const whole = decoded.byteLength <= entry.wqe.byteLength;
      const { wqe: _, ...fields } = entry.fields;
      return {
        lines: [title, ...dumpWqe(entry.wqe, { cut: true })],
        items: [{ ...fields, ...(whole ? decoded : { byteLength: decoded.byteLength }) }],
        broken: failed || (whole && breaks(decoded.violations)),
      };
    }),
  );
}

function report(text: string, format: Format): Report {
  if (format === 'trace') return traceReport(text);
  const bytes = parseHex(text);
  if (format === 'wqe') return wqeReport(bytes);
  return format === 'cqe' ? cqeReport(bytes) : commandReport(bytes);
}

export function wqeCommand(): Command {
  const decode = new Command('decode')
    .description('say what bytes of mlx5 queues mean; status 1 if some break their format')
    .addArgument(new Argument('[hex...]', 'the bytes, in hexadecimal; --file otherwise'))
    .addOption(new Option('--file <path>', 'read them from a file, or from standard input (-)'))
    .addOption(
      new Option('--as <format>', 'what they are (default: trace if it begins with {, else wqe)').choices([
        'wqe',
        'cqe',
        'command',
        'trace',
      ] satisfies Format[]),
    )
    .option('--json', 'as one JSON object')
    .action((words: string[], flags: DecodeFlags) => {
      if ((words.length === 0) === (flags.file === undefined)) {
        throw new EpError('EP_INVALID_ARGUMENT', 'expected either hexadecimal digits or --file');
      }
      const text = flags.file === undefined ? words.join(' ') : readInput(flags.file);
      const { lines, items, broken } = report(text, flags.as ?? (text.trimStart().startsWith('{') ? 'trace' : 'wqe'));
      process.stdout.write(flags.json === true ? `${jsonText({ broken, items })}\n` : `${lines.join('\n')}\n`);
      if (broken) throw new CommandExit(1);
    });
  return new Command('wqe').description('bytes of mlx5 queues').addCommand(decode);
}
