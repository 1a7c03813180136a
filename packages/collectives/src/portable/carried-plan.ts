/**
 * The data of a large call that native code carries (`Carrier` of core): JS begins it and holds its thread for it, a few milliseconds at a time, with a turn of the event loop in between. All ranks
 * have said, with what they call, that they can; so all do.
 *
 * HAZARD: a carrier says that a call is over only once all ranks have their data, and said so: nobody tells it again in records, but with its good-bye.
 */
import type { CarriedCall, Carrier, CarrierMaker } from '@ep/core';
import type { Elements, EngineCall } from '../engine.js';
import { factorOf, reductionCode, TYPE_CODES } from '../shm/codes.js';
import type { PlannedCall } from './collectives-init.js';
import type { DataPlan } from './plan.js';

/** Between turns in which nothing has moved: somebody is away. */
const FIRST_PAUSE_MS = 1;
const LONGEST_PAUSE_MS = 8;

/** Whether carriers have calls like this one, whatever its length. */
export function isCarried({ kind, dtype, reduceOp }: EngineCall, maker: Pick<CarrierMaker, 'carries'>): boolean {
  if (reduceOp !== undefined) return maker.carries(TYPE_CODES[dtype], reductionCode(reduceOp));
  return kind !== 'barrier';
}

/** The call as it is among some ranks: of arrays one for each rank there are those of members alone, and the root is counted among them. */
export function callAmong(call: EngineCall, members: readonly number[]): EngineCall {
  const { kind, inputs, outputs, root } = call;
  const ofMembers = (arrays: readonly Elements[], isOfRanks: boolean): readonly Elements[] =>
    isOfRanks && arrays.length > 0 ? members.map((rank) => arrays[rank]!) : arrays;
  return {
    ...call,
    inputs: ofMembers(inputs, kind === 'all-to-all' || kind === 'reduce-scatter' || kind === 'scatter'),
    outputs: ofMembers(outputs, kind === 'all-to-all' || kind === 'all-gather' || kind === 'gather'),
    root: root < 0 ? root : members.indexOf(root),
  };
}

/** Bytes of the longest array that this rank gives, or takes of a root. */
export function longestOf({ inputs, outputs }: EngineCall): number {
  return Math.max(...(inputs.length === 0 ? outputs : inputs).map(({ byteLength }) => byteLength));
}

/** As carriers have it. */
export function carriedCallOf({ sequence, kind, dtype, reduceOp, root }: EngineCall, longest: number): CarriedCall {
  return {
    number: sequence,
    kind: kind as CarriedCall['kind'],
    type: TYPE_CODES[dtype],
    reduction: reductionCode(reduceOp),
    factor: factorOf(reduceOp),
    longest,
    root: Math.max(root, 0),
  };
}

/** A call, as `callAmong` has it, that a carrier has begun, and goes on with whenever it is given a turn. */
export class BegunCall {
  readonly sequence: number;
  readonly #carrier: Carrier;
  readonly #inputs: readonly Elements[];
  readonly #outputs: readonly Elements[];
  readonly #longest: number;

  /** `longest`: with which it was begun. */
  constructor(carrier: Carrier, { sequence, inputs, outputs }: EngineCall, longest: number) {
    this.sequence = sequence;
    this.#carrier = carrier;
    this.#longest = longest;
    this.#inputs = inputs;
    this.#outputs = outputs;
  }

  /** `longest`: of all ranks' `longestOf`. */
  static begin(carrier: Carrier, call: EngineCall, longest: number): BegunCall {
    carrier.begin(carriedCallOf(call, longest));
    return new BegunCall(carrier, call, longest);
  }

  /** As all have told by now. */
  settle(longest: number): void {
    if (longest !== this.#longest) this.#carrier.lengthen!(longest);
  }

  /** Holds the thread for so long at most. */
  turn(mostMs: number): ReturnType<Carrier['carry']> {
    return this.#carrier.carry(this.#inputs, this.#outputs, mostMs);
  }

  /** Bytes that left the host from here. */
  get sent(): number {
    return this.#carrier.sent;
  }
}

export interface CarriedInit extends PlannedCall {
  /** Of a call that has begun, and had a turn. */
  readonly begun: BegunCall | undefined;
  readonly begin: () => BegunCall;
  /** Of a turn, in milliseconds. */
  readonly mostMs: () => number;
}

export class CarriedPlan implements DataPlan {
  readonly lacking: readonly number[] = [];
  readonly sink = (): undefined => undefined;
  readonly agreed = true;
  readonly #init: CarriedInit;
  #begun: BegunCall | undefined;
  #pending = 1;
  #cut = false;
  #next: (() => void) | undefined;

  constructor(init: CarriedInit) {
    this.#init = init;
  }

  get pending(): number {
    return this.#pending;
  }

  readonly begin = (): void => {
    const { begun, begin, onFailed } = this.#init;
    try {
      this.#begun = begun ?? begin();
    } catch (error) {
      // HAZARD: not from within: whoever begins the plan holds its call.
      queueMicrotask(() => onFailed(error));
      return;
    }
    // The thread has been held for it already.
    this.#turn(FIRST_PAUSE_MS, () => {}, begun === undefined ? this.#init.mostMs() : 0);
  };

  readonly cut = (): void => {
    this.#cut = true;
    this.#next?.();
    this.#next = undefined;
  };

  readonly look = (): void => {
    this.#next?.();
    this.#turn(FIRST_PAUSE_MS, this.#init.onComplete, 0);
  };

  /** `pauseMs`: before the next turn, if nothing moves in this one. */
  #turn(pauseMs: number, onOver: () => void, mostMs = this.#init.mostMs()): void {
    const { onSent, onComplete, onFailed } = this.#init;
    const begun = this.#begun;
    if (this.#cut || this.#pending === 0 || begun === undefined) return;
    let found: ReturnType<Carrier['carry']>;
    try {
      found = begun.turn(mostMs);
    } catch (error) {
      queueMicrotask(() => onFailed(error));
      return;
    }
    if (found === 'over') {
      this.#pending = 0;
      if (begun.sent > 0) onSent(begun.sent);
      onOver();
    } else if (found === 'moved') {
      const next = setImmediate(() => this.#turn(FIRST_PAUSE_MS, onComplete));
      this.#next = () => clearImmediate(next);
    } else {
      const next = setTimeout(() => this.#turn(Math.min(2 * pauseMs, LONGEST_PAUSE_MS), onComplete), pauseMs);
      this.#next = () => clearTimeout(next);
    }
  }
}
