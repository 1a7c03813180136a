/** One connection of a client: requests in order, each with the reader of its reply. */
import { connect, type Socket } from 'node:net';
import { EpError, isEpError } from '../../errors.js';
import { ByteQueue, type Parsing } from './bytes.js';
import type { Reached } from './reachability.js';
import { pingReply, type ReplyReader } from './replies.js';
import { openingOf } from './secret.js';
import { formatAddress } from './server.js';
import { MAGIC, type Request, requestParts } from './wire.js';

interface Pending {
  readonly parsing: Parsing<unknown>;
  readonly resolve: (value: never) => void;
  readonly reject: (reason: unknown) => void;
  /** Says what was awaited, for example `get of "k"`. */
  readonly what: string;
}

const NOTHING = new Uint8Array(0);

export interface Address {
  readonly host: string;
  readonly port: number;
  /** Made of the job secret, which the server then must prove to have; undefined: it is taken as it is, PyTorch's too. */
  readonly key?: Uint8Array | undefined;
}

export class Channel {
  readonly #socket: Socket;
  readonly #server: string;
  readonly #queue = new ByteQueue();
  readonly #pending: Pending[] = [];
  #failure: EpError | undefined;

  constructor(socket: Socket, address: Address) {
    this.#socket = socket;
    this.#server = formatAddress(address.host, address.port);
    socket.setNoDelay(true);
    socket.setKeepAlive(true, 60_000);
    socket.on('data', (chunk) => this.#receive(chunk));
    socket.on('error', (cause) => this.#lose(cause));
    socket.on('close', () => this.#lose());
    // An idle store does not keep a process running.
    socket.unref();
  }

  /** This end, `host:port`; undefined when it is closed. */
  get localAddress(): string | undefined {
    const { localAddress, localPort } = this.#socket;
    return localAddress === undefined || localPort === undefined ? undefined : formatAddress(localAddress, localPort);
  }

  get failure(): EpError | undefined {
    return this.#failure;
  }

  /** Sends a request that has no reply. */
  post(request: Request): void {
    this.send(requestParts(request));
  }

  send(parts: readonly Uint8Array[]): void {
    if (this.#failure !== undefined) throw this.#failure;
    this.#socket.cork();
    for (const part of parts) this.#socket.write(part);
    // Requests of one turn of the event loop leave together.
    process.nextTick(() => this.#socket.uncork());
  }

  /** Sends a request; resolves with what `read` makes of the reply. `EP_PEER_LOST` if the server goes away before. */
  async request<T>(request: Request, read: ReplyReader<T>, what: string): Promise<T> {
    this.post(request);
    return this.expect(read, what);
  }

  /** Reads one more reply, behind those that are expected already. */
  expect<T>(read: ReplyReader<T>, what: string): Promise<T> {
    return new Promise<T>((resolve, reject) => {
      if (this.#pending.length === 0) this.#socket.ref();
      this.#pending.push({ parsing: read(this.#queue), resolve, reject, what });
      // A reply may have no bytes: that of no keys.
      if (this.#pending.length === 1) this.#receive(NOTHING);
    });
  }

  /** Ends it; whoever waits gets the reason. */
  destroy(reason?: EpError): void {
    this.#fail(reason ?? this.#lost());
  }

  #receive(chunk: Uint8Array): void {
    this.#queue.push(chunk);
    try {
      for (;;) {
        const first = this.#pending[0];
        if (first === undefined) {
          if (this.#queue.length > 0) this.#fail(this.#garbled(`${this.#queue.length} bytes that nobody asked for`));
          return;
        }
        const step = first.parsing.next();
        if (step.done !== true) return;
        this.#pending.shift();
        if (this.#pending.length === 0) this.#socket.unref();
        first.resolve(step.value as never);
      }
    } catch (error) {
      if (!isEpError(error)) throw error;
      this.#fail(error.code === 'EP_SECRET' ? this.#refused(error.message) : this.#garbled(error.message));
    }
  }

  #garbled(what: string): EpError {
    return new EpError('EP_TRANSPORT_FAILED', `tcp store: the server at ${this.#server} sent nonsense: ${what}`, {
      context: { server: this.#server },
    });
  }

  #refused(why: string): EpError {
    return new EpError('EP_SECRET', `tcp store: the server at ${this.#server} is of no use to this client: ${why}`, {
      context: { server: this.#server },
    });
  }

  #lost(cause?: unknown): EpError {
    const awaited = this.#pending.map(({ what }) => what);
    const shown = awaited.slice(0, 4).join(', ');
    const while_ = awaited.length === 0 ? '' : ` while this waited for ${shown}${awaited.length > 4 ? ', …' : ''}`;
    const code = (cause as NodeJS.ErrnoException | undefined)?.code;
    return new EpError(
      'EP_PEER_LOST',
      `tcp store: the server at ${this.#server} closed the connection${code === undefined ? '' : ` (${code})`}${while_}`,
      { context: { server: this.#server, awaited }, ...(cause === undefined ? {} : { cause }) },
    );
  }

  #lose(cause?: unknown): void {
    if (this.#failure === undefined) this.#fail(this.#lost(cause));
  }

  #fail(failure: EpError): void {
    this.#failure ??= failure;
    this.#socket.destroy();
    for (const { reject } of this.#pending.splice(0)) reject(failure);
  }
}

/** Either side proves that it has the job secret. */
async function introduce(channel: Channel, key: Uint8Array): Promise<void> {
  const { hello, challenge, welcome } = openingOf(key);
  channel.send([hello]);
  const proof = await channel.expect(challenge, 'its challenge for the job secret (PyTorch has none to give)');
  channel.send([proof]);
  await channel.expect(welcome, 'its own proof of the job secret');
}

/** Resolves when the server has answered; rejects with the socket's own error, with `EP_SECRET`, or with the signal's reason. */
export async function openChannel(
  address: Address,
  signal: AbortSignal,
  onReached: (what: Reached) => void = () => {},
): Promise<Channel> {
  signal.throwIfAborted();
  onReached('nothing');
  const socket = connect({ host: address.host, port: address.port });
  const abort = (): void => void socket.destroy(signal.reason instanceof Error ? signal.reason : undefined);
  signal.addEventListener('abort', abort);
  try {
    await new Promise<void>((resolve, reject) => {
      socket.once('connect', resolve);
      socket.once('error', reject);
      socket.once('close', () => reject(signal.reason));
    });
    onReached('connection');
    const channel = new Channel(socket, address);
    if (address.key !== undefined) await introduce(channel, address.key);
    const nonce = process.pid >>> 0;
    channel.post({ kind: 'validate', magic: MAGIC });
    await channel.request({ kind: 'ping', nonce }, pingReply(nonce), 'the answer to its first ping');
    return channel;
  } catch (error) {
    socket.destroy();
    throw signal.aborted ? signal.reason : error;
  } finally {
    signal.removeEventListener('abort', abort);
  }
}
