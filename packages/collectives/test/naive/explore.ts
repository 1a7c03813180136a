/** Every order of the moves of a small model: what a test that runs threads may never meet, this meets always. */

export interface Move<S> {
  readonly name: string;
  readonly to: S;
}

/** States are plain data: two with the same JSON are one. */
export interface Model<S> {
  readonly start: S;
  readonly moves: (state: S) => readonly Move<S>[];
  /** Nothing need happen any more: without moves it is no deadlock. */
  readonly ended: (state: S) => boolean;
  /** What is wrong in this state. */
  readonly broken: (state: S) => string | undefined;
}

export interface Exploration {
  readonly states: number;
  /** The shortest ways to a state that is broken, and to one that has no moves and has not ended. */
  readonly broken?: { readonly what: string; readonly moves: readonly string[] };
  readonly deadlock?: readonly string[];
}

/** Throws if there are more than `limit` states: a bound that was reached would prove nothing. */
export function explore<S>(model: Model<S>, limit = 200_000): Exploration {
  interface Place {
    readonly state: S;
    readonly moves: readonly string[];
  }
  const queue: Place[] = [{ state: model.start, moves: [] }];
  const known = new Set([JSON.stringify(model.start)]);
  let broken: Exploration['broken'];
  let deadlock: Exploration['deadlock'];
  for (let place = queue.shift(); place !== undefined; place = queue.shift()) {
    const { state, moves } = place;
    const what = model.broken(state);
    if (what !== undefined) {
      broken ??= { what, moves };
      continue;
    }
    const next = model.moves(state);
    if (next.length === 0 && !model.ended(state)) deadlock ??= moves;
    for (const { name, to } of next) {
      const key = JSON.stringify(to);
      if (known.has(key)) continue;
      known.add(key);
      if (known.size > limit) throw new Error(`more than ${limit} states`);
      queue.push({ state: to, moves: [...moves, name] });
    }
  }
  return { states: known.size, ...(broken && { broken }), ...(deadlock && { deadlock }) };
}
