/** Tokens to their experts and results back: one buffer of a group of ranks. */
import {
  type Closeable,
  checkTimeout,
  createWork,
  type DeviceHandle,
  doneWork,
  type Endpoint,
  EpError,
  formatRanks,
  invalid,
  isEpError,
  linkSignals,
  type Rank,
  Resource,
  type SymmetricMemory,
  type Tensor,
  type Work,
  WorkOwner,
} from '@ep/core';
import {
  codeOfStatus,
  EP_MOE_CACHED,
  EP_MOE_NON_TEMPORAL,
  EP_MOE_RENORMALISE,
  type MoeCall,
  type MoeCombineHalf,
  type MoeDispatchHalf,
  type NativeHostStream,
  type NativeMoeBuffer,
  type OperationId,
  type Outcome,
} from '@ep/native';
import { type ExpertMap, localExperts, type RankMask, replicaCandidates } from '@ep/plan/moe';
import type { DispatchTransport } from '../dispatcher.js';
import type { HostStream } from '../host-stream.js';
import { outcomeText } from '../outcome-text.js';
import { dtypeCode } from './codes.js';
import { combineOperands, dispatchOperand } from './operands.js';
import type { MoeCallOptions, MoeDType, ResolvedMoe } from './options.js';
import { farewellSlot } from './place.js';
import {
  HeldCall,
  type MoeCombined,
  type MoeHandle,
  type MoeHook,
  type MoeLayout,
  type MoeReceived,
} from './received.js';
import { CallSlot, hostStorage, placeOfStorage } from './slot.js';

export interface MoeDispatchOptions extends MoeCallOptions {
  /** Ranks to be left out from the start, besides those of `activeRanks` of the buffer: 0 or false. Alike on all ranks that take part. */
  readonly activeRanks?: RankMask;
  /** 'high-throughput': also hand out a `layout` for later dispatches of the same choices. */
  readonly keepLayout?: boolean;
}

export interface MoeCombineOptions extends MoeCallOptions {
  /** Of each choice, token-major: tokens * topK. Without them rows are summed as they are: the backward pass of dispatch. */
  readonly weights?: Float32Array;
  /** At most two tensors like the result, added to it. */
  readonly bias?: readonly Tensor<MoeDType>[];
  /** Where some of a token's experts are gone, scale what is left so that its weights keep their sum. */
  readonly renormalise?: boolean;
  /** Where the result goes, packed: in native memory (`allocateHost`) without a copy. New memory unless given. */
  readonly out?: Tensor<MoeDType>;
}

/** Why a rank takes no part any more, in the words of error codes; `EP_EVICTED` if it was left out by `leaveOut`. */
export type MoeLoss = 'EP_TIMEOUT' | 'EP_PEER_LOST' | 'EP_EVICTED';

export interface MoeBufferInit {
  readonly moe: ResolvedMoe;
  readonly transport: DispatchTransport;
  readonly memory: SymmetricMemory;
  readonly endpoints: readonly Endpoint<'bundled' | 'add'>[];
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
  readonly native: NativeMoeBuffer;
}

/** How long close() waits for the others' last call. */
const FAREWELL_MS = 2000;
const SEND = 1;
const RECEIVE = 2;
const DONE: Outcome = { status: 0, rank: -1, stage: 0, expected: 0n, found: 0n };
const MASKED = 0xffff_ffff_ffff_ffffn;
/** From this payload on, copies go past the caches. */
const NON_TEMPORAL_BYTES = 8 * 1024 * 1024;

/**
 * Collective: all ranks that take part make the same calls in the same order. A call takes one of `calls` slots from its dispatch to the end of its
 * combine (or `release()`); when all are taken, dispatch throws `EP_BUSY`.
 *
 * A rank that does not come in time, or dies, is no failure: the call goes on without it, `lostRanks` of the result names it, and later calls leave it
 * out. Only an abort, a closed transport or a broken NIC rejects a call; the buffer takes no more calls then.
 */
export class MoeBuffer extends Resource implements Closeable {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly map: ExpertMap;
  /** Of this rank. */
  readonly localExperts: number;
  readonly #init: MoeBufferInit;
  readonly #owner = new WorkOwner('MoE buffer');
  readonly #slots: readonly CallSlot[];
  readonly #totals: BigUint64Array;
  readonly #losses = new Map<Rank, MoeLoss>();
  /** The mask that replica candidates were chosen by, as text. */
  #chosenBy = '';
  #calls = 0;
  #sequence = 0;
  #poison: { readonly reason: unknown } | undefined;
  readonly #cancel = new AbortController();

  constructor(init: MoeBufferInit) {
    super('MoE buffer');
    const { moe, transport, memory, native } = init;
    this.#init = init;
    this.rank = transport.rank;
    this.worldSize = transport.worldSize;
    this.map = moe.map;
    this.localExperts = localExperts(moe.map, transport.rank);
    this.#slots = Array.from({ length: moe.calls }, (_, i) => new CallSlot(i, moe, memory, transport.rank, native));
    this.#totals = hostStorage('u64', this.localExperts);
  }

  /** As opened: what all ranks agreed on, and where the bytes of the buffer go (`bufferText` prints it). */
  get sizes(): ResolvedMoe['sizes'] {
    return this.#init.moe.sizes;
  }

  /** A mask of who takes part in the next call. */
  get activeRanks(): Uint8Array {
    return Uint8Array.from({ length: this.worldSize }, (_, rank) => (this.#losses.has(rank) ? 0 : 1));
  }

  /** Who was found late or dead, or was left out, and why. */
  get losses(): ReadonlyMap<Rank, MoeLoss> {
    return new Map(this.#losses);
  }

  /** Leaves ranks out of all later calls: what a process group, say, knows of its members. All ranks that stay do it before the same call. */
  leaveOut(ranks: Iterable<Rank>): void {
    for (const rank of ranks) {
      if (!Number.isSafeInteger(rank) || rank < 0 || rank >= this.worldSize || rank === this.rank) {
        throw invalid('ranks', { where: 'leaveOut', expected: `other ranks of ${this.worldSize}`, found: rank });
      }
      if (!this.#losses.has(rank)) this.#losses.set(rank, 'EP_EVICTED');
    }
  }

  /** Rows that each local expert has received in all calls so far. */
  totals(): BigUint64Array {
    return this.#totals.slice();
  }

  /** How each rank is reached. */
  routes(): readonly { readonly peer: Rank; readonly via: string }[] {
    const { transport, handle } = this.#init;
    return Array.from({ length: this.worldSize }, (_, peer) => ({
      peer,
      via: peer === this.rank ? 'own memory' : `${transport.name} (${handle.kind})`,
    }));
  }

  /**
   * Sends each row of `x` [tokens, hidden] to the ranks of its experts, and resolves with the rows that came here. `choices`: `topK` experts for each
   * token, -1 for none; or the layout of an earlier dispatch of the same choices, which all ranks then give.
   */
  dispatch(x: Tensor, choices: Int32Array | MoeLayout, options: MoeDispatchOptions = {}): Work<MoeReceived> {
    const begun = this.#beginDispatch(x, choices, options, 'dispatch');
    return this.#follow('dispatch', begun.launch(SEND | RECEIVE, options), begun.received, begun.refused);
  }

  /** The first half alone: `receive()` of what it resolves with is the second. In between nothing runs here for this call. `x` stays unchanged until then. */
  dispatchSend(
    x: Tensor,
    choices: Int32Array | MoeLayout,
    options: MoeDispatchOptions = {},
  ): Work<MoeHook<MoeReceived>> {
    const begun = this.#beginDispatch(x, choices, options, 'dispatchSend');
    const hook = (): MoeHook<MoeReceived> => ({
      receive: (late = {}) => this.#follow('dispatch receive', begun.launch(RECEIVE, late), begun.received),
    });
    return this.#follow('dispatchSend', begun.launch(SEND, options), hook, begun.refused);
  }

  /**
   * Sends the results `y` of experts, a tensor like `received.x` in the buffer's dtype, back to where their tokens came from, and resolves with each of
   * this rank's tokens' mixture. Ends the call.
   */
  combine(y: Tensor, handle: MoeHandle, options: MoeCombineOptions = {}): Work<MoeCombined> {
    const begun = this.#beginCombine(y, handle, options, 'combine');
    return this.#follow('combine', begun.launch(SEND | RECEIVE, options), begun.combined);
  }

  /** As `dispatchSend`, of a combine. `y` stays unchanged until `receive()` has resolved. */
  combineSend(y: Tensor, handle: MoeHandle, options: MoeCombineOptions = {}): Work<MoeHook<MoeCombined>> {
    const begun = this.#beginCombine(y, handle, options, 'combineSend');
    return this.#follow('combineSend', begun.launch(SEND, options), () => ({
      receive: (late = {}) => this.#follow('combine receive', begun.launch(RECEIVE, late), begun.combined),
    }));
  }

  protected override async release(): Promise<void> {
    this.#cancel.abort(new EpError('EP_ABORTED', 'the MoE buffer was closed'));
    await this.#owner.idle();
    await this.#farewell();
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
    this.#owner.check();
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
    if (this.#poison !== undefined) return;
    await Promise.allSettled(
      others.map(({ peer }) =>
        memory.signals.until(first + peer, { cmp: 'ge', value: 1n }, { peers: [peer], timeoutMs }),
      ),
    );
  }

  #beginDispatch(x: Tensor, choices: Int32Array | MoeLayout, options: MoeDispatchOptions, where: string) {
    const { moe, native } = this.#init;
    this.#checkUsable(where);
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
    this.#mask(report.ranks, options.activeRanks, where);
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
      launch: (halves: number, limits: MoeCallOptions) => {
        const timeoutMs = this.#timeout(limits, where);
        const started = this.#launch((stream) => native.dispatch(stream, { ...half, halves, timeoutMs }), limits);
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
      },
      received: (): MoeReceived => {
        call.stage = 'received';
        call.rows = slot.rowsOf(routing);
        this.#note(report.ranks);
        return {
          ...slot.tensors(call.rows),
          counts: routing.recvCount,
          blockStart: routing.blockStart.subarray(0, this.localExperts),
          layoutRange: routing.layoutRange,
          sourceToken: routing.sourceToken.subarray(0, call.rows),
          sourceChoice: routing.sourceChoice.subarray(0, call.rows),
          lostRanks: lostOf(report.ranks),
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
    this.#checkUsable(where);
    options.signal?.throwIfAborted();
    const { call, slot } = this.#callOf(handle, where);
    const operands = combineOperands(y, call, options, moe, this.localExperts, where);
    const report = slot.report;
    report.waitNs.fill(0n);
    // Ranks that were found missing since: a call that began with them need not wait for them once more.
    for (const rank of this.#losses.keys()) if (report.ranks[rank] === 0n) report.ranks[rank] = MASKED;
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
    let begun = false;
    return {
      launch: (halves: number, limits: MoeCallOptions) => {
        const timeoutMs = this.#timeout(limits, where);
        const started = this.#launch((stream) => native.combine(stream, { ...half, halves, timeoutMs }), limits);
        if (!begun) {
          begun = true;
          call.stage = 'combining';
        }
        return started;
      },
      combined: (): MoeCombined => {
        call.stage = 'released';
        slot.held = undefined;
        this.#note(report.ranks);
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
    if (call.released) return doneWork('release', this.#sequence++, undefined);
    const where = 'release';
    this.#checkUsable(where);
    const { moe, native } = this.#init;
    const { slot } = this.#callOf(call, where);
    const done = (): void => {
      call.stage = 'released';
      slot.held = undefined;
    };
    if (moe.mode === 'low-latency') {
      // Its dispatch has given the slot back to the senders already: rows were packed out of it.
      done();
      return doneWork(where, this.#sequence++, undefined);
    }
    const { slot: index, epoch, tokens, routing } = call;
    const description: MoeCall = {
      routing: routing.native,
      report: slot.report.native,
      slot: index,
      epoch,
      tokens,
      timeoutMs: this.#timeout({}, where),
    };
    call.stage = 'combining';
    return this.#follow(
      where,
      this.#launch((stream) => native.release(stream, description), {}),
      done,
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

  /** Throws what the addon refuses: then nothing was launched, and the call does not count. */
  #launch(start: (stream: NativeHostStream) => OperationId, { signal }: MoeCallOptions): Promise<Outcome> {
    const linked = linkSignals(signal, this.#cancel.signal, this.closing);
    try {
      const under = this.#init.stream.launchInline(start, () => linked.signal);
      return (under ?? Promise.resolve(DONE)).finally(linked.unlink);
    } catch (error) {
      linked.unlink();
      throw error;
    }
  }

  #follow<T>(name: string, under: Promise<Outcome>, value: () => T, onRefused = (): void => {}): Work<T> {
    const control = createWork<T>({ op: name, sequence: this.#sequence++, owner: this.#owner });
    const letGo = this.hold(name);
    under
      .then((outcome) => {
        if (outcome.status !== 0) throw this.#failure(name, outcome);
        control.resolve(value());
      })
      .catch((reason: unknown) => {
        // What does not fit is refused by all ranks alike, before anything has moved: the next call may fit.
        const refused = isEpError(reason) && reason.code === 'EP_CAPACITY';
        if (refused) onRefused();
        else this.#poison ??= { reason };
        const cut = [this.#cancel.signal, this.closing].some((signal) => signal.aborted && signal.reason === reason);
        if (cut) control.abort(reason);
        else control.reject(reason);
      })
      .finally(letGo);
    return control.work;
  }

  #failure(name: string, outcome: Outcome): EpError {
    const code = codeOfStatus(outcome.status);
    const verb = code === 'EP_TIMEOUT' ? 'timed out waiting for' : 'ended while waiting for';
    const { rank, stage, expected, found } = outcome;
    const text =
      code === 'EP_CAPACITY'
        ? `rank ${rank} has room for ${expected} rows, ${found} were to go there: send fewer, or open with more recvRows`
        : (outcome.message ?? outcomeText(outcome, verb));
    return new EpError(code, `${name}: ${text}`, { context: { rank, stage, expected, found } });
  }

  #checkUsable(where: string): void {
    this.checkOpen(where);
    this.#owner.check();
    if (this.#init.memory.closed) throw new EpError('EP_CLOSED', `${where}: the memory of the buffer was closed`);
    if (this.#poison === undefined) return;
    const { reason } = this.#poison;
    const text = reason instanceof Error ? reason.message : String(reason);
    throw new EpError('EP_POISONED', `${where}: an earlier call failed (${text}): close this buffer and open another`, {
      cause: reason,
    });
  }

  #timeout({ timeoutMs }: MoeCallOptions, where: string): number {
    const limit = checkTimeout(timeoutMs ?? this.#init.moe.timeoutMs, where);
    return Number.isFinite(limit) ? limit : -1;
  }

  #nonTemporal(rows: number, rowBytes: number): number {
    return rows * rowBytes * this.#init.moe.topK >= NON_TEMPORAL_BYTES ? EP_MOE_NON_TEMPORAL : 0;
  }

  /** Writes who takes part into a call's report, and has replicas chosen among those. */
  #mask(ranks: BigUint64Array, mask: RankMask | undefined, where: string): void {
    const { moe, native } = this.#init;
    if (mask !== undefined && mask.length !== this.worldSize) {
      const expected = `${this.worldSize} elements, one for each rank`;
      throw invalid('activeRanks', { where, expected, found: mask.length });
    }
    if (mask !== undefined && !mask[this.rank]) {
      throw invalid('activeRanks', { where, expected: `with this rank, ${this.rank}, in it`, found: mask });
    }
    const active = this.activeRanks.map((is, rank) => (is === 1 && (mask === undefined || mask[rank]) ? 1 : 0));
    for (let rank = 0; rank < this.worldSize; rank++) ranks[rank] = active[rank] === 1 ? 0n : MASKED;
    const text = active.join('');
    if (text === this.#chosenBy) return;
    const { policy, ranksPerNode } = moe;
    const { offsets, replicas } = replicaCandidates(moe.map, this.rank, { policy, ranksPerNode, activeRanks: active });
    native.setCandidates(offsets, replicas);
    this.#chosenBy = text;
  }

  /** Remembers who was found missing. */
  #note(ranks: BigUint64Array): void {
    for (let rank = 0; rank < this.worldSize; rank++) {
      const why = ranks[rank]!;
      if (why === 0n || why === MASKED || this.#losses.has(rank)) continue;
      this.#losses.set(rank, codeOfStatus(Number(why)) === 'EP_TIMEOUT' ? 'EP_TIMEOUT' : 'EP_PEER_LOST');
    }
  }
}

const lostOf = (ranks: BigUint64Array): Uint8Array => Uint8Array.from(ranks, (why) => (why === 0n ? 0 : 1));

/** `rank 3 (EP_TIMEOUT), rank 5 (EP_PEER_LOST)`, for people. */
export function lossesText(losses: ReadonlyMap<Rank, MoeLoss>): string {
  return [...losses].map(([rank, why]) => `${formatRanks([rank])} (${why})`).join(', ') || 'nobody';
}
