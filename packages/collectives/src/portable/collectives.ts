/**
 * The collective calls of one rank: one at a time, in the order in which they were made.
 *
 * A call begins with a meeting: every rank tells every other one what it calls, and, where that is little, all that it gives. A call of which all have told all is small: it ends
 * with the last of these words (given.ts). Any other has two more parts. Data: see plan.ts; payload is sent only to ranks that have come, so that whatever arrives can be put where
 * it belongs. Closing: every rank tells that it has all of its data, and the call ends with the last of these.
 *
 * So a rank that completed a call knows that all have their data, or that whoever completed it can give them what they lack; and nobody completes the next one before all have
 * completed this one. When a member is lost, survivors agree (membership.ts) on the last call that any of them completed: it completes on all, the one after it ends with
 * EP_PEER_LOST on all, whether it was made yet or not, and the one after that is made by the survivors.
 *
 * What the lost rank told of a small call may have reached one survivor, who completed it, and not another. So whoever tells in an agreement how far it has come tells before that what
 * it heard of the ranks that are gone (`relay`). When a rank commits, all that a survivor ever heard of them has come to it; what it still lacks is of ranks that live, and on its way,
 * or was heard by nobody who is left: then none of them has completed the call, and it is lost as well. A rank that is taken out alive is given the same before it hears of it.
 *
 * A call that admits ranks ends with a view that has them, which is told to all once one rank has completed it.
 *
 * A repair has no parts of its own: who has come to it says so in the agreement, which ends all that others still wait for, and all go on behind the calls of all. It takes out
 * members that are alive; so does, where the group evicts, a call whose time is up. What these still say has numbers of calls that are over, or is not read at all.
 */
import { EpError } from '@ep/core';
import { ActiveCall, QueuedCall } from './active-call.js';
import { foundByAll } from './admission.js';
import { Arrivals, absentFrom, retold } from './arrivals.js';
import { readChunk } from './chunks.js';
import type { CollectivesInit, Ended } from './collectives-init.js';
import { checkArrays, lostError, type Poison, poisonedError, poisonOf } from './failures.js';
import { takeGiven } from './given.js';
import type { Commit } from './membership.js';
import { nameOf, type OrderedCall, type OrderedEnd } from './ordered.js';
import { QuickCalls, type QuickEnd } from './quick-calls.js';
import { type CallRecord, type ControlRecord, type DoneRecord, describeError, type PoisonRecord } from './records.js';
import { callRecords, findMismatch, longestCarried } from './signature.js';
import { ToldInRounds } from './told-in-rounds.js';

/** Once calls are known to differ, how long ranks that have not come are waited for, so that the message can name all. */
const MISMATCH_GRACE_MS = 200;
/** What a rank that is taken out lacks of a call that others have completed follows at once. */
const FAREWELL_MS = 1000;
/** How long an agreement without ranks that were late may take before somebody else is. */
const AGREEMENT_MS = 1000;

export class Collectives {
  readonly #init: CollectivesInit;
  readonly #queue: QueuedCall[] = [];
  readonly #arrivals = new Arrivals();
  readonly #told: ToldInRounds;
  readonly #quick: QuickCalls;
  /** Calls that end with the loss of these ranks, before they were made here. */
  readonly #forfeited = new Map<number, readonly number[]>();
  #active: ActiveCall | undefined;
  /** The last call that is known to have ended alike on all ranks. One that is `due` here may be behind it. */
  #completed = 0;
  /** Undefined: a quick one. */
  #last: Ended | undefined = { sequence: 0, contributors: [], words: new Map() };
  #lastQuick: { readonly sequence: number; readonly end: QuickEnd } | undefined;
  #poison: Poison | undefined;
  /** The call behind which all went on when the group was repaired last. */
  #repairedAt = 0;
  #broken: { readonly error: unknown } | undefined;
  #advancing = false;

  constructor(init: CollectivesInit) {
    this.#init = init;
    this.#quick = new QuickCalls(init);
    this.#told = new ToldInRounds(init, this.#arrivals, {
      active: () => this.#active,
      onWords: () => this.#meet(),
    });
  }

  get completed(): number {
    return this.#completed;
  }

  get last(): Ended {
    // HAZARD: at once: the round after the next has its words in the same memory.
    if (this.#last === undefined) {
      const { sequence, end } = this.#lastQuick!;
      this.#last = { sequence, contributors: end.contributors, words: end.rounds.wordsOf(sequence) };
    }
    return this.#last;
  }

  /** A call of this rank is under way. */
  get busy(): boolean {
    return this.#active !== undefined;
  }

  /** HAZARD: a rank that was stopped may have all words of a call that the others have lost since, and lost it with them: what they told last has to be looked at first. */
  run(call: OrderedCall): OrderedEnd | Promise<OrderedEnd> {
    if (this.#active === undefined) {
      // Behind a quick call all others may be in the next one already. What they cannot have done without this rank, in the moment since it looked, is to agree on a loss: but for its own, which takes a timeout.
      if (this.#last === undefined) this.#init.lookLately();
      else this.#init.look();
    }
    const end = this.#isNext(call) ? this.#quick.run(call) : undefined;
    if (end !== undefined) {
      this.#completed = call.sequence;
      this.#last = undefined;
      this.#lastQuick = { sequence: call.sequence, end };
      return end;
    }
    const queued = new QueuedCall(call, (aborted) => this.#giveUp(aborted, call.signal!.reason));
    this.#queue.push(queued);
    if (call.signal?.aborted === true) this.#giveUp(queued, call.signal.reason);
    this.#advance();
    return queued.answer();
  }

  /** It goes at once, all that came before has ended well, and nobody has told of it. */
  #isNext({ sequence }: OrderedCall): boolean {
    if (this.#active !== undefined || this.#advancing || this.#queue.length > 0) return false;
    if (this.#broken !== undefined || this.#poison !== undefined || this.#forfeited.size > 0) return false;
    return sequence === this.#completed + 1 && !this.#arrivals.has(sequence);
  }

  /** Of the rank that made the call, or of one that passes on its words. */
  onCall(from: number, record: CallRecord): void {
    const { sequence, of: caller = from } = record;
    if (this.#poison !== undefined && sequence >= this.#poison.record.sequence) {
      // Whoever poisoned the group may have died before it told all.
      this.#init.tell(from, this.#poison.record);
      return;
    }
    // Who tells in a record has no round of that call, and may have none ever.
    if (caller === from) this.#told.retell(from, sequence);
    if (sequence <= this.#completed && sequence !== this.#active?.sequence) return;
    this.#arrivals.add(caller, record);
    if (this.#active?.sequence === sequence) this.#meet();
  }

  onDone(from: number, record: DoneRecord): void {
    const active = this.#active;
    if (active?.sequence !== record.sequence) return;
    active.done(from);
    this.#close();
  }

  onPoison(from: number, record: PoisonRecord): void {
    // Of somebody who had not heard yet that all have come to a repair.
    if (record.sequence > this.#repairedAt) this.#takePoison(poisonOf(from, record));
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

  /** A rank is gone, which has completed this call. Where nobody tells in records who has its data, it may be the only one that knows that all have. */
  onGone(rank: number, completed: number): void {
    const { membership } = this.#init;
    membership.lose(rank);
    const active = this.#active;
    if (active?.plan?.agreed === true && active.sequence <= completed && !membership.agreeing) this.#complete(active);
  }

  /** After `membership.lose`. HAZARD: a call may be over by now, which this rank has not seen. */
  onLost(rank: number): void {
    const awaiting = (): boolean => {
      const active = this.#active;
      return active?.contributors?.includes(rank) === true && this.#awaits(active, rank);
    };
    if (awaiting() && !this.#init.membership.agreeing) this.#active?.plan?.look?.();
    if (awaiting()) this.#init.membership.begin();
    else this.onReach();
  }

  /** There is a peer more that is reached, or that need not be. */
  onReach(): void {
    if (this.#active !== undefined) this.#meet();
  }

  /** What the ranks that are gone have told, and what this one has told in rounds alone: to a survivor, before it is told how far this rank has come. */
  relay(peer: number, gone: readonly number[]): void {
    this.#told.retell(peer);
    for (const words of [this.last.words, ...this.#arrivals.all()]) {
      for (const record of retold(words, gone)) this.#init.tell(peer, record);
    }
  }

  /** In a repair, which not all have come to, survivors have told all that they had heard. */
  onAwaited(): void {
    const active = this.#active;
    const { membership } = this.#init;
    if (active?.due !== true) return;
    const lost = this.#absentFrom(active).filter((peer) => membership.isGone(peer));
    // Nobody who lives has completed it, and nothing comes any more that would let it end.
    if (lost.length > 0) this.#giveUp(active.queued, lostError(nameOf(active.call), active.sequence, lost));
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
    this.#takePoison({ record: { kind: 'poison', sequence, code: 'EP_ABORTED', text, context }, error });
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
    this.#lookForGone();
    const active = this.#active;
    // It was about deaths, and not all had come to the repair.
    if (active?.agreeing === true) this.#agree(active);
    this.#advance();
  }

  /** This rank was taken out, by one that had completed this call, and whose farewell follows. */
  end(completed: number, error: unknown): void {
    this.#advancing = true;
    this.#completeUpTo(completed);
    this.#advancing = false;
    const active = this.#active;
    if (active?.due !== true) {
      this.fail(error);
      return;
    }
    this.#refuse(error);
    active.after(FAREWELL_MS, () => this.fail(error));
  }

  /** This rank comes to members that have completed this call. */
  reopen(completed: number): void {
    this.#broken = undefined;
    this.#poison = undefined;
    this.#forfeited.clear();
    this.#arrivals.drop(() => true);
    this.#repairedAt = completed;
    this.#completed = completed;
    this.#last = { sequence: completed, contributors: [], words: new Map() };
  }

  /** Nothing works any more: every call ends with `error`. */
  fail(error: unknown): void {
    const active = this.#active;
    this.#cut();
    active?.queued.reject(error);
    this.#refuse(error);
  }

  #refuse(error: unknown): void {
    this.#broken ??= { error };
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
      if (isBehind || sequence >= this.#poison.record.sequence) return { error: poisonedError(this.#poison, sequence) };
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
    const awaited = membership.agreeing && !active.due ? membership.awaited : [];
    const unreached = (active.contributors ?? []).filter((peer) => !this.#told.isTold(peer));
    return active.timeoutError(rank, this.#arrivals.of(active.sequence), { awaited, unreached });
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
    const recordFor = this.#recordsOf(active);
    const own = recordFor(rank);
    const inRound = this.#told.goesInRound(active, own);
    this.#arrivals.add(rank, own);
    if (inRound) {
      if (!this.#told.say(active, own)) this.#meet();
      return;
    }
    for (const peer of membership.active) {
      if (peer === rank) continue;
      const record = recordFor(peer);
      const byteLength = record.given?.byteLength ?? 0;
      traces.signalled(nameOf(call));
      if (byteLength > 0) traces.wrote(call.kind, byteLength);
      tell(peer, record);
    }
    this.#meet();
  }

  #recordsOf(active: ActiveCall): (peer: number) => CallRecord {
    const { call } = active;
    const canBeCarried = call.membership === undefined && !active.rootless;
    const record = canBeCarried ? this.#told.roundsOf(active)?.recordOf(call) : undefined;
    return record === undefined ? callRecords(call) : () => record;
  }

  /** HAZARD: what this rank has said in an agreement of how far it has come stays true, unless others had come further before. */
  #meet(): void {
    const active = this.#active!;
    const { rank, membership } = this.#init;
    const { contributors } = active;
    const stands = membership.agreeing && !active.due;
    if (contributors === undefined || active.plan !== undefined || stands) return;
    const words = this.#arrivals.of(active.sequence);
    const all = this.#absentFrom(active).length === 0;
    const mismatchOf = (): EpError | undefined =>
      findMismatch(active.call, rank, this.#arrivals.of(active.sequence), all);
    if (mismatchOf() !== undefined) {
      if (all) this.#giveUp(active.queued, mismatchOf());
      else active.after(MISMATCH_GRACE_MS, () => this.#giveUp(active.queued, mismatchOf()));
      return;
    }
    if (!all) return;
    if (active.rootless) this.#complete(active);
    else if (contributors.every((peer) => words.get(peer)!.given !== undefined)) this.#settleIfTold(active);
    else if (contributors.some((peer) => membership.isGone(peer))) membership.begin();
    else this.#move(active);
  }

  /** Of a small call that all have come to. HAZARD: a rank that has not told the others yet must not go its way, nor close: they would never hear of it. */
  #settleIfTold(active: ActiveCall): void {
    const { rank, orderOf } = this.#init;
    const { call } = active;
    const contributors = active.contributors!;
    if (!contributors.every((peer) => this.#told.isTold(peer))) return;
    try {
      takeGiven({ call, rank, contributors, order: orderOf(contributors) }, this.#arrivals.of(call.sequence));
    } catch (error) {
      this.#giveUp(active.queued, error);
      return;
    }
    this.#complete(active);
  }

  /** Whether this rank cannot go on without more of that one. */
  #awaits(active: ActiveCall, rank: number): boolean {
    if (active.plan !== undefined) return active.needs(rank);
    return this.#arrivals.of(active.sequence).get(rank)?.given === undefined;
  }

  #absentFrom(active: ActiveCall): readonly number[] {
    return absentFrom(this.#arrivals.of(active.sequence), active.contributors ?? []);
  }

  /** Of who was found gone while survivors agreed, and is in the new view nevertheless. */
  #lookForGone(): void {
    const active = this.#active;
    const { membership } = this.#init;
    if (active?.due !== true || membership.agreeing) return;
    if (this.#absentFrom(active).some((peer) => membership.isGone(peer))) membership.begin();
  }

  /** Data. */
  #move(active: ActiveCall): void {
    const { rank, traces, planOf, send, kick, drain } = this.#init;
    const { call, contributors } = active;
    if (call.membership !== undefined) {
      const words = this.#arrivals.of(active.sequence);
      active.found = foundByAll(contributors!.map((peer) => words.get(peer)!.found ?? []));
    }
    const data = {
      call,
      rank,
      contributors: contributors!,
      send,
      onSent: (byteLength: number) => traces.wrote(call.kind, byteLength),
      onAdvance: kick,
      onComplete: () => this.#finish(active),
      onFailed: (error: unknown) => {
        try {
          // What is wrong with an array says more than what came of it.
          checkArrays(call);
        } catch (gone) {
          return this.#giveUp(active.queued, gone);
        }
        this.#giveUp(active.queued, error);
      },
    };
    try {
      checkArrays(call);
      const plan = planOf(data, longestCarried(this.#arrivals.of(active.sequence), contributors!));
      active.plan = plan;
      active.queued.heldBy = plan;
      plan.begin();
    } catch (error) {
      this.#giveUp(active.queued, error);
      return;
    }
    drain();
    if (active.plan.pending === 0) this.#finish(active);
  }

  /** Closing. */
  #finish(active: ActiveCall): void {
    if (active.finished || this.#active !== active) return;
    const { rank, traces, tell } = this.#init;
    active.finished = true;
    active.done(rank);
    const done: DoneRecord = { kind: 'done', sequence: active.sequence };
    for (const peer of active.contributors!) {
      if (peer === rank) continue;
      if (active.plan?.agreed === true) {
        active.done(peer);
        continue;
      }
      traces.signalled(nameOf(active.call));
      tell(peer, done);
    }
    this.#close();
  }

  #close(): void {
    const active = this.#active!;
    const { membership } = this.#init;
    if (!active.finished || membership.agreeing) return;
    if (!active.contributors!.every((peer) => active.isDone(peer))) return;
    const { admits } = active;
    const asked = active.call.membership?.size ?? 0;
    const size = asked > this.#init.size() ? asked : undefined;
    if (admits.length > 0 || size !== undefined) membership.admit(admits, active.sequence, size);
    else this.#complete(active);
  }

  /** Others have completed these calls. So all of them have told that they have their data; or the call is small, and what this rank lacks of it is on its way, or lost. */
  #completeUpTo(sequence: number): void {
    const active = this.#active;
    if (active === undefined || active.repairs || active.sequence > sequence) return;
    if (active.plan !== undefined || active.rootless) {
      this.#complete(active);
      return;
    }
    active.due = true;
    this.#completed = Math.max(this.#completed, active.sequence);
    this.#meet();
  }

  #complete(active: ActiveCall): void {
    const { call, contributors, sequence, queued } = active;
    this.#completed = Math.max(this.#completed, sequence);
    this.#last = { sequence, contributors: contributors!, words: this.#arrivals.take(sequence) };
    active.cut();
    this.#active = undefined;
    if (active.rootless) queued.reject(lostError(nameOf(call), sequence, [call.root]));
    else queued.resolve({ contributors: contributors!, ...(active.found && { found: active.found }) });
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
    this.#takePoison({
      record,
      error: new EpError('EP_ABORTED', `call ${sequence} of rank ${rank}: ${record.text}`, { cause: error }),
    });
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

  /** This rank's call is one that was completed, or the one that is forfeited, or a repair, which goes on. */
  #forfeit(lost: readonly number[], completed: number): void {
    const active = this.#active;
    const isDue = active !== undefined && !active.repairs && active.sequence <= completed;
    if (isDue && this.#isLost(active)) {
      // Of two losses in a row, the second took the first one's witnesses: they are told together.
      this.#end(active, lost);
      this.#countFrom(completed);
      return;
    }
    const forfeited = completed + 1;
    if (active !== undefined && !active.repairs && !isDue) this.#end(active, lost);
    if (active?.sequence !== forfeited) this.#forfeited.set(forfeited, lost);
    this.#countFrom(forfeited);
    this.#completeUpTo(completed);
  }

  /** After an agreement: what this small call lacks was told to nobody who lives. */
  #isLost(active: ActiveCall): boolean {
    const { active: members } = this.#init.membership;
    if (active.plan !== undefined || active.rootless) return false;
    return this.#absentFrom(active).some((peer) => !members.includes(peer));
  }

  #end(active: ActiveCall, lost: readonly number[]): void {
    this.#cut();
    active.queued.reject(lostError(nameOf(active.call), active.sequence, lost));
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
    const error = new EpError('EP_ABORTED', `call ${next} of rank ${this.#init.rank}: ${text}`);
    this.#takePoison({ record, error });
  }

  #countFrom(completed: number): void {
    this.#completed = completed;
    const current = this.#active?.sequence;
    this.#arrivals.drop((sequence) => sequence <= completed && sequence !== current);
  }

  #takePoison(poison: Poison): void {
    const { record } = poison;
    if (this.#poison !== undefined && this.#poison.record.sequence <= record.sequence) return;
    this.#poison = poison;
    const active = this.#active;
    if (active !== undefined && !active.repairs && active.sequence >= record.sequence) {
      this.#cut();
      active.queued.reject(poisonedError(poison, active.sequence));
    }
    for (const queued of this.#queue) {
      const { sequence } = queued.call;
      if (!queued.repairs && sequence >= record.sequence) queued.reject(poisonedError(poison, sequence));
    }
    this.#arrivals.drop((sequence) => sequence >= record.sequence);
    this.#init.drain();
    this.#advance();
  }
}
