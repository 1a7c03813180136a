/** Experts' rows in memory of a GPU, whose kernels carry them between ranks and compute the experts: on the way from dispatch to combine no row is copied to the host. */
import {
  type CudaBuffer,
  CudaDevice,
  type CudaExperts,
  type CudaExpertWeights,
  type CudaStream,
  type DeviceMoeBuffer,
  type DeviceMoeOptions,
  type DeviceMoeReceived,
  openDeviceMoeBuffer,
  readTensor,
  writeTensor,
} from '@ep/cuda-kernels';
import { gpuOfRank, ranksOfGpu } from '../demo/devices.js';
import { movingShare } from '../demo/ping-pong-machine.js';
import type { CudaDemoTransport } from '../demo/transports.js';
import { CudaTurns, type TurnsHalf } from './cuda-turns.js';
import type { Arrived, Batch, Combined, Exchange, Turns } from './exchange.js';
import type { ExpertWeights, MoeModel } from './model.js';

/** Calls that are under way at one time. */
const CALLS = 2;

interface Held {
  readonly x: CudaBuffer;
  readonly y: CudaBuffer;
  readonly out: CudaBuffer;
}

/** A call between its dispatch and its combine. */
interface Call {
  readonly slot: Held;
  readonly received: DeviceMoeReceived;
  readonly tokens: number;
}

interface CudaExchangeInit {
  readonly device: CudaDevice;
  readonly buffer: DeviceMoeBuffer;
  /** Of the buffer's calls. */
  readonly transfer: CudaStream;
  /** Beside it: while experts compute, the next tokens travel. */
  readonly stream: CudaStream;
  readonly barrier: () => Promise<void>;
  /** Of this rank; absent where it has none. */
  readonly experts: CudaExperts | undefined;
  readonly hidden: number;
  readonly maxTokens: number;
  /** Those that ranks take in turn. */
  readonly gpus: readonly number[];
}

export class CudaExchange implements Exchange {
  readonly #init: CudaExchangeInit;
  readonly #slots: readonly Held[];
  readonly #under = new Map<Arrived, Call>();
  /** Resolves once the latest dispatch is on the stream of the buffer. */
  #put: Promise<unknown> = Promise.resolve();
  #calls = 0;

  private constructor(init: CudaExchangeInit) {
    const { device, buffer, hidden, maxTokens } = init;
    this.#init = init;
    const rows = (count: number): CudaBuffer => device.allocate(Math.max(64, count * hidden * 2));
    this.#slots = Array.from({ length: CALLS }, () => ({
      x: rows(maxTokens),
      y: rows(buffer.receiveRows),
      out: rows(maxTokens),
    }));
  }

  /** Collective. All memory is made here: later, allocating may wait for kernels that wait for this rank. */
  static async open(
    transport: CudaDemoTransport,
    options: Omit<DeviceMoeOptions, 'stream' | 'calls'>,
    { model, gpus, inTurns }: { readonly model: MoeModel; readonly gpus: readonly number[]; readonly inTurns: boolean },
  ): Promise<CudaExchange> {
    const device = new CudaDevice(transport.deviceIndex);
    // In turns, what travels comes first where both could start, and leaves most of the GPU to the experts.
    const transfer = device.stream({ highPriority: inTurns });
    const share = inTurns ? movingShare(ranksOfGpu(gpus, transport.worldSize)) : {};
    const buffer = await openDeviceMoeBuffer(transport, { ...options, ...share, stream: transfer, calls: CALLS });
    const { map, rank } = buffer;
    const local = map.expert.subarray(map.rankOffsets[rank]!, map.rankOffsets[rank + 1]!);
    const experts = local.length === 0 ? undefined : device.experts(await placeWeights(device, model, local));
    const { hidden, maxTokens } = options;
    const made = new CudaExchange({
      ...{ device, buffer, transfer, stream: device.stream(), experts, hidden, maxTokens, gpus },
      barrier: () => transport.barrier(),
    });
    // Whoever is ahead would send while others still allocate.
    await transport.barrier();
    return made;
  }

  get gpu(): number {
    return this.#init.device.index;
  }

  get activeRanks(): Uint8Array {
    return this.#init.buffer.activeRanks;
  }

  get losses() {
    return this.#init.buffer.losses;
  }

  routes(): readonly string[] {
    const { buffer, gpus } = this.#init;
    return Array.from({ length: buffer.map.worldSize }, (_, rank) => {
      const gpu = gpuOfRank(gpus, rank);
      return `rank ${rank} by ${gpu === this.gpu ? 'memory of its own GPU' : `mapped memory of cuda:${gpu}`}`;
    });
  }

  async dispatch(rows: Uint16Array, topkIdx: Int32Array): Promise<Arrived> {
    const { buffer, hidden } = this.#init;
    const slot = this.#slots[this.#calls++ % CALLS]!;
    const tokens = rows.length / hidden;
    const x = slot.x.tensor('bf16', [tokens, hidden]);
    const put = writeTensor(rows, x).then(() => ({ work: buffer.dispatch(x, topkIdx) }));
    this.#put = put;
    const received = await (await put).work;
    const { counts, blockStart, handle } = received;
    const arrived: Arrived = { counts, blockStart, handle, stagedBytes: 0 };
    this.#under.set(arrived, { slot, received, tokens });
    return arrived;
  }

  async experts(arrived: Arrived): Promise<void> {
    const { experts, stream } = this.#init;
    const { slot, received } = this.#under.get(arrived)!;
    const { x, scales, counts, blockStart } = received;
    const y = slot.y.tensor('bf16', x.shape);
    await experts?.forward(stream, { x, y, counts, blockStart, ...(scales && { scales }) });
  }

  async combine(arrived: Arrived, weights: Float32Array): Promise<Combined> {
    const { buffer, hidden } = this.#init;
    const { slot, received, tokens } = this.#under.get(arrived)!;
    this.#under.delete(arrived);
    const y = slot.y.tensor('bf16', received.x.shape);
    const out = slot.out.tensor('bf16', [tokens, hidden]);
    // HAZARD: ranks whose calls are on their streams in different orders wait for each other. The next dispatch, begun before, may still be copying its rows.
    await this.#put;
    const combined = await buffer.combine(y, arrived.handle, { out, weights, renormalise: true });
    const bytes = await readTensor(combined.y);
    return { y: new Uint16Array(bytes.buffer), lostRanks: combined.lostRanks, stagedBytes: 0 };
  }

  async turns(halves: readonly [Batch, Batch], rounds: number): Promise<Turns> {
    const { buffer, transfer, stream: compute, experts, barrier, hidden } = this.#init;
    const place = async ({ rows, topkIdx, weights }: Batch, slot: Held): Promise<TurnsHalf> => {
      const shape = [rows.length / hidden, hidden];
      const x = slot.x.tensor('bf16', shape);
      await writeTensor(rows, x);
      const results = (of: readonly number[]) => slot.y.tensor('bf16', of);
      return { x, topkIdx, weights, results, out: slot.out.tensor('bf16', shape) };
    };
    const [first, second] = this.#slots as readonly [Held, Held];
    const placed = [await place(halves[0], first), await place(halves[1], second)] as const;
    const turns = new CudaTurns({ buffer, transfer, compute, experts, halves: placed, barrier });
    const times = await turns.times(rounds);
    const read = async ({ out }: TurnsHalf) => new Uint16Array((await readTensor(out)).buffer);
    return { times, results: [await read(placed[0]), await read(placed[1])] };
  }

  async close(): Promise<void> {
    await this.#init.buffer.close();
    await this.#init.device.close();
  }
}

/** The weights of these experts, one after the other. */
async function placeWeights(device: CudaDevice, model: MoeModel, experts: Int32Array): Promise<CudaExpertWeights> {
  const { hidden, intermediate } = model.shape;
  const place = async (name: keyof ExpertWeights, shape: readonly [number, number]) => {
    const bytes = shape[0] * shape[1] * Float32Array.BYTES_PER_ELEMENT;
    const memory = device.allocate(experts.length * bytes);
    for (const [at, expert] of experts.entries()) {
      await writeTensor(model.weights(expert)[name], memory.tensor('f32', shape, at * bytes));
    }
    return memory.tensor('f32', [experts.length, ...shape]);
  };
  return {
    gate: await place('gate', [intermediate, hidden]),
    up: await place('up', [intermediate, hidden]),
    down: await place('down', [hidden, intermediate]),
  };
}
