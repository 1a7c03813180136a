/**
 * Operations that end inside their call are awaited in microtasks, and a chain of microtasks never lets the event loop turn: timers, signals and aborts would
 * wait as long as peers keep up. Whoever completes inline asks here first.
 */

/** How long inline completions may follow each other without a turn of the loop. */
export const LONGEST_RUN_MS = 5;

let runBegan: number | undefined;

/** True when the loop has not turned for `LONGEST_RUN_MS` of inline completions: the caller should now take the way through the loop. */
export function loopIsDue(): boolean {
  const now = performance.now();
  if (runBegan === undefined) {
    runBegan = now;
    setImmediate(() => {
      runBegan = undefined;
    }).unref();
    return false;
  }
  return now - runBegan > LONGEST_RUN_MS;
}

/** Lets the event loop turn if it is due. */
export async function turnLoopIfDue(): Promise<void> {
  if (loopIsDue()) await new Promise<void>((resolve) => setImmediate(resolve));
}
