/** What the nodes of a job say of themselves and tell each other, in words that the store holds for them, and which node gets which ranks. */
import { randomUUID } from 'node:crypto';
import { EpError } from '@ep/core';

export interface NodeSpec {
  readonly host: string;
  readonly ranks: number;
}

/** What a node says of itself when it joins. */
export interface NodeRecord extends NodeSpec {
  readonly id: string;
  /** Its place among the nodes, where the hosts are listed. */
  readonly index?: number;
  readonly holdsStore: boolean;
  /** Its end of the connection to the store, as it sees it. */
  readonly connection?: string;
  /** Free on this host, for MASTER_PORT if rank 0 is here. */
  readonly port: number;
  /** The same on all nodes: each counts for itself, and they would part. */
  readonly maxRestarts: number;
}

export interface PlannedNode extends NodeRecord {
  readonly firstRank: number;
}

export interface JobPlan {
  readonly nodes: readonly PlannedNode[];
  readonly worldSize: number;
}

/** Why an attempt ended before its ranks had. */
export interface Failure {
  readonly code: number;
  readonly text: string;
  /** Somebody asked for the end: nothing is started again. */
  readonly stopped?: boolean;
}

/** What the node that holds the store tells the others. */
export type Met = JobPlan | { readonly error: string } | { readonly failure: Failure };

const isText = (value: unknown): value is string => typeof value === 'string';
const isInteger = (value: unknown, min: number, max: number): value is number =>
  Number.isInteger(value) && (value as number) >= min && (value as number) <= max;
const isCount = (value: unknown): value is number => isInteger(value, 0, 1_000_000);
const isOptional = (value: unknown, is: (value: unknown) => boolean): boolean => value === undefined || is(value);

function fieldsOf<T>(value: unknown): { readonly [K in keyof T]?: unknown } {
  return typeof value === 'object' && value !== null ? value : {};
}

function isRecord(value: unknown): value is NodeRecord {
  const { id, host, ranks, index, holdsStore, connection, port, maxRestarts } = fieldsOf<NodeRecord>(value);
  return (
    [id, host].every(isText) &&
    isInteger(ranks, 1, 2 ** 20) &&
    isInteger(port, 1, 65_535) &&
    isCount(maxRestarts) &&
    typeof holdsStore === 'boolean' &&
    isOptional(index, (one) => isInteger(one, 0, 65_535)) &&
    isOptional(connection, isText)
  );
}

function isFailure(value: unknown): value is Failure {
  const { code, text, stopped } = fieldsOf<Failure>(value);
  return isInteger(code, 0, 255) && isText(text) && isOptional(stopped, (one) => typeof one === 'boolean');
}

function isMet(value: unknown): value is Met {
  const { error, failure, nodes, worldSize } = fieldsOf<{ error: 0; failure: 0; nodes: 0; worldSize: 0 }>(value);
  if (error !== undefined) return isText(error);
  if (failure !== undefined) return isFailure(failure);
  const isPlanned = (one: unknown) => isRecord(one) && isInteger(fieldsOf<PlannedNode>(one).firstRank, 0, 2 ** 20);
  return Array.isArray(nodes) && nodes.length > 0 && nodes.every(isPlanned) && isInteger(worldSize, 1, 2 ** 30);
}

/** HAZARD: ranks have the same store, and a program may have written there what it likes. Throws `EP_RENDEZVOUS` that names the key. */
function reading<T>(what: string, is: (value: unknown) => value is T): (key: string, value: Uint8Array) => T {
  return (key, value) => {
    let found: unknown;
    try {
      found = JSON.parse(new TextDecoder().decode(value));
      if (is(found)) return found;
    } catch {
      // Below, as any other that is none.
    }
    throw new EpError(
      'EP_RENDEZVOUS',
      `ep run: ${JSON.stringify(key)} in the store of the job holds ${value.byteLength} bytes that are not ${what}: another program writes there`,
      { context: { key, byteLength: value.byteLength } },
    );
  };
}

export const bytes = (value: unknown): Uint8Array => new TextEncoder().encode(JSON.stringify(value));
export const readId = reading('the id of a job', isText);
/** Of an attempt, or a status. */
export const readNumber = reading('a number', isCount);
export const readRecord = reading('what a node says of itself', isRecord);
export const readFailure = reading('why a job ended', isFailure);
export const readMet = reading('a plan', isMet);

export function recordOf(
  spec: NodeSpec & { readonly maxRestarts: number },
  port: number,
  holdsStore: boolean,
  index: number | undefined,
): NodeRecord {
  return { ...spec, id: randomUUID(), port, holdsStore, ...(index !== undefined && { index }) };
}

/** Ranks in the order of the list, or else of joining, beginning on the node that holds the store. Throws `EP_RENDEZVOUS` for nodes that cannot be one job. */
export function planNodes(records: readonly NodeRecord[], hosts: readonly NodeSpec[] | undefined): JobPlan {
  const order = (one: NodeRecord): number => one.index ?? (one.holdsStore ? -1 : 0);
  const sorted = [...records].sort((a, b) => order(a) - order(b));
  checkPlaces(sorted, hosts);
  for (const one of sorted) checkRestarts(one, sorted[0]!);
  let firstRank = 0;
  const nodes = sorted.map((one): PlannedNode => {
    const planned = { ...one, firstRank };
    firstRank += one.ranks;
    return planned;
  });
  return { nodes, worldSize: firstRank };
}

/** Throws unless each place was given to one node, in a list that is the same for all or by --node-rank, or no node was given any. */
function checkPlaces(sorted: readonly NodeRecord[], hosts: readonly NodeSpec[] | undefined): void {
  if (hosts === undefined && sorted.every(({ index }) => index === undefined)) return;
  const sound = sorted.every(
    ({ index, ranks }, at) => index === at && (hosts === undefined || hosts[at]?.ranks === ranks),
  );
  if (sound) return;
  const seen = sorted.map(
    ({ index, host, ranks }) => `${index ?? 'no --node-rank'} (${hosts === undefined ? host : `${host}:${ranks}`})`,
  );
  const wanted =
    hosts === undefined
      ? `have --node-rank 0 to ${sorted.length - 1}, each once, or none at all`
      : `fit the list ${hosts.map(({ host, ranks }) => `${host}:${ranks}`).join(',')} of the one that holds the store`;
  throw new EpError('EP_RENDEZVOUS', `ep run: the nodes do not ${wanted}: ${seen.join(', ')} came`, {
    context: { nodes: sorted.map(({ host, index }) => ({ host, index })) },
  });
}

/** Throws `EP_RENDEZVOUS`. */
export function checkRestarts(one: NodeRecord, other: NodeRecord): void {
  if (one.maxRestarts === other.maxRestarts) return;
  const [here, there] = [other, one].map(({ maxRestarts, host }) => `${maxRestarts} on ${host}`);
  throw new EpError('EP_RENDEZVOUS', `ep run: --max-restarts is ${here} and ${there}: give the same on all hosts`);
}
