/**
 * Who is to blame once the time of a call is up. Not all that are awaited: a rank that waits for another one is awaited, too. Those that do not answer are, and those that answer
 * and have made no call.
 */
import { setTimeout } from 'node:timers/promises';
import type { AskRecord, ControlRecord, HereRecord } from './records.js';

/** Long enough for a thread that computes beside others on few cores. */
const ANSWER_MS = 200;

export interface StragglersInit {
  readonly tell: (peer: number, record: ControlRecord) => void;
  /** This rank has a call under way. */
  readonly waits: () => boolean;
  /** Takes in what has come. */
  readonly look: () => void;
}

export class Stragglers {
  readonly #init: StragglersInit;
  #id = 0;
  /** To the last question. */
  readonly #answers = new Map<number, HereRecord>();

  constructor(init: StragglersInit) {
    this.#init = init;
  }

  /** Of `ranks`; one question at a time. `idleToo`: also those that answer, and have made no call. */
  async among(ranks: readonly number[], idleToo: boolean): Promise<readonly number[]> {
    const { tell, look } = this.#init;
    const id = ++this.#id;
    this.#answers.clear();
    for (const rank of ranks) tell(rank, { kind: 'ask', id });
    await setTimeout(ANSWER_MS);
    look();
    return ranks.filter((rank) => {
      const answer = this.#answers.get(rank);
      return answer === undefined || (idleToo && !answer.waits);
    });
  }

  onAsk(from: number, { id }: AskRecord): void {
    const { tell, waits } = this.#init;
    tell(from, { kind: 'here', id, waits: waits() });
  }

  onHere(from: number, record: HereRecord): void {
    if (record.id === this.#id) this.#answers.set(from, record);
  }
}
