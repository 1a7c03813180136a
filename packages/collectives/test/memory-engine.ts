/**
 * An engine among objects of one process: the ranks' calls meet in an object, and the last to come carries the call out in plain loops. It does all that
 * `GroupEngine` promises and nothing fast: what a group does over it is what it must do over every other engine.
 */
import { createStorage, type DType, EpError, formatRanks, type Storage } from '@ep/core';
import type { EngineInit } from '../src/backends.js';
import type {
  EngineCall,
  EngineEnd,
  GroupEngine,
  GroupView,
  OpKind,
  OpTrace,
  RecvCall,
  RecvEnd,
  SendCall,
} from '../src/engine.js';
import { carryOut, payload } from './memory-arithmetic.js';
import { MemoryMessages } from './memory-messages.js';

type Ended = { readonly end: EngineEnd } | { readonly error: unknown };

/** What must be the same on all ranks. */
function signatureOf({ kind, dtype, reduceOp, root, inputs, outputs }: EngineCall): string {
  const lengths = kind === 'all-to-all' || kind === 'barrier' ? [] : [(inputs[0] ?? outputs[0])?.length];
  return JSON.stringify([kind, dtype, reduceOp, root, ...lengths]);
}

/** A call from `run` to its end. */
class Pending {
  readonly call: EngineCall;
  /** As the call was made: an array may be detached before the others come. */
  readonly signature: string;
  ended: Ended | undefined;
  #settle: ((ended: Ended) => void) | undefined;
  #timer: NodeJS.Timeout | undefined;
  #armed = false;
  #stopListening: (() => void) | undefined;

  constructor(call: EngineCall, onAbort: () => void) {
    this.call = call;
    this.signature = signatureOf(call);
    const { signal } = call;
    signal?.addEventListener('abort', onAbort);
    this.#stopListening = () => signal?.removeEventListener('abort', onAbort);
  }

  /** The deadline counts from here. */
  arm(expired: () => void): void {
    if (this.#armed || this.ended !== undefined) return;
    this.#armed = true;
    if (this.call.timeoutMs !== Number.POSITIVE_INFINITY) this.#timer = setTimeout(expired, this.call.timeoutMs);
  }

  finish(ended: Ended): void {
    if (this.ended !== undefined) return;
    this.ended = ended;
    clearTimeout(this.#timer);
    this.#stopListening?.();
    this.#settle?.(ended);
  }

  outcome(): EngineEnd | Promise<EngineEnd> {
    if (this.ended !== undefined && 'end' in this.ended) return this.ended.end;
    return new Promise((resolve, reject) => {
      const settle = (ended: Ended): void => ('end' in ended ? resolve(ended.end) : reject(ended.error));
      if (this.ended === undefined) this.#settle = settle;
      else settle(this.ended);
    });
  }
}

class MemoryGroup {
  readonly size: number;
  readonly ranks: readonly number[];
  readonly messages: MemoryMessages;
  readonly members: (MemoryEngine | undefined)[];
  epoch = 0;
  active: readonly number[];
  /** Losses that a call is telling the survivors, and who has been told. */
  #telling: { readonly lost: readonly number[]; readonly told: Set<number> } | undefined;
  #untold: number[] = [];
  #poison: EpError | undefined;

  constructor(size: number, ranks: readonly number[]) {
    this.size = size;
    this.ranks = ranks;
    this.messages = new MemoryMessages(size);
    this.members = new Array<MemoryEngine | undefined>(size).fill(undefined);
    this.active = Array.from({ length: size }, (_, rank) => rank);
  }

  get poison(): EpError | undefined {
    return this.#poison;
  }

  leave(rank: number): void {
    if (!this.active.includes(rank)) return;
    this.active = this.active.filter((one) => one !== rank);
    this.epoch++;
    this.#untold.push(rank);
    this.messages.leave(rank);
    this.advance();
  }

  /** Carries out all that is complete. */
  advance(): void {
    while (this.#poison === undefined && this.active.length > 0) {
      if (this.#telling === undefined && this.#untold.length > 0) {
        this.#telling = { lost: this.#untold.sort((a, b) => a - b), told: new Set() };
        this.#untold = [];
      }
      if (this.#telling === undefined ? !this.#runOne() : !this.#tellLoss(this.#telling)) break;
    }
    for (const rank of this.active) this.members[rank]?.oldest?.arm(() => this.#expire(rank));
  }

  /** Ends the oldest call of each with what `errorOf` says, all others as poisoned. */
  fail(cause: string, errorOf: (rank: number) => unknown): void {
    this.#poison = new EpError('EP_POISONED', `an earlier call of this group failed: ${cause}`);
    for (const rank of this.active) {
      const engine = this.members[rank];
      engine?.end({ error: errorOf(rank) });
      while (engine?.oldest !== undefined) engine.end({ error: this.#poison });
    }
  }

  #runOne(): boolean {
    const calls = this.members.map((member) => member?.oldest?.call);
    if (this.active.some((rank) => calls[rank] === undefined)) return false;
    const mismatch = this.#mismatch(calls);
    if (mismatch !== undefined) {
      this.fail(mismatch.message, () => mismatch);
      return true;
    }
    const { root } = calls[this.active[0]!]!;
    const rootLost = root >= 0 && !this.active.includes(root);
    if (!rootLost) carryOut(this.active, calls);
    const contributors = this.active;
    for (const rank of this.active) {
      const call = calls[rank]!;
      if (rootLost) {
        const message = `${call.kind} ${call.sequence}: its root, rank ${root}, is lost`;
        this.members[rank]!.end({ error: new EpError('EP_PEER_LOST', message, { context: { lost: [root] } }) });
      } else {
        this.members[rank]!.count(call.kind, { ...payload(this.active, rank, call), signals: this.active.length - 1 });
        this.members[rank]!.end({ end: { contributors } });
      }
    }
    return true;
  }

  #tellLoss({ lost, told }: { readonly lost: readonly number[]; readonly told: Set<number> }): boolean {
    for (const rank of this.active) {
      const engine = this.members[rank];
      if (told.has(rank) || engine?.oldest === undefined) continue;
      told.add(rank);
      const { kind, sequence } = engine.oldest.call;
      const message = `${kind} ${sequence}: ${formatRanks(lost)} died or closed`;
      engine.end({ error: new EpError('EP_PEER_LOST', message, { context: { lost } }) });
    }
    if (this.active.some((rank) => !told.has(rank))) return false;
    this.#telling = undefined;
    return true;
  }

  #expire(rank: number): void {
    const call = this.members[rank]?.oldest?.call;
    if (call === undefined) return;
    const told = this.#telling?.told;
    const arrived = this.active.filter((one) => told?.has(one) === true || this.members[one]?.oldest !== undefined);
    const awaited = this.active.filter((one) => !arrived.includes(one));
    const message = `${call.kind} ${call.sequence}: ${formatRanks(awaited)} did not come within ${call.timeoutMs} ms of rank ${rank}`;
    const error = new EpError('EP_TIMEOUT', message, { context: { arrived, awaited, timeoutMs: call.timeoutMs } });
    this.fail(message, () => error);
  }

  #mismatch(calls: readonly (EngineCall | undefined)[]): EpError | undefined {
    const camps = new Map<string, number[]>();
    for (const rank of this.active) {
      const { signature } = this.members[rank]!.oldest!;
      camps.set(signature, [...(camps.get(signature) ?? []), rank]);
    }
    const { kind, sequence } = calls[this.active[0]!]!;
    if (camps.size > 1) {
      const [[expected, most], ...rest] = [...camps].sort(([, a], [, b]) => b.length - a.length) as [
        [string, number[]],
        ...[string, number[]][],
      ];
      const odd = 2 * most.length > this.active.length ? rest : [[expected, most] as const, ...rest];
      const ranks = odd.flatMap(([, camp]) => camp).sort((a, b) => a - b);
      const found = odd.map(([signature, camp]) => `${signature} by ${formatRanks(camp)}`).join(', ');
      const message = `call ${sequence}: ${formatRanks(ranks)} of ${this.size} made another call: ${found}`;
      return new EpError('EP_MISMATCH', message, { context: { ranks, sequence, expected, found } });
    }
    if (kind !== 'all-to-all') return undefined;
    for (const to of this.active) {
      for (const from of this.active) {
        const [expected, found] = [calls[to]!.outputs[from]!.length, calls[from]!.inputs[to]!.length];
        if (expected === found) continue;
        const ranks = [...new Set([from, to])].sort((a, b) => a - b);
        const message = `all-to-all ${sequence}: rank ${from} gives ${found} elements to rank ${to}, which takes ${expected}`;
        return new EpError('EP_MISMATCH', message, { context: { ranks, sequence, expected, found } });
      }
    }
    return undefined;
  }
}

export class MemoryEngine implements GroupEngine {
  readonly name = 'memory';
  readonly rank: number;
  readonly size: number;
  readonly #group: MemoryGroup;
  readonly #queue: Pending[] = [];
  readonly #trace: Partial<Record<OpKind | 'send' | 'recv', OpTrace>> = {};
  closed = false;

  constructor(group: MemoryGroup, rank: number) {
    this.#group = group;
    this.rank = rank;
    this.size = group.size;
  }

  get oldest(): Pending | undefined {
    return this.#queue[0];
  }

  run(call: EngineCall): EngineEnd | Promise<EngineEnd> {
    if (this.closed) throw new EpError('EP_CLOSED', 'the engine was closed');
    if (this.#group.poison !== undefined) return Promise.reject(this.#group.poison);
    const abort = (): void => {
      const message = `rank ${this.rank} gave up ${call.kind} ${call.sequence}`;
      const told = new EpError('EP_ABORTED', message, { context: { ranks: [this.rank] } });
      pending.finish({ error: call.signal?.reason });
      this.#group.fail(message, () => told);
    };
    const pending = new Pending(call, abort);
    this.#queue.push(pending);
    if (call.signal?.aborted === true) abort();
    else this.#group.advance();
    return pending.outcome();
  }

  /** Ends the oldest call. */
  end(ended: Ended): void {
    this.#queue.shift()?.finish(ended);
  }

  count(kind: OpKind | 'send' | 'recv', cost: Omit<OpTrace, 'calls'>): void {
    const before = this.#trace[kind] ?? { calls: 0, bytes: 0, writes: 0, signals: 0 };
    this.#trace[kind] = {
      calls: before.calls + 1,
      bytes: before.bytes + cost.bytes,
      writes: before.writes + cost.writes,
      signals: before.signals + cost.signals,
    };
  }

  async send(call: SendCall): Promise<void> {
    if (this.closed) throw new EpError('EP_CLOSED', 'the engine was closed');
    await this.#group.messages.send(this.rank, call);
    this.count('send', { bytes: call.data.byteLength, writes: call.data.length === 0 ? 0 : 1, signals: 1 });
  }

  async recv(call: RecvCall): Promise<RecvEnd> {
    if (this.closed) throw new EpError('EP_CLOSED', 'the engine was closed');
    const end = await this.#group.messages.recv(this.rank, call);
    this.count('recv', { bytes: 0, writes: 0, signals: 1 });
    return end;
  }

  view(): GroupView {
    return { epoch: this.#group.epoch, active: this.#group.active };
  }

  allocate<D extends DType>(dtype: D, length: number): Storage[D] {
    return createStorage(dtype, length);
  }

  trace(): Readonly<Partial<Record<OpKind | 'send' | 'recv', OpTrace>>> {
    return { ...this.#trace };
  }

  connections(): ReturnType<GroupEngine['connections']> {
    return this.#group.members.map((member, rank) => {
      if (rank === this.rank) return { rank, state: 'self' };
      if (!this.#group.active.includes(rank)) return { rank, state: 'lost' };
      return member === undefined
        ? { rank, state: 'connecting', detail: 'not here yet' }
        : { rank, state: 'connected' };
    });
  }

  /** As if the rank had died: its calls never end. */
  die(): void {
    this.closed = true;
    this.#queue.length = 0;
    this.#group.leave(this.rank);
  }

  async close(): Promise<void> {
    if (this.closed) return;
    this.closed = true;
    const error = new EpError('EP_ABORTED', 'the engine was closed');
    while (this.oldest !== undefined) this.end({ error });
    this.#group.leave(this.rank);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/** Where the engines of one world meet; `open` is the backend of its groups. */
export class MemoryWorld {
  readonly #groups = new Map<string, MemoryGroup>();

  readonly open = ({ name, rank, size, ranks }: EngineInit): MemoryEngine => {
    let group = this.#groups.get(name);
    if (group === undefined) {
      group = new MemoryGroup(size, ranks);
      this.#groups.set(name, group);
    }
    if (group.members[rank] !== undefined) throw new Error(`rank ${rank} opened ${name} twice`);
    const engine = new MemoryEngine(group, rank);
    group.members[rank] = engine;
    group.advance();
    return engine;
  };

  /** Kills a rank of the world in all groups at once. */
  kill(worldRank: number): void {
    for (const { ranks, members } of this.#groups.values()) {
      const rank = ranks.indexOf(worldRank);
      if (rank >= 0) members[rank]?.die();
    }
  }
}
