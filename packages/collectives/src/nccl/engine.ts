/**
 * Calls on tensors of a GPU by NVIDIA's NCCL. Another engine carries calls in host memory, says which ranks there are, and which have died; the addon keeps the order of the
 * stream (native: core/gpu/nccl.hpp).
 */
import { EpError, formatRanks, Resource, type Store } from '@ep/core';
import {
  codeOfStatus,
  type GpuQueue,
  type NativeGpuMemory,
  type NativeGpuOperand,
  type NativeNcclCommunicator,
  native,
  type OperationId,
  type Outcome,
} from '@ep/native';
import { DeviceElements } from '../device/elements.js';
import type { DeviceCall, EngineCall, EngineEnd, GroupEngine, RecvCall, RecvEnd, SendCall } from '../engine.js';
import { describeCall, differentCalls } from '../portable/signature.js';
import { factorOf, reductionCode, TYPE_CODES } from '../shm/codes.js';
import { type Answers, Inquest, type Note, type Standing } from './inquest.js';
import { checkReduction, type Step, stepsOf, VERBS } from './steps.js';

/** How often ranks that died are looked for while calls are under way. */
const LOOK_MS = 50;
/** For what is under way when a group closes; all of its calls have ended then but messages. */
const CLOSING_MS = 2000;

/** What the members have agreed on before. */
export interface NcclParts {
  readonly communicator: NativeNcclCommunicator;
  readonly stream: GpuQueue;
  readonly store: Store;
  /** Of 16 bytes. */
  readonly word: NativeGpuMemory;
  readonly name: string;
}

/** A call or messages under way. */
interface Underway {
  readonly what: string;
  /** 0 of messages. */
  readonly sequence: number;
  readonly describe: () => string;
  /** Of the addon, to be cancelled; and why that was done, if it was. */
  readonly operation: OperationId;
  cut?: { readonly reason: EpError };
  /** Other ends of messages. */
  readonly peers: readonly number[];
  readonly timeoutMs: number;
}

type Limits = Pick<DeviceCall, 'timeoutMs' | 'signal'>;
type Message = (SendCall<DeviceElements> | RecvCall<DeviceElements>) & { readonly verb: 'send' | 'recv' };

interface Batch {
  readonly messages: Message[];
  refused?: { readonly reason: unknown };
  readonly launched: Promise<void>;
  readonly end: (launching: Promise<void>) => void;
}

function flattened(steps: readonly Step[]): (NativeGpuOperand | number)[] {
  const flat: (NativeGpuOperand | number)[] = [];
  for (const { verb, rank, from, to } of steps) {
    flat.push(VERBS.indexOf(verb), rank);
    for (const one of [from, to]) {
      if (one === undefined || one.length === 0) flat.push(0, 0, 0);
      else flat.push(one.place.operand, one.place.byteOffset, one.byteLength);
    }
  }
  return flat;
}

const unsupported = (what: string): EpError =>
  new EpError('EP_UNSUPPORTED', `${what}`, { context: { backend: 'nccl' } });

export class NcclEngine extends Resource implements GroupEngine {
  readonly name: string;
  readonly rank: number;
  readonly size: number;
  readonly device: NonNullable<GroupEngine['device']>;
  readonly send: GroupEngine['send'];
  readonly recv: GroupEngine['recv'];
  readonly view: GroupEngine['view'];
  readonly allocate: GroupEngine['allocate'];
  readonly trace: GroupEngine['trace'];
  readonly connections: GroupEngine['connections'];
  readonly #host: GroupEngine;
  readonly #parts: NcclParts;
  readonly #inquest: Inquest;
  readonly #word: DeviceElements;
  readonly #everybody: EngineEnd;
  readonly #underway = new Set<Underway>();
  readonly #pending = new Set<Promise<unknown>>();
  /** Of collective calls: a refused one is none. */
  #sequence = 0;
  #hostSequence = 0;
  #batch: Batch | undefined;
  #looking: NodeJS.Timeout | undefined;
  #failed: { readonly reason: unknown } | undefined;
  /** The call that failed before all others: they went with it. */
  #first: Underway | undefined;
  /** Where this rank was when it gave up, or heard of another that did. */
  #standing: Standing | undefined;
  #heard: Note | undefined;
  #ending: Promise<Outcome> | undefined;

  constructor(host: GroupEngine, parts: NcclParts) {
    super(`group over NCCL on GPU ${parts.stream.device.index}`);
    this.#host = host;
    this.#parts = parts;
    this.name = parts.name;
    this.rank = host.rank;
    this.size = host.size;
    const { word, stream } = parts;
    const operand = { operand: word, byteOffset: 0 };
    this.#word = new DeviceElements('i32', stream.device.index, word.address(), 1, operand);
    this.#everybody = { contributors: Object.freeze(Array.from({ length: host.size }, (_, rank) => rank)) };
    this.#inquest = new Inquest(parts.store, host.rank, host.size);
    this.device = {
      run: (call) => this.#run(call),
      // Calls go into no graph: the addon refuses them while the stream is being captured.
      capturing: () => false,
      send: async (call) => void (await this.#message({ ...call, verb: 'send' })),
      recv: (call) => this.#message({ ...call, verb: 'recv' }),
    };
    this.send = host.send;
    this.recv = host.recv;
    this.view = host.view;
    this.allocate = host.allocate;
    this.trace = host.trace;
    this.connections = host.connections;
    this.closing.addEventListener('abort', () => this.#cutAll(new EpError('EP_ABORTED', 'the group was closed')), {
      once: true,
    });
    this.#inquest.hear(this.closing).then(
      (note) => this.#onNote(note),
      // Closed, or the store is gone: then nobody tells, and calls end by their time.
      () => {},
    );
  }

  /** A barrier is an all-reduce of one element: behind it, all that was on the streams of all ranks before has run. */
  readonly run = (call: EngineCall): EngineEnd | Promise<EngineEnd> => {
    // HAZARD: numbered apart. Ranks may have made different numbers of calls on the device, once these have failed.
    if (call.kind !== 'barrier') return this.#host.run({ ...call, sequence: ++this.#hostSequence });
    return this.#run({ ...call, inputs: [this.#word], outputs: [this.#word] }, 'i32');
  };

  /** All messages that `body` posts are one group of NCCL: no order among them can block. */
  readonly grouped = <T>(body: () => T): T => {
    let end: Batch['end'] = () => {};
    const launched = new Promise<void>((resolve) => {
      end = resolve;
    });
    // Each message hears of its failure.
    launched.catch(() => {});
    const batch: Batch = { messages: [], launched, end };
    this.#batch = batch;
    try {
      return body();
    } finally {
      this.#batch = undefined;
      const { refused, messages } = batch;
      end(refused === undefined ? this.#post(messages) : Promise.reject(refused.reason));
    }
  };

  async #run(given: DeviceCall, dtype = given.dtype): Promise<EngineEnd> {
    this.checkOpen(given.kind);
    this.#checkUsable(`call ${given.sequence}: ${given.kind}`);
    checkReduction(given);
    const call = { ...given, dtype, sequence: this.#sequence + 1 };
    await this.#launch(
      stepsOf(call, this.rank, this.size),
      { element: TYPE_CODES[dtype], fold: reductionCode(call.reduceOp), factor: factorOf(call.reduceOp) },
      call,
      {
        what: `call ${call.sequence}: ${call.kind}`,
        sequence: call.sequence,
        describe: () => describeCall(given),
        peers: [],
      },
    );
    return this.#everybody;
  }

  async #message(message: Message): Promise<RecvEnd> {
    const { verb, peer, tag, data } = message;
    const end = { source: peer, byteLength: data.byteLength };
    const batch = this.#batch;
    try {
      this.checkOpen(verb);
      this.#checkUsable(verb);
      if (tag !== 0)
        throw unsupported(`${verb} with tag ${tag}: NCCL has no tags; messages of two ranks go in their order`);
      if (peer < 0) throw unsupported('recvAnySource: a receive of NCCL names its sender');
      if (peer === this.rank && batch === undefined) {
        throw unsupported(
          `${verb} of rank ${peer} to itself: NCCL has both ends of such messages in one batch (batchIsendIrecv)`,
        );
      }
    } catch (reason) {
      if (batch !== undefined) batch.refused ??= { reason };
      throw reason;
    }
    if (batch === undefined) await this.#post([message]);
    else {
      batch.messages.push(message);
      await batch.launched;
    }
    return end;
  }

  async #post(messages: readonly Message[]): Promise<void> {
    const [first] = messages;
    if (first === undefined) return;
    const own = (verb: Message['verb']) =>
      messages.filter((one) => one.verb === verb && one.peer === this.rank).map(({ data }) => data.byteLength);
    const [sent, taken] = [own('send'), own('recv')];
    if (sent.length !== taken.length || sent.some((bytes, i) => bytes !== taken[i])) {
      throw unsupported(
        `messages of rank ${this.rank} to itself: ${sent.length} are sent and ${taken.length} received in one batch, or of other lengths: NCCL has both ends in one`,
      );
    }
    const steps = messages.map(
      ({ verb, peer, data }): Step =>
        verb === 'send' ? { verb, rank: peer, from: data } : { verb, rank: peer, to: data },
    );
    const peers = [...new Set(messages.map(({ peer }) => peer))].filter((peer) => peer !== this.rank);
    const what =
      messages.length === 1 ? `${first.verb} with rank ${first.peer}` : `batch of ${messages.length} messages`;
    await this.#launch(steps, { element: TYPE_CODES.u8, fold: 0, factor: 0 }, first, {
      what,
      sequence: 0,
      describe: () => what,
      peers,
    });
  }

  #checkUsable(where: string): void {
    if (this.#failed === undefined) return;
    throw new EpError(
      'EP_POISONED',
      `${where}: an earlier call on the device failed, and NCCL's communicator is gone: open another group`,
      { cause: this.#failed.reason },
    );
  }

  /** HAZARD: the launch comes before anything is awaited: whoever returns from here has put it on the stream. */
  async #launch(
    steps: readonly Step[],
    kind: { readonly element: number; readonly fold: number; readonly factor: number },
    { timeoutMs, signal }: Limits,
    named: Omit<Underway, 'operation' | 'cut' | 'timeoutMs'>,
  ): Promise<void> {
    signal?.throwIfAborted();
    const { communicator, stream } = this.#parts;
    const call = { ...kind, timeoutMs: Number.isFinite(timeoutMs) ? timeoutMs : -1 };
    let one: Underway | undefined;
    // No AbortController for each call: with its listeners it takes as long as all else that a small one does in JS. What cuts all calls cancels their operations.
    const running = stream.follow((queue) => {
      const operation = queue.ncclCall(communicator, call, ...flattened(steps));
      one = { ...named, operation, timeoutMs };
      if (named.sequence > 0) this.#sequence++;
      this.#underway.add(one);
      this.#looking ??= setInterval(() => this.#look(), LOOK_MS).unref();
      return operation;
    }, signal);
    const ending = this.#end(running, () => one, signal);
    this.#pending.add(ending);
    try {
      await ending;
    } finally {
      this.#pending.delete(ending);
    }
  }

  /** `launched`: undefined of one that was refused. */
  async #end(
    running: Promise<Outcome>,
    launched: () => Underway | undefined,
    signal: AbortSignal | undefined,
  ): Promise<void> {
    let failure: unknown;
    try {
      const outcome = await running;
      if (outcome.status !== 0) failure = launched()?.cut?.reason ?? outcome;
    } catch (error) {
      failure = error;
    }
    const one = launched();
    // What was refused at the launch is no call: others may go on.
    if (one === undefined) throw failure;
    if (failure === undefined) return this.#over(one);
    const error = await this.#errorOf(one, failure, signal);
    this.#failed ??= { reason: error };
    this.#over(one);
    throw error;
  }

  /** The timer stays: a small call is over long before it is due, and the next one needs it again. */
  #over(one: Underway): void {
    this.#underway.delete(one);
  }

  #lost(): number[] {
    return this.#host.connections().flatMap(({ rank, state }) => (state === 'lost' ? [rank] : []));
  }

  /** NCCL goes on waiting for a rank that died. */
  #look(): void {
    if (this.#underway.size === 0) {
      clearInterval(this.#looking);
      this.#looking = undefined;
      return;
    }
    const lost = this.#lost();
    if (lost.length > 0) this.#cutAll(new EpError('EP_PEER_LOST', `${formatRanks(lost)} died or closed the group`));
  }

  #stand(): Standing {
    this.#standing ??= {
      made: this.#sequence,
      calls: [...this.#underway]
        .filter(({ sequence }) => sequence > 0)
        .map(({ sequence, describe }) => ({ sequence, text: describe() })),
    };
    return this.#standing;
  }

  #onNote(note: Note): void {
    if (note.rank === this.rank) return;
    this.#heard ??= note;
    // Nobody waits for what the store says to it.
    this.#inquest.tell(this.#stand()).catch(() => {});
    const where = note.sequence > 0 ? ` at call ${note.sequence}` : '';
    const error = new EpError('EP_ABORTED', `${formatRanks([note.rank])} gave up${where} (${note.code})`, {
      context: { ranks: [note.rank] },
    });
    this.#failed ??= { reason: error };
    this.#cutAll(error);
  }

  #cutAll(reason: EpError): void {
    for (const one of this.#underway) {
      one.cut ??= { reason };
      native().binding.cancel(one.operation);
    }
  }

  /** When NCCL is through with the tensors of calls that failed, and all who could have said where they are. */
  async #errorOf(one: Underway, failure: unknown, signal: AbortSignal | undefined): Promise<unknown> {
    const first = this.#first === undefined;
    this.#first ??= one;
    const own = this.#stand();
    const why = this.#parts.communicator.failed();
    await this.#endCommunicator(0);
    const given = signal?.aborted === true && failure === signal.reason;
    if (this.closing.aborted) {
      return failure instanceof Error ? failure : new EpError('EP_ABORTED', `${one.what}: the group was closed`);
    }
    if (!first) return given ? failure : this.#poisoned(one);
    const status = given || failure instanceof Error ? undefined : (failure as Outcome).status;
    const code = status === undefined ? 'EP_ABORTED' : codeOfStatus(status);
    const before = this.#lost();
    const note = { rank: this.rank, code: before.length > 0 ? 'EP_PEER_LOST' : code, sequence: one.sequence };
    // Where the store is gone with whoever held it, nobody says more.
    const answers = await this.#inquest.hold(own, note).catch(() => undefined);
    if (given) return failure;
    // Whoever answered has left since, as this rank may.
    const lost = [...new Set([...before, ...this.#lost()])].filter((rank) => answers?.has(rank) !== true);
    return this.#verdict(one, { code, why, lost, answers });
  }

  #verdict(
    one: Underway,
    found: {
      readonly code: string;
      readonly why: string | undefined;
      readonly lost: readonly number[];
      readonly answers: Answers | undefined;
    },
  ): EpError {
    const { what, sequence, timeoutMs } = one;
    const { answers, code, why } = found;
    const lost = [...found.lost].sort((a, b) => a - b);
    const context = sequence > 0 ? { sequence } : {};
    if (lost.length > 0) {
      return new EpError('EP_PEER_LOST', `${what}: ${formatRanks(lost)} died or closed the group`, {
        context: { ...context, lost },
      });
    }
    const standings = answers ?? new Map<number, Standing>();
    const texts = new Map<number, string>([[this.rank, one.describe()]]);
    for (const [rank, { calls }] of standings) {
      const same = calls.find((call) => call.sequence === sequence);
      if (same !== undefined) texts.set(rank, same.text);
    }
    const different = sequence > 0 ? differentCalls(sequence, texts) : undefined;
    if (different !== undefined) return different;
    const ranks = Array.from({ length: this.size }, (_, rank) => rank);
    const arrived =
      sequence > 0
        ? ranks.filter((rank) => rank === this.rank || (standings.get(rank)?.made ?? 0) >= sequence)
        : ranks.filter((rank) => !one.peers.includes(rank));
    const awaited = ranks.filter((rank) => !arrived.includes(rank));
    const who = awaited.length > 0 ? `awaited ${formatRanks(awaited)}` : 'all ranks have come: NCCL does not go on';
    if (code === 'EP_TIMEOUT') {
      const there = `${formatRanks(arrived)} arrived`;
      return new EpError('EP_TIMEOUT', `${what}: timed out after ${timeoutMs} ms; ${who}; ${there}`, {
        context: { ...context, arrived, awaited, timeoutMs },
      });
    }
    if (this.#heard !== undefined) {
      const { rank, code: theirs } = this.#heard;
      const text = `${what}: ${formatRanks([rank])} gave up this call, or an earlier one (${theirs}); ${who}`;
      return new EpError('EP_ABORTED', text, { context: { ...context, ranks: [rank], awaited } });
    }
    return new EpError('EP_SYSTEM', `${what}: ${why ?? 'NCCL failed'}; ${who}`, { context: { ...context, awaited } });
  }

  #poisoned({ what }: Underway): EpError {
    return new EpError('EP_POISONED', `${what}: an earlier call on the device failed, and took this one with it`, {
      cause: this.#failed?.reason,
    });
  }

  #endCommunicator(timeoutMs: number): Promise<Outcome> {
    this.#ending ??= native().operations.run(() => this.#parts.communicator.end(timeoutMs));
    return this.#ending;
  }

  protected override async release(): Promise<void> {
    await Promise.allSettled(this.#pending);
    clearInterval(this.#looking);
    // HAZARD: others may still be in a call that has ended here, in which NCCL reads and writes memory of this rank.
    if (this.#failed === undefined) await this.#inquest.part(CLOSING_MS);
    try {
      await this.#endCommunicator(CLOSING_MS);
    } finally {
      this.#parts.communicator.release();
      this.#parts.word.release();
      await this.#host.close();
    }
  }
}
