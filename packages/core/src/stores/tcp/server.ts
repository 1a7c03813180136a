/** The sockets of a TCP store's server. */
import { createServer, isIPv4, isIPv6, type Server, type Socket } from 'node:net';
import { publish } from '../../diagnostics.js';
import { defaultTimeoutMs } from '../../env.js';
import { checkInteger, checkObject, EpError, invalid, isEpError } from '../../errors.js';
import { type AbortOptions, Resource } from '../../scope.js';
import { type JobSecret, jobKey, resolveJobSecret, secretMissing } from '../../secret.js';
import { interruptible } from '../../waiting.js';
import { gateOf } from './secret.js';
import { Session, StoreState, type TcpStoreLimits } from './session.js';
import { JOIN_KEY, MOST_ITEMS, MOST_STRING_BYTES } from './wire.js';

export interface TcpStoreServerOptions {
  /** 0 takes one that is free: `server.port` says which. */
  readonly port: number;
  /** The address to listen at, `127.0.0.1` unless given; `0.0.0.0` is every interface. */
  readonly bind?: string;
  /**
   * What clients must know; EP_JOB_SECRET unless given. Without one whoever reaches the address can read and write everything, so that has to be said
   * where it is no loopback address: `none`, which PyTorch's clients need.
   */
  readonly secret?: JobSecret;
  readonly limits?: Partial<TcpStoreLimits>;
}

const LIMITS: TcpStoreLimits = {
  stringBytes: MOST_STRING_BYTES,
  items: MOST_ITEMS,
  requestBytes: 64 * 2 ** 20,
  storeBytes: 2 ** 30,
  connections: 4096,
  unreadBytes: 2 ** 20,
  stallMs: 60_000,
};

/** How often stalled connections are looked for, as a part of the time that they may take. */
const LOOKS_PER_STALL = 4;
/** Kernel probes of a peer that has nothing to say: a host that vanished is noticed, a rank that waits for hours is not. */
const KEEP_ALIVE_MS = 60_000;

export function formatAddress(host: string, port: number): string {
  return `${isIPv6(host) ? `[${host}]` : host}:${port}`;
}

export const isLoopback = (host: string): boolean =>
  host === 'localhost' || host === '::1' || (isIPv4(host) && host.startsWith('127.'));

class Connection {
  readonly session: Session;
  readonly socket: Socket;
  readonly peer: string;
  /** It was told why it is not served, and may read that. */
  refused = false;
  #movedAt = performance.now();
  #unread = 0;

  constructor(socket: Socket, state: StoreState) {
    this.socket = socket;
    this.peer = formatAddress(socket.remoteAddress ?? 'unknown', socket.remotePort ?? 0);
    this.session = new Session(state, {
      send: (parts) => {
        // One write for one answer: the parts would be as many segments.
        socket.cork();
        for (const part of parts) socket.write(part);
        socket.uncork();
      },
      blocked: () => socket.writableLength > state.limits.unreadBytes,
    });
  }

  moved(): void {
    this.#movedAt = performance.now();
  }

  /** Why this connection has been waited for too long; undefined if it has not. */
  stalled(now: number, stallMs: number): string | undefined {
    const unread = this.socket.writableLength;
    if (unread < this.#unread) this.moved();
    this.#unread = unread;
    if (unread === 0 && !this.session.owesBytes) this.moved();
    if (now - this.#movedAt < stallMs) return undefined;
    return unread > 0
      ? `did not read its ${unread} bytes of answers for ${stallMs} ms`
      : `did not finish what it began for ${stallMs} ms`;
  }
}

/** Use `openTcpStoreServer`. */
export class TcpStoreServer extends Resource {
  readonly host: string;
  readonly port: number;
  readonly #server: Server;
  readonly #state: StoreState;
  readonly #connections = new Set<Connection>();
  #sweep: NodeJS.Timeout | undefined;

  constructor(server: Server, state: StoreState) {
    super('tcp store server');
    const { address, port } = server.address() as { readonly address: string; readonly port: number };
    this.host = address;
    this.port = port;
    this.#server = server;
    this.#state = state;
    server.on('connection', (socket) => this.#accept(socket));
    server.on('drop', (data) => {
      const peer = formatAddress(data?.remoteAddress ?? 'unknown', data?.remotePort ?? 0);
      this.#report(peer, `was one more than ${state.limits.connections} connections`);
    });
  }

  /** Connections that are open now. */
  get connections(): number {
    return this.#connections.size;
  }

  /** Whether a connection from there (`host:port`, as this host sees it) is open now. */
  hasClient(address: string): boolean {
    for (const { peer } of this.#connections) if (peer === address) return true;
    return false;
  }

  /** Resolves when that many clients have joined, each with one ADD on the join counter. `EP_TIMEOUT` says how many had. */
  async waitForWorkers(
    worldSize: number,
    { timeoutMs = defaultTimeoutMs(), signal }: AbortOptions & { readonly timeoutMs?: number } = {},
  ): Promise<void> {
    checkInteger(worldSize, 'worldSize', 'tcp store server', 1);
    const { map } = this.#state;
    const joined = (): number => Number.parseInt(Buffer.from(map.get(JOIN_KEY) ?? []).toString('latin1'), 10) || 0;
    await this.guard('waitForWorkers', () =>
      interruptible<void>(
        {
          signals: [signal, this.closing],
          timeoutMs,
          where: 'tcp store server: waitForWorkers',
          timedOut: () =>
            new EpError(
              'EP_TIMEOUT',
              `tcp store server: ${joined()} of ${worldSize} clients joined at ${formatAddress(this.host, this.port)} within ${timeoutMs} ms`,
              { context: { worldSize, joined: joined(), host: this.host, port: this.port, timeoutMs } },
            ),
        },
        (resolve) => {
          if (joined() >= worldSize) resolve();
          return map.observe([JOIN_KEY], () => {
            if (joined() >= worldSize) resolve();
          });
        },
      ),
    );
  }

  protected override async release(): Promise<void> {
    clearInterval(this.#sweep);
    for (const connection of this.#connections) this.#drop(connection);
    await new Promise<void>((resolve) => {
      this.#server.close(() => resolve());
    });
  }

  #accept(socket: Socket): void {
    if (this.closed) {
      socket.destroy();
      return;
    }
    socket.setNoDelay(true);
    socket.setKeepAlive(true, KEEP_ALIVE_MS);
    const connection = new Connection(socket, this.#state);
    this.#connections.add(connection);
    const { stallMs } = this.#state.limits;
    this.#sweep ??= setInterval(() => this.#dropStalled(), stallMs / LOOKS_PER_STALL).unref();
    const run = (step: () => void): void => {
      try {
        step();
      } catch (error) {
        // HAZARD: closing at once could take the answer away from a client that has not read it.
        if (isEpError(error) && error.code === 'EP_SECRET') this.#refuse(connection, error.message);
        // Anything else than a malformed message is a slip of ours; it may cost this connection, not the job.
        else this.#drop(connection, isEpError(error) ? error.message : String(error));
        return;
      }
      if (socket.writableLength > this.#state.limits.unreadBytes) socket.pause();
    };
    socket.on('data', (chunk) => {
      if (connection.refused) return;
      connection.moved();
      run(() => connection.session.receive(chunk));
    });
    socket.on('drain', () => {
      if (connection.refused) return;
      connection.moved();
      socket.resume();
      run(() => connection.session.resume());
    });
    socket.on('error', () => this.#drop(connection));
    socket.on('end', () => this.#drop(connection));
    socket.on('close', () => this.#drop(connection));
  }

  #dropStalled(): void {
    const now = performance.now();
    for (const connection of this.#connections) {
      const why = connection.stalled(now, this.#state.limits.stallMs);
      if (why !== undefined) this.#drop(connection, why);
    }
    if (this.#connections.size > 0) return;
    clearInterval(this.#sweep);
    this.#sweep = undefined;
  }

  #refuse(connection: Connection, reason: string): void {
    connection.refused = true;
    connection.session.end();
    connection.socket.end();
    this.#report(connection.peer, reason);
  }

  #drop(connection: Connection, reason?: string): void {
    if (!this.#connections.delete(connection)) return;
    connection.session.end();
    connection.socket.destroy();
    if (reason !== undefined) this.#report(connection.peer, reason);
  }

  #report(peer: string, reason: string): void {
    publish('ep:store:dropped', () => ({ server: formatAddress(this.host, this.port), peer, reason }));
  }
}

/**
 * Opens a server that PyTorch's TCPStore clients and ours connect to; it speaks the protocol of torch 2.13. `EP_SYSTEM` names the errno if the
 * address cannot be had, `EP_SECRET` asks for a job secret where other hosts could connect. A client that sends what the protocol does not know, or that stalls, loses its own connection only; the diagnostics channel
 * `ep:store:dropped` says why.
 */
export async function openTcpStoreServer(options: TcpStoreServerOptions): Promise<TcpStoreServer> {
  const where = 'tcp store server';
  checkObject(options, 'options', 'an object with port', where);
  const port = checkInteger(options.port, 'port', where, 0, 65535);
  const host = options.bind ?? '127.0.0.1';
  if (typeof host !== 'string' || host === '')
    throw invalid('bind', { where, expected: 'an address of this machine', found: host });
  const limits = { ...LIMITS, ...options.limits };
  for (const [name, value] of Object.entries(limits)) checkInteger(value, `limits.${name}`, where, 1);
  const secret = resolveJobSecret(options.secret);
  if (secret === undefined && !isLoopback(host))
    throw secretMissing(`${where}: ${formatAddress(host, port)} can be reached from other hosts`);
  const server = createServer({ noDelay: true });
  server.maxConnections = limits.connections;
  await new Promise<void>((resolve, reject) => {
    server.once('error', (cause: NodeJS.ErrnoException) => {
      const { code = '', errno } = cause;
      reject(
        new EpError('EP_SYSTEM', `${where}: listen at ${formatAddress(host, port)} failed: ${code}`, {
          context: { call: 'listen', host, port },
          cause,
          ...(errno === undefined ? {} : { native: { status: errno, name: code, errno: -errno } }),
        }),
      );
    });
    server.listen({ host, port, backlog: 1024 }, resolve);
  });
  server.removeAllListeners('error');
  // Accepting can fail for a moment (no file descriptors left): those who wait are accepted later.
  server.on('error', () => {});
  const gate = secret === undefined || secret === 'none' ? undefined : gateOf(jobKey(secret, 'store'));
  return new TcpStoreServer(server, new StoreState(limits, gate));
}
