/**
 * The demo's step on a GPU with two halves of the batch in turns: while attention of one half runs on a stream, rows of the other travel on another. Events order the two; the host
 * waits for nothing in between.
 */
import type { DeviceTensor, Storage } from '@ep/core';
import {
  type AttentionDType,
  type AttentionShape,
  attentionLeaseBytes,
  CudaDevice,
  type CudaEvent,
  type CudaStream,
  type DeviceDispatcher,
  type DeviceLease,
  openDeviceDispatcher,
} from '@ep/cuda-kernels';
import type { AttentionPlan } from '@ep/plan';
import { bindCudaBatch, type CudaBatch, placeRows, readRows } from './cuda-batch.js';
import type { HomeRows } from './machine.js';
import type { ComparedTensor } from './results.js';
import type { CudaDemoTransport } from './transports.js';

/** Two halves in turns: milliseconds by events of the GPU, by round. */
export interface TurnTimes {
  /** The calls of both halves, with nothing beside them. */
  readonly transfer: readonly number[];
  /** Attention, or experts, of both halves, likewise. */
  readonly compute: readonly number[];
  /** Both, in turns. */
  readonly together: readonly number[];
}

type StepName = 'queryKeyValue' | 'output' | 'outputGradient' | 'gradients';

type Halves<T> = readonly [T, T];

/** All leases of a round are held to its end. */
const LEASES = 8;

/**
 * Blocks of 512 threads that carry rows, of all ranks of a GPU together: what is not attention's. HAZARD: a dispatch that waits for a peer keeps its place on the GPU, and one whose blocks do not
 * all fit keeps others from starting; with half of the GPU, as usual, both halves took twice the time of attention alone.
 */
const MOVING_BLOCKS = 32;
const MOST_BLOCKS_OF_RANK = 8;
const MOVING_LANES = 512;

/** One rank's share of them, alike on all ranks: `ranksOnGpu` is that of the GPU with most. */
export const movingShare = (ranksOnGpu: number) => ({
  blocks: Math.max(1, Math.min(MOST_BLOCKS_OF_RANK, Math.floor(MOVING_BLOCKS / ranksOnGpu))),
  lanes: MOVING_LANES,
});

/** What has been put on the streams. */
class Round {
  readonly #transfer: CudaStream;
  readonly #compute: CudaStream;
  readonly #leases = new Map<CudaBatch, Partial<Record<StepName, DeviceLease>>>();
  readonly #running: PromiseLike<unknown>[] = [];
  readonly #events: CudaEvent[] = [];

  constructor(transfer: CudaStream, compute: CudaStream) {
    this.#transfer = transfer;
    this.#compute = compute;
  }

  /** A point of a stream, which the other may wait for. */
  mark(stream: CudaStream): CudaEvent {
    const event = stream.record({ timed: true });
    this.#events.push(event);
    return event;
  }

  tensors(half: CudaBatch, step: StepName): Readonly<Record<string, DeviceTensor>> {
    return this.#leases.get(half)![step]!.tensors;
  }

  dispatch(half: CudaBatch, step: StepName): CudaEvent {
    const { home, computed, moves } = half;
    const { o, dQ, dK, dV } = computed;
    const { q, k, v, dO } = home;
    const sources = { queryKeyValue: { q, k, v }, output: { o }, outputGradient: { dO }, gradients: { dQ, dK, dV } };
    const { lease, done } = moves.bound[step].enqueue(sources[step]);
    this.#leases.set(half, { ...this.#leases.get(half), [step]: lease });
    this.#running.push(done!);
    return this.mark(this.#transfer);
  }

  forward(half: CudaBatch): CudaEvent {
    const { q, k, v } = this.tensors(half, 'queryKeyValue') as Record<'q' | 'k' | 'v', DeviceTensor>;
    const { o, lse } = half.computed;
    this.#running.push(half.core.forward(this.#compute, { q, k, v, o, lse }));
    return this.mark(this.#compute);
  }

  backward(half: CudaBatch): CudaEvent {
    const { q, k, v } = this.tensors(half, 'queryKeyValue') as Record<'q' | 'k' | 'v', DeviceTensor>;
    const { dO } = this.tensors(half, 'outputGradient') as Record<'dO', DeviceTensor>;
    this.#running.push(half.core.backward(this.#compute, { q, k, v, ...half.computed, dO }));
    return this.mark(this.#compute);
  }

  /** Until all of it has run. */
  async ended(): Promise<void> {
    await Promise.all(this.#running);
  }

  /** After `ended()`: nothing reads the tensors any more. */
  async release(): Promise<void> {
    for (const leases of this.#leases.values()) for (const lease of Object.values(leases)) lease.release();
    await Promise.all(this.#events.map((event) => event.close()));
  }
}

interface PingPongInit {
  readonly device: CudaDevice;
  readonly dispatcher: DeviceDispatcher;
  readonly transfer: CudaStream;
  readonly compute: CudaStream;
  readonly halves: Halves<CudaBatch>;
  readonly barrier: () => Promise<void>;
}

export class PingPongMachine {
  readonly #init: PingPongInit;

  private constructor(init: PingPongInit) {
    this.#init = init;
  }

  /** Collective. All memory is made here, as in `CudaMachine.open`. */
  static async open(
    transport: CudaDemoTransport,
    plans: Halves<AttentionPlan>,
    shape: AttentionShape,
    ranksOnGpu: number,
  ): Promise<PingPongMachine> {
    const device = new CudaDevice(transport.deviceIndex);
    // First where both could start: attention fills the GPU, and what travels would begin when it is over.
    const transfer = device.stream({ highPriority: true });
    const compute = device.stream();
    const leaseBytes = Math.max(...plans.map((plan) => attentionLeaseBytes(plan, shape)));
    const dispatcher = await openDeviceDispatcher(transport, {
      leaseBytes,
      leases: LEASES,
      stream: transfer,
      ...movingShare(ranksOnGpu),
    });
    const { rank } = transport;
    const half = (plan: AttentionPlan): Promise<CudaBatch> => bindCudaBatch(device, dispatcher, { plan, shape, rank });
    const halves = [await half(plans[0]), await half(plans[1])] as const;
    return new PingPongMachine({
      ...{ device, dispatcher, transfer, compute, halves },
      barrier: () => transport.barrier(),
    });
  }

  get bytesSent() {
    const [first, second] = this.#init.halves;
    return {
      forward: first.moves.bytesSent.forward + second.moves.bytesSent.forward,
      backward: first.moves.bytesSent.backward + second.moves.bytesSent.backward,
    };
  }

  async place(rows: Halves<HomeRows>): Promise<void> {
    for (const [i, half] of this.#init.halves.entries()) await placeRows(rows[i]!, half.home);
  }

  /** Both halves in turns, once; what comes home, by half. */
  async step(): Promise<Halves<Record<ComparedTensor, Storage[AttentionDType]>>> {
    const { halves } = this.#init;
    const { round } = this.#together();
    await round.ended();
    const homes = async (half: CudaBatch) => {
      const { o, dQ, dK, dV } = { ...round.tensors(half, 'output'), ...round.tensors(half, 'gradients') };
      return { o: await readRows(o!), dQ: await readRows(dQ!), dK: await readRows(dK!), dV: await readRows(dV!) };
    };
    const results = [await homes(halves[0]), await homes(halves[1])] as const;
    await round.release();
    return results;
  }

  /** Collective. Rounds of transfer alone, of attention alone and of both in turns, one after the other. */
  async times(rounds: number): Promise<TurnTimes> {
    const times = { transfer: [] as number[], compute: [] as number[], together: [] as number[] };
    for (let i = 0; i < rounds; i++) {
      times.transfer.push(await this.#timed(() => this.#transferAlone()));
      times.compute.push(await this.#timed(() => this.#computeAlone()));
      times.together.push(await this.#timed(() => this.#together()));
    }
    return times;
  }

  /** After all ranks have verified. */
  async close(): Promise<void> {
    await this.#init.dispatcher.close();
    await this.#init.device.close();
  }

  async #timed(put: () => Span | Promise<Span>): Promise<number> {
    await this.#init.barrier();
    const { round, begin, end } = await put();
    await round.ended();
    await this.#init.transfer.synchronize();
    await this.#init.compute.synchronize();
    const milliseconds = end.elapsedMs(begin);
    await round.release();
    return milliseconds;
  }

  /**
   * Rows of the second half come while attention of the first runs, outputs of the first go and their gradients come while that of the second does, and so on. Nothing hides the
   * first dispatch and the last.
   */
  #together(): Span {
    const { transfer, compute, halves } = this.#init;
    const [first, second] = halves;
    const round = new Round(transfer, compute);
    const begin = round.mark(transfer);
    const served = halves.map((half) => round.dispatch(half, 'queryKeyValue'));
    const computed = halves.map((half, i) => {
      compute.wait(served[i]!);
      return round.forward(half);
    });
    const answered = halves.map((half, i) => {
      transfer.wait(computed[i]!);
      round.dispatch(half, 'output');
      return round.dispatch(half, 'outputGradient');
    });
    const sloped = halves.map((half, i) => {
      compute.wait(answered[i]!);
      return round.backward(half);
    });
    transfer.wait(sloped[0]!);
    round.dispatch(first, 'gradients');
    transfer.wait(sloped[1]!);
    return { round, begin, end: round.dispatch(second, 'gradients') };
  }

  /** The same dispatches in the same order, of what earlier rounds have left. */
  #transferAlone(): Span {
    const { transfer, compute, halves } = this.#init;
    const [first, second] = halves;
    const round = new Round(transfer, compute);
    const begin = round.mark(transfer);
    for (const half of halves) round.dispatch(half, 'queryKeyValue');
    for (const half of halves) {
      round.dispatch(half, 'output');
      round.dispatch(half, 'outputGradient');
    }
    round.dispatch(first, 'gradients');
    return { round, begin, end: round.dispatch(second, 'gradients') };
  }

  /** The same attention in the same order, of rows that have come before. */
  async #computeAlone(): Promise<Span> {
    const { transfer, compute, halves, barrier } = this.#init;
    const round = new Round(transfer, compute);
    for (const half of halves) {
      round.dispatch(half, 'queryKeyValue');
      round.dispatch(half, 'outputGradient');
    }
    await round.ended();
    await barrier();
    const begin = round.mark(compute);
    for (const half of halves) round.forward(half);
    for (const half of halves) round.backward(half);
    return { round, begin, end: round.mark(compute) };
  }
}

/** Work between two events. */
interface Span {
  readonly round: Round;
  readonly begin: CudaEvent;
  readonly end: CudaEvent;
}
