/** The calls of one group on their way to its engine: their order, their Works, and what becomes of failures. */
import { createWork, type DType, EpError, isEpError, publish, type Work, type WorkControl, WorkOwner } from '@ep/core';
import { reduceOpName } from './checks.js';
import { DeviceElements } from './device/elements.js';
import type {
  Data,
  DeviceCall,
  Elastic,
  EngineCall,
  EngineEnd,
  GroupEngine,
  MembershipCall,
  MembershipEnd,
  RecvCall,
  RecvEnd,
  SendCall,
} from './engine.js';
import { checkStillLiving } from './operands.js';
import type { CallEntry, CallRecorder } from './recorder/types.js';
import { type CollectiveWork, DoneCollective, PendingCollective } from './work.js';

declare module '@ep/core' {
  interface DiagnosticMessages {
    /** An operation of a group ended with an error that is not the caller's own abort. */
    'ep:collectives:failed': {
      readonly group: string;
      readonly rank: number;
      readonly op: string;
      readonly sequence: number;
      readonly error: unknown;
    };
  }
}

type Mutable<T> = { -readonly [K in keyof T]: T[K] };

/** A call that has no number yet: it gets one when the engine gets it. */
export type DraftCall = Mutable<Omit<EngineCall, 'inputs' | 'outputs'>> & {
  inputs: readonly Data[];
  outputs: readonly Data[];
};

/** When a call gives up. */
export type CallLimits = Pick<DraftCall, 'timeoutMs' | 'signal'>;

/** A call with n of the table at `EngineCall`, for the records. */
export interface CountedCall {
  readonly call: DraftCall;
  readonly elements: number;
}

/** Runs a call in the place that a turn has; see `Lane.turn`. */
export type RunInTurn = (counted: CountedCall) => Promise<EngineEnd>;

/** Likewise, for a call that changes who takes part. */
export type ChangeInTurn = (call: Omit<MembershipCall, 'sequence'>) => Promise<MembershipEnd>;

const NOT_RECORDED = -1;

/** A promise also of what ended, or threw, at once. */
function started<T>(start: () => T | Promise<T>): Promise<T> {
  try {
    return Promise.resolve(start());
  } catch (error) {
    return Promise.reject(error);
  }
}

type LaneCall = DraftCall | SendCall<Data> | RecvCall<Data>;

/** Throws `EP_DETACHED` if an array of it was taken away while it was under way. */
function checkArrays(call: LaneCall, where: string): void {
  if ('data' in call) {
    checkStillLiving(call.data, where);
    return;
  }
  for (const elements of call.inputs) checkStillLiving(elements, where);
  for (const elements of call.outputs) checkStillLiving(elements, where);
}

export class Lane {
  readonly engine: GroupEngine;
  readonly #group: string;
  readonly #recorder: CallRecorder | undefined;
  /** Filled anew for each call: an object for each would be the largest cost of recording. */
  readonly #entry: Mutable<CallEntry>;
  readonly #calls: WorkOwner;
  readonly #receives: WorkOwner;
  readonly #failed = new AbortController();
  /** Numbers that Works got, and that calls got. A Work's is its call's, unless a turn before it ends without having made all of its calls. */
  #issued = 0;
  #ran = 0;
  #messages = 0;
  /** Resolves when the last turn is over: until then nobody may go before its calls. */
  #gate: Promise<void> | undefined;
  #closing = false;
  #joining = false;

  constructor(group: string, engine: GroupEngine, recorder: CallRecorder | undefined) {
    this.engine = engine;
    this.#group = group;
    this.#recorder = recorder;
    this.#calls = new WorkOwner(`group ${group}`);
    this.#receives = new WorkOwner(`group ${group}`);
    this.#entry = {
      group,
      rank: engine.rank,
      kind: 'barrier',
      op: '',
      sequence: 0,
      dtype: 'u8',
      elements: 0,
      bytes: 0,
      root: -1,
      reduceOp: '',
      peer: -1,
      tag: -1,
    };
  }

  /** Fires with the first error of an operation, whether somebody looks at it or not. */
  get failed(): AbortSignal {
    return this.#failed.signal;
  }

  /** Throws failures that nobody looked at, once; `EP_BUSY` while the rank joins the others. */
  check(): void {
    if (this.#joining) {
      throw new EpError(
        'EP_BUSY',
        `group ${this.#group}: joinGroup() is under way: until it ends, no call has a place`,
        {
          context: { group: this.#group },
        },
      );
    }
    if (this.#gate !== undefined && this.engine.device?.capturing() === true) {
      throw new EpError(
        'EP_BUSY',
        `group ${this.#group}: an operation of several calls is under way, behind which a call would not come into the graph: await it before the capture`,
        { context: { group: this.#group } },
      );
    }
    this.#calls.check();
    this.#receives.check();
  }

  /** Hands `call` to the engine, behind all earlier ones. What has ended when this returns has cost no promise. `explain` may reword its failure. */
  run(op: string, call: DraftCall, elements: number, explain?: (error: unknown) => unknown): CollectiveWork {
    const number = ++this.#issued;
    if (this.#gate !== undefined) {
      const outcome = this.#gate.then(() => this.#recorded(op, call, elements));
      return this.#follow(op, number, call.signal, outcome, explain);
    }
    call.sequence = ++this.#ran;
    const token = this.#begin(op, call, elements);
    let outcome: EngineEnd | Promise<EngineEnd>;
    try {
      outcome = this.#start(call);
    } catch (error) {
      outcome = Promise.reject(error);
    }
    if (outcome instanceof Promise) {
      return this.#follow(op, number, call.signal, this.#ending(token, call, outcome), explain);
    }
    this.#recorder?.end(token, 'done');
    return new DoneCollective(op, number, outcome.contributors, this.engine.size);
  }

  /** One or more calls as one Work, which ends when all have, as the first that fails, or after `finish`. HAZARD: not before: those behind the one that fails still write to the caller's tensors. */
  runAll(op: string, calls: readonly CountedCall[], finish: () => void): CollectiveWork {
    const number = this.#issued + 1;
    this.#issued += calls.length;
    const gate = this.#gate;
    const ends = calls.map(({ call, elements }) =>
      gate === undefined ? this.#recorded(op, call, elements) : gate.then(() => this.#recorded(op, call, elements)),
    );
    const outcome = Promise.allSettled(ends).then((all) => {
      const failed = all.find((end) => end.status === 'rejected');
      if (failed !== undefined) throw failed.reason;
      finish();
      return (all.at(-1) as PromiseFulfilledResult<EngineEnd>).value;
    });
    return this.#follow(op, number, calls[0]?.call.signal, outcome);
  }

  /**
   * Up to `count` calls, each of which may depend on the results of those before, as one operation: calls made later wait behind the last one.
   *
   * HAZARD: without that, a call made while the first part is under way would go before or after the second as the timing of each rank has it.
   */
  turn<T>(
    op: string,
    count: number,
    signal: AbortSignal | undefined,
    body: (run: RunInTurn, change: ChangeInTurn) => Promise<T>,
  ): Work<T> {
    const number = this.#issued + 1;
    this.#issued += count;
    const control = createWork<T>({ op, sequence: number, owner: this.#calls });
    let made = 0;
    const run: RunInTurn = ({ call, elements }) => {
      made++;
      return this.#recorded(op, call, elements);
    };
    const change: ChangeInTurn = (call) => {
      made++;
      return this.#recordedChange(op, call);
    };
    const before = this.#gate;
    const gate = (before === undefined ? started(() => body(run, change)) : before.then(() => body(run, change))).then(
      (value) => {
        this.#issued -= count - made;
        control.resolve(value);
      },
      (error) => {
        this.#issued -= count - made;
        this.#fail(control, op, number, error, signal);
      },
    );
    this.#gate = gate;
    // The first reaction of this promise, so that whoever finds the gate open goes behind all who waited for it.
    void gate.then(() => {
      if (this.#gate === gate) this.#gate = undefined;
    });
    return control.work;
  }

  /**
   * Of a rank that takes no part: ends its numbering of calls, and goes on with that of the group once that has taken it in; then makes the calls of `body`,
   * which all make.
   */
  async join(op: string, elastic: Elastic, limits: CallLimits, body: (run: RunInTurn) => Promise<void>): Promise<void> {
    if (this.#joining) {
      throw new EpError('EP_BUSY', `${op}: this rank waits in joinGroup() already`, {
        context: { group: this.#group },
      });
    }
    this.#joining = true;
    try {
      await this.#calls.idle(limits.signal === undefined ? {} : { signal: limits.signal });
      this.#ran = await elastic.join(limits);
      await body(({ call, elements }) => this.#recorded(op, call, elements));
      this.#issued = this.#ran;
    } finally {
      this.#joining = false;
    }
  }

  send(op: string, call: SendCall<Data>, dtype: DType): Work {
    return this.#message('send', op, call, dtype, this.#calls, () => {
      if (call.data instanceof DeviceElements) return this.engine.device!.send(call as SendCall<DeviceElements>);
      return this.engine.send(call as SendCall);
    });
  }

  recv(op: string, call: RecvCall<Data>, dtype: DType): Work<RecvEnd> {
    return this.#message('recv', op, call, dtype, this.#receives, () => {
      if (call.data instanceof DeviceElements) return this.engine.device!.recv(call as RecvCall<DeviceElements>);
      return this.engine.recv(call as RecvCall);
    });
  }

  /**
   * Waits until all but the receives have ended, or `cut` fires; closes the engine, which ends the rest; then reports as `check`. A receive may never
   * find its sender: it does not keep a group open.
   */
  async close(cut: AbortSignal): Promise<void> {
    this.#closing = true;
    let reason: unknown = new EpError('EP_ABORTED', `group ${this.#group} was closed`, {
      context: { group: this.#group },
    });
    try {
      await this.#calls.idle({ signal: cut });
    } catch (error) {
      reason = error;
    }
    try {
      await this.engine.close();
    } finally {
      this.#calls.abort(reason);
      this.#receives.abort(reason);
    }
    // What has failed; not that a rank which waits to be taken in makes no calls.
    this.#calls.check();
    this.#receives.check();
  }

  #start(call: DraftCall): EngineEnd | Promise<EngineEnd> {
    if (!((call.inputs[0] ?? call.outputs[0]) instanceof DeviceElements)) return this.engine.run(call as EngineCall);
    const { device } = this.engine;
    if (device !== undefined) return device.run(call as DeviceCall);
    throw new EpError(
      'EP_UNSUPPORTED',
      `group ${this.#group}: tensors of a GPU are for groups of an initProcessGroup with the option device, over nvshmem.cuda or by nccl`,
      { context: { group: this.#group } },
    );
  }

  #begin(op: string, call: DraftCall, elements: number): number {
    if (this.#recorder === undefined) return NOT_RECORDED;
    const entry = this.#entry;
    entry.kind = call.kind;
    entry.op = op;
    entry.sequence = call.sequence;
    entry.dtype = call.dtype;
    entry.elements = elements;
    entry.bytes = elements * ((call.inputs[0] ?? call.outputs[0])?.BYTES_PER_ELEMENT ?? 1);
    entry.root = call.root;
    entry.reduceOp = call.reduceOp === undefined ? '' : reduceOpName(call.reduceOp);
    entry.peer = -1;
    entry.tag = -1;
    return this.#recorder.begin(entry);
  }

  #beginMessage(kind: 'send' | 'recv', op: string, call: SendCall<Data> | RecvCall<Data>, dtype: DType): number {
    if (this.#recorder === undefined) return NOT_RECORDED;
    const entry = this.#entry;
    entry.kind = kind;
    entry.op = op;
    entry.sequence = this.#messages;
    entry.dtype = dtype;
    entry.elements = call.data.length;
    entry.bytes = call.data.byteLength;
    entry.root = -1;
    entry.reduceOp = '';
    entry.peer = call.peer;
    entry.tag = call.tag;
    return this.#recorder.begin(entry);
  }

  /** Numbers, records and starts a call at once; its end is a promise even if it has come. */
  #recorded(op: string, call: DraftCall, elements: number): Promise<EngineEnd> {
    call.sequence = ++this.#ran;
    const token = this.#begin(op, call, elements);
    return this.#ending(
      token,
      call,
      started(() => this.#start(call)),
    );
  }

  async #recordedChange(op: string, call: Omit<MembershipCall, 'sequence'>): Promise<MembershipEnd> {
    const sequence = ++this.#ran;
    const entry = this.#entry;
    Object.assign(entry, { kind: 'membership', op, sequence, dtype: 'u8', elements: 0, bytes: 0 });
    Object.assign(entry, { root: -1, reduceOp: '', peer: -1, tag: -1 });
    const token = this.#recorder?.begin(entry) ?? NOT_RECORDED;
    try {
      const end = await this.engine.elastic!.change({ ...call, sequence });
      this.#ran = end.sequence;
      // Numbers of Works are those of the records, also where ranks had made unlike calls before.
      this.#issued += end.sequence - sequence;
      this.#recorder?.end(token, 'done');
      return end;
    } catch (error) {
      this.#recorder?.end(token, this.#wasCut(error, call.signal) ? 'aborted' : 'failed', error);
      throw error;
    }
  }

  /** Records the end of `outcome`, and looks whether its arrays are still there: the caller may have transferred them. */
  async #ending<T>(token: number, call: LaneCall, outcome: Promise<T>): Promise<T> {
    try {
      const end = await outcome;
      checkArrays(call, `group ${this.#group}`);
      this.#recorder?.end(token, 'done');
      return end;
    } catch (failure) {
      const error = this.#detachedOr(failure, call);
      this.#recorder?.end(token, this.#wasCut(error, call.signal) ? 'aborted' : 'failed', error);
      throw error;
    }
  }

  /** What native code says of an array that is gone is only that it does not fit. */
  #detachedOr(error: unknown, call: LaneCall): unknown {
    if (!isEpError(error) || error.code !== 'EP_INVALID_ARGUMENT') return error;
    try {
      checkArrays(call, `group ${this.#group}`);
      return error;
    } catch (detached) {
      if (isEpError(detached)) detached.cause ??= error;
      return detached;
    }
  }

  #follow(
    op: string,
    number: number,
    signal: AbortSignal | undefined,
    outcome: Promise<EngineEnd>,
    explain: (error: unknown) => unknown = (error) => error,
  ): CollectiveWork {
    const control = createWork({ op, sequence: number, owner: this.#calls });
    const work = new PendingCollective(control, this.engine.size);
    outcome.then(
      (end) => work.resolve(end.contributors),
      (error) => this.#fail(work, op, number, explain(error), signal),
    );
    return work;
  }

  #message<T>(
    kind: 'send' | 'recv',
    op: string,
    call: SendCall<Data> | RecvCall<Data>,
    dtype: DType,
    owner: WorkOwner,
    post: () => Promise<T>,
  ): Work<T> {
    const sequence = ++this.#messages;
    const token = this.#beginMessage(kind, op, call, dtype);
    const control = createWork<T>({ op, sequence, owner });
    this.#ending(token, call, started(post)).then(
      (end) => control.resolve(end),
      (error) => this.#fail(control, op, sequence, error, call.signal),
    );
    return control.work;
  }

  #wasCut(error: unknown, signal: AbortSignal | undefined): boolean {
    if (signal?.aborted === true && error === signal.reason) return true;
    return this.#closing && isEpError(error) && (error.code === 'EP_ABORTED' || error.code === 'EP_CLOSED');
  }

  #fail(
    control: Pick<WorkControl, 'reject' | 'abort'>,
    op: string,
    sequence: number,
    error: unknown,
    signal: AbortSignal | undefined,
  ): void {
    if (this.#wasCut(error, signal)) {
      control.abort(error);
      return;
    }
    if (!control.reject(error)) return;
    const { rank } = this.engine;
    publish('ep:collectives:failed', () => ({ group: this.#group, rank, op, sequence, error }));
    if (!this.#failed.signal.aborted) this.#failed.abort(error);
  }
}
