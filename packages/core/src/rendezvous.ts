/** The handshake at set-up: all ranks show what they are, and all find the same odd one out. */
import { createHash } from 'node:crypto';
import { availableParallelism, endianness, hostname } from 'node:os';
import { publish } from './diagnostics.js';
import { checkObject, EpError, invalid } from './errors.js';
import { comersOf, gather, type Meeting, type MeetingKind, type MeetingOptions } from './exchange.js';
import { formatRanks } from './ranks.js';
import type { Store } from './store.js';
import type { Rank } from './transport.js';

export type Fact = string | number | boolean;
export type FactTable = Readonly<Record<string, Fact>>;

/** What a rank publishes. */
export interface Facts {
  /** Must be the same on all ranks: versions, ABI, the digest of the configuration. */
  readonly agree: FactTable;
  /** May differ: shown to the other ranks, and in messages. `hostFacts()` unless given. */
  readonly host?: FactTable;
}

/** What one rank published. */
export interface PeerFacts {
  readonly rank: Rank;
  readonly agree: FactTable;
  readonly host: FactTable;
}

/** Bumped when what ranks write into the store changes. */
const PROTOCOL = 1;

export function hostFacts(): FactTable {
  return {
    host: hostname(),
    pid: process.pid,
    node: process.version,
    cpu: process.arch,
    cores: availableParallelism(),
  };
}

/** The same text for equal configurations, whatever the order of their keys. Takes what JSON takes, and bigints; absent is `undefined`. */
export function configurationDigest(configuration: unknown): string {
  const canonical = (value: unknown): string => {
    if (typeof value === 'bigint') return `${value}n`;
    if (typeof value === 'function' || typeof value === 'symbol' || ArrayBuffer.isView(value)) {
      throw invalid('configuration', {
        where: 'configurationDigest',
        expected: 'made of JSON values and bigints',
        found: value,
      });
    }
    if (Array.isArray(value)) return `[${value.map(canonical).join()}]`;
    if (typeof value !== 'object' || value === null) return JSON.stringify(value) ?? 'null';
    const entries = Object.entries(value).filter(([, inner]) => inner !== undefined);
    entries.sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${entries.map(([key, inner]) => `${JSON.stringify(key)}:${canonical(inner)}`).join()}}`;
  };
  return createHash('sha256').update(canonical(configuration)).digest('hex').slice(0, 16);
}

/** Whether somebody else's value is one. */
export const isFactTable = (value: unknown): value is FactTable =>
  typeof value === 'object' &&
  value !== null &&
  !Array.isArray(value) &&
  Object.values(value).every((fact) => ['string', 'number', 'boolean'].includes(typeof fact));

/** What a rank published, and, where not all ranks come, who it is; undefined for bytes that no rank of this version publishes. */
export function parseFacts(bytes: Uint8Array): (Omit<PeerFacts, 'rank'> & { readonly rank?: Rank }) | undefined {
  try {
    const { agree, host, rank } = JSON.parse(new TextDecoder().decode(bytes)) as Record<string, unknown>;
    if (!isFactTable(agree) || !isFactTable(host)) return undefined;
    if (rank === undefined) return { agree, host };
    return Number.isSafeInteger(rank) && (rank as number) >= 0 ? { agree, host, rank: rank as Rank } : undefined;
  } catch {
    return undefined;
  }
}

const RENDEZVOUS: MeetingKind = {
  name: 'rendezvous',
  missing: 'EP_RENDEZVOUS',
  conflict: 'EP_RENDEZVOUS',
  author(part) {
    const host = parseFacts(part)?.host;
    return host === undefined ? 'somebody of another version' : `process ${host.pid} on ${host.host}`;
  },
};

interface Camp {
  readonly value: Fact | undefined;
  readonly ranks: readonly Rank[];
}

function campsOf(peers: readonly PeerFacts[], field: string): readonly Camp[] {
  const camps = new Map<Fact | undefined, Rank[]>();
  for (const { rank, agree } of peers) {
    const value = Object.hasOwn(agree, field) ? agree[field] : undefined;
    const ranks = camps.get(value);
    if (ranks === undefined) camps.set(value, [rank]);
    else ranks.push(rank);
  }
  return [...camps].map(([value, ranks]) => ({ value, ranks })).sort((a, b) => b.ranks.length - a.ranks.length);
}

const show = (value: Fact | undefined): string => (value === undefined ? 'nothing' : JSON.stringify(value));

/** Throws `EP_RENDEZVOUS` unless all agree: names the fields that differ and the ranks outside of the majority, or all camps if there is none. */
export function compareFacts(peers: readonly PeerFacts[]): void {
  if (!Array.isArray(peers)) throw invalid('peers', { where: 'compareFacts', expected: 'a list', found: peers });
  const fields = [...new Set(peers.flatMap(({ agree }) => Object.keys(agree)))].sort();
  const odd = new Set<Rank>();
  const differences: string[] = [];
  const found: Record<string, readonly Camp[]> = {};
  for (const field of fields) {
    const camps = campsOf(peers, field);
    const [largest, ...others] = camps;
    if (largest === undefined || others.length === 0) continue;
    found[field] = camps;
    const majority = 2 * largest.ranks.length > peers.length;
    for (const { ranks } of majority ? others : camps) for (const rank of ranks) odd.add(rank);
    const shown = (majority ? others : camps).map(({ value, ranks }) => `${show(value)} on ${formatRanks(ranks)}`);
    const rest = majority ? `, ${show(largest.value)} on the other ${largest.ranks.length}` : '';
    differences.push(`${field} is ${shown.join(', ')}${rest}`);
  }
  if (differences.length === 0) return;
  throw new EpError(
    'EP_RENDEZVOUS',
    `rendezvous: ${formatRanks(odd)} of ${peers.length} differ: ${differences.join('; ')}`,
    {
      context: { ranks: [...odd].sort((a, b) => a - b), fields: found },
    },
  );
}

async function meet(
  store: Store,
  meeting: Meeting & { readonly facts: Facts },
  options: MeetingOptions,
): Promise<readonly PeerFacts[]> {
  const { rank, worldSize, ranks, facts } = meeting;
  checkObject(facts, 'facts', 'an object with agree', 'rendezvous');
  const agree = {
    ...facts.agree,
    'rendezvous protocol': PROTOCOL,
    'world size': worldSize,
    'byte order': endianness(),
    ...(ranks && { 'active ranks': ranks.join(' ') }),
  };
  const host = facts.host ?? hostFacts();
  if (!isFactTable(agree) || !isFactTable(host)) {
    throw invalid('facts', { where: 'rendezvous', expected: 'tables of strings, numbers and booleans', found: facts });
  }
  const part = new TextEncoder().encode(JSON.stringify({ agree, host, ...(ranks && { rank }) }));
  const parts = await gather(store, { ...meeting, part, fetchParts: true }, RENDEZVOUS, options);
  const comers = comersOf(meeting);
  const peers = parts.map((bytes, at): PeerFacts => {
    const peer = comers[at] ?? at;
    const parsed = parseFacts(bytes);
    if (parsed !== undefined) return { rank: peer, ...parsed };
    throw new EpError('EP_RENDEZVOUS', `rendezvous: rank ${peer} published facts in the form of another version`, {
      context: { ranks: [peer] },
    });
  });
  // The lowest rank collects as many as it believes in: a rank beyond them compares itself with what was collected.
  compareFacts(peers.some((peer) => peer.rank === rank) ? peers : [...peers, { rank, agree, host }]);
  return peers;
}

/**
 * Collective. Returns what every rank that comes published, in their order. Throws `EP_RENDEZVOUS` on every rank alike, naming the odd ranks: facts that differ (with
 * the field and both values), two processes with one rank, ranks that did not come within `timeoutMs`, a rank that was aborted. `key` serves
 * once; give another one for the next rendezvous on the same store.
 */
export async function rendezvous(
  store: Store,
  member: Omit<Meeting, 'key'> & { readonly facts: Facts; readonly key?: string },
  options: MeetingOptions = {},
): Promise<readonly PeerFacts[]> {
  checkObject(member, 'member', 'an object with rank, worldSize and facts', 'rendezvous');
  const { rank, worldSize } = member;
  const begin = performance.now();
  const report = (error?: unknown): void =>
    publish('ep:rendezvous', () => ({
      rank,
      worldSize,
      durationMs: performance.now() - begin,
      ...(error === undefined ? {} : { error }),
    }));
  try {
    const peers = await meet(store, { key: 'rendezvous', ...member }, options);
    report();
    return peers;
  } catch (error) {
    report(error);
    throw error;
  }
}
