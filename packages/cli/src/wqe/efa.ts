/** Bytes of EFA queues, and traces of the software EFA that executes them. How large an entry is belongs to its queue, and the bytes do not say. */
import { invalid } from '@ep/core';
import { decodeCqe, decodeReceive, decodeWqe, dumpCqe, dumpReceive, dumpWqe, statusName } from '@ep/efa-gda';
import { misused, UsageError } from '../failure.js';
import { parseHex } from './input.js';
import { entryReports, type Report } from './report.js';
import { type TraceStyle, traceReport } from './trace.js';

export const efaFormats = ['wqe', 'cqe', 'receive', 'trace'] as const;
type EfaFormat = Exclude<(typeof efaFormats)[number], 'trace'>;

interface Queue {
  readonly word: string;
  /** What is taken where nothing is said. */
  readonly usual: number;
  readonly sizes: readonly number[];
}

const queues: Readonly<Record<EfaFormat, Queue>> = {
  wqe: { word: 'work request', usual: 64, sizes: [64, 128] },
  cqe: { word: 'completion', usual: 16, sizes: [8, 16, 32] },
  receive: { word: 'buffer', usual: 16, sizes: [16] },
};

function entryReport(entry: Uint8Array, at: number, format: EfaFormat): Report {
  if (format === 'cqe') return { lines: dumpCqe(entry), items: [decodeCqe(entry)], broken: false };
  const decoded = format === 'wqe' ? decodeWqe(entry) : decodeReceive(entry);
  const lines = format === 'wqe' ? dumpWqe(entry) : dumpReceive(entry);
  return { lines, items: [{ at, ...decoded }], broken: decoded.violations.length > 0 };
}

const traceStyle: TraceStyle = {
  failed: ({ status }) => (typeof status === 'number' && status !== 0 ? statusName(status) : undefined),
  hidden: ['status'],
  request: (bytes) => {
    const decoded = decodeWqe(bytes);
    return { lines: dumpWqe(bytes), item: decoded, broken: decoded.violations.length > 0 };
  },
};

/** `entryBytes` undefined: the usual size of that format. */
export function efaReport(text: string, format: (typeof efaFormats)[number], entryBytes: number | undefined): Report {
  if (format === 'trace') {
    if (entryBytes !== undefined) throw new UsageError('--entry-bytes is not for traces: they say it');
    return traceReport(text, traceStyle);
  }
  const { word, usual, sizes } = queues[format];
  const size = entryBytes ?? usual;
  const where = `efa ${format}`;
  if (!sizes.includes(size)) throw misused('--entry-bytes', { where, expected: sizes.join(', '), found: size });
  const bytes = parseHex(text);
  if (bytes.byteLength % size !== 0) {
    const others = sizes.filter((other) => bytes.byteLength % other === 0);
    const hint = others.length === 0 ? '' : ` (or --entry-bytes ${others.join(', ')})`;
    const expected = `${word}s of ${size} bytes each${hint}`;
    throw invalid('input', { where, expected, found: `${bytes.byteLength} bytes` });
  }
  return entryReports(bytes, { entryBytes: size, what: word }, (entry, at) => entryReport(entry, at, format));
}
