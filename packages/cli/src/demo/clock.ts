/** How long the phases of a step take on this rank. */
import type { DemoTransport } from './transports.js';

export class Clock<P extends string> {
  readonly milliseconds: Record<string, number> = {};
  readonly #transport: Pick<DemoTransport, 'barrier'>;
  readonly #onPhase: ((phase: P) => void) | undefined;

  constructor(transport: Pick<DemoTransport, 'barrier'>, onPhase: ((phase: P) => void) | undefined) {
    this.#transport = transport;
    this.#onPhase = onPhase;
  }

  async phase<T>(name: P, body: () => Promise<T> | T): Promise<T> {
    await this.#transport.barrier();
    this.#onPhase?.(name);
    const begin = performance.now();
    const value = await body();
    this.milliseconds[name] = performance.now() - begin;
    return value;
  }
}
