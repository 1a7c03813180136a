/**
 * Protocols of the reference (Mooncake's process group) that fail, as small models, each with the rule that repairs it. What they leave out is
 * everything that does not matter to the failure: payload is one word, a network is a write that lands later or never.
 */
import type { Model, Move } from './explore.js';

type Moves<S> = readonly Move<S>[];
const when = <S>(condition: boolean, name: string, to: () => S): Move<S>[] => (condition ? [{ name, to: to() }] : []);

// --- Signal words -------------------------------------------------------------------------------------------------------------------------

interface SignalState {
  /** Rank A's word for the rank that signals it: 0 is empty. */
  readonly word: number;
  /** The removed rank's last signal is still on its way. */
  readonly late: boolean;
  readonly evicted: boolean;
  readonly replacement: 'absent' | 'wrote' | 'signalled';
  readonly accepted: boolean;
}

/**
 * A rank is removed while its signal is under way, and another takes its place. `constant`: every signal is the number one, as in the reference.
 * `keyed`: a signal carries epoch and operation.
 */
export function signalWords(words: 'constant' | 'keyed'): Model<SignalState> {
  const word = (epoch: number, operation: number): number => (words === 'constant' ? 1 : epoch * 1_000 + operation);
  return {
    start: { word: 0, late: true, evicted: false, replacement: 'absent', accepted: false },
    moves: (state): Moves<SignalState> => [
      ...when(state.late, 'the late signal lands', () => ({ ...state, late: false, word: word(1, 7) })),
      ...when(!state.evicted, 'A gives the rank up and clears the word', () => ({ ...state, evicted: true, word: 0 })),
      ...when(state.evicted && state.replacement === 'absent', 'the replacement writes its payload', () => ({
        ...state,
        replacement: 'wrote' as const,
      })),
      ...when(state.replacement === 'wrote', 'the replacement signals', () => ({
        ...state,
        replacement: 'signalled' as const,
        word: word(2, 9),
      })),
      ...when(state.evicted && !state.accepted && state.word === word(2, 9), 'A takes the payload', () => ({
        ...state,
        accepted: true,
      })),
    ],
    // A late signal that lands last overwrites a word that nobody has read yet: the transport's counters do not, and it is not what is looked for here.
    ended: (state) => state.accepted || (state.replacement === 'signalled' && !state.late),
    broken: (state) =>
      state.accepted && state.replacement === 'absent'
        ? 'A took a payload that nobody had written: the signal was that of the removed rank'
        : undefined,
  };
}

// --- Parity -------------------------------------------------------------------------------------------------------------------------------

interface ParityRank {
  readonly operation: number;
  /** Of the operation under way, fixed when it was issued. */
  readonly parity: number;
  /** Operations issued, as this rank counts. */
  readonly count: number;
  readonly signalled: boolean;
  readonly sawView: boolean;
}

interface ParityState {
  readonly ranks: readonly ParityRank[];
  /** [receiver][parity]: the other survivor's signal is there. */
  readonly slots: readonly (readonly boolean[])[];
}

const PARITY_OPERATIONS = 4;

/**
 * Ranks A and B, and X, which died when its signal of operation 0 had reached B but not A. A view without X comes to each of them at some moment.
 * `reset`: it sets the counter of operations to zero, under whatever is in flight, as in the reference. `kept`: it never touches the counter.
 */
export function parityAfterView(counter: 'reset' | 'kept'): Model<ParityState> {
  const issue = (rank: ParityRank): ParityRank => ({
    ...rank,
    operation: rank.operation + 1,
    parity: rank.count % 2,
    count: rank.count + 1,
    signalled: false,
  });
  const first: ParityRank = { operation: 0, parity: 0, count: 1, signalled: false, sawView: false };
  const change = (state: ParityState, at: number, rank: ParityRank): ParityState => ({
    ...state,
    ranks: state.ranks.map((old, i) => (i === at ? rank : old)),
  });
  const mark = (state: ParityState, at: number, parity: number, value: boolean): ParityState => ({
    ...state,
    slots: state.slots.map((row, i) => (i === at ? row.map((old, p) => (p === parity ? value : old)) : row)),
  });
  return {
    start: {
      ranks: [first, first],
      slots: [
        [false, false],
        [false, false],
      ],
    },
    moves: (state): Moves<ParityState> =>
      state.ranks.flatMap((rank, me) => {
        const name = 'AB'[me];
        const busy = rank.operation < PARITY_OPERATIONS;
        // B has all of X for operation 0; A, and both from operation 1 on, must learn from the view that X is not coming.
        const withoutX = rank.sawView || (me === 1 && rank.operation === 0);
        return [
          ...when(busy && !rank.signalled, `${name} signals operation ${rank.operation} in parity ${rank.parity}`, () =>
            mark(change(state, me, { ...rank, signalled: true }), 1 - me, rank.parity, true),
          ),
          ...when(
            busy && rank.signalled && withoutX && state.slots[me]![rank.parity]!,
            `${name} ends operation ${rank.operation}`,
            () => mark(change(state, me, issue(rank)), me, rank.parity, false),
          ),
          ...when(!rank.sawView, `the view comes to ${name}`, () =>
            change(state, me, { ...rank, sawView: true, count: counter === 'reset' ? 0 : rank.count }),
          ),
        ];
      }),
    ended: (state) => state.ranks.every((rank) => rank.operation === PARITY_OPERATIONS),
    broken: () => undefined,
  };
}

// --- Contributors -------------------------------------------------------------------------------------------------------------------------

interface Survivor {
  readonly gotX: boolean;
  readonly sawDeath: boolean;
  /** Told the other that everything is here; only where there is agreement. */
  readonly told: boolean;
  readonly end: 'none' | 'with X' | 'without X' | 'lost';
}

interface ContributorState {
  readonly alive: boolean;
  readonly survivors: readonly Survivor[];
}

/**
 * One operation of A, B and X, who may die between its write to A and its write to B. `local`: each survivor folds over those it takes for alive when
 * it copies out, as in the reference. `agreed`: nobody ends before both know that both have everything; once the death is seen they compare first.
 */
export function contributors(mask: 'local' | 'agreed'): Model<ContributorState> {
  const fresh: Survivor = { gotX: false, sawDeath: false, told: false, end: 'none' };
  const change = (state: ContributorState, at: number, more: Partial<Survivor>): ContributorState => ({
    ...state,
    survivors: state.survivors.map((old, i) => (i === at ? { ...old, ...more } : old)),
  });
  return {
    start: { alive: true, survivors: [fresh, fresh] },
    moves: (state): Moves<ContributorState> => [
      ...when(state.alive, 'X dies', () => ({ ...state, alive: false })),
      ...state.survivors.flatMap((rank, me) => {
        const name = 'AB'[me];
        const other = state.survivors[1 - me]!;
        const open = rank.end === 'none';
        const deliver = when(state.alive && !rank.gotX, `X's data reach ${name}`, () =>
          change(state, me, { gotX: true }),
        );
        const see = when(!state.alive && !rank.sawDeath, `${name} sees the death`, () =>
          change(state, me, { sawDeath: true }),
        );
        if (mask === 'local') {
          return [
            ...deliver,
            ...see,
            ...when(open && rank.gotX, `${name} ends with X`, () => change(state, me, { end: 'with X' })),
            ...when(open && !rank.gotX && rank.sawDeath, `${name} ends without X`, () =>
              change(state, me, { end: 'without X' }),
            ),
          ];
        }
        const comparing = rank.sawDeath && (other.sawDeath || other.end !== 'none');
        const both = rank.gotX && other.gotX;
        return [
          ...deliver,
          ...see,
          ...when(open && rank.gotX && !rank.told && !rank.sawDeath, `${name} tells that it has everything`, () =>
            change(state, me, { told: true }),
          ),
          ...when(open && rank.gotX && rank.told && other.told, `${name} ends with X`, () =>
            change(state, me, { end: 'with X' }),
          ),
          ...when(open && comparing && both, `${name} ends with X, compared`, () =>
            change(state, me, { end: 'with X' }),
          ),
          ...when(open && comparing && !both, `${name} finds the operation lost`, () =>
            change(state, me, { end: 'lost' }),
          ),
        ];
      }),
    ],
    ended: (state) => state.survivors.every((rank) => rank.end !== 'none'),
    broken: ({ survivors }) => {
      const ends = survivors.map((rank) => rank.end);
      return ends.includes('none') || ends[0] === ends[1] ? undefined : `A ended ${ends[0]}, B ended ${ends[1]}`;
    },
  };
}

// --- Task slots ---------------------------------------------------------------------------------------------------------------------------

interface QueueState {
  readonly posted: number;
  readonly done: number;
  readonly asserted: boolean;
}

/** A caller posts `calls` operations without waiting. `slots`: there are two places, and a third call fails, as in the reference. `queue`: they queue. */
export function tasks(places: 'slots' | 'queue', calls: number): Model<QueueState> {
  return {
    start: { posted: 0, done: 0, asserted: false },
    moves: (state): Moves<QueueState> => [
      ...when(state.posted < calls, 'the caller posts one', () => ({
        ...state,
        posted: state.posted + 1,
        asserted: places === 'slots' && state.posted - state.done >= 2,
      })),
      ...when(state.done < state.posted, 'the worker ends one', () => ({ ...state, done: state.done + 1 })),
    ],
    ended: (state) => state.done === calls,
    broken: (state) => (state.asserted ? 'a call found both slots taken' : undefined),
  };
}

// --- Receive chunks -----------------------------------------------------------------------------------------------------------------------

interface ChunkState {
  readonly content: 'empty' | 'old' | 'new';
  /** The timed-out message's write is still on its way. */
  readonly late: boolean;
  readonly timedOut: boolean;
  /** Its sender can no longer write: it has been told, and answered. */
  readonly fenced: boolean;
  readonly next: 'none' | 'credited' | 'written' | 'copied';
}

/** A receive times out and its chunk is used for another sender. `reused`: at once, as in the reference. `quarantined`: once the first sender is fenced. */
export function receiveChunk(chunk: 'reused' | 'quarantined'): Model<ChunkState & { readonly copied?: string }> {
  type S = ChunkState & { readonly copied?: string };
  return {
    start: { content: 'empty', late: true, timedOut: false, fenced: false, next: 'none' },
    moves: (state): Moves<S> => [
      ...when(state.late, 'the late write lands', () => ({ ...state, late: false, content: 'old' as const })),
      ...when(!state.timedOut, 'the receive times out', () => ({ ...state, timedOut: true })),
      // Its write has either landed before the fence, or never will.
      ...when(state.timedOut && !state.fenced, 'the old sender is fenced', () => ({
        ...state,
        fenced: true,
        late: false,
      })),
      ...when(
        state.timedOut && state.next === 'none' && (chunk === 'reused' || state.fenced),
        'the chunk is credited to another sender',
        () => ({ ...state, next: 'credited' as const }),
      ),
      ...when(state.next === 'credited', 'the other sender writes', () => ({
        ...state,
        next: 'written' as const,
        content: 'new' as const,
      })),
      ...when(state.next === 'written', 'the receiver copies out', () => ({
        ...state,
        next: 'copied' as const,
        copied: state.content,
      })),
    ],
    ended: (state) => state.next === 'copied',
    broken: (state) =>
      state.copied === 'old' ? "another sender's message was overwritten by the late one" : undefined,
  };
}

/**
 * Messages of one sender to a receiver who comes at `receiverMs` and takes `serviceMs` for each: which of them time out. `enqueue`: the clock starts when
 * a message is queued, as in the reference. `activation`: when it is the oldest one and the receiver may be awaited.
 */
export function messageTimeouts(
  clock: 'enqueue' | 'activation',
  {
    messages,
    receiverMs,
    serviceMs,
    timeoutMs,
  }: Readonly<Record<'messages' | 'receiverMs' | 'serviceMs' | 'timeoutMs', number>>,
): readonly number[] {
  const late: number[] = [];
  let free = 0;
  for (let i = 0; i < messages; i++) {
    const ends = Math.max(free, receiverMs) + serviceMs;
    if (ends - (clock === 'enqueue' ? 0 : free) > timeoutMs) late.push(i);
    free = ends;
  }
  return late;
}
