/** Tokens to their experts and results back: one buffer of a group of ranks. */
import {
  type Closeable,
  checkAttached,
  type DeviceHandle,
  type Endpoint,
  EpError,
  invalid,
  type Rank,
  Resource,
  type Route,
  type SymmetricMemory,
  type Tensor,
  type WaitOptions,
  type Work,
} from '@ep/core';
import {
  EP_MOE_CACHED,
  EP_MOE_NON_TEMPORAL,
  EP_MOE_NON_TEMPORAL_OUT,
  EP_MOE_RENORMALISE,
  type MoeCall,
  type MoeCombineHalf,
  type MoeDispatchHalf,
  type NativeMoeBuffer,
} from '@ep/native';
import { type ExpertMap, localExperts, replicaCandidates } from '@ep/plan/moe';
import type { DispatchTransport } from '../dispatcher-base.js';
import type { HostStream } from '../host-stream.js';
import { checkRunOptions } from '../options.js';
import { COMBINE_TIMEOUTS, callTimeout } from './call-time.js';
import { dtypeCode } from './codes.js';
import { Culprits, namedBy } from './culprits.js';
import { callFailure } from './failure.js';
import { Launches } from './launches.js';
import { checkLayout, Losses, lostOf, type MoeLoss, reportActive } from './losses.js';
import { beginsAgain, isEmptyPlace, type Membership, meetMembers, renewOf } from './members.js';
import { combineOperands, dispatchOperand } from './operands.js';
import type { MoeCallOptions, MoeCombineOptions, MoeDispatchOptions, ResolvedMoe } from './options.js';
import { farewellSlot, STORES_ONLY } from './place.js';
import {
  HeldCall,
  type MoeCombined,
  type MoeHandle,
  type MoeHook,
  type MoeLayout,
  type MoeReceived,
} from './received.js';
import { RoutingArrays } from './routing.js';
import { CallSlot, hostStorage, placeOfStorage } from './slot.js';

export interface MoeBufferInit {
  readonly moe: ResolvedMoe;
  readonly transport: DispatchTransport;
  readonly memory: SymmetricMemory;
  readonly endpoints: readonly Endpoint<'bundled' | 'add'>[];
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
  readonly native: NativeMoeBuffer;
  /** Who is here, and how many calls they have begun. */
  readonly membership: Pick<Membership, 'calls' | 'present'>;
}

/** How long close() waits for the others' last call. */
const FAREWELL_MS = 2000;
const SEND = 1;
const RECEIVE = 2;
/** Kernels reach some peer by EFA: no call goes on without one. */
const ENDS_WITH_A_RANK: readonly string[] = ['memory:efa', 'memory:load-store+efa'];
/** From this payload on, copies go past the caches. */
const NON_TEMPORAL_BYTES = 1024 * 1024;

/**
 * Collective: all ranks that take part make the same calls in the same order. A call takes one of `calls` slots from its dispatch to the end of its
 * combine (or `release()`); when all are taken, dispatch throws `EP_BUSY`.
 *
 * A rank that does not come in time, or dies, is no failure: the call goes on without it, `lostRanks` of the result names it, and later calls leave it
 * out. Only an abort, a closed transport or a broken NIC rejects a call; the buffer takes no more calls then. Over EFA such a rank does, too
 * (`EP_TIMEOUT`, `EP_PEER_LOST`; all ranks name it, those that others told of it with `context.toldBy`), and the way on is `readmit` of the transport and `updateMembers`, or a new transport.
 *
 * `EP_CAPACITY` (a rank has too little room) and `EP_BUSY` (one that was given up alive may still write into the slot) refuse a call on all ranks: it counts, its handle is
 * over, and the next one may go on. Dispatch rejects with them; in low-latency mode, combine does on a rank that dispatch has not told: one without experts, or one that does without the
 * rank that refuses.
 */
export class MoeBuffer extends Resource implements Closeable {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly map: ExpertMap;
  /** Of this rank. */
  readonly localExperts: number;
  readonly #init: MoeBufferInit;
  readonly #launches: Launches;
  readonly #slots: readonly CallSlot[];
  readonly #totals: BigUint64Array;
  readonly #losses: Losses;
  /** How often ranks have come back. */
  #generation = 0;
  #updating = false;
  /** The mask that replica candidates were chosen by, as text. */
  #chosenBy = '';
  #calls = 0;

  constructor(init: MoeBufferInit) {
    super('MoE buffer');
    const { moe, transport, memory, native } = init;
    this.#init = init;
    this.#launches = new Launches({
      stream: init.stream,
      checkOpen: (where) => this.#checkOpen(where),
      hold: (operation) => this.hold(operation),
      closing: () => this.closing,
      culprits: this.#culprits(),
    });
    this.rank = transport.rank;
    this.worldSize = transport.worldSize;
    this.#losses = new Losses(transport.rank, transport.worldSize, (rank) => isEmptyPlace(transport, rank));
    this.map = moe.map;
    this.localExperts = localExperts(moe.map, transport.rank);
    this.#slots = Array.from({ length: moe.calls }, (_, i) => new CallSlot(i, moe, memory, transport.rank, native));
    this.#totals = hostStorage('u64', this.localExperts);
    this.#calls = init.membership.calls;
    this.#losses.agreed(init.membership.present);
  }

  /** As opened: what all ranks agreed on, and where the bytes of the buffer go (`bufferText` prints it). */
  get sizes(): ResolvedMoe['sizes'] {
    return this.#init.moe.sizes;
  }

  /** A mask of who takes part in the next call. */
  get activeRanks(): Uint8Array {
    return this.#losses.active(undefined, 'activeRanks');
  }

  /** Who was found late or dead, or was left out, and why. */
  get losses(): ReadonlyMap<Rank, MoeLoss> {
    return this.#losses.all;
  }

  /** Leaves ranks out of all later calls: what a process group, say, knows of its members. All ranks that stay do it before the same call. */
  leaveOut(ranks: Iterable<Rank>): void {
    this.#losses.leaveOut(ranks);
  }

  /**
   * Leaves out whom a process group over the same ranks has taken out (its `activeRanks`), so that all ranks go by one decision; returns those that were not left out before. All
   * ranks that stay do it before the same call. Whoever the group takes in again comes back here by `updateMembers`.
   */
  goOnWith({ activeRanks }: { readonly activeRanks: readonly Rank[] }): readonly Rank[] {
    if (!Array.isArray(activeRanks) || !activeRanks.includes(this.rank)) {
      const expected = `with activeRanks, this rank, ${this.rank}, among them`;
      throw invalid('group', { where: 'goOnWith', expected, found: activeRanks });
    }
    const gone = Array.from({ length: this.worldSize }, (_, rank) => rank).filter(
      (rank) => !activeRanks.includes(rank) && !this.#losses.has(rank),
    );
    this.#losses.leaveOut(gone);
    return gone;
  }

  /**
   * Takes ranks in that have come in the place of dead ones, or into places in which nobody was (`joinMoeBuffer`), and those that were given up alive and are here. Collective over all ranks that the transport has
   * present, between calls, at the same call on all ranks; nothing is held, and nothing is allocated. Afterwards all of them have one mask, whoever was lost on the way: ranks that are
   * here take part, others do not. Layouts that were kept before are over. Resolves with the ranks that came back.
   *
   * What it rejects with, it rejects with on all ranks: `EP_BUSY` for a rank that holds a call, `EP_MISMATCH` for ranks at different calls or with other options, `EP_PEER_LOST` or
   * `EP_TIMEOUT` for who died or did not come; nothing has changed then, but newcomers may have to come again. `EP_UNSUPPORTED` over transports that let nobody in.
   *
   * Over EFA (`Transport.renews`) the buffer begins again, also after a call that failed: calls that some rank held or had failed in are over on all ranks, and the next call is alike on all.
   */
  updateMembers(options: WaitOptions = {}): Promise<readonly Rank[]> {
    const where = 'updateMembers';
    this.#checkOpen(where);
    const { transport, memory, moe, native } = this.#init;
    const renew = renewOf(transport, where);
    return this.guard(where, async () => {
      checkRunOptions(options, where);
      this.#updating = true;
      try {
        await this.#launches.idle();
        const { failure } = this.#launches;
        const again = beginsAgain(transport);
        const membership = await meetMembers(
          { transport, memory, moe, native },
          {
            ...{ where, renew, options },
            calls: this.#calls,
            held: this.#slots.filter(({ held }) => held !== undefined).length,
            lost: [...this.#losses.all.keys()],
            ...(failure && { failure }),
          },
        );
        // One that is here all the same takes part again.
        const culprit = again ? namedBy(failure?.reason) : undefined;
        if (culprit !== undefined) this.#losses.noteCulprit(culprit);
        this.#losses.agreed(membership.present);
        if (again) this.#beginAgain(membership);
        else if (membership.back.length > 0) this.#generation++;
        return membership.back;
      } finally {
        this.#updating = false;
      }
    });
  }

  /** What was under way is over, on all ranks. */
  #beginAgain({ calls }: Membership): void {
    this.#calls = calls;
    this.#generation++;
    this.#launches.mend();
    for (const slot of this.#slots) {
      if (slot.held !== undefined) slot.held.stage = 'released';
      slot.held = undefined;
    }
  }

  /** Rows that each local expert has received in all calls so far. */
  totals(): BigUint64Array {
    return this.#totals.slice();
  }

  /** How each rank is reached. */
  routes(): readonly Route[] {
    const { transport, handle } = this.#init;
    const composed = transport.routes?.();
    return Array.from({ length: this.worldSize }, (_, peer) => {
      if (peer === this.rank) return { peer, via: 'own memory' };
      return { peer, via: composed?.[peer]?.via ?? `${transport.name} (${handle.kind})` };
    });
  }

  /**
   * Sends each row of `x` [tokens, hidden] to the ranks of its experts, and resolves with the rows that came here. `choices`: `topK` experts for each
   * token, -1 for none; or the layout of an earlier dispatch of the same choices, which all ranks then give.
   */
  dispatch(x: Tensor, choices: Int32Array | MoeLayout, options: MoeDispatchOptions = {}): Work<MoeReceived> {
    const begun = this.#beginDispatch(x, choices, options, 'dispatch');
    return this.#launches.follow('dispatch', begun.launch(SEND | RECEIVE, options), begun.received, begun.refused);
  }

  /** The first half alone: `receive()` of what it resolves with is the second. In between nothing runs here for this call. `x` stays unchanged until then. */
  dispatchSend(
    x: Tensor,
    choices: Int32Array | MoeLayout,
    options: MoeDispatchOptions = {},
  ): Work<MoeHook<MoeReceived>> {
    const begun = this.#beginDispatch(x, choices, options, 'dispatchSend');
    const hook = () =>
      this.#launches.hook('dispatch receive', (late) =>
        this.#launches.follow('dispatch receive', begun.launch(RECEIVE, late), begun.received, begun.refused),
      );
    return this.#launches.follow('dispatchSend', begun.launch(SEND, options), hook, begun.refused);
  }

  /**
   * Sends the results `y` of experts, a tensor like `received.x` in the buffer's dtype, back to where their tokens came from, and resolves with each of
   * this rank's tokens' mixture. Ends the call.
   */
  combine(y: Tensor, handle: MoeHandle, options: MoeCombineOptions = {}): Work<MoeCombined> {
    const begun = this.#beginCombine(y, handle, options, 'combine');
    return this.#launches.follow('combine', begun.launch(SEND | RECEIVE, options), begun.combined, begun.refused);
  }

  /** As `dispatchSend`, of a combine. `y` stays unchanged until `receive()` has resolved. */
  combineSend(y: Tensor, handle: MoeHandle, options: MoeCombineOptions = {}): Work<MoeHook<MoeCombined>> {
    const begun = this.#beginCombine(y, handle, options, 'combineSend');
    const hook = () =>
      this.#launches.hook('combine receive', (late) =>
        this.#launches.follow('combine receive', begun.launch(RECEIVE, late), begun.combined, begun.refused),
      );
    return this.#launches.follow('combineSend', begun.launch(SEND, options), hook);
  }

  /**
   * Calls, one after the other in a native loop: nanoseconds of each. Collective; of a buffer with one call slot and nothing held. The numbers are what kernels
   * take without JS. Experts return rows as they are, with `zeroCopyCombine` in the `combineBuffer`, which is not timed, and each token's weights add up to it exactly: every call's result is
   * compared with its `x`, of which there are two in turn, and one that differs rejects. @internal
   */
  async measureSteps(
    x: readonly [Tensor, Tensor],
    choices: Int32Array,
    weights: Float32Array,
    rounds: number,
  ): Promise<Float64Array> {
    const where = 'measureSteps';
    const { moe, native, stream } = this.#init;
    const { x: rows, combineBuffer, handle } = await this.dispatch(x[1], choices);
    const y = combineBuffer ?? rows;
    const call = handle as HeldCall;
    const { half: back } = combineOperands(y, call, { weights }, moe, this.localExperts, where);
    await this.combine(y, handle, { weights });
    const timeoutMs = callTimeout(moe, {}, where);
    const [even, odd] = x.map((rows) => this.#beginDispatch(rows, choices, {}, where).half);
    const { routing, report, slot, epoch, tokens, flags, dtype } = even!;
    const shared = { routing, report, slot, epoch, tokens, dtype, timeoutMs, halves: SEND | RECEIVE };
    const samples = hostStorage('f64', rounds);
    const halves = [
      { ...even!, ...shared },
      { ...odd!, ...shared },
      { ...back, ...shared, flags },
    ] as const;
    const outcome = await stream.launch((of) => native.steps(of, ...halves, rounds, placeOfStorage(samples).operand));
    this.#calls += rounds * moe.calls;
    if (outcome.status !== 0) throw callFailure(where, outcome);
    return samples;
  }

  /** Undefined where calls go on without a rank. */
  #culprits(): Culprits | undefined {
    const { moe, memory, endpoints, transport, handle } = this.#init;
    if (!ENDS_WITH_A_RANK.includes(handle.kind)) return undefined;
    return new Culprits({
      ...{ rank: transport.rank, memory, endpoints, timeoutMs: moe.timeoutMs, firstSlot: farewellSlot(moe) },
      takesPart: (rank) => !this.#losses.has(rank),
      calls: () => {
        const held = this.#slots.flatMap((slot) => (slot.held === undefined ? [] : [slot.held]));
        return { begun: this.#calls, first: Math.min(this.#calls, ...held.map((one) => one.number(moe.calls))) };
      },
    });
  }

  protected override async release(): Promise<void> {
    await this.#launches.cancel();
    await this.#farewell();
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
    this.#launches.check();
  }

  /**
   * HAZARD: a rank that is ahead has its results while others still grant it credit. Were its memory gone by then, a NIC would break their queue pairs to it. So
   * ranks wait a while for each other's last call; whoever is dead or does not come is not waited for any longer, and what it still posts is its own loss.
   */
  async #farewell(): Promise<void> {
    const { memory, endpoints, moe } = this.#init;
    if (memory.closed) return;
    const others = endpoints.filter(({ peer }) => peer !== this.rank && !this.#losses.has(peer));
    const first = farewellSlot(moe);
    const timeoutMs = Math.min(moe.timeoutMs, FAREWELL_MS);
    await Promise.allSettled(
      others.map(async (endpoint) => {
        await endpoint.signal(memory, { slot: first + this.rank, op: 'add', value: 1n });
        await endpoint.flush({ timeoutMs });
      }),
    );
    if (this.#launches.failure !== undefined) return;
    await Promise.allSettled(
      others.map(({ peer }) =>
        memory.signals.until(first + peer, { cmp: 'ge', value: 1n }, { peers: [peer], timeoutMs }),
      ),
    );
  }

  #beginDispatch(x: Tensor, choices: Int32Array | MoeLayout, options: MoeDispatchOptions, where: string) {
    const { moe, native } = this.#init;
    this.#launches.checkUsable(where);
    checkRunOptions(options, where);
    options.signal?.throwIfAborted();
    const index = this.#calls % moe.calls;
    const slot = this.#slots[index]!;
    if (slot.held !== undefined) {
      throw new EpError(
        'EP_BUSY',
        `${where}: call slot ${index} of ${moe.calls} is still taken: combine or release an earlier call, or open with more calls (at most 4)`,
        { context: { slot: index, calls: moe.calls } },
      );
    }
    const cached = !(choices instanceof Int32Array);
    if (cached && moe.mode === 'low-latency') {
      throw invalid('choices', { where, expected: 'an Int32Array in low-latency mode', found: choices });
    }
    if (cached && !(choices?.routing instanceof RoutingArrays)) {
      throw invalid('choices', { where, expected: 'an Int32Array, or the layout of a dispatch', found: choices });
    }
    if (options.keepLayout === true && moe.mode === 'low-latency') {
      throw invalid('keepLayout', { where, expected: 'false in low-latency mode', found: true });
    }
    if (!cached) checkAttached(choices, `${where}, choices`);
    const operand = dispatchOperand(x, moe, where);
    const { tokens } = operand;
    if (cached ? choices.tokens !== tokens : choices.length !== tokens * moe.topK) {
      const expected = cached
        ? `those of ${choices.tokens} tokens`
        : `${tokens * moe.topK} (${tokens} tokens * ${moe.topK})`;
      throw invalid('choices', { where, expected, found: cached ? tokens : choices.length });
    }
    const routing = cached ? choices.routing : slot.routing(options.keepLayout === true);
    const outputs = slot.outputs();
    const report = slot.report;
    const active = this.#losses.active(options.activeRanks, where);
    if (cached) {
      checkLayout(routing, active, where);
      if (routing.generation !== this.#generation) {
        const expected = 'a layout that was made after ranks came back (updateMembers): they do not have it';
        throw invalid('choices', { where, expected, found: 'an older one' });
      }
    } else {
      routing.dropped.clear();
      routing.generation = this.#generation;
    }
    this.#choose(active);
    reportActive(report.ranks, active);
    report.waitNs.fill(0n);
    if (!cached) routing.topk.set(choices);
    const epoch = Math.floor(this.#calls / moe.calls) + 1;
    const call = new HeldCall({ slot: index, epoch, tokens, routing, release: (held) => this.#release(held) });
    const totals = placeOfStorage(this.#totals);
    const half: Omit<MoeDispatchHalf, 'halves' | 'timeoutMs'> = {
      routing: routing.native,
      report: report.native,
      slot: index,
      epoch,
      tokens,
      flags: (cached ? EP_MOE_CACHED : 0) | this.#nonTemporal(tokens, moe.rowBytes),
      dtype: dtypeCode(moe.dtype),
      x: operand.operand,
      xOffset: operand.byteOffset,
      xStride: operand.strideBytes,
      ...(outputs.out && { out: outputs.out.operand, outOffset: outputs.out.offset }),
      ...(outputs.scales && { scales: outputs.scales.operand, scalesOffset: outputs.scales.offset }),
      totals: totals.operand,
      totalsOffset: totals.offset,
    };
    let begun = false;
    return {
      half,
      launch: (halves: number, limits: MoeCallOptions) => {
        const timeoutMs = callTimeout(moe, limits, where);
        const started = this.#launches.launch(
          (stream) => native.dispatch(stream, { ...half, halves, timeoutMs }),
          limits,
        );
        if (!begun) {
          // Only now does the call count: everything that can be refused has been.
          begun = true;
          this.#calls++;
          slot.held = call;
        }
        return started;
      },
      refused: (): void => {
        call.stage = 'released';
        slot.held = undefined;
        this.#losses.note(report.ranks);
      },
      received: (): MoeReceived => {
        call.stage = 'received';
        call.rows = slot.rowsOf(routing);
        this.#losses.note(report.ranks);
        const lostRanks = lostOf(report.ranks);
        for (const [rank, lost] of lostRanks.entries()) if (lost === 1) routing.dropped.add(rank as Rank);
        const combineBuffer = slot.results(call.rows);
        return {
          ...slot.tensors(call.rows),
          ...(combineBuffer && { combineBuffer }),
          ...routing.said(call.rows, this.localExperts),
          lostRanks,
          waitNs: report.waitNs.slice(),
          stagedBytes: operand.stagedBytes,
          handle: call,
          ...(options.keepLayout === true && { layout: { tokens, routing } }),
        };
      },
    };
  }

  #beginCombine(y: Tensor, handle: MoeHandle, options: MoeCombineOptions, where: string) {
    const { moe, native } = this.#init;
    this.#launches.checkUsable(where);
    checkRunOptions(options, where);
    options.signal?.throwIfAborted();
    const { call, slot } = this.#callOf(handle, where);
    const operands = combineOperands(y, call, options, moe, this.localExperts, where);
    const report = slot.report;
    report.waitNs.fill(0n);
    this.#losses.mask(report.ranks);
    const half: Omit<MoeCombineHalf, 'halves' | 'timeoutMs'> = {
      routing: call.routing.native,
      report: report.native,
      slot: call.slot,
      epoch: call.epoch,
      tokens: call.tokens,
      flags: (options.renormalise === true ? EP_MOE_RENORMALISE : 0) | this.#nonTemporal(call.rows, moe.resultRowBytes),
      dtype: dtypeCode(moe.dtype),
      ...operands.half,
    };
    const ended = (): void => {
      call.stage = 'released';
      slot.held = undefined;
      this.#losses.note(report.ranks);
    };
    let begun = false;
    return {
      launch: (halves: number, limits: MoeCallOptions) => {
        const timeoutMs = callTimeout(moe, limits, where, COMBINE_TIMEOUTS);
        const started = this.#launches.launch(
          (stream) => native.combine(stream, { ...half, halves, timeoutMs }),
          limits,
        );
        if (!begun) {
          begun = true;
          call.stage = 'combining';
        }
        return started;
      },
      refused: ended,
      combined: (): MoeCombined => {
        ended();
        return {
          y: operands.finish(),
          lostRanks: lostOf(report.ranks),
          waitNs: report.waitNs.slice(),
          stagedBytes: operands.stagedBytes,
        };
      },
    };
  }

  #release(call: HeldCall): Work {
    if (call.released) return this.#launches.done('release');
    const where = 'release';
    this.#launches.checkUsable(where);
    const { moe, native, handle } = this.#init;
    const { slot } = this.#callOf(call, where);
    const done = (): void => {
      call.stage = 'released';
      slot.held = undefined;
    };
    if (moe.mode === 'low-latency' && handle.kind === STORES_ONLY) {
      // Its dispatch has given the slot back to the senders already: rows were packed out of it. And nothing is counted.
      done();
      return this.#launches.done(where);
    }
    const { slot: index, epoch, tokens, routing } = call;
    const description: MoeCall = {
      routing: routing.native,
      report: slot.report.native,
      slot: index,
      epoch,
      tokens,
      timeoutMs: callTimeout(moe, {}, where),
    };
    call.stage = 'combining';
    return this.#launches.follow(
      where,
      this.#launches.launch((stream) => native.release(stream, description), {}),
      () => {
        done();
        this.#losses.note(slot.report.ranks);
      },
    );
  }

  #callOf(handle: MoeHandle, where: string): { readonly call: HeldCall; readonly slot: CallSlot } {
    const slot = this.#slots.find(({ held }) => held !== undefined && held === handle);
    if (slot !== undefined && handle instanceof HeldCall) {
      handle.expect('received', where);
      return { call: handle, slot };
    }
    throw invalid('handle', {
      where,
      expected: 'that of a call of this buffer which was not combined yet',
      found: handle,
    });
  }

  #checkOpen(where: string): void {
    this.checkOpen(where);
    if (this.#init.memory.closed) throw new EpError('EP_CLOSED', `${where}: the memory of the buffer was closed`);
    if (this.#updating) throw new EpError('EP_BUSY', `${where}: updateMembers is under way: await it first`);
  }

  #nonTemporal(rows: number, rowBytes: number): number {
    return rows * rowBytes * this.#init.moe.topK >= NON_TEMPORAL_BYTES
      ? EP_MOE_NON_TEMPORAL | EP_MOE_NON_TEMPORAL_OUT
      : 0;
  }

  /** Has replicas chosen among those that take part. */
  #choose(activeRanks: Uint8Array): void {
    const { moe, native } = this.#init;
    const text = activeRanks.join('');
    if (text === this.#chosenBy) return;
    const { policy, ranksPerNode } = moe;
    const { offsets, replicas } = replicaCandidates(moe.map, this.rank, { policy, ranksPerNode, activeRanks });
    native.setCandidates(offsets, replicas);
    this.#chosenBy = text;
  }
}
