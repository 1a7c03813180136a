/**
 * Two batches of tokens in turns on a GPU: while experts of the one compute on a stream, tokens of the other travel on another. Events order the two streams; the host waits for what it has to know,
 * how many rows have come.
 */
import type { DeviceTensor } from '@ep/core';
import type { CudaEvent, CudaExperts, CudaStream, DeviceMoeBuffer, DeviceMoeReceived } from '@ep/cuda-kernels';
import type { TurnTimes } from '../demo/ping-pong-machine.js';

/** A batch, with memory of its own. */
export interface TurnsHalf {
  readonly x: DeviceTensor;
  readonly topkIdx: Int32Array;
  readonly weights: Float32Array;
  /** Results of experts, shaped as what was received. */
  readonly results: (shape: readonly number[]) => DeviceTensor;
  readonly out: DeviceTensor;
}

export interface TurnsInit {
  readonly buffer: DeviceMoeBuffer;
  /** The stream of the buffer's calls. */
  readonly transfer: CudaStream;
  readonly compute: CudaStream;
  /** Absent on a rank without experts. */
  readonly experts: CudaExperts | undefined;
  readonly halves: readonly [TurnsHalf, TurnsHalf];
  readonly barrier: () => Promise<void>;
}

/** What was put on the streams between two events of one of them, and runs. */
interface Span {
  readonly begin: CudaEvent;
  readonly end: CudaEvent;
}

/** HAZARD: all ranks put their calls on their streams in one order: dispatches of both halves, then combines. */
export class CudaTurns {
  readonly #init: TurnsInit;
  readonly #events: CudaEvent[] = [];
  readonly #running: PromiseLike<unknown>[] = [];

  constructor(init: TurnsInit) {
    this.#init = init;
  }

  /** Collective. Rounds of calls alone, of experts alone and of both in turns, one after the other; `out` of both halves is that of the last round. */
  async times(rounds: number): Promise<TurnTimes> {
    const times = { transfer: [] as number[], compute: [] as number[], together: [] as number[] };
    // The first ones pay for what is done once.
    for (let round = -1; round < rounds; round++) {
      for (const [name, put] of [
        ['transfer', () => this.#transferAlone()],
        ['compute', () => this.#computeAlone()],
        ['together', () => this.#together()],
      ] as const) {
        const milliseconds = await this.#timed(put);
        if (round >= 0) times[name].push(milliseconds);
      }
    }
    return times;
  }

  async #timed(put: () => Promise<Span>): Promise<number> {
    await this.#init.barrier();
    const { begin, end } = await put();
    await Promise.all(this.#running.splice(0));
    await this.#init.transfer.synchronize();
    await this.#init.compute.synchronize();
    const milliseconds = end.elapsedMs(begin);
    await Promise.all(this.#events.splice(0).map((event) => event.close()));
    return milliseconds;
  }

  #mark(stream: CudaStream): CudaEvent {
    const event = stream.record({ timed: true });
    this.#events.push(event);
    return event;
  }

  #dispatch({ x, topkIdx }: TurnsHalf): PromiseLike<DeviceMoeReceived> {
    return this.#init.buffer.dispatch(x, topkIdx);
  }

  #combine(half: TurnsHalf, received: DeviceMoeReceived): void {
    const { weights, out } = half;
    const y = half.results(received.x.shape);
    this.#running.push(this.#init.buffer.combine(y, received.handle, { out, weights, renormalise: true }));
  }

  /** The event behind it. */
  #forward(half: TurnsHalf, { x, scales, counts, blockStart }: DeviceMoeReceived): CudaEvent {
    const { experts, compute } = this.#init;
    const rows = { x, y: half.results(x.shape), counts, blockStart, ...(scales && { scales }) };
    if (experts !== undefined) this.#running.push(experts.forward(compute, rows));
    return this.#mark(compute);
  }

  /** Tokens of the second half travel while experts of the first compute, and results of the first while those of the second do. Nothing hides the first dispatch and the last combine. */
  async #together(): Promise<Span> {
    const { transfer, halves } = this.#init;
    const begin = this.#mark(transfer);
    const served = halves.map((half) => this.#dispatch(half));
    const computed: { readonly received: DeviceMoeReceived; readonly behind: CudaEvent }[] = [];
    for (const [i, half] of halves.entries()) {
      const received = await served[i]!;
      computed.push({ received, behind: this.#forward(half, received) });
    }
    for (const [i, half] of halves.entries()) {
      const { received, behind } = computed[i]!;
      transfer.wait(behind);
      this.#combine(half, received);
    }
    return { begin, end: this.#mark(transfer) };
  }

  /** The same calls in the same order, of what earlier rounds have left. */
  async #transferAlone(): Promise<Span> {
    const { transfer, halves } = this.#init;
    const begin = this.#mark(transfer);
    const served = halves.map((half) => this.#dispatch(half));
    for (const [i, half] of halves.entries()) this.#combine(half, await served[i]!);
    return { begin, end: this.#mark(transfer) };
  }

  /** The same experts in the same order, of rows that have come before. */
  async #computeAlone(): Promise<Span> {
    const { compute, halves, barrier } = this.#init;
    const received = await Promise.all(halves.map((half) => this.#dispatch(half)));
    await barrier();
    const begin = this.#mark(compute);
    for (const [i, half] of halves.entries()) this.#forward(half, received[i]!);
    const end = this.#mark(compute);
    await Promise.all(this.#running.splice(0));
    for (const [i, half] of halves.entries()) this.#combine(half, received[i]!);
    return { begin, end };
  }
}
