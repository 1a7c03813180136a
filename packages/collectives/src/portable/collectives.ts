/**
 * The collective calls of one rank: one at a time, in the order in which they were made.
 *
 * A call has three parts. Meeting: every rank tells every other one what it calls; payload is sent only to ranks that have come, so that whatever arrives can
 * be put where it belongs. Data: see plan.ts. Closing: every rank tells that it has all of its data, and the call ends with the last of these.
 *
 * So a rank that completed a call knows that all had their data, and a rank begins the next one only after that. When a member is lost, survivors agree
 * (membership.ts) on the last call that any of them completed: it completes on all, the one after it ends with EP_PEER_LOST on all, whether it was made yet or not, and
 * the one after that is made by the survivors.
 */
import { EpError, formatRanks } from '@ep/core';
import type { EngineCall, EngineEnd } from '../engine.js';
import { ActiveCall, QueuedCall } from './active-call.js';
import type { LaneSource } from './channel.js';
import { readChunk } from './chunks.js';
import type { Membership } from './membership.js';
import type { DataPlan, PlanInit } from './plan.js';
import { type CallRecord, type ControlRecord, type DoneRecord, describeError, type PoisonRecord } from './records.js';
import { callRecord, findMismatch } from './signature.js';
import type { Traces } from './traces.js';

/** Once calls are known to differ, how long ranks that have not come are waited for, so that the message can name all. */
const MISMATCH_GRACE_MS = 200;

/** A call whose contributors have met; `onFailed` ends it, and poisons the group. */
export interface PlannedCall extends Omit<PlanInit, 'order'> {
  readonly onFailed: (error: unknown) => void;
}

export interface CollectivesInit {
  readonly rank: number;
  readonly membership: Membership;
  readonly traces: Traces;
  /** How the data of a call travels. */
  readonly planOf: (data: PlannedCall) => DataPlan;
  readonly tell: (peer: number, record: ControlRecord) => void;
  readonly send: (peer: number, source: LaneSource) => void;
  /** More of what was given to `send` may be sent to all peers. */
  readonly kick: () => void;
  /** Offers again what `onChunk` did not take. */
  readonly drain: () => void;
}

interface Poison {
  readonly record: PoisonRecord;
  readonly error: EpError;
}

export class Collectives {
  readonly #init: CollectivesInit;
  readonly #queue: QueuedCall[] = [];
  /** By sequence, then rank: who has come to calls that this rank has not ended. */
  readonly #arrivals = new Map<number, Map<number, CallRecord>>();
  /** Calls that end with the loss of these ranks, before they were made here. */
  readonly #forfeited = new Map<number, readonly number[]>();
  #active: ActiveCall | undefined;
  #completed = 0;
  #poison: Poison | undefined;
  #broken: { readonly error: unknown } | undefined;
  #advancing = false;

  constructor(init: CollectivesInit) {
    this.#init = init;
  }

  /** The last call that ended alike on all ranks. */
  get completed(): number {
    return this.#completed;
  }

  run(call: EngineCall): EngineEnd | Promise<EngineEnd> {
    const queued = new QueuedCall(call, (aborted) => this.#giveUp(aborted, call.signal!.reason));
    this.#queue.push(queued);
    if (call.signal?.aborted === true) this.#giveUp(queued, call.signal.reason);
    this.#advance();
    return queued.answer();
  }

  onCall(from: number, record: CallRecord): void {
    const { sequence } = record;
    if (this.#poison !== undefined && sequence >= this.#poison.record.sequence) {
      // Whoever poisoned the group may have died before it told all.
      this.#init.tell(from, this.#poison.record);
      return;
    }
    if (sequence <= this.#completed) return;
    this.#arrivalsOf(sequence).set(from, record);
    if (this.#active?.sequence === sequence) this.#meet();
  }

  onDone(from: number, record: DoneRecord): void {
    const active = this.#active;
    if (active?.sequence !== record.sequence) return;
    active.done(from);
    this.#close();
  }

  onPoison(from: number, record: PoisonRecord): void {
    const { code, text, context, sequence } = record;
    const error =
      code === 'EP_MISMATCH'
        ? new EpError(code, text, { context })
        : new EpError('EP_ABORTED', `call ${sequence}: rank ${from} gave up: ${text}`, {
            context: { ...context, ranks: [from], sequence, reason: code },
          });
    this.#takePoison(record, error);
  }

  /** False: not now. */
  onChunk(from: number, slot: Uint8Array, release: () => void): boolean {
    const chunk = readChunk(slot);
    const active = this.#active;
    const late =
      chunk.id <= this.#completed || (this.#poison !== undefined && chunk.id >= this.#poison.record.sequence);
    if (late || this.#broken !== undefined) {
      release();
      return true;
    }
    if (active?.plan === undefined || active.sequence !== chunk.id || this.#init.membership.agreeing) return false;
    active.plan.sink(from, chunk.stream)!.accept(chunk, release);
    return true;
  }

  /** After `membership.lose`. */
  onLost(rank: number): void {
    const active = this.#active;
    if (active?.contributors?.includes(rank) && active.needs(rank)) this.#init.membership.begin();
  }

  /** Survivors have agreed. This rank's call is the last that was completed, or the one that is forfeited. */
  onCommit(lost: readonly number[], completed: number): void {
    const active = this.#active;
    const forfeited = completed + 1;
    this.#advancing = true;
    if (active !== undefined && active.sequence <= completed) {
      this.#complete(active);
    } else if (active !== undefined) {
      active.cut();
      this.#active = undefined;
      active.queued.reject(lostError(active.call.kind, active.sequence, lost));
    }
    if (active?.sequence !== forfeited) this.#forfeited.set(forfeited, lost);
    this.#completed = forfeited;
    for (const sequence of this.#arrivals.keys()) if (sequence <= forfeited) this.#arrivals.delete(sequence);
    this.#advancing = false;
    this.#init.drain();
    this.#advance();
  }

  /** Nothing works any more: every call ends with `error`. */
  fail(error: unknown): void {
    if (this.#broken !== undefined) return;
    this.#broken = { error };
    this.#active?.cut();
    this.#active?.queued.reject(error);
    this.#active = undefined;
    for (const queued of this.#queue.splice(0)) queued.reject(error);
  }

  /** Begins calls until one has to wait for others. */
  #advance(): void {
    if (this.#advancing) return;
    this.#advancing = true;
    try {
      while (this.#active === undefined && this.#queue.length > 0) {
        const queued = this.#queue.shift()!;
        if (queued.settled) continue;
        const refusal = this.#refusal(queued.call);
        if (refusal !== undefined) queued.reject(refusal.error);
        else this.#activate(queued);
      }
    } finally {
      this.#advancing = false;
    }
  }

  #refusal({ sequence, kind }: EngineCall): { readonly error: unknown } | undefined {
    if (this.#broken !== undefined) return this.#broken;
    if (this.#poison !== undefined && sequence >= this.#poison.record.sequence)
      return { error: this.#poisonFor(sequence) };
    const lost = this.#forfeited.get(sequence);
    if (lost === undefined) return undefined;
    this.#forfeited.delete(sequence);
    return { error: lostError(kind, sequence, lost) };
  }

  #activate(queued: QueuedCall): void {
    const active = new ActiveCall(queued);
    this.#active = active;
    active.after(queued.call.timeoutMs, () => {
      const { rank, membership } = this.#init;
      const awaited = membership.agreeing ? membership.awaited : [];
      this.#giveUp(queued, active.timeoutError(rank, this.#arrivalsOf(active.sequence), awaited));
    });
    this.#start(active);
  }

  /** Meeting. */
  #start(active: ActiveCall): void {
    const { rank, membership, traces, tell } = this.#init;
    if (membership.agreeing) return;
    active.contributors = membership.active;
    if (membership.goneMembers.length > 0) {
      membership.begin();
      return;
    }
    const { call } = active;
    traces.call(call.kind);
    for (const peer of membership.active) {
      if (peer === rank) continue;
      traces.signalled(call.kind);
      tell(peer, callRecord(call, peer));
    }
    this.#meet();
  }

  #meet(): void {
    const active = this.#active!;
    const { rank, membership } = this.#init;
    if (active.contributors === undefined || active.plan !== undefined || membership.agreeing) return;
    const arrivals = this.#arrivalsOf(active.sequence);
    const mismatch = findMismatch(active.call, rank, arrivals);
    const all = active.contributors.every((peer) => peer === rank || arrivals.has(peer));
    if (mismatch !== undefined) {
      const name = (): void =>
        this.#giveUp(active.queued, findMismatch(active.call, rank, this.#arrivalsOf(active.sequence)));
      if (all) name();
      else active.after(MISMATCH_GRACE_MS, name);
      return;
    }
    if (all) this.#move(active);
  }

  /** Data. */
  #move(active: ActiveCall): void {
    const { rank, traces, planOf, send, kick, drain } = this.#init;
    const { call, contributors } = active;
    if (call.root >= 0 && !contributors!.includes(call.root)) {
      // All know, and nobody waits for anybody.
      this.#complete(active);
      return;
    }
    const plan = planOf({
      call,
      rank,
      contributors: contributors!,
      send,
      onSent: (byteLength) => traces.wrote(call.kind, byteLength),
      onAdvance: kick,
      onComplete: () => this.#finish(active),
      onFailed: (error) => this.#giveUp(active.queued, error),
    });
    active.plan = plan;
    active.queued.heldBy = plan;
    plan.begin();
    drain();
    if (plan.pending === 0) this.#finish(active);
  }

  /** Closing. */
  #finish(active: ActiveCall): void {
    if (active.finished || this.#active !== active) return;
    const { rank, traces, tell } = this.#init;
    active.finished = true;
    active.done(rank);
    for (const peer of active.contributors!) {
      if (peer === rank) continue;
      traces.signalled(active.call.kind);
      tell(peer, { kind: 'done', sequence: active.sequence });
    }
    this.#close();
  }

  #close(): void {
    const active = this.#active!;
    if (!active.finished || this.#init.membership.agreeing) return;
    if (active.contributors!.every((peer) => active.isDone(peer))) this.#complete(active);
  }

  #complete(active: ActiveCall): void {
    const { call, contributors, sequence, queued } = active;
    this.#completed = sequence;
    this.#arrivals.delete(sequence);
    active.cut();
    this.#active = undefined;
    if (call.root >= 0 && !contributors!.includes(call.root)) {
      queued.reject(lostError(call.kind, sequence, [call.root]));
    } else {
      queued.resolve({ contributors: contributors! });
    }
    this.#advance();
  }

  /** This rank ends its call, and nobody can go on from there. */
  #giveUp(queued: QueuedCall, error: unknown): void {
    if (queued.settled) return;
    const { rank, membership, tell } = this.#init;
    const { sequence } = queued.call;
    const record: PoisonRecord = { kind: 'poison', sequence, ...describeError(error) };
    // The caller's own reason is given to the caller as it is.
    queued.reject(error);
    for (const peer of membership.active) if (peer !== rank && !membership.isGone(peer)) tell(peer, record);
    this.#takePoison(
      record,
      new EpError('EP_ABORTED', `call ${sequence} of rank ${rank}: ${record.text}`, { cause: error }),
    );
  }

  #takePoison(record: PoisonRecord, error: EpError): void {
    if (this.#poison !== undefined && this.#poison.record.sequence <= record.sequence) return;
    this.#poison = { record, error };
    const active = this.#active;
    if (active !== undefined && active.sequence >= record.sequence) {
      active.cut();
      this.#active = undefined;
      active.queued.reject(this.#poisonFor(active.sequence));
    }
    for (const queued of this.#queue) {
      const { sequence } = queued.call;
      if (sequence >= record.sequence) queued.reject(this.#poisonFor(sequence));
    }
    for (const sequence of this.#arrivals.keys()) if (sequence >= record.sequence) this.#arrivals.delete(sequence);
    this.#init.drain();
    this.#advance();
  }

  #poisonFor(sequence: number): EpError {
    const { record, error } = this.#poison!;
    if (sequence === record.sequence) return error;
    return new EpError('EP_POISONED', `call ${sequence}: call ${record.sequence} failed before: ${error.message}`, {
      context: { sequence, failed: record.sequence },
      cause: error,
    });
  }

  #arrivalsOf(sequence: number): Map<number, CallRecord> {
    let arrivals = this.#arrivals.get(sequence);
    if (arrivals === undefined) {
      arrivals = new Map();
      this.#arrivals.set(sequence, arrivals);
    }
    return arrivals;
  }
}

function lostError(kind: string, sequence: number, lost: readonly number[]): EpError<'EP_PEER_LOST'> {
  return new EpError(
    'EP_PEER_LOST',
    `${kind} ${sequence}: ${formatRanks(lost)} died or left; the next call is made without`,
    {
      context: { sequence, lost },
    },
  );
}
