/** Experts' rows in memory of the host. */
import { decode, type Storage, type Store, tensor } from '@ep/core';
import {
  joinMoeBuffer,
  type MoeBuffer,
  type MoeBufferOptions,
  type MoeReceived,
  openMoeBuffer,
} from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';
import { type DemoTransport, readmitDemoRanks } from '../demo/transports.js';
import type { Arrived, Combined, Exchange } from './exchange.js';

const bf16 = (rows: number, hidden: number) =>
  tensor('bf16', [rows, hidden], new Uint16Array(allocateHost(Math.max(64, rows * hidden * 2)), 0, rows * hidden));

function readRow({ x, scales }: MoeReceived, row: number, hidden: number, into: Float32Array): void {
  const stride = x.strides?.at(-2) ?? hidden;
  const codes = x.data.subarray(row * stride, row * stride + hidden);
  into.set(decode(x.dtype as 'bf16', codes as Storage['bf16']));
  if (scales === undefined) return;
  // Column-major: the scales of neighbouring rows lie side by side.
  const perBlock = scales.strides!.at(-1)!;
  for (let h = 0; h < hidden; h++) into[h]! *= (scales.data as Float32Array)[row + Math.floor(h / 128) * perBlock]!;
}

export class HostExchange implements Exchange {
  readonly #buffer: MoeBuffer;
  readonly #hidden: number;
  readonly #transport: DemoTransport;

  private constructor(buffer: MoeBuffer, hidden: number, transport: DemoTransport) {
    this.#buffer = buffer;
    this.#hidden = hidden;
    this.#transport = transport;
  }

  /** Collective. */
  static async open(transport: DemoTransport, options: MoeBufferOptions): Promise<HostExchange> {
    return new HostExchange(await openMoeBuffer(transport, options), options.hidden, transport);
  }

  /** In the place of a rank that died, while the others take it in. */
  static async join(transport: DemoTransport, options: MoeBufferOptions): Promise<HostExchange> {
    return new HostExchange(await joinMoeBuffer(transport, options), options.hidden, transport);
  }

  async takeIn(store: Store, rank: number): Promise<void> {
    await readmitDemoRanks(this.#transport, { store, joining: [rank], without: [] });
    await this.#buffer.updateMembers();
  }

  async goOnWithout(store: Store, rank: number): Promise<void> {
    await readmitDemoRanks(this.#transport, { store, joining: [], without: [rank] });
    await this.#buffer.updateMembers();
  }

  get activeRanks(): Uint8Array {
    return this.#buffer.activeRanks;
  }

  get losses() {
    return this.#buffer.losses;
  }

  routes(): readonly string[] {
    return this.#buffer.routes().map(({ peer, via }) => `rank ${peer} by ${via}`);
  }

  async dispatch(rows: Uint16Array, topkIdx: Int32Array): Promise<Arrived> {
    const hidden = this.#hidden;
    const x = bf16(rows.length / hidden, hidden);
    x.data.set(rows);
    const received = await this.#buffer.dispatch(x, topkIdx);
    const { counts, blockStart, handle, stagedBytes } = received;
    const count = received.x.shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
    return {
      ...{ counts, blockStart, handle, stagedBytes },
      host: { read: (row, into) => readRow(received, row, hidden, into), results: bf16(count, hidden).data },
    };
  }

  async combine({ host, handle }: Arrived, weights: Float32Array): Promise<Combined> {
    const { results } = host!;
    const y = tensor('bf16', [results.length / this.#hidden, this.#hidden], results);
    const combined = await this.#buffer.combine(y, handle, { weights, renormalise: true });
    const { lostRanks, stagedBytes } = combined;
    return { y: combined.y.data as Uint16Array, lostRanks, stagedBytes };
  }

  async close(): Promise<void> {
    await this.#buffer.close();
  }
}
