/** What one call of `ep wqe decode` has to tell. */

export interface Report {
  readonly lines: readonly string[];
  readonly items: readonly object[];
  /** Something breaks its format. */
  readonly broken: boolean;
}

/** One after the other, with an empty line between them. */
export const joined = (reports: readonly Report[]): Report => ({
  lines: reports.flatMap(({ lines }, i) => (i === 0 ? lines : ['', ...lines])),
  items: reports.flatMap(({ items }) => items),
  broken: reports.some(({ broken }) => broken),
});

/** The entries of a queue, each of the same size, with a title where there are several. */
export function entryReports(
  bytes: Uint8Array,
  { entryBytes, what }: { readonly entryBytes: number; readonly what: string },
  report: (entry: Uint8Array, at: number) => Report,
): Report {
  const count = bytes.byteLength / entryBytes;
  return joined(
    Array.from({ length: count }, (_, i) => {
      const { lines, ...rest } = report(bytes.subarray(i * entryBytes, (i + 1) * entryBytes), i * entryBytes);
      return { lines: [...(count === 1 ? [] : [`${what} ${i}`]), ...lines], ...rest };
    }),
  );
}
