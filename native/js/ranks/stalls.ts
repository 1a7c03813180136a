/** From here on a gap between two looks at the clock is a stall, and not what a look takes. Microseconds. */
export const SHORTEST_STALL_US = 50;

const MOST = 100_000;

/**
 * How long a thread that does nothing but read the clock is kept from it, in nanoseconds, for each time in `milliseconds`: what no wait of a rank on this core can be
 * shorter than. Blocks; `now` tells milliseconds.
 */
export function stallsIn(milliseconds: number, now: () => number = () => performance.now()): Float64Array {
  const found = new Float64Array(MOST);
  let count = 0;
  let before = now();
  for (const end = before + milliseconds; before < end && count < MOST; ) {
    const at = now();
    if (at - before > SHORTEST_STALL_US / 1000) found[count++] = (at - before) * 1e6;
    before = at;
  }
  return found.slice(0, count);
}
