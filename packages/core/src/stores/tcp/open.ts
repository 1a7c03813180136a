/** Opening a TCP store: the client, and on one rank the server. */
import { defaultTimeoutMs } from '../../env.js';
import { checkInteger, checkObject, EpError, invalid } from '../../errors.js';
import type { AbortOptions } from '../../scope.js';
import { type JobSecret, jobKey, type ResolvedSecret, resolveJobSecret, secretMissing } from '../../secret.js';
import { checkTimeout } from '../../waiting.js';
import { openPatiently } from './lanes.js';
import {
  formatAddress,
  isLoopback,
  openTcpStoreServer,
  type TcpStoreServer,
  type TcpStoreServerOptions,
} from './server.js';
import { LABEL, TcpStore } from './store.js';

export interface TcpStoreOptions extends AbortOptions {
  /** Where the server is, or will be. */
  readonly host: string;
  /** 0 with `isServer`: one that is free. */
  readonly port: number;
  /** This rank holds the server; exactly one of the job does. */
  readonly isServer?: boolean;
  /** Where the server listens. Not needed where `host` is a loopback address; otherwise say it, for example `0.0.0.0` for all interfaces. */
  readonly bind?: string;
  /** Counts this client as one of so many that join. Absent: it does not join, as torch's clients without a world size. */
  readonly worldSize?: number;
  /** Whether the server's rank waits until `worldSize` clients have joined; true unless given. The others never wait. */
  readonly waitForWorkers?: boolean;
  /** For connecting and joining, and for every later request unless that gives its own. EP_TIMEOUT_MS unless given. */
  readonly timeoutMs?: number;
  readonly limits?: TcpStoreServerOptions['limits'];
  /**
   * What all ranks of the job share: client and server prove to each other that they have it. EP_JOB_SECRET unless given; `none` for PyTorch's servers and
   * clients, which know no secret. One of the two has to be said unless both ends are at a loopback address.
   */
  readonly secret?: JobSecret;
}

/** Where the server of this rank listens, and where its own client finds it. */
async function openServer(
  options: TcpStoreOptions,
  secret: ResolvedSecret | undefined,
): Promise<{ server: TcpStoreServer; host: string }> {
  const { host, bind } = options;
  if (bind === undefined && !isLoopback(host)) {
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `${LABEL}: the server for ${host} would listen at a loopback address, where other hosts cannot reach it: give bind (EP_STORE_BIND), for example "0.0.0.0" for all interfaces`,
      { context: { host } },
    );
  }
  const address = bind ?? (host === '::1' ? host : '127.0.0.1');
  const { limits } = options;
  const server = await openTcpStoreServer({
    port: options.port,
    bind: address,
    ...(secret !== undefined && { secret }),
    ...(limits && { limits }),
  });
  return { server, host: address === '0.0.0.0' ? '127.0.0.1' : address === '::' ? '::1' : address };
}

/**
 * A store at a server which speaks the protocol of PyTorch's TCPStore (torch 2.13): at a server of ours on the rank with `isServer`, or at torch's.
 * Keys are the same on both sides. Throws `EP_TIMEOUT` if no server answers in time, or, on the server's rank, if fewer than `worldSize` clients
 * joined, `EP_SECRET` if one side has no job secret or another one. When the server goes away, waits and requests end with `EP_PEER_LOST`; closing the store of the server's rank closes the server.
 *
 * HAZARD: nothing is encrypted, and the secret is asked for when a connection opens: whoever can read or change what is on its way sees and changes keys.
 */
export async function openTcpStore(options: TcpStoreOptions): Promise<TcpStore> {
  checkObject(options, 'options', 'an object with host and port', LABEL);
  const { worldSize, isServer = false, waitForWorkers = true } = options;
  const timeoutMs = checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), LABEL);
  if (typeof options.host !== 'string' || options.host === '')
    throw invalid('host', { where: LABEL, expected: 'a host name or address', found: options.host });
  checkInteger(options.port, 'port', LABEL, isServer ? 0 : 1, 65535);
  if (worldSize !== undefined) checkInteger(worldSize, 'worldSize', LABEL, 1);
  const signal = options.signal ?? new AbortController().signal;
  signal.throwIfAborted();
  const begin = performance.now();
  const left = (): number => Math.max(0, timeoutMs - (performance.now() - begin));
  const secret = resolveJobSecret(options.secret);
  if (secret === undefined && !isServer && !isLoopback(options.host))
    throw secretMissing(`${LABEL}: the store at ${formatAddress(options.host, options.port)} is on another host`);
  const key = secret === undefined || secret === 'none' ? undefined : jobKey(secret, 'store');
  const hosted = isServer ? await openServer(options, secret) : undefined;
  try {
    const at = { host: hosted?.host ?? options.host, port: hosted?.server.port ?? options.port, key };
    const main = await openPatiently(at, { timeoutMs, signal });
    const spare = await openPatiently(at, { timeoutMs: left(), signal }).catch((error: unknown) => {
      main.destroy();
      throw error;
    });
    const store = new TcpStore(main, spare, at, timeoutMs);
    try {
      if (worldSize !== undefined) await store.join();
      if (worldSize !== undefined && waitForWorkers)
        await hosted?.server.waitForWorkers(worldSize, { timeoutMs: left(), signal });
      if (hosted !== undefined) store.holdServer(hosted.server);
      return store;
    } catch (error) {
      await store.close();
      throw error;
    }
  } catch (error) {
    await hosted?.server.close();
    throw error;
  }
}
