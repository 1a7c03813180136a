/** A merged report as text. */
import pc from 'picocolors';
import type { Finding } from './findings.js';
import type { CallReport, RankReport, Skew, WorldReport } from './merge.js';
import { countText, durationText, nameText, ranksText } from './words.js';

export function reportText(reports: readonly WorldReport[], older: readonly string[]): string {
  const lines = reports.flatMap(worldLines);
  if (older.length > 0) lines.push(pc.dim(`left out, as the same ranks have newer ones: ${older.join(', ')}`), '');
  return lines.join('\n');
}

function worldLines(report: WorldReport): string[] {
  const dumps = report.ranks.filter((rank) => rank.dump).length;
  const { findings, skews } = report;
  const verdict =
    findings.length === 0 ? pc.green('nothing differs') : pc.red(countText(findings.length, 'difference'));
  return [
    `${pc.bold(nameText(report.world))}: ${countText(report.size, 'rank')}, ${countText(dumps, 'dump')}: ${verdict}`,
    ...findings.map((finding) => `  ${kindText(finding)} ${finding.text}`),
    ...causeLines(report.ranks),
    '',
    'where each rank was',
    ...columns(report.ranks.map((rank) => [`  rank ${rank.rank}`, whereText(rank)])),
    '',
    ...skewLines(skews, report),
    ...report.ranks.flatMap((rank) => timelineLines(rank, report)),
  ];
}

const kindText = ({ kind }: Finding): string => pc.bold(`${kind}:`);

/** What errors said, once for all ranks to which they said the same. */
function causeLines(ranks: readonly RankReport[]): string[] {
  const said = new Map<string, number[]>();
  for (const rank of ranks) {
    if (!rank.dump || rank.cause === undefined) continue;
    const text = `${oneLine(rank.cause.message)} [${nameText(rank.cause.code)}]`;
    said.set(text, [...(said.get(text) ?? []), rank.rank]);
  }
  return [...said].map(([text, of]) => `  ${pc.dim(`${ranksText(of)} said:`)} ${text}`);
}

// biome-ignore lint/suspicious/noControlCharactersInRegex: a message may hold what others wrote; it must not steer the terminal.
const oneLine = (text: string): string => text.replace(/[\u0000-\u001f\u007f-\u009f]+/g, ' ').slice(0, 500);

function whereText(rank: RankReport): string {
  if (!rank.dump) return pc.yellow('no dump');
  const made = pc.dim(
    `(dump by ${rank.reason}, pid ${rank.pid}${rank.thread === 0 ? '' : ` thread ${rank.thread}`}, ${nameText(rank.host)})`,
  );
  const now = rank.underWay;
  if (now !== undefined) {
    const since = now.queuedUs === null ? '' : `, ${durationText(rank.dumpedUs - now.queuedUs)} after it was called`;
    return `in ${placeText(now)}${since} ${made}`;
  }
  const last = rank.last;
  return last === undefined
    ? `in no call ${made}`
    : `in no call; last was ${placeText(last)}, ${endText(last)} ${made}`;
}

const placeText = ({ group, kind, sequence, call }: CallReport): string =>
  kind === 'send' || kind === 'recv'
    ? `${call} of ${nameText(group)}`
    : `call ${sequence} of ${nameText(group)}, ${call}`;

function endText({ state, code, queuedUs, endedUs }: CallReport): string {
  const took = queuedUs === null || endedUs === null ? '' : ` after ${durationText(endedUs - queuedUs)}`;
  switch (state) {
    case 'done':
      return `ended${took}`;
    case 'failed':
    case 'aborted':
      return pc.red(`${state} with ${nameText(code ?? 'an unknown error')}${took}`);
    default:
      return state === 'queued' ? 'queued' : 'under way';
  }
}

function skewLines(skews: readonly Skew[], report: WorldReport): string[] {
  if (skews.length === 0) return [];
  const caveat = report.clock === 'wall' ? ' (clocks of several machines, as they are set)' : '';
  return [
    `slowest entry, of calls that ended on all ranks${caveat}`,
    ...skews.map(
      ({ group, sequence, call, us, first, last, calls }) =>
        `  call ${sequence} of ${nameText(group)}, ${call}: rank ${last} came ${Math.round(us)} us after rank ${first} (${countText(calls, 'call')} compared)`,
    ),
    '',
  ];
}

/** Times count back from the last dump. */
function timelineLines(rank: RankReport, report: WorldReport): string[] {
  if (!rank.dump || rank.calls.length === 0) return [];
  const end = Math.max(...report.ranks.map((one) => (one.dump ? one.dumpedUs : 0)));
  const rows = rank.calls.map((call) => [
    call.queuedUs === null ? '' : `${((call.queuedUs - end) / 1000).toFixed(3)} ms`,
    nameText(call.group),
    String(call.sequence),
    call.call,
    endText(call),
  ]);
  return [pc.bold(`rank ${rank.rank}`), ...columns(rows, [true, false, true, false, false], '  '), ''];
}

/** Cells side by side; the last may hold colours, whose width does not count. */
function columns(rows: readonly (readonly string[])[], right: readonly boolean[] = [], indent = ''): string[] {
  const widths = (rows[0] ?? []).map((_, i) => Math.max(...rows.map((row) => row[i]!.length)));
  return rows.map((row) => {
    const cells = row.map((cell, i) => {
      if (i === row.length - 1) return cell;
      return right[i] === true ? cell.padStart(widths[i]!) : cell.padEnd(widths[i]!);
    });
    return `${indent}${cells.join('  ')}`;
  });
}
