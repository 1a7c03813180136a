/** Tokens to their experts and results back between ranks that share a GPU, or GPUs that reach each other's memory: `MoeBuffer` of tensors on the device. */
import {
  createWork,
  type DeviceTensor,
  doneWork,
  EpError,
  elementBytes,
  invalid,
  linkSignals,
  type Rank,
  Resource,
  type Work,
  WorkOwner,
} from '@ep/core';
import {
  EP_MOE_RENORMALISE,
  type MoeCall,
  type MoeCombineHalf,
  type MoeDispatchHalf,
  type NativeGpuMoeBuffer,
  type NativeGpuOperand,
  type OperationId,
} from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { type ExpertMap, localExperts, replicaCandidates } from '@ep/plan/moe';
import { COMBINE_TIMEOUTS, callTimeout } from '../moe/call-time.js';
import { dtypeCode } from '../moe/codes.js';
import { callFailure, isRefusal } from '../moe/failure.js';
import { Losses, lostOf, type MoeLoss, reportActive } from '../moe/losses.js';
import type { MoeCallOptions, ResolvedMoe } from '../moe/options.js';
import { HeldCall, type MoeHandle } from '../moe/received.js';
import type {
  DeviceMoeCombined,
  DeviceMoeCombineOptions,
  DeviceMoeDispatchOptions,
  DeviceMoeReceived,
} from './moe-received.js';
import { DeviceMoeSlot, type Pinned, pinnedMemory } from './moe-slot.js';
import { deviceSource } from './operand.js';
import type { CudaStream } from './stream.js';

interface DeviceMoeInit {
  readonly rank: Rank;
  readonly moe: ResolvedMoe;
  readonly memory: DeviceMemory;
  readonly stream: CudaStream;
  readonly native: NativeGpuMoeBuffer;
  /** Of the agreements, in host memory. */
  readonly closeControl: () => Promise<void>;
}

const SEND_AND_RECEIVE = 3;

/**
 * Collective, as `MoeBuffer`: all ranks that take part make the same calls in the same order; each takes one of `calls` slots until its combine or release. A rank that
 * does not come in time is no failure: the call goes on without it. A GPU sees no rank die, so a dead one is late.
 */
export class DeviceMoeBuffer extends Resource {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly map: ExpertMap;
  /** Of this rank. */
  readonly localExperts: number;
  readonly #init: DeviceMoeInit;
  readonly #owner = new WorkOwner('MoE buffer of a GPU');
  readonly #slots: readonly DeviceMoeSlot[];
  readonly #totals: Pinned;
  readonly #losses: Losses;
  #chosenBy = '';
  #calls = 0;
  #sequence = 0;
  #poison: { readonly reason: unknown } | undefined;
  readonly #cancel = new AbortController();

  constructor(init: DeviceMoeInit) {
    super('MoE buffer of a GPU');
    const { moe, memory, rank } = init;
    this.#init = init;
    this.rank = rank;
    this.worldSize = moe.worldSize;
    this.map = moe.map;
    this.localExperts = localExperts(moe.map, rank);
    this.#losses = new Losses(rank, moe.worldSize);
    this.#slots = Array.from({ length: moe.calls }, (_, i) => new DeviceMoeSlot(i, init));
    this.#totals = pinnedMemory(memory, this.localExperts * BigUint64Array.BYTES_PER_ELEMENT);
  }

  /** Thread blocks and threads of a call, and how many such blocks the GPU runs at once. */
  get shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number } {
    this.checkOpen('shape');
    return this.#init.native.shape();
  }

  /** Rows that a receive tensor has room for. */
  get receiveRows(): number {
    return this.#slots[0]!.room;
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
    return new BigUint64Array(this.#totals.bytes, 0, this.localExperts).slice();
  }

  /** Sends each row of `x` [tokens, hidden] to the ranks of its experts; resolves with the rows that came here. `choices`: `topK` experts for each token, -1 for none. */
  dispatch(x: DeviceTensor, choices: Int32Array, options: DeviceMoeDispatchOptions = {}): Work<DeviceMoeReceived> {
    const where = 'dispatch';
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
    const tokens = x?.shape?.[0];
    if (typeof tokens !== 'number' || tokens > moe.maxTokens) {
      throw invalid('x', { where, expected: `[at most ${moe.maxTokens} tokens, ${moe.hidden}]`, found: x?.shape });
    }
    const from = this.#rows(`${where}, x`, x, tokens);
    if (!(choices instanceof Int32Array) || choices.length !== tokens * moe.topK) {
      const expected = `an Int32Array of ${tokens * moe.topK} (${tokens} tokens * ${moe.topK})`;
      throw invalid('choices', { where, expected, found: choices });
    }
    const { routing } = slot;
    const active = this.#losses.active(options.activeRanks, where);
    this.#choose(active);
    reportActive(routing.ranks, active);
    routing.waitNs.fill(0n);
    routing.topk.set(choices);
    const epoch = Math.floor(this.#calls / moe.calls) + 1;
    const half: MoeDispatchHalf<NativeGpuOperand> = {
      ...this.#call(slot, epoch, tokens, callTimeout(moe, options, where)),
      halves: SEND_AND_RECEIVE,
      flags: 0,
      dtype: dtypeCode(moe.dtype),
      ...{ x: from.operand, xOffset: from.byteOffset, xStride: from.strideBytes },
      ...(slot.out && { out: slot.out.operand, outOffset: 0 }),
      ...(slot.scales && { scales: slot.scales.operand, scalesOffset: 0 }),
      ...{ totals: this.#totals.operand, totalsOffset: 0 },
    };
    const operation = native.dispatch(this.#init.stream.nativeStream(where), half);
    // Only now does the call count: everything that can be refused has been.
    const call = new HeldCall({ slot: index, epoch, tokens, routing, release: (held) => this.#release(held) });
    slot.held = call;
    this.#calls++;
    const refused = (): void => {
      call.stage = 'released';
      slot.held = undefined;
      this.#losses.note(routing.ranks);
    };
    const received = (): DeviceMoeReceived => {
      call.stage = 'received';
      call.rows = slot.rows();
      this.#losses.note(routing.ranks);
      return {
        ...slot.tensors(call.rows),
        // Copies: the slot's next call writes over the originals. Kernels follow what lies on the device.
        counts: routing.recvCount.slice(),
        blockStart: routing.blockStart.slice(0, this.localExperts),
        layoutRange: routing.layoutRange.slice(),
        sourceToken: routing.sourceToken.slice(0, call.rows),
        sourceChoice: routing.sourceChoice.slice(0, call.rows),
        lostRanks: lostOf(routing.ranks),
        waitNs: routing.waitNs.slice(),
        handle: call,
      };
    };
    return this.#follow(where, operation, options, received, refused);
  }

  /** Sends the results `y` of experts, a tensor like `received.x` in the buffer's dtype, back to where their tokens came from. Ends the call. */
  combine(y: DeviceTensor, handle: MoeHandle, options: DeviceMoeCombineOptions): Work<DeviceMoeCombined> {
    const where = 'combine';
    const { moe, native } = this.#init;
    this.#checkUsable(where);
    options?.signal?.throwIfAborted();
    const { call, slot } = this.#callOf(handle, where);
    const { tokens, rows, routing } = call;
    const rowBytes = moe.hidden * elementBytes(moe.dtype);
    const from = this.#results(`${where}, y`, y, rows);
    const packed = (tensor: DeviceTensor | undefined, name: string) => {
      const found = this.#rows(`${where}, ${name}`, tensor, tokens);
      if (tokens > 1 && found.strideBytes !== rowBytes) {
        throw invalid('strides', { where: `${where}, ${name}`, expected: 'packed rows', found: tensor?.strides });
      }
      return found;
    };
    const out = packed(options?.out, 'out');
    const bias = options.bias ?? [];
    if (bias.length > 2) throw invalid('bias', { where, expected: 'at most two tensors', found: bias.length });
    const [first, second] = bias.map((one, i) => packed(one, `bias ${i}`));
    const { weights } = options;
    if (weights !== undefined && !(weights instanceof Float32Array && weights.length === tokens * moe.topK)) {
      const expected = `a Float32Array of ${tokens * moe.topK} (${tokens} tokens * ${moe.topK})`;
      throw invalid('weights', { where, expected, found: weights });
    }
    const timeoutMs = callTimeout(moe, options, where, COMBINE_TIMEOUTS);
    if (weights !== undefined) new Float32Array(slot.weights.bytes).set(weights);
    routing.waitNs.fill(0n);
    this.#losses.mask(routing.ranks);
    const half: MoeCombineHalf<NativeGpuOperand> = {
      ...this.#call(slot, call.epoch, tokens, timeoutMs),
      halves: SEND_AND_RECEIVE,
      flags: options.renormalise === true ? EP_MOE_RENORMALISE : 0,
      dtype: dtypeCode(moe.dtype),
      ...{ y: from.operand, yOffset: from.byteOffset, yStride: from.strideBytes, yRows: rows },
      ...{ out: out.operand, outOffset: out.byteOffset },
      ...(weights && { weights: slot.weights.operand, weightsOffset: 0 }),
      ...(first && { bias0: first.operand, bias0Offset: first.byteOffset }),
      ...(second && { bias1: second.operand, bias1Offset: second.byteOffset }),
    };
    const operation = native.combine(this.#init.stream.nativeStream(where), half);
    call.stage = 'combining';
    const ended = (): void => {
      call.stage = 'released';
      slot.held = undefined;
      this.#losses.note(routing.ranks);
    };
    const combined = (): DeviceMoeCombined => {
      ended();
      return { y: options.out, lostRanks: lostOf(routing.ranks), waitNs: routing.waitNs.slice() };
    };
    return this.#follow(where, operation, options, combined, ended);
  }

  protected override async release(): Promise<void> {
    this.#cancel.abort(new EpError('EP_ABORTED', 'the MoE buffer was closed'));
    await this.#owner.idle();
    this.#init.native.close();
    for (const slot of this.#slots) await slot.close();
    await this.#init.memory.close();
    await this.#init.closeControl();
    this.#owner.check();
  }

  #release(call: HeldCall): Work {
    if (call.released) return doneWork('release', this.#sequence++, undefined);
    const where = 'release';
    this.#checkUsable(where);
    const { moe, native, stream } = this.#init;
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
    const description = this.#call(slot, call.epoch, call.tokens, callTimeout(moe, {}, where));
    const operation = native.release(stream.nativeStream(where), description);
    call.stage = 'combining';
    return this.#follow(where, operation, {}, done);
  }

  #call(slot: DeviceMoeSlot, epoch: number, tokens: number, timeoutMs: number): MoeCall {
    const { native: routing } = slot.routing;
    return { routing, report: routing, slot: slot.index, epoch, tokens, timeoutMs };
  }

  #rows(where: string, tensor: DeviceTensor | undefined, rows: number) {
    const { moe, memory } = this.#init;
    return deviceSource(tensor, { where, dtype: moe.dtype, rows, rowShape: [moe.hidden], device: memory.device });
  }

  /** Rows of the receive tensor, in the low-latency form also by expert. */
  #results(where: string, y: DeviceTensor, rows: number) {
    const { moe, memory } = this.#init;
    const { mode, hidden, dtype, worldSize, maxTokens } = moe;
    if (mode !== 'low-latency' || y?.shape?.length !== 3) return this.#rows(where, y, rows);
    const rowShape = [worldSize * maxTokens, hidden];
    const found = deviceSource(y, { where, dtype, rows: this.localExperts, rowShape, device: memory.device });
    const strideBytes = hidden * elementBytes(dtype);
    if (this.localExperts > 1 && found.strideBytes !== worldSize * maxTokens * strideBytes) {
      throw invalid('strides', { where, expected: 'contiguous where it has three axes', found: y.strides });
    }
    return { ...found, strideBytes };
  }

  #callOf(handle: MoeHandle, where: string): { readonly call: HeldCall; readonly slot: DeviceMoeSlot } {
    const slot = this.#slots.find(({ held }) => held !== undefined && held === handle);
    if (slot !== undefined && handle instanceof HeldCall) {
      handle.expect('received', where);
      return { call: handle, slot };
    }
    const expected = 'that of a call of this buffer which was not combined yet';
    throw invalid('handle', { where, expected, found: handle });
  }

  #follow<T>(
    name: string,
    operation: OperationId,
    { signal }: MoeCallOptions,
    value: () => T,
    onRefused = (): void => {},
  ): Work<T> {
    const linked = linkSignals(signal, this.#cancel.signal, this.closing);
    const control = createWork<T>({ op: name, sequence: this.#sequence++, owner: this.#owner });
    const letGo = this.hold(name);
    this.#init.stream
      .follow(() => operation, linked.signal)
      .then((outcome) => {
        if (outcome.status !== 0) throw callFailure(name, outcome);
        control.resolve(value());
      })
      .catch((reason: unknown) => {
        if (isRefusal(reason)) onRefused();
        else this.#poison ??= { reason };
        const cut = [this.#cancel.signal, this.closing].some((one) => one.aborted && one.reason === reason);
        if (cut) control.abort(reason);
        else control.reject(reason);
      })
      .finally(() => {
        linked.unlink();
        letGo();
      });
    return control.work;
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
