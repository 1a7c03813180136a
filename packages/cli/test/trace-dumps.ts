/** Dumps of flight recorders as ranks would write them, made by hand. */
import type { CallKind, TraceDump, TraceEntry, TraceGroup } from '@ep/collectives/trace';

/** When the dumps of these tests are made, by the machine's clock. */
export const made = 1_000_000;
export const wall = 1_790_000_000_000_000;

export interface Call extends Partial<TraceEntry> {
  readonly kind?: CallKind;
}

export const reduce: Call = {
  kind: 'all-reduce',
  op: 'allReduce',
  dtype: 'f32',
  elements: 8,
  bytes: 32,
  reduceOp: 'sum',
};
export const send = (peer: number, tag: number, state: TraceEntry['state'] = 'started'): Call => ({
  kind: 'send',
  op: 'send',
  elements: 4,
  bytes: 4,
  peer,
  tag,
  state,
});
export const recv = (peer: number, tag: number, state: TraceEntry['state'] = 'started'): Call => ({
  ...send(peer, tag, state),
  kind: 'recv',
  op: 'recv',
});

/** Barriers, numbered in the order of their group, made a millisecond apart and ended 100 us later unless they say otherwise. */
export function entriesOf(calls: readonly Call[]): TraceEntry[] {
  const numbers = new Map<string, number>();
  return calls.map((call, i) => {
    const group = call.group ?? 'world';
    const counter = call.kind === 'send' || call.kind === 'recv' ? `${group} messages` : group;
    const sequence = call.sequence ?? (numbers.get(counter) ?? 0) + 1;
    numbers.set(counter, sequence);
    const queuedUs = 500_000 + 1000 * i;
    const ended = call.state === undefined || call.state === 'done' || call.state === 'failed';
    return {
      group,
      kind: 'barrier',
      op: 'barrier',
      dtype: 'u8',
      elements: 0,
      bytes: 0,
      state: 'done',
      queuedUs,
      startedUs: queuedUs,
      endedUs: ended ? queuedUs + 100 : null,
      ...call,
      sequence,
    };
  });
}

export function groupOf(
  name: string,
  ranks: readonly number[],
  rank: number,
  entries: readonly TraceEntry[],
): TraceGroup {
  const own = entries.filter((entry) => entry.group === name && entry.kind !== 'send' && entry.kind !== 'recv');
  const ended = own.filter((entry) => entry.endedUs !== null);
  const most = (of: readonly TraceEntry[]) => Math.max(0, ...of.map((entry) => entry.sequence));
  return {
    name,
    ranks,
    rank: ranks.indexOf(rank),
    epoch: 1,
    active: ranks.map((_, i) => i),
    closed: false,
    entered: most(own),
    ended: most(ended),
  };
}

export interface DumpOptions {
  readonly size?: number;
  readonly groups?: readonly (readonly [string, readonly number[]])[];
  readonly group?: Partial<TraceGroup>;
  readonly fields?: Partial<TraceDump>;
}

export function dumpOf(rank: number, calls: readonly Call[], options: DumpOptions = {}): TraceDump {
  const { size = 4, group, fields } = options;
  const entries = entriesOf(calls);
  const groups = options.groups ?? [['world', Array.from({ length: size }, (_, i) => i)]];
  return {
    format: 'ep-flight-recorder',
    version: 1,
    reason: 'signal',
    world: 'world',
    rank,
    size,
    process: { pid: 100 + rank, thread: 0, host: 'here', boot: 'b00t' },
    clock: { monotonicUs: made, wallUs: wall },
    capacity: 1000,
    recorded: entries.length,
    groups: groups.map(([name, ranks]) => ({ ...groupOf(name, ranks, rank, entries), ...group })),
    entries,
    ...fields,
  };
}
