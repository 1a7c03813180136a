/** Calls of a buffer for experts on a GPU as parts of the graph that its stream is being captured into. */
import { type DeviceTensor, EpError } from '@ep/core';
import { EP_MOE_CACHED, type MoeCall, type NativeGpuMoeBuffer } from '@ep/native';
import { COMBINE_TIMEOUTS, callTimeout } from '../moe/call-time.js';
import { dtypeCode } from '../moe/codes.js';
import { checkLayout, type Losses, reportActive } from '../moe/losses.js';
import type { ResolvedMoe } from '../moe/options.js';
import { HeldCall, type MoeHandle } from '../moe/received.js';
import { type BegunMoeCapture, BOTH_HALVES, type CombineHalf, type DispatchHalf, RECEIVE, SEND } from './moe-begun.js';
import type { DeviceLaunches } from './moe-launches.js';
import { KeptLayout, type KeptLayouts } from './moe-layouts.js';
import type { MoeOperands } from './moe-operands.js';
import type {
  DeviceMoeCaptureCombineOptions,
  DeviceMoeCaptured,
  DeviceMoeCaptureHook,
  DeviceMoeCaptureOptions,
  DeviceMoeLayout,
} from './moe-received.js';
import type { CapturedCall, MoeReplays } from './moe-replays.js';
import type { DeviceMoeSlots } from './moe-slots.js';
import type { CudaStream } from './stream.js';

interface MoeCapturesInit {
  readonly moe: ResolvedMoe;
  readonly native: NativeGpuMoeBuffer;
  readonly stream: CudaStream;
  readonly launches: DeviceLaunches;
  readonly layouts: KeptLayouts;
  readonly losses: Losses;
  readonly operands: MoeOperands;
  readonly replays: MoeReplays;
  readonly slots: DeviceMoeSlots;
  /** Of every call: `totals` of a dispatch, where kernels add and where the host looks. */
  readonly totals: Pick<DispatchHalf, 'totals' | 'totalsOffset' | 'totalsSeen'>;
  /** Has replicas chosen among those that take part. */
  readonly choose: (active: Uint8Array) => void;
}

export class MoeCaptures {
  readonly #init: MoeCapturesInit;

  constructor(init: MoeCapturesInit) {
    this.#init = init;
  }

  dispatch(
    x: DeviceTensor,
    choices: DeviceTensor | DeviceMoeLayout,
    options: DeviceMoeCaptureOptions,
  ): DeviceMoeCaptured {
    const begun = this.beginDispatch(x, choices, 'captureDispatch');
    return this.#whole(begun, options, (half) => this.#putDispatch(half, 'captureDispatch'));
  }

  dispatchSend(
    x: DeviceTensor,
    choices: DeviceTensor | DeviceMoeLayout,
    options: DeviceMoeCaptureOptions,
  ): DeviceMoeCaptureHook<DeviceMoeCaptured> {
    const where = 'captureDispatchSend';
    const begun = this.beginDispatch(x, choices, where);
    return this.#send(begun, options, where, (half, at) => this.#putDispatch(half, at));
  }

  combine(y: DeviceTensor, handle: MoeHandle, options: DeviceMoeCaptureCombineOptions): void {
    const begun = this.beginCombine(y, handle, options, 'captureCombine');
    this.#whole(begun, options, (half) => this.#putCombine(half, 'captureCombine'));
  }

  combineSend(y: DeviceTensor, handle: MoeHandle, options: DeviceMoeCaptureCombineOptions): DeviceMoeCaptureHook<void> {
    const where = 'captureCombineSend';
    const begun = this.beginCombine(y, handle, options, where);
    return this.#send(begun, options, where, (half, at) => this.#putCombine(half, at));
  }

  beginDispatch(
    x: DeviceTensor,
    choices: DeviceTensor | DeviceMoeLayout,
    where: string,
  ): BegunMoeCapture<DispatchHalf, DeviceMoeCaptured> {
    const { moe, launches, losses, operands, replays, slots, stream } = this.#init;
    launches.checkUsable(where);
    this.#checkCapturing(where, 'dispatch() runs a call');
    replays.checkNone(where);
    const slot = slots.due(where);
    const { from, tokens } = operands.tokens(where, x);
    const active = losses.active(undefined, where);
    const routes = this.#routes(where, choices, tokens, active);
    const routing = 'layout' in routes ? routes.layout.routing : slot.routing;
    this.#init.choose(active);
    reportActive(routing.ranks, active);
    const release = (held: HeldCall) => replays.forget(held);
    const call = new HeldCall({ slot: slot.index, epoch: slots.epoch, tokens, routing, release });
    call.rows = slot.room;
    const captured: CapturedCall = { call, slot, active, routes };
    const half: Omit<DispatchHalf, 'halves' | 'timeoutMs'> = {
      ...this.#call(captured),
      ...{ flags: 'layout' in routes ? EP_MOE_CACHED : 0, dtype: dtypeCode(moe.dtype) },
      ...{ x: from.operand, xOffset: from.byteOffset, xStride: from.strideBytes },
      ...(slot.out && { out: slot.out.operand, outOffset: 0 }),
      ...(slot.scales && { scales: slot.scales.operand, scalesOffset: 0 }),
      ...this.#init.totals,
    };
    return {
      captured,
      half: (halves, limits, at = where) => ({ ...half, halves, timeoutMs: callTimeout(moe, limits, at) }),
      begun: () => {
        replays.take(captured);
        stream.join(replays.member(captured));
      },
      ended: () => {
        call.stage = 'captured';
        const combineBuffer = slot.results(slot.room);
        const said = { ...(combineBuffer && { combineBuffer }), ...slot.captured(routing), handle: call };
        return { ...slot.tensors(slot.room), ...said };
      },
    };
  }

  beginCombine(
    y: DeviceTensor,
    handle: MoeHandle,
    options: DeviceMoeCaptureCombineOptions,
    where: string,
  ): BegunMoeCapture<CombineHalf, void> {
    const { moe, launches, operands, replays, slots } = this.#init;
    launches.checkUsable(where);
    const { call } = slots.callOf(handle, where, 'captured');
    this.#checkCapturing(where, 'combine() ends a call that is run');
    const captured = replays.capturedOf(call, where);
    const { tokens } = call;
    const given = operands.combine(where, call, y, options);
    const weights = options.weights && operands.packed(`${where}, weights`, options.weights, 'f32', tokens, moe.topK);
    const half: Omit<CombineHalf, 'halves' | 'timeoutMs'> = {
      ...this.#call(captured),
      ...given,
      ...(weights && { weights: weights.operand, weightsOffset: weights.byteOffset }),
    };
    return {
      captured,
      half: (halves, limits, at = where) => ({
        ...half,
        ...{ halves, timeoutMs: callTimeout(moe, limits, at, COMBINE_TIMEOUTS) },
      }),
      begun: () => {
        call.stage = 'combining';
      },
      ended: () => replays.drop(captured),
    };
  }

  #whole<Half, Value>(
    { half, begun, ended }: BegunMoeCapture<Half, Value>,
    limits: DeviceMoeCaptureOptions,
    put: (half: Half) => void,
  ): Value {
    put(half(BOTH_HALVES, limits));
    begun();
    return ended();
  }

  /** HAZARD: a second half that was captured twice would take what belongs to the slot's next call, and give credit for it. */
  #send<Half, Value>(
    { captured, half, begun, ended }: BegunMoeCapture<Half, Value>,
    limits: DeviceMoeCaptureOptions,
    where: string,
    put: (half: Half, where: string) => void,
  ): DeviceMoeCaptureHook<Value> {
    put(half(SEND, limits), where);
    begun();
    const { stage } = captured.call;
    return {
      receive: (late = {}) => {
        const at = `${where}: receive`;
        this.#init.launches.checkUsable(at);
        this.#init.replays.capturedOf(captured.call, at);
        if (captured.call.stage !== stage) {
          const why = `${at}: it was called before, expected once for each call`;
          throw new EpError('EP_INVALID_ARGUMENT', why, { context: { slot: captured.call.slot } });
        }
        put(half(RECEIVE, late, at), at);
        return ended();
      },
    };
  }

  #putDispatch(half: DispatchHalf, where: string): void {
    this.#init.native.dispatch(this.#init.stream.nativeStream(where), half);
  }

  #putCombine(half: CombineHalf, where: string): void {
    this.#init.native.combine(this.#init.stream.nativeStream(where), half);
  }

  #checkCapturing(where: string, instead: string): void {
    if (this.#init.stream.capturing) return;
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the stream is not being captured; ${instead}`);
  }

  #routes(
    where: string,
    choices: DeviceTensor | DeviceMoeLayout,
    tokens: number,
    active: Uint8Array,
  ): CapturedCall['routes'] {
    const { moe, layouts, operands } = this.#init;
    if (!(choices instanceof KeptLayout)) {
      return { choices: operands.packed(`${where}, choices`, choices as DeviceTensor, 'i32', tokens, moe.topK) };
    }
    const layout = layouts.again(choices, moe, tokens, where, 'a tensor of i32');
    checkLayout(layout.routing, active, where);
    return { layout };
  }

  #call({ call, routes }: CapturedCall): Omit<MoeCall, 'timeoutMs'> {
    const { slot, epoch, tokens } = call;
    const { native: routing } = call.routing;
    return {
      ...{ captured: true, routing, report: routing, slot, epoch, tokens },
      ...('choices' in routes && { choices: routes.choices.operand, choicesOffset: routes.choices.byteOffset }),
    };
  }
}
