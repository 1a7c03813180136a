/** Turns what the ranks tell into a log. Every rank tells every step; who tells one first is quoted. */
export class Narrator {
  #log;
  #worldSize;
  #steps = 0;
  /** When and where each rank died that has not been replaced. */
  #deaths = new Map();
  /** Of the survivors, from the first loss until all have done the step that it ended. */
  #recovery;
  #digests = new Map();

  constructor(log, worldSize) {
    this.#log = log;
    this.#worldSize = worldSize;
  }

  /** False if the ranks do not have the same weights. */
  get agreed() {
    return new Set(this.#digests.values()).size <= 1;
  }

  hear(event) {
    switch (event.event) {
      case 'lost':
        return this.#lost(event);
      case 'step':
        return this.#step(event);
      case 'died':
        this.#deaths.set(event.rank, event);
        return this.#tellRecovery();
      case 'joined':
        this.#deaths.delete(event.rank);
        return this.#log(`rank ${event.rank} is back, and takes part from step ${event.step} on`);
      case 'done':
        return this.#done(event);
    }
  }

  #lost({ at, rank, lost, active }) {
    this.#recovery ??= { lost: new Set(), heard: new Map(), done: new Map() };
    this.#recovery.active = active;
    this.#recovery.heard.set(rank, at);
    for (const other of lost) this.#recovery.lost.add(other);
  }

  #step({ at, rank, step, loss, active }) {
    if (step >= this.#steps) {
      this.#steps = step + 1;
      this.#log(`step ${step}  loss ${loss.toFixed(5)}  ranks ${active.join(' ')}`);
    }
    const recovery = this.#recovery;
    if (!recovery?.heard.has(rank) || recovery.done.has(rank)) return;
    recovery.step = step;
    recovery.done.set(rank, at);
    this.#tellRecovery();
  }

  /** The launcher may hear of the death after the survivors have gone on. */
  #tellRecovery() {
    if (this.#recovery === undefined) return;
    const { lost, heard, done, active, step } = this.#recovery;
    const deaths = [...lost].map((rank) => this.#deaths.get(rank));
    if (deaths.includes(undefined) || active.some((rank) => !done.has(rank))) return;
    this.#recovery = undefined;
    const last = deaths.reduce((latest, death) => (death.at > latest.at ? death : latest));
    const after = (times) => `${(Math.max(...active.map((rank) => times.get(rank))) - last.at).toFixed(1)} ms`;
    const who = [...lost].join(' and ');
    this.#log(
      last.moment === undefined
        ? `rank ${who} died; ranks ${active.join(' ')} have done step ${step} without`
        : `rank ${who} was killed ${last.moment} the all-reduce of step ${last.step}; ranks ${active.join(' ')} knew it after ${after(heard)} and had done step ${step} after ${after(done)}`,
    );
  }

  #done({ rank, losses, weights }) {
    this.#digests.set(rank, weights);
    if (this.#digests.size < this.#worldSize) return;
    const weightsAre = this.agreed ? `all ranks have the weights ${weights.slice(0, 16)}` : 'THE WEIGHTS DIFFER';
    this.#log(`${losses.length} steps, loss ${losses[0].toFixed(5)} to ${losses.at(-1).toFixed(5)}, ${weightsAre}`);
  }
}
