/**
 * The collective calls of one rank: one at a time, in the order in which they were made.
 *
 * A call has three parts. Meeting: every rank tells every other one what it calls; payload is sent only to ranks that have come, so that whatever arrives can
 * be put where it belongs. Data: see plan.ts. Closing: every rank tells that it has all of its data, and the call ends with the last of these.
 *
 * So a rank that completed a call knows that all had their data, and a rank begins the next one only after that. When a member is lost, survivors agree
 * (membership.ts) on the last call that any of them completed: it completes on all, the one after it ends with EP_PEER_LOST on all, whether it was made yet or not, and
 * the one after that is made by the survivors.
 *
 * A call that admits ranks ends with a view that has them, which is told to all once one rank has completed it.
 *
 * A repair has no parts of its own: who has come to it says so in the agreement, which ends all that others still wait for, and all go on behind the calls of all. It takes out
 * members that are alive; so does, where the group evicts, a call whose time is up. What these still say has numbers of calls that are over, or is not read at all.
 */
import { EpError, formatRanks } from '@ep/core';
import { ActiveCall, QueuedCall } from './active-call.js';
import { foundByAll } from './admission.js';
import type { LaneSource } from './channel.js';
import { readChunk } from './chunks.js';
import type { Commit, Membership } from './membership.js';
import { nameOf, type OrderedCall, type OrderedEnd } from './ordered.js';
import type { DataPlan, PlanInit } from './plan.js';
import { type CallRecord, type ControlRecord, type DoneRecord, describeError, type PoisonRecord } from './records.js';
import { callRecord, findMismatch } from './signature.js';
import type { Traces } from './traces.js';

/** Once calls are known to differ, how long ranks that have not come are waited for, so that the message can name all. */
const MISMATCH_GRACE_MS = 200;
/** How long an agreement without ranks that were late may take before somebody else is. */
const AGREEMENT_MS = 1000;

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
  /** Takes members out that may be alive. Rejects with `EP_EVICTED` if they have taken out this rank before, or with what the store throws. */
  readonly evict: (ranks: readonly number[]) => Promise<void>;
  /** This rank goes, of its own will. */
  readonly leave: () => void;
  /** Those of `awaited` that a call whose time is up takes out; absent where such a call poisons the group. */
  readonly findLate?: ((awaited: readonly number[], idleToo: boolean) => Promise<readonly number[]>) | undefined;
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
  #last: { readonly sequence: number; readonly contributors: readonly number[] } = { sequence: 0, contributors: [] };
  #poison: Poison | undefined;
  /** The call behind which all went on when the group was repaired last. */
  #repairedAt = 0;
  #broken: { readonly error: unknown } | undefined;
  #advancing = false;

  constructor(init: CollectivesInit) {
    this.#init = init;
  }

  /** The last call that ended alike on all ranks. */
  get completed(): number {
    return this.#completed;
  }

  /** The last call that ended well, and whose data it had. */
  get last(): { readonly sequence: number; readonly contributors: readonly number[] } {
    return this.#last;
  }

  /** A call of this rank is under way. */
  get busy(): boolean {
    return this.#active !== undefined;
  }

  run(call: OrderedCall): OrderedEnd | Promise<OrderedEnd> {
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
    // Of somebody who had not heard yet that all have come to a repair.
    if (sequence <= this.#repairedAt) return;
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

  /** A member waits in a repair: it carries no call on that it has not completed. */
  onRepair(from: number, completed: number): void {
    if (this.#active?.repairs === true) return;
    this.#advancing = true;
    this.#completeUpTo(completed);
    const sequence = this.#completed + 1;
    const text = `rank ${from} calls deactivate(), and waits for all to call it`;
    const context = { ranks: [from], sequence };
    const error = new EpError('EP_ABORTED', `call ${sequence}: ${text}`, { context });
    this.#takePoison({ kind: 'poison', sequence, code: 'EP_ABORTED', text, context }, error);
    this.#advancing = false;
    this.#advance();
  }

  /** Survivors have agreed. */
  onCommit({ lost, completed, repair, admitted }: Commit): void {
    this.#advancing = true;
    if (admitted !== undefined) this.#completeUpTo(completed);
    else if (repair !== undefined) this.#resume(repair);
    else this.#forfeit(lost, completed);
    this.#advancing = false;
    this.#init.drain();
    const active = this.#active;
    // It was about deaths, and not all had come to the repair.
    if (active?.agreeing === true) this.#agree(active);
    this.#advance();
  }

  /** This rank was taken out, by one that had completed this call. */
  end(completed: number, error: unknown): void {
    this.#advancing = true;
    this.#completeUpTo(completed);
    this.#advancing = false;
    this.fail(error);
  }

  /** This rank comes to members that have completed this call. */
  reopen(completed: number): void {
    this.#broken = undefined;
    this.#poison = undefined;
    this.#forfeited.clear();
    this.#arrivals.clear();
    this.#repairedAt = completed;
    this.#completed = completed;
    this.#last = { sequence: completed, contributors: [] };
  }

  /** Nothing works any more: every call ends with `error`. */
  fail(error: unknown): void {
    if (this.#broken !== undefined) return;
    this.#broken = { error };
    const active = this.#active;
    this.#cut();
    active?.queued.reject(error);
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
        const refusal = this.#refusal(queued);
        if (refusal !== undefined) queued.reject(refusal.error);
        else this.#activate(queued);
      }
    } finally {
      this.#advancing = false;
    }
  }

  #refusal({ call, repairs }: QueuedCall): { readonly error: unknown } | undefined {
    const { sequence } = call;
    if (this.#broken !== undefined) return this.#broken;
    if (repairs) return undefined;
    const lost = this.#forfeited.get(sequence);
    if (this.#poison !== undefined) {
      // The others have been repaired without this rank, and count from there.
      const isBehind = lost === undefined && sequence <= this.#completed;
      if (isBehind || sequence >= this.#poison.record.sequence) return { error: this.#poisonFor(sequence) };
    }
    if (lost === undefined) return undefined;
    this.#forfeited.delete(sequence);
    return { error: lostError(nameOf(call), sequence, lost) };
  }

  #activate(queued: QueuedCall): void {
    const active = new ActiveCall(queued);
    this.#active = active;
    active.after(queued.call.timeoutMs, () => void this.#timeIsUp(active));
    if (queued.repairs) void this.#repair(active);
    else this.#start(active);
  }

  /** Takes ranks out, and waits in the agreement for those who stay. */
  async #repair(active: ActiveCall): Promise<void> {
    const { rank, membership, evict, leave } = this.#init;
    const { evicted } = active.call.membership!;
    if (evicted.includes(rank)) {
      leave();
      return;
    }
    const living = evicted.filter((peer) => membership.active.includes(peer) && !membership.isGone(peer));
    try {
      if (living.length > 0) await evict(living);
    } catch (error) {
      this.#giveUp(active.queued, error);
      return;
    }
    if (this.#active === active) this.#agree(active);
  }

  #agree(active: ActiveCall): void {
    active.agreeing = true;
    this.#init.membership.repair(active.sequence);
  }

  /** HAZARD: a rank that was stopped comes here before it has seen that the others have taken it out; `evict` tells. */
  async #timeIsUp(active: ActiveCall): Promise<void> {
    const { membership, evict, findLate } = this.#init;
    const error = this.#timeoutError(active);
    if (findLate === undefined || active.repairs) {
      this.#giveUp(active.queued, error);
      return;
    }
    const asked = await findLate(error.context.awaited as readonly number[], !membership.agreeing);
    if (this.#active !== active) return;
    const awaited = this.#timeoutError(active).context.awaited as readonly number[];
    const late = asked.filter((peer) => awaited.includes(peer));
    try {
      // This begins the agreement without them, as their deaths would.
      if (late.length > 0) await evict(late);
      else if (!membership.agreeing) this.#giveUp(active.queued, error);
    } catch {
      this.#giveUp(active.queued, error);
    }
    if (this.#active === active) active.after(AGREEMENT_MS, () => void this.#timeIsUp(active));
  }

  #timeoutError(active: ActiveCall): EpError {
    const { rank, membership } = this.#init;
    const awaited = membership.agreeing ? membership.awaited : [];
    return active.timeoutError(rank, this.#arrivalsOf(active.sequence), awaited);
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
    traces.call(nameOf(call));
    for (const peer of membership.active) {
      if (peer === rank) continue;
      traces.signalled(nameOf(call));
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
    if (call.membership !== undefined) {
      const arrivals = this.#arrivalsOf(active.sequence);
      const others = contributors!.filter((peer) => peer !== rank);
      active.found = foundByAll([call.membership.found, ...others.map((peer) => arrivals.get(peer)!.found ?? [])]);
    }
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
      traces.signalled(nameOf(active.call));
      tell(peer, { kind: 'done', sequence: active.sequence });
    }
    this.#close();
  }

  #close(): void {
    const active = this.#active!;
    const { membership } = this.#init;
    if (!active.finished || membership.agreeing) return;
    if (!active.contributors!.every((peer) => active.isDone(peer))) return;
    const { admits } = active;
    if (admits.length > 0) membership.admit(admits, active.sequence);
    else this.#complete(active);
  }

  /** Others have completed these calls, and so had the data of this rank, which has theirs. */
  #completeUpTo(sequence: number): void {
    const active = this.#active;
    if (active !== undefined && !active.repairs && active.sequence <= sequence) this.#complete(active);
  }

  #complete(active: ActiveCall): void {
    const { call, contributors, sequence, queued } = active;
    this.#completed = sequence;
    this.#last = { sequence, contributors: contributors! };
    this.#arrivals.delete(sequence);
    active.cut();
    this.#active = undefined;
    if (call.root >= 0 && !contributors!.includes(call.root)) {
      queued.reject(lostError(nameOf(call), sequence, [call.root]));
    } else {
      queued.resolve({ contributors: contributors!, ...(active.found && { found: active.found }) });
    }
    this.#advance();
  }

  /** This rank ends its call, and nobody can go on from there. */
  #giveUp(queued: QueuedCall, error: unknown): void {
    if (queued.settled) return;
    const { rank } = this.#init;
    const { sequence } = queued.call;
    const record: PoisonRecord = { kind: 'poison', sequence, ...describeError(error) };
    // The caller's own reason is given to the caller as it is.
    queued.reject(error);
    if (queued.repairs) {
      if (this.#active?.queued === queued) this.#cut();
    } else {
      this.#tellAll(record);
    }
    this.#takePoison(
      record,
      new EpError('EP_ABORTED', `call ${sequence} of rank ${rank}: ${record.text}`, { cause: error }),
    );
    this.#advance();
  }

  #tellAll(record: ControlRecord): void {
    const { rank, membership, tell } = this.#init;
    for (const peer of membership.active) if (peer !== rank && !membership.isGone(peer)) tell(peer, record);
  }

  #cut(): void {
    this.#active?.cut();
    this.#active = undefined;
  }

  /** This rank's call is the last that was completed, or the one that is forfeited, or a repair, which goes on. */
  #forfeit(lost: readonly number[], completed: number): void {
    const active = this.#active;
    const forfeited = completed + 1;
    if (active !== undefined && !active.repairs) {
      if (active.sequence <= completed) {
        this.#complete(active);
      } else {
        this.#cut();
        active.queued.reject(lostError(nameOf(active.call), active.sequence, lost));
      }
    }
    if (active?.sequence !== forfeited) this.#forfeited.set(forfeited, lost);
    this.#countFrom(forfeited);
  }

  /** All who are left have come to a repair, and go on behind this call. */
  #resume(sequence: number): void {
    const active = this.#active;
    this.#poison = undefined;
    this.#forfeited.clear();
    this.#repairedAt = sequence;
    this.#countFrom(sequence);
    if (active?.repairs === true) {
      this.#cut();
      active.queued.resolve({ contributors: this.#init.membership.active, sequence });
      return;
    }
    // It had given its repair up when the last one came to it, and counts otherwise than they do.
    const next = sequence + 1;
    const text = 'its deactivate() ended before all had come to it';
    const record: PoisonRecord = { kind: 'poison', sequence: next, code: 'EP_POISONED', text, context: {} };
    this.#tellAll(record);
    this.#takePoison(record, new EpError('EP_ABORTED', `call ${next} of rank ${this.#init.rank}: ${text}`));
  }

  #countFrom(completed: number): void {
    this.#completed = completed;
    for (const sequence of this.#arrivals.keys()) if (sequence <= completed) this.#arrivals.delete(sequence);
  }

  #takePoison(record: PoisonRecord, error: EpError): void {
    if (this.#poison !== undefined && this.#poison.record.sequence <= record.sequence) return;
    this.#poison = { record, error };
    const active = this.#active;
    if (active !== undefined && !active.repairs && active.sequence >= record.sequence) {
      this.#cut();
      active.queued.reject(this.#poisonFor(active.sequence));
    }
    for (const queued of this.#queue) {
      const { sequence } = queued.call;
      if (!queued.repairs && sequence >= record.sequence) queued.reject(this.#poisonFor(sequence));
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
