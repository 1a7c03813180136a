/** The first error among the lines that a benchmark's ranks left on stderr: the benchmark itself knows only that one of them ended. */
export function causeAmong(lines: readonly string[]): string | undefined {
  return lines.map((line) => line.trim()).find((line) => /^\w*Error(?: \[\w+\])?:/.test(line));
}
