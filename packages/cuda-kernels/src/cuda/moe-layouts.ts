/** Layouts that a buffer on a GPU keeps: routings of their own, all of them made when the buffer is opened. */
import { EpError, invalid } from '@ep/core';
import type { NativeGpuMoeBuffer } from '@ep/native';
import type { ResolvedMoe } from '../moe/options.js';
import { RoutingArrays } from '../moe/routing.js';
import type { DeviceMoeLayout } from './moe-received.js';

export class KeptLayout implements DeviceMoeLayout {
  readonly tokens: number;
  readonly routing: RoutingArrays;
  readonly #free: RoutingArrays[];
  /** Of calls that go by it: where on the device a call is reported belongs to its routing. */
  #held = false;
  #released = false;

  constructor(tokens: number, routing: RoutingArrays, free: RoutingArrays[]) {
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
  readonly #free: RoutingArrays[];
  readonly #most: number;
  readonly #mine = new WeakSet<KeptLayout>();

  /** HAZARD: page-locking may wait for kernels that run, and a peer's may wait for this rank: all are made before any runs. */
  constructor(native: NativeGpuMoeBuffer, most: number) {
    this.#most = most;
    this.#free = Array.from({ length: most }, () => new RoutingArrays(native));
  }

  /** For a call that keeps its layout. Throws `EP_CAPACITY` where as many are kept as there may be. */
  take(tokens: number, where: string): KeptLayout {
    const routing = this.#free.pop();
    if (routing === undefined) {
      const why = `${where}: ${this.#most} layouts are kept already: release() one, or open with more (option layouts)`;
      throw new EpError('EP_CAPACITY', why, { context: { layouts: this.#most } });
    }
    const made = new KeptLayout(tokens, routing, this.#free);
    this.#mine.add(made);
    return made;
  }

  /** One that a call is given. Throws `EP_INVALID_ARGUMENT`, or `EP_BUSY` while another call goes by it. */
  again(layout: DeviceMoeLayout, { mode }: ResolvedMoe, tokens: number, where: string): KeptLayout {
    const expected = `an Int32Array${mode === 'low-latency' ? ' in low-latency mode' : ', or a layout of this buffer that was not released'}`;
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
}
