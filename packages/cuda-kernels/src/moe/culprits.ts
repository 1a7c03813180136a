/**
 * Over EFA, where no call goes on without a rank: whoever has failed tells the others whom it missed. Else one that has all it needs of a dead rank waits for those that have failed, to its limit,
 * and names one that lives.
 *
 * It is told by the slots of the farewell, which count 1 when a rank has ended its last call, as one that has failed has: no slot more, and what ranks forget of each other when they begin
 * again is among it. A word is `call << 32 | code << 24 | (rank + 1) << 8 | farewell`.
 */
import { type Endpoint, EpError, formatRanks, isEpError, type Rank, type SymmetricMemory } from '@ep/core';

/** Whom a call has missed, and why. */
export interface Culprit {
  readonly rank: Rank;
  readonly code: 'EP_PEER_LOST' | 'EP_TIMEOUT';
}

/** What a rank has told. `call`: the first of its calls, modulo 2^32, that nobody brings to an end with it. */
export interface Told extends Culprit {
  readonly call: number;
}

const CODES = ['EP_PEER_LOST', 'EP_TIMEOUT'] as const;
/** Ranks that fit a word. */
const MOST_RANKS = 0xffff;
/** How often a rank that waits looks for what it was told, in milliseconds. */
const LOOK_MS = 20;
/** How long one whose time is up lets others say whom they have missed, as a share of its time and at most. */
const PATIENCE = 1 / 4;
const PATIENCE_MS = 1000;

export function toldWord({ rank, code, call }: Told): bigint {
  const low = (BigInt(CODES.indexOf(code) + 1) << 24n) | (BigInt(rank + 1) << 8n);
  return (BigInt(call >>> 0) << 32n) | low;
}

/** Undefined: nothing was told. */
export function toldOf(word: bigint): Told | undefined {
  const rank = Number((word >> 8n) & 0xffffn) - 1;
  const code = CODES[Number((word >> 24n) & 0xffn) - 1];
  return rank < 0 || code === undefined ? undefined : { rank, code, call: Number(word >> 32n) };
}

/** Whom an error of a call names as missing. */
export function namedBy(reason: unknown): Culprit | undefined {
  if (!isEpError(reason)) return undefined;
  const code = CODES.find((one) => one === reason.code);
  const { rank } = reason.context;
  return code === undefined || typeof rank !== 'number' || rank < 0 ? undefined : { rank, code };
}

export interface CulpritsInit {
  readonly rank: Rank;
  readonly memory: SymmetricMemory;
  readonly endpoints: readonly Endpoint<'add'>[];
  /** Slot of rank 0's farewell. */
  readonly firstSlot: number;
  readonly takesPart: (rank: Rank) => boolean;
  /** Calls that were begun, and the first of them that has not ended. */
  readonly calls: () => { readonly begun: number; readonly first: number };
  /** Of a call that gives no limit of its own, in milliseconds. */
  readonly timeoutMs: number;
}

export class Culprits {
  readonly #init: CulpritsInit;
  #timer: NodeJS.Timeout | undefined;
  #hasTold = false;

  constructor(init: CulpritsInit) {
    this.#init = init;
  }

  /**
   * While `isBusy`: looks whether somebody has told of a failure of a call that was begun here, and says so once. A timer, and nothing of a call: one that goes well finds it running, or starts
   * it once for all that follow it closely.
   */
  watch(isBusy: () => boolean, onTold: (error: EpError) => void): void {
    if (this.#timer !== undefined) return;
    const look = (): void => {
      let error: EpError | undefined;
      try {
        error = this.#heard();
      } catch {
        // HAZARD: a timer that throws ends the process. The words are of no use any more; whatever waits for them hears that itself.
        this.rest();
        return;
      }
      if (error === undefined) return;
      this.rest();
      onTold(error);
    };
    const lookWhileBusy = (): void => {
      if (isBusy()) look();
      else this.rest();
    };
    this.#timer = setInterval(lookWhileBusy, LOOK_MS).unref();
  }

  rest(): void {
    clearInterval(this.#timer);
    this.#timer = undefined;
  }

  /** All ranks begin again, and have forgotten what was told. */
  renew(): void {
    this.rest();
    this.#hasTold = false;
  }

  /**
   * Why a call failed here, as far as others know better; tells them. A rank that was late may have missed another one, and say so a little later: ends after a share of the buffer's limit, a
   * second at most. Ranks that name each other in a circle know no better than this one, unless the last of it is known to be dead.
   */
  async settle(name: string, reason: unknown): Promise<unknown> {
    const own = namedBy(reason);
    const { rank: self, memory, timeoutMs } = this.#init;
    if (own === undefined || own.rank === self) return reason;
    this.#tell(own);
    const by = performance.now() + Math.min(PATIENCE_MS, timeoutMs * PATIENCE);
    const passed: Rank[] = [];
    let found = own;
    while (!memory.closed) {
      const said = this.#saidBy(found.rank);
      if (said !== undefined) {
        if (passed.includes(said.rank) && found.code === 'EP_TIMEOUT') return reason;
        if (said.rank === self || said.rank === found.rank || passed.includes(said.rank)) break;
        passed.push(found.rank);
        found = said;
      } else if (found.code === 'EP_PEER_LOST' || performance.now() >= by) {
        break;
      } else {
        await new Promise((resolve) => setTimeout(resolve, 5));
      }
    }
    return passed.length === 0 ? reason : errorOf(name, found, passed.at(-1)!, reason);
  }

  #heard(): EpError | undefined {
    const { endpoints, rank: self, calls, takesPart } = this.#init;
    const { begun } = calls();
    for (const { peer } of endpoints) {
      if (peer === self || !takesPart(peer)) continue;
      const said = this.#saidBy(peer);
      // HAZARD: one that is ahead may have failed in a call that has not begun here, and those before it go well yet.
      if (said === undefined || ((begun - said.call) | 0) <= 0) continue;
      if (said.rank !== self) return errorOf('', said, peer);
    }
    return undefined;
  }

  #saidBy(peer: Rank): Told | undefined {
    const { memory, firstSlot, endpoints } = this.#init;
    if (peer >= endpoints.length) return undefined;
    const said = toldOf(memory.signals.peek(firstSlot + peer));
    return said !== undefined && said.rank < endpoints.length ? said : undefined;
  }

  /** HAZARD: once, for what is told twice to a word that counts is the sum of both. It awaits nobody: requests to ranks that do not answer end with the farewell. */
  #tell({ rank, code }: Culprit): void {
    const { rank: self, memory, endpoints, firstSlot, calls, takesPart } = this.#init;
    if (this.#hasTold || endpoints.length > MOST_RANKS) return;
    this.#hasTold = true;
    const value = toldWord({ rank, code, call: calls().first });
    for (const endpoint of endpoints) {
      const { peer } = endpoint;
      if (peer === self || peer === rank || !takesPart(peer)) continue;
      void (async () => endpoint.signal(memory, { slot: firstSlot + self, op: 'add', value }))().catch(() => {});
    }
  }
}

function errorOf(name: string, { rank, code }: Culprit, toldBy: Rank, cause?: unknown): EpError {
  const why = code === 'EP_TIMEOUT' ? 'did not come in time' : 'is lost';
  const where = name === '' ? '' : `${name}: `;
  const text = `${where}${formatRanks([rank])} ${why}, as ${formatRanks([toldBy])} has told, whose call has failed`;
  return new EpError(code, text, { context: { rank, toldBy }, ...(cause !== undefined && { cause }) });
}
