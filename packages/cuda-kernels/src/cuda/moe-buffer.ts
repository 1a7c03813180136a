/** Tokens to their experts and results back between ranks that share a GPU, or GPUs that reach each other's memory: `MoeBuffer` of tensors on the device. */
import { type DeviceTensor, EpError, invalid, type Rank, Resource, type Work } from '@ep/core';
import {
  EP_MOE_CACHED,
  type MoeCall,
  type MoeCombineHalf,
  type MoeDispatchHalf,
  type NativeGpuMoeBuffer,
  type NativeGpuOperand,
  native,
  type OperationId,
} from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { type ExpertMap, localExperts, replicaCandidates } from '@ep/plan/moe';
import { COMBINE_TIMEOUTS, callTimeout } from '../moe/call-time.js';
import { dtypeCode } from '../moe/codes.js';
import { checkLayout, Losses, lostOf, type MoeLoss, reportActive } from '../moe/losses.js';
import type { MoeCallOptions, ResolvedMoe } from '../moe/options.js';
import { HeldCall, type MoeHandle, type MoeHook } from '../moe/received.js';
import { CudaBuffer } from './buffer.js';
import {
  type BegunMoeCall,
  BOTH_HALVES,
  type CombineHalf,
  type DispatchHalf,
  launchBegun,
  RECEIVE,
  SEND,
} from './moe-begun.js';
import { MoeCaptures } from './moe-captures.js';
import { DeviceLaunches } from './moe-launches.js';
import { KeptLayouts } from './moe-layouts.js';
import { MoeOperands } from './moe-operands.js';
import type {
  DeviceMoeCaptureCombineOptions,
  DeviceMoeCaptured,
  DeviceMoeCaptureHook,
  DeviceMoeCaptureOptions,
  DeviceMoeCombined,
  DeviceMoeCombineOptions,
  DeviceMoeDispatchOptions,
  DeviceMoeLayout,
  DeviceMoeReceived,
} from './moe-received.js';
import { MoeReplays } from './moe-replays.js';
import { type Pinned, pinnedMemory } from './moe-slot.js';
import { DeviceMoeSlots } from './moe-slots.js';
import type { CudaStream } from './stream.js';

interface DeviceMoeInit {
  readonly rank: Rank;
  readonly moe: ResolvedMoe;
  readonly memory: DeviceMemory;
  readonly stream: CudaStream;
  readonly native: NativeGpuMoeBuffer;
  /** How many layouts may be kept. */
  readonly layouts: number;
  /** Of the agreements, in host memory. */
  readonly closeControl: () => Promise<void>;
}

/**
 * Collective, as `MoeBuffer`: all ranks that take part make the same calls in the same order; each takes one of `calls` slots until its combine or release. A rank that
 * does not come in time, or dies, is no failure: the call goes on without it, for a dead one at once. One that has closed its transport is awaited for a second more.
 */
export class DeviceMoeBuffer extends Resource {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly map: ExpertMap;
  /** Of this rank. */
  readonly localExperts: number;
  readonly #init: DeviceMoeInit;
  readonly #launches: DeviceLaunches;
  readonly #layouts: KeptLayouts;
  readonly #operands: MoeOperands;
  readonly #slots: DeviceMoeSlots;
  /** Where kernels add, and where the host looks. */
  readonly #totals: CudaBuffer;
  readonly #totalsSeen: Pinned;
  readonly #replays: MoeReplays;
  readonly #losses: Losses;
  readonly #captures: MoeCaptures;
  #chosenBy = '';

  constructor(init: DeviceMoeInit) {
    super('MoE buffer of a GPU');
    const { moe, memory, rank } = init;
    this.#init = init;
    this.rank = rank;
    this.worldSize = moe.worldSize;
    this.map = moe.map;
    this.localExperts = localExperts(moe.map, rank);
    this.#losses = new Losses(rank, moe.worldSize);
    this.#launches = new DeviceLaunches({
      stream: init.stream,
      checkOpen: (where) => this.#checkOpen(where),
      hold: (operation) => this.hold(operation),
      closing: () => this.closing,
    });
    this.#operands = new MoeOperands(moe, memory.device);
    this.#layouts = new KeptLayouts(init.native, memory, init.layouts);
    this.#slots = new DeviceMoeSlots(init);
    const totalBytes = Math.max(64, this.localExperts * BigUint64Array.BYTES_PER_ELEMENT);
    this.#replays = new MoeReplays(this.#launches, this.#losses, this.#slots);
    this.#totalsSeen = pinnedMemory(memory, totalBytes);
    const device = Object.freeze({ kind: 'cuda' as const, index: memory.device });
    const totals = new (native().binding.GpuMemory)(memory.library, memory.device, totalBytes);
    this.#totals = new CudaBuffer({ memory: totals, byteLength: totalBytes, device, copier: memory.copier });
    this.#captures = new MoeCaptures({
      ...{ moe, native: init.native, stream: init.stream, launches: this.#launches, layouts: this.#layouts },
      ...{ losses: this.#losses, operands: this.#operands, replays: this.#replays, slots: this.#slots },
      totals: { totals: this.#totals.operand, totalsOffset: 0, totalsSeen: this.#totalsSeen.operand },
      choose: (active) => this.#choose(active),
    });
    // So that calls may be captured before any was made.
    this.#choose(this.activeRanks);
    init.native.placeCandidates();
  }

  get mode(): ResolvedMoe['mode'] {
    return this.#init.moe.mode;
  }

  /** That calls are put on. */
  get stream(): CudaStream {
    return this.#init.stream;
  }

  /** The addon's object. @internal */
  nativeBuffer(operation: string): NativeGpuMoeBuffer {
    this.#checkOpen(operation);
    return this.#init.native;
  }

  /** Thread blocks and threads of a call, and how many such blocks the GPU runs at once. */
  get shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number } {
    this.checkOpen('shape');
    return this.#init.native.shape();
  }

  /** Rows that a receive tensor has room for. */
  get receiveRows(): number {
    return this.#slots.all[0]!.room;
  }

  /** A mask of who takes part in the next call. */
  get activeRanks(): Uint8Array {
    return this.#losses.active(undefined, 'activeRanks');
  }

  /** Who was found late, or was left out, and why. */
  get losses(): ReadonlyMap<Rank, MoeLoss> {
    return this.#losses.all;
  }

  /** As `MoeBuffer.leaveOut`. */
  leaveOut(ranks: Iterable<Rank>): void {
    this.#losses.leaveOut(ranks);
  }

  /** Rows that each local expert has received in all calls so far. */
  totals(): BigUint64Array {
    return new BigUint64Array(this.#totalsSeen.bytes, 0, this.localExperts).slice();
  }

  /**
   * Sends each row of `x` [tokens, hidden] to the ranks of its experts; resolves with the rows that came here. `choices`: `topK` experts for each token, -1 for none; or the layout of an
   * earlier dispatch of the same choices, which all ranks then give.
   */
  dispatch(
    x: DeviceTensor,
    choices: Int32Array | DeviceMoeLayout,
    options: DeviceMoeDispatchOptions = {},
  ): Work<DeviceMoeReceived> {
    const begun = this.beginDispatch(x, choices, options, 'dispatch');
    return begun.follow('dispatch', this.#launchDispatch(begun, BOTH_HALVES, options), options);
  }

  /** The first half alone: `receive()` of what it resolves with is the second. In between nothing runs here for this call. `x` stays unchanged until then. */
  dispatchSend(
    x: DeviceTensor,
    choices: Int32Array | DeviceMoeLayout,
    options: DeviceMoeDispatchOptions = {},
  ): Work<MoeHook<DeviceMoeReceived>> {
    const begun = this.beginDispatch(x, choices, options, 'dispatchSend');
    const name = 'dispatch receive';
    const hook = () =>
      this.#launches.hook(name, (late) => begun.follow(name, this.#launchDispatch(begun, RECEIVE, late), late));
    const operation = this.#launchDispatch(begun, SEND, options);
    return this.#launches.follow('dispatchSend', operation, options, hook, begun.refused);
  }

  /**
   * Sends the results `y` of experts, a tensor like `received.x` in the buffer's dtype, or `received.combineBuffer` itself, back to where their tokens came from. Ends the call.
   */
  combine(y: DeviceTensor, handle: MoeHandle, options: DeviceMoeCombineOptions): Work<DeviceMoeCombined> {
    const begun = this.beginCombine(y, handle, options, 'combine');
    return begun.follow('combine', this.#launchCombine(begun, BOTH_HALVES, options), options);
  }

  /** As `dispatchSend`, of a combine. `y` stays unchanged until `receive()` has resolved. */
  combineSend(y: DeviceTensor, handle: MoeHandle, options: DeviceMoeCombineOptions): Work<MoeHook<DeviceMoeCombined>> {
    const begun = this.beginCombine(y, handle, options, 'combineSend');
    const name = 'combine receive';
    const hook = () =>
      this.#launches.hook(name, (late) => begun.follow(name, this.#launchCombine(begun, RECEIVE, late), late));
    return this.#launches.follow('combineSend', this.#launchCombine(begun, SEND, options), options, hook);
  }

  /**
   * `dispatch` as a part of the graph that the stream is being captured into: each replay sends what `x` and `choices`, i32 [tokens, topK] on the device, hold then, and counts as a call on the
   * device. Both stay unchanged until the call's combine has run. Choices that are no expert count as none; a token that names one twice sends it two rows. Or by the layout of an earlier dispatch that was
   * not captured, which all ranks then give: the graph is of no use once that was released, and the layout of use to one call at a time. `activeRanks` has no place in a graph. A rank that a replay gives up
   * stays left out of later ones, and `launch` refuses to begin one (`EP_PEER_LOST`) once the loss is known: capture anew.
   */
  captureDispatch(
    x: DeviceTensor,
    choices: DeviceTensor | DeviceMoeLayout,
    options: DeviceMoeCaptureOptions = {},
  ): DeviceMoeCaptured {
    return this.#captures.dispatch(x, choices, options);
  }

  /**
   * The first half of `captureDispatch` alone, as `dispatchSend`: `receive()` of what it returns captures the second, in the same graph, and what the stream is given in between runs while rows travel. A
   * graph without the second half is of no use (`EP_INVALID_ARGUMENT` of its `launch`).
   */
  captureDispatchSend(
    x: DeviceTensor,
    choices: DeviceTensor | DeviceMoeLayout,
    options: DeviceMoeCaptureOptions = {},
  ): DeviceMoeCaptureHook<DeviceMoeCaptured> {
    return this.#captures.dispatchSend(x, choices, options);
  }

  /** `combine` of what `captureDispatch` of the same graph has received: `y` has room for as many rows as `x` there. Weights lie on the device. */
  captureCombine(y: DeviceTensor, handle: MoeHandle, options: DeviceMoeCaptureCombineOptions): void {
    this.#captures.combine(y, handle, options);
  }

  /** The first half of `captureCombine` alone, as `captureDispatchSend`. `out` is written by the second. */
  captureCombineSend(
    y: DeviceTensor,
    handle: MoeHandle,
    options: DeviceMoeCaptureCombineOptions,
  ): DeviceMoeCaptureHook<void> {
    return this.#captures.combineSend(y, handle, options);
  }

  /** For calls of several buffers. @internal */
  get captures(): MoeCaptures {
    return this.#captures;
  }

  protected override async release(): Promise<void> {
    await this.#launches.cancel();
    this.#init.native.close();
    await this.#slots.close();
    await this.#layouts.close();
    await this.#totals.close();
    await this.#init.memory.close();
    await this.#init.closeControl();
    this.#launches.check();
  }

  #launchDispatch(begun: BegunMoeCall<DispatchHalf, unknown>, halves: number, limits: MoeCallOptions): OperationId {
    const { native, stream } = this.#init;
    return launchBegun(begun, halves, limits, (half) => native.dispatch(stream.nativeStream('dispatch'), half));
  }

  #launchCombine(begun: BegunMoeCall<CombineHalf, unknown>, halves: number, limits: MoeCallOptions): OperationId {
    const { native, stream } = this.#init;
    return launchBegun(begun, halves, limits, (half) => native.combine(stream.nativeStream('combine'), half));
  }

  /** @internal */
  beginDispatch(
    x: DeviceTensor,
    choices: Int32Array | DeviceMoeLayout,
    options: DeviceMoeDispatchOptions,
    where: string,
  ): BegunMoeCall<DispatchHalf, DeviceMoeReceived> & { readonly refused: () => void } {
    const { moe } = this.#init;
    this.#launches.checkUsable(where);
    options.signal?.throwIfAborted();
    this.#replays.checkNone(where);
    const slot = this.#slots.due(where);
    const { index } = slot;
    const { from, tokens } = this.#operands.tokens(where, x);
    const given = choices instanceof Int32Array ? choices : undefined;
    if (given !== undefined && given.length !== tokens * moe.topK) {
      const expected = `an Int32Array of ${tokens * moe.topK} (${tokens} tokens * ${moe.topK})`;
      throw invalid('choices', { where, expected, found: given.length });
    }
    if (options.keepLayout === true && moe.mode === 'low-latency') {
      throw invalid('keepLayout', { where, expected: 'false in low-latency mode', found: true });
    }
    const active = this.#losses.active(options.activeRanks, where);
    const layout =
      given === undefined
        ? this.#layouts.again(choices as DeviceMoeLayout, moe, tokens, where)
        : options.keepLayout === true
          ? this.#layouts.take(tokens, where)
          : undefined;
    const routing = layout?.routing ?? slot.routing;
    if (given === undefined) checkLayout(routing, active, where);
    else routing.dropped.clear();
    this.#choose(active);
    reportActive(routing.ranks, active);
    routing.waitNs.fill(0n);
    if (given !== undefined) routing.topk.set(given);
    const { epoch } = this.#slots;
    const call = new HeldCall({ slot: index, epoch, tokens, routing, release: (held) => this.#release(held) });
    const ended = (): void => {
      call.stage = 'released';
      slot.held = undefined;
      layout?.letGo();
      this.#losses.note(routing.ranks);
    };
    slot.ended = ended;
    const half: Omit<MoeDispatchHalf<NativeGpuOperand>, 'halves' | 'timeoutMs'> = {
      ...this.#call(call),
      flags: given === undefined ? EP_MOE_CACHED : 0,
      dtype: dtypeCode(moe.dtype),
      ...{ x: from.operand, xOffset: from.byteOffset, xStride: from.strideBytes },
      ...(slot.out && { out: slot.out.operand, outOffset: 0 }),
      ...(slot.scales && { scales: slot.scales.operand, scalesOffset: 0 }),
      ...{ totals: this.#totals.operand, totalsOffset: 0 },
    };
    const totalsSeen = this.#totalsSeen.operand;
    const received = (): DeviceMoeReceived => {
      call.stage = 'received';
      call.rows = slot.rowsOf(routing);
      this.#losses.note(routing.ranks);
      const lostRanks = lostOf(routing.ranks);
      for (const [rank, lost] of lostRanks.entries()) if (lost === 1) routing.dropped.add(rank as Rank);
      const combineBuffer = slot.results(call.rows);
      return {
        ...slot.tensors(call.rows),
        ...(combineBuffer && { combineBuffer }),
        ...routing.said(call.rows, this.localExperts),
        lostRanks,
        waitNs: routing.waitNs.slice(),
        handle: call,
        ...(options.keepLayout === true && given !== undefined && { layout: layout! }),
      };
    };
    const refused = (): void => {
      ended();
      if (given !== undefined) layout?.release();
    };
    return {
      half: (halves, limits) => {
        const timeoutMs = callTimeout(moe, limits, where);
        return { ...half, ...{ totalsSeen, halves, timeoutMs, apart: options.activeRanks !== undefined } };
      },
      launched: () => {
        if (slot.held === call) return;
        // Only now does the call count: everything that can be refused has been.
        this.#slots.take(slot, call);
        layout?.hold();
      },
      dropped: () => {
        if (given !== undefined && slot.held !== call) layout?.release();
      },
      follow: (name, operation, limits, on) => this.#launches.follow(name, operation, limits, received, refused, on),
      refused,
    };
  }

  /** @internal */
  beginCombine(
    y: DeviceTensor,
    handle: MoeHandle,
    options: DeviceMoeCombineOptions,
    where: string,
  ): BegunMoeCall<CombineHalf, DeviceMoeCombined> {
    const { moe } = this.#init;
    this.#launches.checkUsable(where);
    options?.signal?.throwIfAborted();
    const { call, slot } = this.#slots.callOf(handle, where);
    const { tokens, routing } = call;
    const given = this.#operands.combine(where, call, y, options);
    const { weights } = options;
    if (weights !== undefined && !(weights instanceof Float32Array && weights.length === tokens * moe.topK)) {
      const expected = `a Float32Array of ${tokens * moe.topK} (${tokens} tokens * ${moe.topK})`;
      throw invalid('weights', { where, expected, found: weights });
    }
    callTimeout(moe, options, where, COMBINE_TIMEOUTS);
    if (weights !== undefined) new Float32Array(slot.weights.bytes).set(weights);
    routing.waitNs.fill(0n);
    this.#losses.mask(routing.ranks);
    const half: Omit<MoeCombineHalf<NativeGpuOperand>, 'halves' | 'timeoutMs'> = {
      ...this.#call(call),
      ...given,
      ...(weights && { weights: slot.weights.operand, weightsOffset: 0 }),
    };
    const combined = (): DeviceMoeCombined => {
      slot.ended();
      return { y: options.out, lostRanks: lostOf(routing.ranks), waitNs: routing.waitNs.slice() };
    };
    return {
      half: (halves, limits) => ({ ...half, halves, timeoutMs: callTimeout(moe, limits, where, COMBINE_TIMEOUTS) }),
      launched: () => {
        call.stage = 'combining';
      },
      follow: (name, operation, limits, on) => this.#launches.follow(name, operation, limits, combined, slot.ended, on),
    };
  }

  #release(call: HeldCall): Work {
    if (call.released) return this.#launches.done('release');
    const where = 'release';
    this.#launches.checkUsable(where);
    const { moe, native, stream } = this.#init;
    const { slot } = this.#slots.callOf(call, where);
    if (moe.mode === 'low-latency') {
      // Its dispatch has given the slot back to the senders already: rows were packed out of it.
      slot.ended();
      return this.#launches.done(where);
    }
    const timeoutMs = callTimeout(moe, {}, where);
    this.#losses.mask(call.routing.ranks);
    const operation = native.release(stream.nativeStream(where), { ...this.#call(call), timeoutMs });
    call.stage = 'combining';
    return this.#launches.follow(where, operation, {}, slot.ended);
  }

  #call({ routing: { native: routing }, slot, epoch, tokens }: HeldCall): Omit<MoeCall, 'timeoutMs'> {
    return { routing, report: routing, slot, epoch, tokens };
  }

  #checkOpen(where: string): void {
    this.checkOpen(where);
    if (this.#init.memory.closed) throw new EpError('EP_CLOSED', `${where}: the memory of the buffer was closed`);
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
