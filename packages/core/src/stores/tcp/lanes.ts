/** The connections of one client: one for requests that are answered at once, and as many as there are waits at a time. */
import { EpError, isEpError } from '../../errors.js';
import { linkSignals } from '../../waiting.js';
import { type Address, type Channel, openChannel } from './channel.js';
import { type Reached, whyUnreachable } from './reachability.js';
import { formatAddress } from './server.js';

/** A connection carries one wait at a time, and torch's servers answer what is asked meanwhile out of its turn. */
const IDLE_KEPT = 2;
const RETRY_MS = [20, 1000] as const;

export interface Deadline {
  readonly timeoutMs: number;
  readonly signal: AbortSignal;
}

const pause = (ms: number, signal: AbortSignal): Promise<void> =>
  new Promise((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      signal.removeEventListener('abort', end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener('abort', end);
  });

/** Connects, again and again while nobody listens there yet: clients may start before the server. */
export async function openPatiently(address: Address, { timeoutMs, signal }: Deadline): Promise<Channel> {
  const at = formatAddress(address.host, address.port);
  const begin = performance.now();
  const late = new AbortController();
  const timer =
    timeoutMs === Number.POSITIVE_INFINITY
      ? undefined
      : setTimeout(() => late.abort(), Math.min(timeoutMs, 2 ** 31 - 1));
  const linked = linkSignals(signal, late.signal);
  let cause: unknown;
  let reached: Reached = 'nothing';
  try {
    for (let wait: number = RETRY_MS[0]; ; wait = Math.min(2 * wait, RETRY_MS[1])) {
      try {
        return await openChannel(address, linked.signal, (what) => {
          reached = what;
          cause = undefined;
        });
      } catch (error) {
        signal.throwIfAborted();
        // The next attempt would hear the same.
        if (isEpError(error) && error.code === 'EP_SECRET') throw error;
        if (!late.signal.aborted) cause = error;
      }
      if (!late.signal.aborted) await pause(wait, linked.signal);
      signal.throwIfAborted();
      if (!late.signal.aborted) continue;
      const { host, port } = address;
      const found = await whyUnreachable(address, reached, cause);
      throw new EpError('EP_TIMEOUT', `tcp store: no server at ${at} within ${Math.round(timeoutMs)} ms: ${found}`, {
        context: { host, port, timeoutMs, waitedMs: performance.now() - begin },
        cause,
      });
    }
  } finally {
    clearTimeout(timer);
    linked.unlink();
  }
}

export class Lanes {
  readonly #address: Address;
  readonly #idle: Channel[];
  readonly #all: Set<Channel>;
  #closed = false;

  /** `spare`: the first wait goes out at once, not after a connect that what it waits for could overtake. */
  constructor(address: Address, spare: Channel) {
    this.#address = address;
    this.#idle = [spare];
    this.#all = new Set([spare]);
  }

  get size(): number {
    return this.#all.size;
  }

  async take(deadline: Deadline): Promise<Channel> {
    for (let lane = this.#idle.pop(); lane !== undefined; lane = this.#idle.pop()) {
      if (lane.failure === undefined) return lane;
      this.#all.delete(lane);
    }
    const lane = await openPatiently(this.#address, deadline);
    this.#all.add(lane);
    if (this.#closed) lane.destroy();
    return lane;
  }

  /** Takes it back for the next one, if nothing is pending on it. */
  giveBack(lane: Channel): void {
    if (lane.failure === undefined && this.#idle.length < IDLE_KEPT && !this.#closed) {
      this.#idle.push(lane);
      return;
    }
    this.drop(lane);
  }

  drop(lane: Channel): void {
    this.#all.delete(lane);
    lane.destroy();
  }

  close(reason?: EpError): void {
    this.#closed = true;
    for (const lane of this.#all) lane.destroy(reason);
    this.#all.clear();
  }
}
