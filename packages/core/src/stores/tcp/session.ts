/** The server without its sockets: what is stored, and one state machine for each connection. */
import { entryBytes, Replica } from '../replica.js';
import { ByteQueue, malformed, type Parsing } from './bytes.js';
import { admit, type Gate } from './secret.js';
import { i64, listParts, MAGIC, type Request, readRequest, stringParts, u32, type WireKey } from './wire.js';

export interface TcpStoreLimits {
  /** Bytes of one key or value, also of a value that appends made. */
  readonly stringBytes: number;
  /** Keys in one request. */
  readonly items: number;
  /** Bytes of all keys and values of one request. */
  readonly requestBytes: number;
  /** Bytes of all keys and values that are held, with what their tables cost. */
  readonly storeBytes: number;
  readonly connections: number;
  /** Bytes that wait for one client to read them before its next request is looked at. */
  readonly unreadBytes: number;
  /** How long a client may take to open the conversation, to go on with a request that it began, or to read a reply. */
  readonly stallMs: number;
}

const EMPTY = Buffer.alloc(0);
const YES = Buffer.from([1]);
const NO = Buffer.from([0]);
const DECIMAL = /^\s*([+-]?\d+)/;

/** As torch reads it: the integer that the value begins with. */
function leadingInteger(held: Uint8Array | undefined): bigint {
  if (held === undefined) return 0n;
  const text = Buffer.from(held.buffer, held.byteOffset, held.byteLength).toString('latin1');
  const found = DECIMAL.exec(text)?.[1];
  // Longer texts are no 64-bit integers, and turning them into one takes time that grows with the square of their length.
  if (found === undefined || found.length > 20) throw malformed('the value that was to be added to is no integer');
  const value = BigInt(found);
  if (value !== BigInt.asIntN(64, value)) throw malformed('the value that was to be added to is no 64-bit integer');
  return value;
}

type Waiter = (key: WireKey) => void;

class Waiters {
  readonly #waiters = new Map<WireKey, Set<Waiter>>();

  at(key: WireKey): readonly Waiter[] {
    return [...(this.#waiters.get(key) ?? [])];
  }

  add(keys: Iterable<WireKey>, waiter: Waiter): () => void {
    const watched = [...keys];
    for (const key of watched) this.#waiters.set(key, (this.#waiters.get(key) ?? new Set()).add(waiter));
    return () => {
      for (const key of watched) {
        const waiters = this.#waiters.get(key);
        waiters?.delete(waiter);
        if (waiters?.size === 0) this.#waiters.delete(key);
      }
    };
  }
}

/** What all connections of a server share. */
export class StoreState {
  readonly map = new Replica();
  readonly queues = new Map<WireKey, Buffer[]>();
  readonly queueWaiters = new Waiters();
  readonly barrierWaiters = new Waiters();
  readonly limits: TcpStoreLimits;
  /** Asks for the job secret; undefined: whoever comes is served. */
  readonly gate: Gate | undefined;
  queuedBytes = 0;

  constructor(limits: TcpStoreLimits, gate?: Gate) {
    this.limits = limits;
    this.gate = gate;
  }

  has(key: WireKey): boolean {
    return this.map.get(key) !== undefined || this.queues.has(key);
  }

  /** Whether what is to be stored still fits, were all of it new. */
  checkRoom(entries: readonly (readonly [WireKey, Uint8Array])[]): void {
    const more = entries.reduce((sum, [key, value]) => sum + entryBytes(key, value), 0);
    const most = this.limits.storeBytes;
    if (this.map.byteLength + this.queuedBytes + more > most)
      throw malformed(`${more} bytes more than the ${most} that this server holds at most`);
  }

  add(key: WireKey, delta: bigint): bigint {
    this.checkRoom([[key, EMPTY]]);
    const sum = BigInt.asIntN(64, leadingInteger(this.map.get(key)) + delta);
    this.map.apply({ kind: 'set', key, value: Buffer.from(String(sum), 'latin1') });
    return sum;
  }

  append(key: WireKey, value: Buffer): void {
    const total = (this.map.get(key)?.byteLength ?? 0) + value.byteLength;
    const most = this.limits.stringBytes;
    if (total > most) throw malformed(`appending makes a value of ${total} bytes, at most ${most}`);
    this.map.apply({ kind: 'append', key, value });
  }

  push(key: WireKey, value: Buffer): void {
    const queue = this.queues.get(key);
    if (queue === undefined) this.queues.set(key, [value]);
    else queue.push(value);
    this.queuedBytes += entryBytes(key, value);
    // One value serves one of those who wait for it: waking the others would have them find nothing.
    this.queueWaiters.at(key)[0]?.(key);
  }

  pop(key: WireKey): readonly Uint8Array[] {
    const queue = this.queues.get(key);
    const length = BigInt(queue?.length ?? 0);
    const value = queue?.shift();
    if (value === undefined) return [i64(0n)];
    if (queue!.length === 0) this.queues.delete(key);
    this.queuedBytes -= entryBytes(key, value);
    return [i64(length), ...stringParts(value)];
  }
}

/** Where a session's answers go. */
export interface SessionOutput {
  send(parts: readonly Uint8Array[]): void;
  /** True while the client does not read: then no further request is looked at. */
  blocked(): boolean;
}

/**
 * One connection. `receive` and `resume` throw `EP_TRANSPORT_FAILED` for what no client sends, `EP_SECRET` for one that was told that it lacks the job
 * secret: then the connection is over, `end` it.
 */
export class Session {
  readonly #state: StoreState;
  readonly #output: SessionOutput;
  readonly #queue = new ByteQueue();
  readonly #parsing: Parsing<never>;
  #validated = false;
  #betweenRequests = true;
  /** Takes back what the open wait or barrier has left with the state. */
  #forget: (() => void) | undefined;

  constructor(state: StoreState, output: SessionOutput) {
    this.#state = state;
    this.#output = output;
    this.#parsing = this.#run();
  }

  /** True if the client owes bytes: it has not opened the conversation, or has begun a request. */
  get owesBytes(): boolean {
    return !this.#validated || !this.#betweenRequests || this.#queue.length > 0;
  }

  get waiting(): boolean {
    return this.#forget !== undefined;
  }

  receive(chunk: Uint8Array): void {
    this.#queue.push(chunk);
    this.#parsing.next();
  }

  /** Goes on with what came while the output was blocked. */
  resume(): void {
    this.#parsing.next();
  }

  end(): void {
    this.#forget?.();
    this.#forget = undefined;
  }

  *#run(): Parsing<never> {
    const { stringBytes, items, requestBytes } = this.#state.limits;
    yield* admit(this.#queue, this.#state.gate, this.#output.send);
    for (;;) {
      this.#betweenRequests = true;
      while (this.#queue.length === 0 || this.#output.blocked()) yield;
      this.#betweenRequests = false;
      const request = yield* readRequest(this.#queue, { stringBytes, items, bytes: requestBytes });
      if ((request.kind === 'validate') === this.#validated)
        throw malformed(this.#validated ? 'a second validate' : `${request.kind} before validate`);
      const answer = this.#answer(request);
      if (answer !== undefined) this.#output.send(answer);
    }
  }

  /** The reply in parts; undefined where the request has none, or not yet. */
  #answer(request: Request): readonly Uint8Array[] | undefined {
    const { map } = this.#state;
    switch (request.kind) {
      case 'validate':
        if (request.magic !== MAGIC) throw malformed(`the magic number is ${request.magic}, expected ${MAGIC}`);
        this.#validated = true;
        return undefined;
      case 'ping':
        return [u32(request.nonce)];
      case 'set':
        this.#state.checkRoom([[request.key, request.value]]);
        map.apply({ ...request, kind: 'set' });
        return undefined;
      case 'append':
        this.#state.checkRoom([[request.key, request.value]]);
        this.#state.append(request.key, request.value);
        return undefined;
      case 'multiSet':
        this.#state.checkRoom(request.entries);
        map.apply({ kind: 'multi-set', entries: request.entries });
        return undefined;
      case 'queuePush':
        this.#state.checkRoom([[request.key, request.value]]);
        this.#state.push(request.key, request.value);
        return undefined;
      case 'compareSet':
        this.#state.checkRoom([[request.key, request.desired]]);
        return stringParts(map.apply({ ...request, kind: 'compare-set' }) as Uint8Array);
      case 'get':
        return stringParts(map.get(request.key) ?? EMPTY);
      case 'multiGet':
        return request.keys.flatMap((key) => stringParts(map.get(key) ?? EMPTY));
      case 'add':
        return [i64(this.#state.add(request.key, request.delta))];
      case 'check':
        return [request.keys.every((key) => this.#state.has(key)) ? NO : YES];
      case 'numKeys':
        return [i64(BigInt(map.size))];
      case 'delete':
        return [i64(map.apply({ kind: 'delete', key: request.key }) === true ? 1n : 0n)];
      case 'listKeys':
        return listParts([...map.keys()].map((key) => Buffer.from(key, 'latin1')));
      case 'queuePop':
        return this.#state.pop(request.key);
      case 'queueLength':
        return [i64(BigInt(this.#state.queues.get(request.key)?.length ?? 0))];
      case 'wait':
        return this.#wait(request.keys);
      case 'barrier':
        return this.#barrier(request.key, request.worldSize);
      case 'cancelWait':
        this.end();
        return [YES];
    }
  }

  #checkNoneOpen(): void {
    if (this.#forget !== undefined) throw malformed('a second wait while one is open');
  }

  #wait(keys: readonly WireKey[]): readonly Uint8Array[] | undefined {
    this.#checkNoneOpen();
    const missing = new Set(keys.filter((key) => !this.#state.has(key)));
    if (missing.size === 0) return [NO];
    const arrive: Waiter = (key) => {
      missing.delete(key);
      if (missing.size > 0) return;
      this.end();
      this.#output.send([NO]);
    };
    const forgetKeys = this.#state.map.observe(missing, arrive);
    const forgetQueues = this.#state.queueWaiters.add(missing, arrive);
    this.#forget = () => {
      forgetKeys();
      forgetQueues();
    };
    return undefined;
  }

  #barrier(key: WireKey, worldSize: bigint): readonly Uint8Array[] | undefined {
    this.#checkNoneOpen();
    const arrived = this.#state.add(key, 1n);
    for (const waiter of this.#state.barrierWaiters.at(key)) waiter(key);
    if (arrived >= worldSize) return [NO];
    this.#forget = this.#state.barrierWaiters.add([key], () => {
      if (leadingInteger(this.#state.map.get(key)) < worldSize) return;
      this.end();
      this.#output.send([NO]);
    });
    return undefined;
  }
}
