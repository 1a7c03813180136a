/** Copies between JS memory and a device, on a stream of their own. */
import { EpError } from '@ep/core';
import type { NativeGpuLibrary, NativeGpuOperand, NativeGpuPinned, NativeGpuStream } from './gpu.js';
import { native } from './native.js';
import { codeOfStatus } from './operations.js';

const STAGING_BYTES = 4 * 2 ** 20;

const copiers = new WeakMap<NativeGpuLibrary, Map<number, GpuCopier>>();

/**
 * One copy after the other, through a piece of pinned memory that is allocated here. HAZARD: not at a copy, since page-locking memory may wait for kernels, and a
 * peer's kernel may wait for what this rank does next. HAZARD: one of each device, whoever copies on this thread: a GPU has few queues, and ranks of one process whose kernels wait for each
 * other must not come to share one for streams that do nothing.
 */
export class GpuCopier {
  /** To be closed by whoever asked for it. */
  static open(library: NativeGpuLibrary, device: number): GpuCopier {
    const ofLibrary = copiers.get(library) ?? new Map<number, GpuCopier>();
    copiers.set(library, ofLibrary);
    const copier = ofLibrary.get(device) ?? new GpuCopier(ofLibrary, library, device);
    ofLibrary.set(device, copier);
    copier.#users++;
    return copier;
  }

  readonly #among: Map<number, GpuCopier>;
  readonly #device: number;
  #users = 0;
  readonly #stream: NativeGpuStream;
  readonly #pinned: NativeGpuPinned;
  readonly #window: Uint8Array;
  #tail: Promise<unknown> = Promise.resolve();

  private constructor(among: Map<number, GpuCopier>, library: NativeGpuLibrary, device: number) {
    this.#among = among;
    this.#device = device;
    const { binding } = native();
    this.#pinned = new binding.GpuPinned(library, device, STAGING_BYTES);
    this.#window = new Uint8Array(this.#pinned.window());
    this.#stream = new binding.GpuStream(library, device, true);
  }

  read(from: NativeGpuOperand, byteOffset: number, into: Uint8Array): Promise<void> {
    return this.#pieces(into.byteLength, async (at, bytes) => {
      this.#stream.copy(this.#pinned, 0, from, byteOffset + at, bytes);
      await this.#finished();
      into.set(this.#window.subarray(0, bytes), at);
    });
  }

  write(from: Uint8Array, to: NativeGpuOperand, byteOffset: number): Promise<void> {
    return this.#pieces(from.byteLength, async (at, bytes) => {
      this.#window.set(from.subarray(at, at + bytes));
      this.#stream.copy(to, byteOffset + at, this.#pinned, 0, bytes);
      await this.#finished();
    });
  }

  /** After the copies under way. */
  async close(): Promise<void> {
    const last = --this.#users === 0;
    if (last) this.#among.delete(this.#device);
    await this.#tail;
    if (last) this.#stream.close();
  }

  #pieces(byteLength: number, piece: (at: number, bytes: number) => Promise<void>): Promise<void> {
    const run = this.#tail.then(async () => {
      for (let at = 0; at < byteLength; at += STAGING_BYTES) await piece(at, Math.min(STAGING_BYTES, byteLength - at));
    });
    this.#tail = run.catch(() => {});
    return run;
  }

  async #finished(): Promise<void> {
    const outcome = await native().operations.run(() => this.#stream.follow(-1));
    if (outcome.status === 0) return;
    throw new EpError(codeOfStatus(outcome.status), `copy: ${outcome.message ?? 'cut off'}`);
  }
}
