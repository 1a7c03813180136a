/** The TCP store's client, and the store of the rank that also holds the server. */
import { defaultTimeoutMs } from '../../env.js';
import { EpError, invalid, isEpError } from '../../errors.js';
import { Resource } from '../../scope.js';
import type { Store, StoreWaitOptions } from '../../store.js';
import { checkTimeout, interruptibleOn, linkSignals } from '../../waiting.js';
import {
  checkKey,
  checkKeys,
  checkWaitOptions,
  copyBytes,
  copyEntries,
  notArrived,
  type StoreEntry,
} from '../replica.js';
import type { Address, Channel } from './channel.js';
import { Lanes } from './lanes.js';
import {
  checkReply,
  deletedReply,
  integerReply,
  pingReply,
  type ReplyReader,
  stringReply,
  stringsReply,
  waitReply,
} from './replies.js';
import type { TcpStoreServer } from './server.js';
import { JOIN_KEY, MOST_ITEMS, MOST_STRING_BYTES, type Request, type WireKey } from './wire.js';

export const LABEL = 'tcp store';
/** How long the server may take to take back a wait before its connection is given up. */
const CANCEL_MS = 2000;
/** How long close() waits for requests that are under way. */
const CLOSE_MS = 1000;
/** How often othersLeft() looks. */
const LOOK_MS = 10;
const TIMED_OUT = Symbol('timed out');

/** The key on the wire: torch puts a slash in front of every key. */
function wireKey(key: string, where: string): WireKey {
  checkKey(key, where);
  if (/\p{Surrogate}/u.test(key)) throw invalid('key', { where, expected: 'a well-formed string', found: key });
  return checkSize(Buffer.from(`/${key}`), 'key', where).toString('latin1');
}

function checkSize<T extends Uint8Array>(bytes: T, what: string, where: string): T {
  if (bytes.byteLength <= MOST_STRING_BYTES) return bytes;
  throw new EpError(
    'EP_CAPACITY',
    `${where}: the ${what} has ${bytes.byteLength} bytes, PyTorch's servers take at most ${MOST_STRING_BYTES}`,
    { context: { byteLength: bytes.byteLength, most: MOST_STRING_BYTES } },
  );
}

function checkCount(count: number, where: string): void {
  if (count <= MOST_ITEMS) return;
  throw new EpError('EP_CAPACITY', `${where}: ${count} keys, PyTorch's servers take at most ${MOST_ITEMS} at once`, {
    context: { count, most: MOST_ITEMS },
  });
}

function valueBytes(value: unknown, what: string, where: string): Buffer {
  const copy = checkSize(copyBytes(value, what, where), what, where);
  return Buffer.from(copy.buffer, copy.byteOffset, copy.byteLength);
}

const plain = (bytes: Buffer): Uint8Array => Uint8Array.from(bytes);

/** Use `openTcpStore`. Operations that are under way at once have no order among each other. */
export class TcpStore extends Resource implements Store {
  readonly host: string;
  readonly port: number;
  readonly #main: Channel;
  readonly #lanes: Lanes;
  readonly #timeoutMs: number;
  #server: TcpStoreServer | undefined;
  #nonce = 0;
  #closeTimer: NodeJS.Timeout | undefined;

  constructor(main: Channel, spare: Channel, at: Address, timeoutMs: number) {
    super(LABEL);
    this.host = at.host;
    this.port = at.port;
    this.#main = main;
    this.#lanes = new Lanes(at, spare);
    this.#timeoutMs = timeoutMs;
    this.closing.addEventListener('abort', () => {
      this.#closeTimer = setTimeout(() => {
        const reason = new EpError('EP_ABORTED', `${LABEL} was closed while requests were under way`);
        main.destroy(reason);
        this.#lanes.close(reason);
      }, CLOSE_MS);
    });
  }

  /** The client's end of the connection, `host:port`; undefined when it is closed. The server has a client of that name, unless addresses are translated on the way. */
  get localAddress(): string | undefined {
    return this.#main.localAddress;
  }

  /** The server, on the rank that holds it; closed with this store. */
  get server(): TcpStoreServer | undefined {
    return this.#server;
  }

  /** Use `openTcpStore`. */
  holdServer(server: TcpStoreServer): void {
    this.#server = this.children.add(server);
  }

  /**
   * Resolves, on the rank that holds the server, when no other client is connected any more: closing it cuts off whoever has not read what it came
   * for. False if that took longer than `timeoutMs`; at once true on the other ranks.
   */
  async othersLeft({ timeoutMs = defaultTimeoutMs(), signal }: StoreWaitOptions = {}): Promise<boolean> {
    const limit = performance.now() + checkTimeout(timeoutMs, `${LABEL}: othersLeft`);
    while (this.#server !== undefined && !this.closed && this.#server.connections > 1 + this.#lanes.size) {
      signal?.throwIfAborted();
      if (performance.now() > limit) return false;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
    return true;
  }

  /** Resolves when the server has the value: torch's own client returns when the bytes are in the socket. */
  async set(key: string, value: Uint8Array): Promise<void> {
    const where = `${LABEL}: set`;
    await this.#post('set', { kind: 'set', key: wireKey(key, where), value: valueBytes(value, 'value', where) }, key);
  }

  async get(key: string, options: StoreWaitOptions = {}): Promise<Uint8Array> {
    const [value] = await this.#fetch('get', [key], options);
    return value!;
  }

  async add(key: string, delta: number): Promise<number> {
    const where = `${LABEL}: add`;
    const wire = wireKey(key, where);
    if (!Number.isSafeInteger(delta)) throw invalid('delta', { where, expected: 'a safe integer', found: delta });
    const refuse = (why: string): never => {
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: key ${JSON.stringify(key)} cannot be added to: ${why}`, {
        context: { key, delta },
      });
    };
    return this.guard('add', () =>
      // On a lane: a server closes the connection if the value is no number, and that must not end what else is under way.
      this.#onLane(async (lane) => {
        const what = `add to ${JSON.stringify(key)}`;
        const change = (by: bigint): Promise<bigint> =>
          this.#within(what, lane.request({ kind: 'add', key: wire, delta: by }, integerReply, what));
        let sum: bigint;
        try {
          sum = await change(BigInt(delta));
        } catch (error) {
          if (!isEpError(error) || error.code !== 'EP_PEER_LOST') throw error;
          const held = await this.#within(what, this.#main.request({ kind: 'get', key: wire }, stringReply, what));
          if (/^-?\d{1,19}$/.test(held.toString('latin1'))) throw error;
          return refuse(`it holds ${held.byteLength} bytes that are no decimal integer`);
        }
        if (Number.isSafeInteger(Number(sum))) return Number(sum);
        await change(-BigInt(delta));
        return refuse(`the sum ${sum} is not a safe integer, and was taken back`);
      }),
    );
  }

  async compareSet(key: string, expected: Uint8Array, desired: Uint8Array): Promise<Uint8Array> {
    const where = `${LABEL}: compareSet`;
    const request = {
      kind: 'compareSet',
      key: wireKey(key, where),
      expected: valueBytes(expected, 'expected', where),
      desired: valueBytes(desired, 'desired', where),
    } as const;
    return plain(await this.#ask('compareSet', request, stringReply, key));
  }

  async wait(keys: readonly string[], options: StoreWaitOptions = {}): Promise<void> {
    await this.#await('wait', keys, options, async () => true);
  }

  async check(keys: readonly string[]): Promise<boolean> {
    const where = `${LABEL}: check`;
    checkKeys(keys, where);
    checkCount(keys.length, where);
    const request = { kind: 'check', keys: keys.map((key) => wireKey(key, where)) } as const;
    return this.#ask('check', request, checkReply, ...keys);
  }

  async append(key: string, value: Uint8Array): Promise<void> {
    const where = `${LABEL}: append`;
    const request = { kind: 'append', key: wireKey(key, where), value: valueBytes(value, 'value', where) } as const;
    await this.#post('append', request, key);
  }

  async multiGet(keys: readonly string[], options: StoreWaitOptions = {}): Promise<readonly Uint8Array[]> {
    return this.#fetch('multiGet', keys, options);
  }

  async multiSet(entries: Iterable<StoreEntry>): Promise<void> {
    const where = `${LABEL}: multiSet`;
    const copied = copyEntries(entries, where);
    checkCount(copied.length, where);
    const wire = copied.map(([key, value]) => [wireKey(key, where), valueBytes(value, 'value', where)] as const);
    await this.#post('multiSet', { kind: 'multiSet', entries: wire }, ...copied.map(([key]) => key));
  }

  async delete(key: string): Promise<boolean> {
    return this.#ask('delete', { kind: 'delete', key: wireKey(key, `${LABEL}: delete`) }, deletedReply, key);
  }

  /** Counts what torch counts: also the keys of others, and the counter of those who joined with a world size. */
  async numKeys(): Promise<number> {
    return Number(await this.#ask('numKeys', { kind: 'numKeys' }, integerReply));
  }

  /** Counts this client among those who joined. */
  async join(): Promise<void> {
    await this.#ask('join', { kind: 'add', key: JOIN_KEY, delta: 1n }, integerReply);
  }

  protected override release(): void {
    clearTimeout(this.#closeTimer);
    this.#main.destroy();
    this.#lanes.close();
  }

  #ask<T>(operation: string, request: Request, read: ReplyReader<T>, ...keys: readonly string[]): Promise<T> {
    return this.guard(operation, () => {
      const what = describe(operation, keys);
      return this.#within(what, this.#main.request(request, read, what));
    });
  }

  /** A request without a reply, and a ping behind it: its echo says that the server has both. */
  #post(operation: string, request: Request, ...keys: readonly string[]): Promise<void> {
    return this.guard(operation, () => {
      this.#main.post(request);
      this.#nonce = (this.#nonce + 1) >>> 0;
      const what = describe(operation, keys);
      const ping = { kind: 'ping', nonce: this.#nonce } as const;
      return this.#within(what, this.#main.request(ping, pingReply(ping.nonce), what));
    });
  }

  /** For replies that come at once: only a server that hangs lets them wait. */
  #within<T>(what: string, reply: Promise<T>): Promise<T> {
    const timeoutMs = this.#timeoutMs;
    const timedOut = (): EpError =>
      new EpError(
        'EP_TIMEOUT',
        `${LABEL}: the server at ${this.host}:${this.port} did not answer ${what} within ${timeoutMs} ms; it may have done it`,
        { context: { host: this.host, port: this.port, awaited: what, timeoutMs } },
      );
    return interruptibleOn({ signals: [], timeoutMs, where: LABEL, timedOut }, reply);
  }

  async #onLane<T>(body: (lane: Channel) => Promise<T>): Promise<T> {
    if (this.#main.failure !== undefined) throw this.#main.failure;
    const lane = await this.#lanes.take({ timeoutMs: this.#timeoutMs, signal: this.closing });
    return body(lane).finally(() => this.#lanes.giveBack(lane));
  }

  /**
   * Waits, then asks for the values. A key that was deleted in between is waited for again. HAZARD: a server of torch says the same, nothing, of a key that is not there and of one
   * whose value is empty, and a key may be set again once it was read as absent: what is empty counts only where the key was there before and after it was read.
   */
  #fetch(operation: string, keys: readonly string[], options: StoreWaitOptions): Promise<readonly Uint8Array[]> {
    return this.#await(operation, keys, options, async (wire) => {
      const what = describe(operation, keys);
      const values = await this.#read(wire, what);
      const empty = values.flatMap(({ byteLength }, i) => (byteLength === 0 ? [i] : []));
      if (empty.length === 0) return values.map(plain);
      const asked = empty.map((i) => wire[i]!);
      // At once: a server looks at them one right behind the other.
      const [before, again, after] = await Promise.all([
        this.#check(asked, what),
        this.#read(asked, what),
        this.#check(asked, what),
      ]);
      if (!before || !after) return undefined;
      const read = new Map(empty.map((i, at) => [i, again[at]!]));
      return values.map((value, i) => plain(read.get(i) ?? value));
    });
  }

  #read(keys: readonly WireKey[], what: string): Promise<readonly Buffer[]> {
    return this.#within(what, this.#main.request({ kind: 'multiGet', keys }, stringsReply(keys.length), what));
  }

  #check(keys: readonly WireKey[], what: string): Promise<boolean> {
    return this.#within(what, this.#main.request({ kind: 'check', keys }, checkReply, what));
  }

  /** Calls `then` when all keys are there, and waits on if that gives nothing back. */
  #await<T>(
    operation: string,
    keys: readonly string[],
    options: StoreWaitOptions,
    then: (wire: readonly WireKey[]) => Promise<T | undefined>,
  ): Promise<T> {
    return this.guard(operation, async () => {
      const where = `${LABEL}: ${operation}`;
      checkKeys(keys, where);
      checkCount(keys.length, where);
      checkWaitOptions(options, where);
      const wire = keys.map((key) => wireKey(key, where));
      const timeoutMs = checkTimeout(options.timeoutMs ?? this.#timeoutMs, where);
      options.signal?.throwIfAborted();
      const begin = performance.now();
      for (;;) {
        const left = Math.max(0, timeoutMs - (performance.now() - begin));
        const what = describe(operation, keys);
        const there =
          left > 0 ? await this.#waitOn(wire, what, { ...options, timeoutMs: left }) : await this.#check(wire, what);
        options.signal?.throwIfAborted();
        const value = there ? await then(wire) : undefined;
        if (value !== undefined) return value;
        if (performance.now() - begin < timeoutMs) continue;
        throw notArrived(LABEL, operation, new Set(keys).size, await this.#missing(keys, wire, what), timeoutMs);
      }
    });
  }

  /** False if they did not come in time. */
  async #waitOn(wire: readonly WireKey[], what: string, options: StoreWaitOptions): Promise<boolean> {
    if (this.#main.failure !== undefined) throw this.#main.failure;
    const signals = [options.signal, this.closing];
    const linked = linkSignals(...signals);
    const begin = performance.now();
    const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
    let lane: Channel;
    try {
      lane = await this.#lanes.take({ timeoutMs, signal: linked.signal });
    } catch (error) {
      if (isEpError(error) && error.code === 'EP_TIMEOUT') return false;
      throw error;
    } finally {
      linked.unlink();
    }
    const left = Math.max(0, timeoutMs - (performance.now() - begin));
    const limits = { signals, timeoutMs: left, where: what, timedOut: () => TIMED_OUT };
    const state = { cancelled: false };
    const answer = lane.request({ kind: 'wait', keys: wire }, waitReply(state), what);
    try {
      await interruptibleOn(limits, answer);
      this.#lanes.giveBack(lane);
      return true;
    } catch (reason) {
      const taken = this.#takeBack(lane, answer, state, what);
      if (reason === TIMED_OUT) return await taken;
      throw reason;
    }
  }

  /** Cancels a wait, so that its connection can serve the next one. True if the keys came all the same. */
  async #takeBack(
    lane: Channel,
    answer: Promise<'arrived' | 'cancelled'>,
    state: { cancelled: boolean },
    what: string,
  ): Promise<boolean> {
    const limits = { signals: [], timeoutMs: CANCEL_MS, where: what, timedOut: () => TIMED_OUT };
    try {
      state.cancelled = true;
      lane.post({ kind: 'cancelWait' });
      const found = await interruptibleOn(limits, answer);
      this.#lanes.giveBack(lane);
      return found === 'arrived';
    } catch {
      this.#lanes.drop(lane);
      return false;
    }
  }

  /** All of them, if the server does not say which. */
  async #missing(keys: readonly string[], wire: readonly WireKey[], what: string): Promise<readonly string[]> {
    const limits = { signals: [], timeoutMs: CANCEL_MS, where: what, timedOut: () => TIMED_OUT };
    const answers = wire.map((key) => this.#main.request({ kind: 'check', keys: [key] }, checkReply, what));
    try {
      const there = await interruptibleOn(limits, Promise.all(answers));
      return [...new Set(keys.filter((_, i) => there[i] === false))];
    } catch {
      return [...new Set(keys)];
    }
  }
}

function describe(operation: string, keys: readonly string[]): string {
  if (keys.length === 0) return operation;
  const shown = keys.slice(0, 4).map((key) => JSON.stringify(key.length > 80 ? `${key.slice(0, 80)}…` : key));
  return `${operation} of ${shown.join(', ')}${keys.length > 4 ? `, … (${keys.length} keys)` : ''}`;
}
