/** Models as in models.ts, of how long ranks wait for one that does not come, and of whom they ask what to do then. */
import type { Model, Move } from './explore.js';

type Moves<S> = readonly Move<S>[];
const when = <S>(condition: boolean, name: string, to: () => S): Move<S>[] => (condition ? [{ name, to: to() }] : []);

// --- A peer that lives, and is stuck ----------------------------------------------------------------------------------------------------------

interface StuckState {
  readonly time: 'running' | 'up';
  readonly end: 'none' | 'straggler';
}

/** A waits for a rank that lives and never comes. `probe`: as long as it answers, the time begins anew, as in the reference. `deadline`: when it is up, A ends. */
export function stuckPeer(rule: 'probe' | 'deadline'): Model<StuckState> {
  return {
    start: { time: 'running', end: 'none' },
    moves: (state): Moves<StuckState> => [
      ...when(state.end === 'none' && state.time === 'running', 'the time passes', () => ({
        ...state,
        time: 'up' as const,
      })),
      ...when(state.time === 'up' && rule === 'probe', 'the probe finds it alive', () => ({
        ...state,
        time: 'running' as const,
      })),
      ...when(state.end === 'none' && state.time === 'up' && rule === 'deadline', 'A names the straggler', () => ({
        ...state,
        end: 'straggler' as const,
      })),
    ],
    ended: (state) => state.end !== 'none',
    broken: () => undefined,
  };
}

// --- Who decides ------------------------------------------------------------------------------------------------------------------------------

interface Decider {
  readonly noticed: boolean;
  /** Has told the other survivor. */
  readonly told: boolean;
  readonly end: 'none' | 'over the survivors' | 'aborted';
}

interface DecisionState {
  readonly coordinatorLives: boolean;
  readonly survivors: readonly [Decider, Decider];
}

/**
 * A rank is lost; A and B, which are left, need to know over whom they go on. `coordinator`: they ask rank 0, as in the reference, and rank 0 is the one that is lost.
 * `survivors`: they agree among themselves.
 */
export function decision(by: 'coordinator' | 'survivors'): Model<DecisionState> {
  const start: Decider = { noticed: false, told: false, end: 'none' };
  const change = (state: DecisionState, me: number, to: Partial<Decider>): DecisionState => ({
    ...state,
    survivors: state.survivors.map((one, i) => (i === me ? { ...one, ...to } : one)) as unknown as [Decider, Decider],
  });
  return {
    start: { coordinatorLives: true, survivors: [start, start] },
    moves: (state): Moves<DecisionState> => [
      ...when(state.coordinatorLives, 'rank 0 dies', () => ({ ...state, coordinatorLives: false })),
      ...state.survivors.flatMap((one, me) => {
        const name = 'AB'[me];
        const other = state.survivors[1 - me]!;
        const open = one.noticed && one.end === 'none';
        return [
          ...when(!state.coordinatorLives && !one.noticed, `${name} notices`, () =>
            change(state, me, { noticed: true }),
          ),
          ...when(open && by === 'coordinator', `${name} asks rank 0`, () => change(state, me, { end: 'aborted' })),
          ...when(open && by === 'survivors' && !one.told, `${name} tells the other`, () =>
            change(state, me, { told: true }),
          ),
          ...when(open && one.told && other.told, `${name} goes on`, () =>
            change(state, me, { end: 'over the survivors' }),
          ),
        ];
      }),
    ],
    ended: ({ survivors }) => survivors.every(({ end }) => end !== 'none'),
    broken: ({ survivors }) =>
      survivors.some(({ end }) => end === 'aborted') ? 'a survivor aborts: who decides is who was lost' : undefined,
  };
}

// --- When the survivors know ------------------------------------------------------------------------------------------------------------------

export interface Loss {
  /** When each survivor tells what it knows, after the first one does. */
  readonly reportsMs: readonly number[];
  readonly windowMs: number;
  /** What an operation of another group on the same worker takes. */
  readonly otherMs: number;
}

/**
 * When the operation that lost a rank ends, and one of another group that was made at the same time. `window`: a fixed time after the first report, in which the worker that both
 * share waits, as in the reference. `reported`: as soon as all have told, and nobody else waits.
 */
export function reconciliation(
  closes: 'window' | 'reported',
  { reportsMs, windowMs, otherMs }: Loss,
): { readonly lost: number; readonly other: number } {
  if (closes === 'window') return { lost: windowMs, other: windowMs + otherMs };
  return { lost: Math.max(...reportsMs), other: otherMs };
}
