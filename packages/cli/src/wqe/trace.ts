/** Traces of software NICs: a line for each thing that happened, some with the bytes of a work request. */
import { parseTrace, type TraceLine } from './input.js';
import { joined, type Report } from './report.js';

/** What traces of one kind of NIC have of their own. */
export interface TraceStyle {
  /** How a request ended; undefined: well, or the line says nothing of it. */
  readonly failed: (fields: TraceLine['fields']) => string | undefined;
  /** The work request whose first bytes these are, or all of them. */
  readonly request: (bytes: Uint8Array) => {
    readonly lines: readonly string[];
    readonly item: object;
    readonly broken: boolean;
  };
  /** Fields that `failed` has the words for. */
  readonly hidden: readonly string[];
}

/** `t` relative to the first line; the other fields as they are, but for the bytes. */
function title({ fields }: TraceLine, origin: number, { failed, hidden }: TraceStyle): string {
  const { t, kind, ...rest } = fields;
  const time = typeof t === 'number' ? `+${((t - origin) / 1000).toFixed(3)} us  ` : '';
  const end = failed(fields);
  const shown = Object.entries(rest)
    .filter(([name]) => name !== 'end' && name !== 'wqe' && !hidden.includes(name))
    .map(([name, value]) => `${name} ${String(value)}`)
    .join('  ');
  return `${time}${String(kind ?? 'event')}  ${shown}${end === undefined ? '' : `  failed: ${end}`}`;
}

export function traceReport(text: string, style: TraceStyle): Report {
  const entries = parseTrace(text);
  const first = entries[0]?.fields.t;
  const origin = typeof first === 'number' ? first : 0;
  return joined(
    entries.map((entry) => {
      const head = title(entry, origin, style);
      const violation = entry.fields.kind === 'violation';
      if (entry.wqe === undefined) return { lines: [head], items: [entry.fields], broken: violation };
      const { wqe: _, ...fields } = entry.fields;
      const { lines, item, broken } = style.request(entry.wqe);
      return { lines: [head, ...lines], items: [{ ...fields, ...item }], broken: violation || broken };
    }),
  );
}
