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
  /** The shortest way to a state from which no end can be reached, whatever moves there are. */
  readonly endless?: readonly string[];
}

/** Throws if there are more than `limit` states: a bound that was reached would prove nothing. */
export function explore<S>(model: Model<S>, limit = 200_000): Exploration {
  interface Place {
    readonly state: S;
    readonly moves: readonly string[];
  }
  const queue: Place[] = [{ state: model.start, moves: [] }];
  const known = new Set([JSON.stringify(model.start)]);
  const places: { readonly key: string; readonly moves: readonly string[]; readonly next: readonly string[] }[] = [];
  /** From which an end can be reached. */
  const ending = new Set<string>();
  let broken: Exploration['broken'];
  let deadlock: Exploration['deadlock'];
  for (let place = queue.shift(); place !== undefined; place = queue.shift()) {
    const { state, moves } = place;
    const what = model.broken(state);
    const here = JSON.stringify(state);
    if (what !== undefined) {
      broken ??= { what, moves };
      ending.add(here);
      continue;
    }
    const next = model.moves(state);
    if (model.ended(state)) ending.add(here);
    places.push({ key: here, moves, next: next.map(({ to }) => JSON.stringify(to)) });
    if (next.length === 0 && !model.ended(state)) deadlock ??= moves;
    for (const { name, to } of next) {
      const key = JSON.stringify(to);
      if (known.has(key)) continue;
      known.add(key);
      if (known.size > limit) throw new Error(`more than ${limit} states`);
      queue.push({ state: to, moves: [...moves, name] });
    }
  }
  for (let before = -1; before < ending.size; ) {
    before = ending.size;
    for (const { key, next } of places.toReversed()) if (next.some((to) => ending.has(to))) ending.add(key);
  }
  const endless = places.find(({ key }) => !ending.has(key))?.moves;
  return { states: known.size, ...(broken && { broken }), ...(deadlock && { deadlock }), ...(endless && { endless }) };
}
