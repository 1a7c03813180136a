/** The one-sided operations of a PE: over all PEs, or numbered as in a team. */
import { atomics } from './atomics.js';
import { order } from './order.js';
import { rma } from './rma.js';
import { signals } from './signal.js';
import type { Space } from './space.js';

export type Context = ReturnType<typeof rma> &
  ReturnType<typeof signals> &
  ReturnType<typeof atomics> &
  ReturnType<typeof order>;

export function createContext(space: Space): Context {
  return { ...rma(space), ...signals(space), ...atomics(space), ...order(space) };
}
