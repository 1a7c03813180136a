/** Bytes of mlx5 queues, and traces of the software NIC that executes them. */
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
import { parseHex, parseTrace, type TraceLine } from './input.js';
import { entryReports, joined, type Report } from './report.js';

const CQE_BYTES = 64;

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
  return entryReports(bytes, { entryBytes: CQE_BYTES, what: 'completion' }, (entry) => ({
    lines: dumpCqe(entry),
    items: [decodeCqe(entry)],
    broken: false,
  }));
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

export const mlx5Formats = ['wqe', 'cqe', 'command', 'trace'] as const;

export function mlx5Report(text: string, format: (typeof mlx5Formats)[number]): Report {
  if (format === 'trace') return traceReport(text);
  const bytes = parseHex(text);
  if (format === 'wqe') return wqeReport(bytes);
  return format === 'cqe' ? cqeReport(bytes) : commandReport(bytes);
}
