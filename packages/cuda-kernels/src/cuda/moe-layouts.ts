/** Layouts that a buffer on a GPU keeps: routings of their own, all of them made when the buffer is opened. */
import { EpError, invalid } from '@ep/core';
import type { NativeGpuMoeBuffer } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import type { ResolvedMoe } from '../moe/options.js';
import type { DeviceMoeLayout } from './moe-received.js';
import { DeviceRouting } from './moe-routing.js';

export class KeptLayout implements DeviceMoeLayout {
  readonly tokens: number;
  readonly routing: DeviceRouting;
  readonly #free: DeviceRouting[];
  /** Of calls that go by it: where on the device a call is reported belongs to its routing. */
  #held = false;
  #released = false;

  constructor(tokens: number, routing: DeviceRouting, free: DeviceRouting[]) {
    this.tokens = tokens;
    this.routing = routing;
    this.#free = free;
  }

  get busy(): boolean {
    return this.#held;
  }

  get released(): boolean {
    return this.#released;
  }

  hold(): void {
    this.#held = true;
  }

  letGo(): void {
    this.#held = false;
    if (this.#released) this.#free.push(this.routing);
  }

  release(): void {
    if (this.#released) return;
    this.#released = true;
    if (!this.#held) this.#free.push(this.routing);
  }
}

export class KeptLayouts {
  readonly #all: readonly DeviceRouting[];
  readonly #free: DeviceRouting[];
  readonly #mine = new WeakSet<KeptLayout>();

  /** HAZARD: page-locking may wait for kernels that run, and a peer's may wait for this rank: all are made before any runs. */
  constructor(native: NativeGpuMoeBuffer, memory: DeviceMemory, most: number) {
    this.#all = Array.from({ length: most }, () => new DeviceRouting(native, memory));
    this.#free = [...this.#all];
  }

  /** For a call that keeps its layout. Throws `EP_CAPACITY` where as many are kept as there may be. */
  take(tokens: number, where: string): KeptLayout {
    const routing = this.#free.pop();
    if (routing === undefined) {
      const { length: layouts } = this.#all;
      const why = `${where}: ${layouts} layouts are kept already: release() one, or open with more (option layouts)`;
      throw new EpError('EP_CAPACITY', why, { context: { layouts } });
    }
    const made = new KeptLayout(tokens, routing, this.#free);
    this.#mine.add(made);
    return made;
  }

  /** One that a call is given, which would also take `choices`. Throws `EP_INVALID_ARGUMENT`, or `EP_BUSY` while another call goes by it. */
  again(
    layout: DeviceMoeLayout,
    { mode }: ResolvedMoe,
    tokens: number,
    where: string,
    choices = 'an Int32Array',
  ): KeptLayout {
    const expected = `${choices}${mode === 'low-latency' ? ' in low-latency mode' : ', or a layout of this buffer that was not released'}`;
    if (!(layout instanceof KeptLayout) || !this.#mine.has(layout) || layout.released) {
      throw invalid('choices', { where, expected, found: layout });
    }
    if (layout.tokens !== tokens) {
      throw invalid('choices', { where, expected: `a layout of ${tokens} tokens`, found: `one of ${layout.tokens}` });
    }
    if (layout.busy) {
      throw new EpError('EP_BUSY', `${where}: a call with this layout is held: combine or release it first`);
    }
    return layout;
  }

  async close(): Promise<void> {
    for (const routing of this.#all) await routing.close();
  }
}
