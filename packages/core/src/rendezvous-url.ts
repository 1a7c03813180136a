/** From `env://`, `tcp://` or `file://` to a store and this rank's place among the others. */
import { fileURLToPath } from 'node:url';
import { type Environment, type LaunchEnv, readLaunchEnv } from './env.js';
import { checkInteger, EpError, invalid, isEpError } from './errors.js';
import type { MeetingOptions } from './exchange.js';
import { MOST_WORLD_SIZE } from './ranks.js';
import { type Facts, type PeerFacts, rendezvous } from './rendezvous.js';
import { type JobSecret, resolveJobSecret } from './secret.js';
import type { Store } from './store.js';
import { openFileStore } from './stores/file.js';
import { openTcpStore } from './stores/tcp/open.js';
import { TcpStore } from './stores/tcp/store.js';
import type { Rank } from './transport.js';

const WHERE = 'rendezvous';
/** How long the rank that holds the server lets the others read why the meeting failed. */
const LINGER_MS = 2000;

export interface OpenRendezvousOptions extends MeetingOptions {
  /** For `tcp://` and `file://` where the URL has no `rank` and `world_size`. */
  readonly rank?: Rank;
  readonly worldSize?: number;
  /** What all ranks must agree on, beside the versions of the handshake. */
  readonly facts?: Facts;
  /**
   * False where ranks of other programs take part that do not know our handshake, such as PyTorch's: then nobody is awaited by name, rank 0 only
   * counts who joins. True unless given.
   */
  readonly handshake?: boolean;
  /** Where the rank that holds a TCP store listens; EP_STORE_BIND unless given, and loopback without that. */
  readonly bind?: string;
  /** For a TCP store, as `openTcpStore` takes it; that of the environment unless given. torchrun's own store has none. */
  readonly secret?: JobSecret;
  readonly env?: Environment;
}

export interface OpenedRendezvous {
  /** The store itself, without a prefix. To be closed by the caller; where this rank holds the server, after the others: `TcpStore.othersLeft`. */
  readonly store: Store;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly localRank?: number;
  readonly localWorldSize?: number;
  /** What every rank published, by rank; absent without the handshake. */
  readonly peers?: readonly PeerFacts[];
}

const EXPECTED =
  'env://, tcp://<host>:<port> or file://<absolute path>, each with ?rank=<r>&world_size=<n> where needed';

/** The place that the URL or the options name; both may, if they say the same. */
function placeOf(url: URL, name: 'rank' | 'world_size', option: number | undefined): number | undefined {
  const text = url.searchParams.get(name);
  if (text === null) return option;
  const value = /^\d{1,16}$/.test(text) ? Number(text) : Number.NaN;
  if (Number.isNaN(value))
    throw invalid(`${name} of the URL`, { where: WHERE, expected: 'a decimal integer', found: text });
  if (option !== undefined && option !== value)
    throw invalid(name, { where: WHERE, expected: `${value}, as in the URL`, found: option });
  return value;
}

/** Undefined where escapes stand for what no path can hold. */
function pathOf(url: URL): string | undefined {
  try {
    const path = fileURLToPath(new URL(url.pathname, 'file:///'));
    return path.includes('\0') ? undefined : path;
  } catch {
    return undefined;
  }
}

function addressOf(url: URL, text: string): LaunchEnv['store'] {
  const bare = url.username === '' && url.password === '' && url.hash === '';
  const port = Number(url.port);
  if (bare && url.protocol === 'tcp:' && url.hostname !== '' && port >= 1 && /^\/?$/.test(url.pathname))
    return { kind: 'tcp', host: url.hostname.replace(/[[\]]/g, ''), port };
  const path = bare && url.protocol === 'file:' && url.host === '' && url.pathname !== '/' ? pathOf(url) : undefined;
  if (path !== undefined) return { kind: 'file', path };
  throw invalid('url', { where: WHERE, expected: EXPECTED, found: text });
}

/** Where the ranks meet and who this is. Throws `EP_INVALID_ARGUMENT` naming the part that is wrong. */
export function parseRendezvousUrl(text: string, options: OpenRendezvousOptions = {}): LaunchEnv {
  let url: URL | undefined;
  if (typeof text === 'string' && /^(?:env|tcp|file):\/\//.test(text) && URL.canParse(text)) url = new URL(text);
  if (url === undefined) throw invalid('url', { where: WHERE, expected: EXPECTED, found: text });
  const unknown = [...url.searchParams.keys()].find((name) => name !== 'rank' && name !== 'world_size');
  if (unknown !== undefined)
    throw invalid('url', {
      where: WHERE,
      expected: 'without parameters other than rank and world_size',
      found: unknown,
    });
  const rank = placeOf(url, 'rank', options.rank);
  const worldSize = placeOf(url, 'world_size', options.worldSize);
  if (url.protocol === 'env:') {
    if (url.host !== '' || !/^\/?$/.test(url.pathname))
      throw invalid('url', { where: WHERE, expected: EXPECTED, found: text });
    const env = options.env ?? process.env;
    const given = {
      ...(rank !== undefined && { RANK: `${rank}` }),
      ...(worldSize !== undefined && { WORLD_SIZE: `${worldSize}` }),
    };
    return readLaunchEnv({ ...env, ...given });
  }
  const size = checkInteger(worldSize, 'world_size', WHERE, 1, MOST_WORLD_SIZE);
  return { rank: checkInteger(rank, 'rank', WHERE, 0, size - 1), worldSize: size, store: addressOf(url, text) };
}

/** Says which rank it is about, where the store's own error only knows an address. */
function explain(error: unknown, { rank, worldSize, storeOfLauncher }: LaunchEnv): unknown {
  if (!isEpError(error)) return error;
  const fail = (ranks: readonly Rank[], what: string): EpError =>
    new EpError('EP_RENDEZVOUS', `${WHERE}: ${what}: ${error.message}`, {
      context: { ...error.context, ranks, worldSize },
      cause: error,
    });
  if (rank === 0 && error.native?.name === 'EADDRINUSE')
    return fail([0], 'the address of rank 0 is taken: two processes run as rank 0, or another program listens there');
  if (error.code !== 'EP_TIMEOUT' && error.code !== 'EP_PEER_LOST') return error;
  if (storeOfLauncher !== undefined) return fail([], "the launcher's store did not answer");
  return rank === 0 ? error : fail([0], `rank 0 of ${worldSize}, which holds the store, did not come or has left`);
}

async function openStore(place: LaunchEnv, options: OpenRendezvousOptions): Promise<Store> {
  const { store: address, rank, worldSize, storeOfLauncher } = place;
  if (address.kind === 'file') return openFileStore(address.path);
  const bind = options.bind ?? ((options.env ?? process.env).EP_STORE_BIND || undefined);
  const { host, port } = address;
  // What torchrun's agent serves is PyTorch's.
  const secret = storeOfLauncher === 'torchrun' ? 'none' : resolveJobSecret(options.secret, options.env);
  return openTcpStore({
    host,
    port,
    worldSize,
    isServer: rank === 0 && storeOfLauncher === undefined,
    // With the handshake the ranks that are missing are named; the counter could only say how many.
    waitForWorkers: options.handshake === false,
    ...(bind !== undefined && { bind }),
    ...(secret !== undefined && { secret }),
    ...(options.timeoutMs !== undefined && { timeoutMs: options.timeoutMs }),
    ...(options.signal && { signal: options.signal }),
  });
}

/**
 * Collective. Opens the store that the URL names and meets the other ranks there.
 *
 * - `env://`: what the launcher has set, see `readLaunchEnv`: torchrun, Open MPI, Slurm; MASTER_ADDR and MASTER_PORT, or EP_STORE.
 * - `tcp://host:port?rank=r&world_size=n`: rank 0 holds the server, unless torchrun's agent does (`env://` only).
 * - `file:///path?rank=r&world_size=n`: a file that all ranks see and that no earlier run has used.
 *
 * Throws `EP_RENDEZVOUS` on every rank that came, naming the ranks that are missing, came when the others had given up, or exist twice.
 */
export async function openRendezvous(url: string, options: OpenRendezvousOptions = {}): Promise<OpenedRendezvous> {
  const place = parseRendezvousUrl(url, options);
  const { rank, worldSize, localRank, localWorldSize, restarts = 0 } = place;
  const opened = {
    rank,
    worldSize,
    ...(localRank !== undefined && { localRank }),
    ...(localWorldSize !== undefined && { localWorldSize }),
  };
  let store: Store | undefined;
  try {
    store = await openStore(place, options);
    if (options.handshake === false) return { store, ...opened };
    // The agent's store outlives an attempt: what was collected then must not count now.
    const key = `ep/rendezvous/${restarts}`;
    const peers = await rendezvous(store, { rank, worldSize, key, facts: options.facts ?? { agree: {} } }, options);
    return { store, ...opened, peers };
  } catch (error) {
    if (store instanceof TcpStore && !(options.signal?.aborted ?? false))
      await store.othersLeft({ timeoutMs: LINGER_MS });
    await store?.close();
    throw explain(error, place);
  }
}
