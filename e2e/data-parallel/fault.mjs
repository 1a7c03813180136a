/** SIGKILL to oneself at a chosen moment. Only there to show what happens then: a training of your own does without this file. */
import { writeSync } from 'node:fs';
import { setImmediate } from 'node:timers/promises';

/** A pipe that nobody reads before this process has ended: a reader that wakes up could take the core from it in the chosen moment. */
const TESTAMENT = 3;
export class Fault {
  #death;

  /** `death`: nothing, or `{ step, moment }`, where `moment` is `before` or `inside` the all-reduce of the step. */
  constructor(death) {
    this.#death = death;
  }

  beforeReduction(step) {
    if (this.#death?.moment !== 'before' || step !== this.#death.step) return;
    this.#writeTestament(step);
    process.kill(process.pid, 'SIGKILL');
  }

  /**
   * Dies between the first and the last of a step's all-reduces, one for each slot: there -0 is left until there are sums, which are never -0. Where they were
   * quicker than this thread, the next step is tried.
   */
  async insideReduction(step, slots, mine, reductions) {
    if (this.#death?.moment !== 'inside' || step < this.#death.step) return;
    const isSum = (element) => !Object.is(element, -0);
    const others = slots.slice(0, -1).filter((slot) => !mine.includes(slot));
    const isInside = () => others.some((slot) => isSum(slot[0])) && others.some((slot) => !isSum(slot.at(-1)));
    while (reductions.some(({ status }) => status === 'pending')) {
      const pause = performance.now() + 1;
      while (performance.now() < pause) {
        if (!isInside()) continue;
        this.#writeTestament(step);
        if (isInside()) process.kill(process.pid, 'SIGKILL');
      }
      await setImmediate();
    }
  }

  #writeTestament(step) {
    const at = Number(process.hrtime.bigint()) / 1e6;
    writeSync(TESTAMENT, `${JSON.stringify({ at, step, moment: this.#death.moment })}\n`);
  }
}
