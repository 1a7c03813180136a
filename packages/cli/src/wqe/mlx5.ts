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
import { parseHex } from './input.js';
import { entryReports, joined, type Report } from './report.js';
import { type TraceStyle, traceReport } from './trace.js';

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

const traceStyle: TraceStyle = {
  failed: ({ syndrome }) => (typeof syndrome === 'number' && syndrome !== 0 ? syndromeName(syndrome) : undefined),
  hidden: ['syndrome'],
  request: (bytes) => {
    const decoded = decodeWqe(bytes);
    const whole = decoded.byteLength <= bytes.byteLength;
    return {
      lines: dumpWqe(bytes, { cut: true }),
      item: whole ? decoded : { byteLength: decoded.byteLength },
      broken: whole && breaks(decoded.violations),
    };
  },
};

export const mlx5Formats = ['wqe', 'cqe', 'command', 'trace'] as const;

export function mlx5Report(text: string, format: (typeof mlx5Formats)[number]): Report {
  if (format === 'trace') return traceReport(text, traceStyle);
  const bytes = parseHex(text);
  if (format === 'wqe') return wqeReport(bytes);
  return format === 'cqe' ? cqeReport(bytes) : commandReport(bytes);
}
