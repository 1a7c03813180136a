/** The nodes of a job that runs on several hosts: how they find each other, who is which, and how each learns of the others' ends. */
import { randomUUID } from 'node:crypto';
import { lookup } from 'node:dns/promises';
import { isIPv4, isIPv6 } from 'node:net';
import { hostname, networkInterfaces } from 'node:os';
import { EpError, isEpError, listen, openTcpStore, prefixStore, type Store, type TcpStore } from '@ep/core';
import {
  bytes,
  type Failure,
  type JobPlan,
  type Met,
  type NodeRecord,
  type NodeSpec,
  type PlannedNode,
  planNodes,
  readFailure,
  readId,
  readMet,
  readNumber,
  readRecord,
} from './node-records.js';

/** How often a node says that it is there, and after how long without that it is lost. */
export const HEARTBEAT_MS = 1000;
export const LOST_MS = 15_000;
const LOOK_MS = 100;
/** How often the name of the rendezvous is looked up while another host is awaited there. */
const LOOKUP_MS = 1000;
/** HAZARD: ranks have the same store, and keys of any name: what launchers tell each other has a part of its own. */
const LAUNCHER = 'ep run';
/** Whoever reaches the port can come as often as he likes. */
const MOST_REFUSALS = 100;
const FOREVER = { timeoutMs: Number.POSITIVE_INFINITY } as const;

export interface Rendezvous {
  readonly host: string;
  readonly port: number;
}

/** The addresses that a name stands for. */
async function addressesOf(host: string): Promise<readonly string[]> {
  try {
    return (await lookup(host, { all: true })).map(({ address }) => address);
  } catch {
    return [];
  }
}

const isLoopback = (host: string): boolean =>
  host === 'localhost' || host === '::1' || /^(::ffff:)?127(\.\d{1,3}){3}$/i.test(host);

const ownAddresses = (): readonly string[] =>
  Object.values(networkInterfaces()).flatMap((all) => (all ?? []).map(({ address }) => address));

/** The address of this host that the name stands for, one that other hosts reach if there is any; undefined where it is another host's. */
export async function localAddressOf(host: string): Promise<string | undefined> {
  const own = new Set(ownAddresses());
  const local = (await addressesOf(host)).filter((address) => own.has(address) || isLoopback(address));
  return local.find((address) => !isLoopback(address)) ?? local[0];
}

/** Whether some of the hosts are beyond a loopback address. */
export async function spansHosts(hosts: readonly NodeSpec[]): Promise<boolean> {
  const found = await Promise.all(hosts.map(({ host }) => addressesOf(host)));
  return hosts.length > 1 && !found.every((addresses) => addresses.length > 0 && addresses.every(isLoopback));
}

/**
 * Where this host listens for a rendezvous at a name of its own; undefined where it is another's, or the name does not resolve. Throws `EP_INVALID_ARGUMENT` where other hosts are to come to
 * a name that stands for a loopback address here, and was not given as one.
 */
async function listenAddressOf({ host, port }: Rendezvous, others: Approach['others']): Promise<string | undefined> {
  const address = await localAddressOf(host);
  if (address === undefined || !isLoopback(address) || isLoopback(host) || !(await others())) return address;
  const better = ownAddresses().find((own) => isIPv4(own) && !isLoopback(own)) ?? '<address>';
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `ep run: --rdzv: on this host ${host} stands for ${address} (see /etc/hosts), where no other host gets: give an address of this host instead, on all hosts, for example --rdzv ${better}:${port}`,
    { context: { host, address } },
  );
}

/** Which entry of the list this host is. Throws `EP_INVALID_ARGUMENT` if that is none, or not clear. */
export async function indexOfThisHost(hosts: readonly NodeSpec[]): Promise<number> {
  const name = hostname();
  const found: number[] = [];
  for (const [index, { host }] of hosts.entries()) {
    if (host === name || host.split('.')[0] === name || (await localAddressOf(host)) !== undefined) found.push(index);
  }
  if (found.length === 1) return found[0]!;
  const listed = hosts.map(({ host }) => host).join(', ');
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `ep run: ${found.length === 0 ? 'none' : `${found.length}`} of the hosts ${listed} ${found.length > 1 ? 'are' : 'is'} this one (${name}): say which with --node-rank`,
  );
}

interface Joined {
  readonly number: number;
  readonly record: NodeRecord;
  /** The server knows its connection by the name that the node gives it: not so where addresses are translated on the way, and then nobody sees here that it closes. */
  readonly named: boolean;
}

/** How a node comes to the meeting. */
interface Approach {
  /** How long the nodes wait for each other. */
  readonly joinMs: number;
  /** Whether nodes of other hosts come, too. */
  readonly others: () => boolean | Promise<boolean>;
  readonly signal: AbortSignal;
}

/** One node's view of the job. Whoever can listen at the address of the rendezvous holds the store for all. */
export class NodeMeeting {
  readonly holdsStore: boolean;
  readonly #store: TcpStore;
  readonly #keys: Store;
  readonly #address: Rendezvous;

  readonly #joinBy: number;

  private constructor(store: TcpStore, holdsStore: boolean, address: Rendezvous, joinBy: number) {
    this.#joinBy = joinBy;
    this.#store = store;
    this.#keys = prefixStore(store, LAUNCHER);
    this.holdsStore = holdsStore;
    this.#address = address;
  }

  static async open(address: Rendezvous, { joinMs, others, signal }: Approach): Promise<NodeMeeting> {
    const end = performance.now() + joinMs;
    let taken = false;
    for (;;) {
      const bind = taken ? undefined : await listenAddressOf(address, others);
      if (bind !== undefined) {
        try {
          const store = await openTcpStore({ ...address, isServer: true, bind, timeoutMs: LOST_MS, signal });
          return new NodeMeeting(store, true, address, end);
        } catch (error) {
          // Another node of this host was first.
          if (!isEpError(error) || error.native?.name !== 'EADDRINUSE') throw error;
          taken = true;
        }
      }
      const limits = { timeoutMs: Math.max(0, end - performance.now()), signal };
      if (await untilHeld(address, taken, limits)) break;
    }
    // For joining others may take their time; later on nobody may be silent for longer than a node may.
    return new NodeMeeting(await openTcpStore({ ...address, timeoutMs: LOST_MS, signal }), false, address, end);
  }

  /**
   * On the node that holds the store: says of each host that was refused, for another secret, say, or that was not understood, why; once, since it may come again and again. Until the returned
   * function is called.
   */
  tellOfRefused(onNote: (text: string) => void): () => void {
    const { server } = this.#store;
    const own = server === undefined ? '' : `${isIPv6(server.host) ? `[${server.host}]` : server.host}:${server.port}`;
    const told = new Set<string>();
    return listen('ep:store:dropped', ({ server: at, peer, reason }) => {
      const text = `the store refused ${peer.replace(/:\d+$/, '')}: ${reason}`;
      if (at !== own || told.has(text) || told.size >= MOST_REFUSALS) return;
      told.add(text);
      onNote(text);
    });
  }

  /** On the node that holds the store: gives the job its id. */
  async openJob(): Promise<string> {
    const id = randomUUID();
    await this.#keys.set('job', bytes(id));
    return id;
  }

  /** The id of the job, the same on all nodes and in all attempts. Throws `EP_RENDEZVOUS` where the store is no launcher's. */
  async jobId(signal: AbortSignal): Promise<string> {
    return readId('job', await this.#ofLauncher('job', signal));
  }

  /** The attempt that is under way, or will be. */
  async attempt(signal: AbortSignal): Promise<number> {
    return readNumber('attempt', await this.#ofLauncher('attempt', signal));
  }

  /** What a launcher that holds the store writes as soon as it does. */
  async #ofLauncher(key: string, signal: AbortSignal): Promise<Uint8Array> {
    const timeoutMs = Math.max(HEARTBEAT_MS, Math.min(LOST_MS, this.#joinBy - performance.now()));
    try {
      return await this.#keys.get(key, { timeoutMs, signal });
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      const { host, port } = this.#address;
      throw new EpError(
        'EP_RENDEZVOUS',
        `ep run: the store at ${host}:${port} is held by something that is no ep run: it has told of no job within ${Math.round(timeoutMs)} ms; give --rdzv a port that nothing else listens at`,
        { context: { host, port, key, timeoutMs }, cause: error },
      );
    }
  }

  /** HAZARD: by the node that holds the store, once it has joined itself: of those that join, the first ones are taken, and without it there is nobody who ends the attempt. */
  async openAttempt(attempt: number): Promise<void> {
    await this.#keys.set(`${attempt}/open`, bytes(attempt));
    await this.#keys.set('attempt', bytes(attempt));
  }

  /** On the other nodes, for attempts after the first one. */
  async opened(attempt: number, timeoutMs: number, signal: AbortSignal): Promise<void> {
    try {
      await this.#keys.wait([`${attempt}/open`], { timeoutMs, signal });
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      const { host, port } = this.#address;
      throw new EpError(
        'EP_TIMEOUT',
        `ep run: the node that holds the store at ${host}:${port} did not begin attempt ${attempt} within ${timeoutMs} ms (--join-timeout and --grace): it still stops its ranks, or the network to it is down`,
        { context: { host, port, attempt, timeoutMs }, cause: error },
      );
    }
  }

  async join(attempt: number, own: NodeRecord): Promise<void> {
    const connection = this.#store.localAddress;
    const record: NodeRecord = { ...own, ...(connection !== undefined && { connection }) };
    const number = await this.#keys.add(`${attempt}/joined`, 1);
    await this.#keys.set(`${attempt}/node/${number - 1}`, bytes(record));
  }

  /**
   * On the node that holds the store: waits for `least` nodes, then `lastCallMs` for more, up to `most`, and tells all what came of it. Nodes whose connection was closed meanwhile are
   * not counted.
   */
  async gather(
    attempt: number,
    limits: { least: number; most: number; joinMs: number; lastCallMs: number; signal: AbortSignal },
    hosts: readonly NodeSpec[] | undefined,
  ): Promise<void> {
    const { least, most, joinMs, lastCallMs, signal } = limits;
    const begin = performance.now();
    const joined: Joined[] = [];
    let enoughAt: number | undefined;
    let there: readonly NodeRecord[];
    for (;;) {
      signal.throwIfAborted();
      if (await this.#keys.check([`${attempt}/failed`])) {
        await this.tell(attempt, { failure: await this.failure(attempt, signal) });
        return;
      }
      await this.#look(attempt, joined);
      there = joined.filter((one) => this.#isThere(one)).map(({ record }) => record);
      const now = performance.now();
      enoughAt = there.length < least ? undefined : (enoughAt ?? now);
      if (there.length >= most || (enoughAt !== undefined && now - enoughAt >= lastCallMs)) break;
      if (enoughAt === undefined && now - begin > joinMs) break;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
    if (there.length < least) {
      const came = there.map(({ host }) => host).join(', ');
      const left = joined.filter((one) => !this.#isThere(one)).map(({ record }) => record.host);
      const gone = left.length === 0 ? '' : `; gone again: ${left.join(', ')}`;
      await this.tell(attempt, {
        error: `${there.length} of ${least} nodes joined at ${this.#address.host}:${this.#address.port} within ${joinMs} ms: ${came}${gone}`,
      });
      return;
    }
    try {
      await this.tell(attempt, planNodes(there.slice(0, most), hosts));
    } catch (error) {
      await this.tell(attempt, { error: error instanceof Error ? error.message : String(error) });
    }
  }

  /** Who has joined since. A node counts itself before it says who it is, and may die in between: then it is none. */
  async #look(attempt: number, joined: Joined[]): Promise<void> {
    const count = await this.#keys.add(`${attempt}/joined`, 0);
    for (let number = 0; number < count; number++) {
      const key = `${attempt}/node/${number}`;
      if (joined.some((one) => one.number === number) || !(await this.#keys.check([key]))) continue;
      const record = readRecord(key, await this.#keys.get(key));
      const named = this.#store.server?.hasClient(record.connection ?? '') === true;
      joined.push({ number, record, named });
    }
    joined.sort((a, b) => a.number - b.number);
  }

  #isThere({ record: { connection = '' }, named }: Joined): boolean {
    return !named || this.#store.server!.hasClient(connection);
  }

  /** On the node that holds the store: what came of the meeting, once. */
  async tell(attempt: number, met: Met): Promise<void> {
    await this.#keys.compareSet(`${attempt}/plan`, new Uint8Array(0), bytes(met));
  }

  /** What came of the meeting: the plan, or why there is none since the job ends. Throws `EP_RENDEZVOUS` where the nodes cannot be one job. */
  async plan(attempt: number, signal: AbortSignal): Promise<JobPlan | { readonly failure: Failure }> {
    const key = `${attempt}/plan`;
    const found = readMet(key, await this.#keys.get(key, { ...FOREVER, signal }));
    if ('error' in found) throw new EpError('EP_RENDEZVOUS', found.error);
    return found;
  }

  /** The first one counts. */
  async fail(attempt: number, failure: Failure): Promise<void> {
    await this.#keys.compareSet(`${attempt}/failed`, new Uint8Array(0), bytes(failure));
  }

  async failure(attempt: number, signal: AbortSignal): Promise<Failure> {
    const key = `${attempt}/failed`;
    return readFailure(key, await this.#keys.get(key, { ...FOREVER, signal }));
  }

  async done(attempt: number, node: number, code: number): Promise<void> {
    await this.#keys.set(`${attempt}/done/${node}`, bytes(code));
  }

  /** What every node's ranks ended with. */
  async allDone(attempt: number, nodes: number, signal: AbortSignal): Promise<readonly number[]> {
    const keys = Array.from({ length: nodes }, (_, node) => `${attempt}/done/${node}`);
    const codes = await this.#keys.multiGet(keys, { ...FOREVER, signal });
    return codes.map((value, node) => readNumber(keys[node]!, value));
  }

  /** Tells the node that holds the store that this one is there, until the signal. Rejects where that node is gone. */
  async speak(attempt: number, node: number, signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      await this.#keys.add(`${attempt}/alive/${node}`, 1);
      await pause(HEARTBEAT_MS, signal);
    }
  }

  /** Says of nodes that are silent, or whose connection was closed, that they are lost, until the signal. */
  async listen(attempt: number, nodes: readonly PlannedNode[], signal: AbortSignal): Promise<void> {
    const heard = nodes.map(() => ({ count: 0, at: performance.now() }));
    const { server } = this.#store;
    // Where addresses are translated on the way, a node's end has another name here: it is known by its words only.
    const named = nodes.map(({ connection = '' }) => server?.hasClient(connection) === true);
    let looked = performance.now();
    while (!signal.aborted) {
      const now = performance.now();
      // HAZARD: a process that was stopped, or got no core for that long, has heard nobody and blames nobody.
      const away = now - looked > LOST_MS / 3;
      looked = now;
      for (const [node, last] of heard.entries()) {
        const { host, connection = '' } = nodes[node]!;
        const hungUp = named[node] === true && !server!.hasClient(connection);
        const count = await this.#keys.add(`${attempt}/alive/${node}`, 0);
        if (count !== last.count || away) heard[node] = { count, at: now };
        const silent = now - heard[node]!.at > LOST_MS;
        if ((!hungUp && !silent) || (await this.#keys.check([`${attempt}/done/${node}`]))) continue;
        const why = hungUp
          ? 'has gone: its connection to the store was closed'
          : `was not heard for ${LOST_MS / 1000} s: it is down, or the network to it is`;
        await this.fail(attempt, { code: 1, text: `node ${node} (${host}) ${why}` });
        return;
      }
      await pause(HEARTBEAT_MS, signal);
    }
  }

  async end(code: number): Promise<void> {
    await this.#keys.set('over', bytes(code));
    await this.#store.othersLeft({ timeoutMs: LOST_MS });
  }

  /** What the whole job ends with. */
  async over(signal: AbortSignal): Promise<number> {
    return readNumber('over', await this.#keys.get('over', { ...FOREVER, signal }));
  }

  close(): Promise<void> {
    return this.#store.close();
  }
}

/**
 * Waits for the node that holds the store: true once it answers. False once the name has become this host's, unless the port is `taken` by another node here: the name of a pod, say, resolves only
 * a while after the pod has started.
 */
async function untilHeld(
  address: Rendezvous,
  taken: boolean,
  { timeoutMs, signal }: { readonly timeoutMs: number; readonly signal: AbortSignal },
): Promise<boolean> {
  const over = new AbortController();
  let ours = false;
  const look = async (): Promise<void> => {
    while (!over.signal.aborted) {
      await pause(LOOKUP_MS, over.signal);
      ours = !over.signal.aborted && (await localAddressOf(address.host)) !== undefined;
      if (ours) over.abort();
    }
  };
  // Nobody waits for its end: a lookup can take long where no name server answers.
  if (!taken) void look();
  try {
    const store = await openTcpStore({ ...address, timeoutMs, signal: AbortSignal.any([signal, over.signal]) });
    await store.close();
    return true;
  } catch (error) {
    if (!ours || signal.aborted) throw error;
    return false;
  } finally {
    over.abort();
  }
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      signal.removeEventListener('abort', end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener('abort', end);
    if (signal.aborted) end();
  });
}
