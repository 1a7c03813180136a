/** Experts' rows in memory of a GPU, whose kernels carry them between ranks; the experts themselves compute on the host, which reads and writes their rows. */
import { decode, type Storage, viewStorage } from '@ep/core';
import {
  type CudaBuffer,
  CudaDevice,
  type DeviceMoeBuffer,
  type DeviceMoeOptions,
  type DeviceMoeReceived,
  openDeviceMoeBuffer,
  readTensor,
  writeTensor,
} from '@ep/cuda-kernels';
import type { CudaDemoTransport } from '../demo/transports.js';
import type { Arrived, Combined, Exchange } from './exchange.js';

/** Calls that are under way at one time. */
const CALLS = 2;

interface Held {
  readonly x: CudaBuffer;
  readonly y: CudaBuffer;
  readonly out: CudaBuffer;
}

export class CudaExchange implements Exchange {
  readonly #device: CudaDevice;
  readonly #buffer: DeviceMoeBuffer;
  readonly #hidden: number;
  readonly #slots: readonly Held[];
  readonly #under = new Map<
    Arrived,
    { readonly slot: Held; readonly shape: readonly number[]; readonly tokens: number }
  >();
  #calls = 0;

  private constructor(device: CudaDevice, buffer: DeviceMoeBuffer, hidden: number, maxTokens: number) {
    this.#device = device;
    this.#buffer = buffer;
    this.#hidden = hidden;
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
  ): Promise<CudaExchange> {
    const device = new CudaDevice(transport.deviceIndex);
    const stream = device.stream();
    const buffer = await openDeviceMoeBuffer(transport, { ...options, stream, calls: CALLS });
    const made = new CudaExchange(device, buffer, options.hidden, options.maxTokens);
    // Whoever is ahead would send while others still allocate.
    await transport.barrier();
    return made;
  }

  get activeRanks(): Uint8Array {
    return this.#buffer.activeRanks;
  }

  get losses() {
    return this.#buffer.losses;
  }

  routes(): readonly string[] {
    return ['rank 0 by memory of one GPU'];
  }

  async dispatch(rows: Uint16Array, topkIdx: Int32Array): Promise<Arrived> {
    const slot = this.#slots[this.#calls++ % CALLS]!;
    const tokens = rows.length / this.#hidden;
    const x = slot.x.tensor('bf16', [tokens, this.#hidden]);
    await writeTensor(rows, x);
    const received = await this.#buffer.dispatch(x, topkIdx);
    const { counts, blockStart, handle } = received;
    const { shape } = received.x;
    const count = shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
    const arrived: Arrived = {
      ...{ counts, blockStart, handle, stagedBytes: 0 },
      read: await rowReader(received, this.#hidden),
      results: new Uint16Array(count * this.#hidden),
    };
    this.#under.set(arrived, { slot, shape, tokens });
    return arrived;
  }

  async combine(arrived: Arrived, weights: Float32Array): Promise<Combined> {
    const { slot, shape, tokens } = this.#under.get(arrived)!;
    this.#under.delete(arrived);
    const y = slot.y.tensor('bf16', shape);
    await writeTensor(arrived.results, y);
    const out = slot.out.tensor('bf16', [tokens, this.#hidden]);
    const combined = await this.#buffer.combine(y, arrived.handle, { out, weights, renormalise: true });
    const bytes = await readTensor(combined.y);
    return { y: new Uint16Array(bytes.buffer), lostRanks: combined.lostRanks, stagedBytes: 0 };
  }

  async close(): Promise<void> {
    await this.#buffer.close();
    await this.#device.close();
  }
}

async function rowReader({ x, scales }: DeviceMoeReceived, hidden: number): Promise<Arrived['read']> {
  const { dtype } = x;
  const bytes = await readTensor(x);
  const elements = x.shape.reduce((product, extent) => product * extent, 1);
  const codes = viewStorage(dtype, bytes.buffer, 0, elements);
  const factors = scales === undefined ? undefined : new Float32Array((await readTensor(scales)).buffer);
  const room = scales?.shape[1] ?? 0;
  return (row, into) => {
    into.set(decode(dtype as 'bf16', codes.subarray(row * hidden, (row + 1) * hidden) as Storage['bf16']));
    if (factors === undefined) return;
    for (let h = 0; h < hidden; h++) into[h]! *= factors[Math.floor(h / 128) * room + row]!;
  };
}
