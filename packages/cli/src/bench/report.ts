/** What `ep bench` found, as data and as text. */
import pc from 'picocolors';
import { type MachineDescription, machineText } from '../doctor/machine.js';
import { plainTable } from '../plain-table.js';
import { type BenchCase, type BenchRatio, type BenchResult, type BenchTable, meetsGoal } from './bench.js';
import type { MachineLoad } from './idle.js';
import type { BenchName } from './registry.js';

export interface BenchReport {
  readonly date: string;
  readonly machine: MachineDescription;
  /** Somebody else was computing before or after: the figures are not to be quoted. */
  readonly busy: boolean;
  readonly quick: boolean;
  readonly load: { readonly before: MachineLoad; readonly after: MachineLoad };
  readonly results: readonly BenchResult[];
  readonly unavailable: readonly { readonly name: BenchName; readonly reason: string }[];
}

/** `(goal: at least 3, met)`; nothing where there is no goal, or where figures mean nothing. */
function promiseOf(ratio: BenchRatio, quick: boolean): string {
  const { goal } = ratio;
  if (goal === undefined || quick) return '';
  const verdict = meetsGoal(ratio) === true ? pc.green('met') : pc.red('MISSED');
  return ` (goal: at ${goal.at} ${goal.value}, ${verdict})`;
}

function caseLines({ name: bench }: BenchResult, one: BenchCase, quick: boolean): string[] {
  const lines = [
    `${pc.bold(bench)}: ${one.name}: median ${figure(one.median)} ${one.unit}, spread ${(one.spread * 100).toFixed(0)} % of ${one.samples} runs`,
    ...one.ratios.map((ratio) => `  ${figure(ratio.value)} ${ratio.name}${promiseOf(ratio, quick)}`),
  ];
  const detail = Object.entries(one.detail).map(
    ([key, value]) => `${key} ${typeof value === 'number' ? figure(value) : value}`,
  );
  if (detail.length > 0) lines.push(pc.dim(`  ${detail.join(', ')}`));
  return lines;
}

function tableLines({ title, rows }: BenchTable): string[] {
  const table = plainTable(rows[0]?.map((_, column) => (column === 0 ? 'left' : 'right')));
  for (const row of rows) table.push(row.map((cell) => (typeof cell === 'number' ? figure(cell) : cell)));
  const lines = table.toString().split('\n');
  return [pc.bold(title), ...lines.map((line) => line.trimEnd()), ''];
}

/** What is promised, and whether it is kept. */
function goalLines({ name: bench, cases }: BenchResult): string[] {
  return cases.flatMap((one) =>
    one.ratios
      .filter((ratio) => ratio.goal !== undefined)
      .map((ratio) => `${pc.bold(bench)}: ${one.name}: ${figure(ratio.value)} ${ratio.name}${promiseOf(ratio, false)}`),
  );
}

export function reportText(report: BenchReport): string {
  const lines: string[] = [];
  for (const result of report.results) {
    if (result.tables === undefined) {
      for (const one of result.cases) lines.push(...caseLines(result, one, report.quick));
    } else {
      for (const table of result.tables) lines.push(...tableLines(table));
      if (!report.quick) lines.push(...goalLines(result));
    }
    for (const note of result.notes ?? []) lines.push(`${pc.bold(result.name)}: ${note}`);
  }
  for (const { name, skipped } of report.results)
    for (const what of skipped ?? []) lines.push(`${pc.bold(name)}: not measured: ${what}`);
  for (const { name, reason } of report.unavailable) lines.push(`${pc.bold(name)}: not available: ${reason}`);
  lines.push('', `${machineText(report.machine)}; ${report.date}`);
  if (report.quick) lines.push(pc.yellow('quick sizes: these figures mean nothing'));
  if (report.busy) lines.push(pc.yellow('busy: true; other work ran beside the benchmark, do not quote these figures'));
  return `${lines.join('\n')}\n`;
}

/** Integers as they are, else four significant digits. */
function figure(value: number): string {
  return Number.isInteger(value) ? String(value) : value >= 1000 ? value.toFixed(0) : value.toPrecision(4);
}
