/** Memory ordering. */
import type { Space } from './space.js';

export function order(space: Space) {
  const { native } = space;
  return {
    /** Orders this PE's earlier puts, atomics and stores (also through `ptr()`) to each PE before its later ones. */
    fence(): void {
      native.fence();
    },
    /** All of them have landed on all PEs when it returns. */
    quiet(): void {
      native.fence();
    },
  };
}
