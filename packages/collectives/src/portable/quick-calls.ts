/**
 * Calls that end where they are made: this rank's word is said in a round, the round comes while the thread is held, all have said the same, and nothing else is the matter. Then a small call costs one
 * call into native code, which folds as well, and one that can be carried a few, and none of what makes a call one that may wait, fail or be passed on.
 *
 * Whatever is out of the ordinary sends a call the ordinary way, which finds there that its word has been said (`GroupRounds.say`). What others may need of a call that has ended here is made
 * from what the round keeps, when somebody asks.
 */
import type { RoundFold } from '@ep/core';
import type { EngineCall } from '../engine.js';
import { factorOf, reductionCode, TYPE_CODES } from '../shm/codes.js';
import type { CollectivesInit } from './collectives-init.js';
import { checkArrays } from './failures.js';
import { bytesOfCall, givenBy, MOST_GIVEN_BYTES, takeGiven } from './given.js';
import { type GroupRounds, headOf } from './group-rounds.js';
import type { OrderedCall, OrderedEnd } from './ordered.js';
import { describeCall, elements } from './signature.js';

/** Of a call that is made again and again. */
interface Shape extends Pick<EngineCall, 'kind' | 'dtype' | 'reduceOp' | 'root'> {
  readonly length: number;
  readonly head: Uint8Array;
  readonly fold: RoundFold | undefined;
  /** Of a call that is carried: what all say is the longest of its arrays, in bytes. */
  readonly carry: number | undefined;
}

type Said = Parameters<typeof headOf>[0];

type SaidOf = (call: EngineCall, rounds: GroupRounds) => Said | undefined;

const headOfSmall = (call: EngineCall): Said => ({ call: describeCall(call) });
const recordOfCarried: SaidOf = (call, rounds) => rounds.recordOf(call);

function foldOf(rounds: GroupRounds, { kind, dtype, reduceOp }: EngineCall): RoundFold | undefined {
  if ((kind !== 'all-reduce' && kind !== 'reduce') || reduceOp === undefined) return undefined;
  const [type, reduction] = [TYPE_CODES[dtype], reductionCode(reduceOp)];
  if (!rounds.folds(type, reduction)) return undefined;
  return { type, reduction, factor: factorOf(reduceOp) };
}

/** All arrays are as long as the first, so that a shape tells all lengths. */
function isEven(inputs: EngineCall['inputs'], outputs: EngineCall['outputs']): boolean {
  const { length } = inputs[0]!;
  return inputs.every((input) => input.length === length) && outputs.every((output) => output.length === length);
}

export interface QuickEnd extends OrderedEnd {
  /** In which its words were said. */
  readonly rounds: GroupRounds;
}

/** Programs repeat few. */
const SHAPES_KEPT = 4;

export class QuickCalls {
  readonly #init: CollectivesInit;
  readonly #shapes: Shape[] = [];
  /** Of calls in these rounds, once all peers are reached: they are for as long as nobody is gone. */
  #end: QuickEnd | undefined;

  constructor(init: CollectivesInit) {
    this.#init = init;
  }

  /** Of the next call, where nothing is under way and nobody has told of it. Its end; undefined: it goes the ordinary way. */
  run(call: OrderedCall): QuickEnd | undefined {
    const { membership, rank, orderOf, traces } = this.#init;
    const rounds = this.#init.rounds();
    if (rounds?.exchanges !== true || !membership.undisturbed) return undefined;
    const end = this.#end?.rounds === rounds ? this.#end : this.#reachAll(rounds);
    // HAZARD: a call that is cut must be told to others, who may have its word by then.
    if (end === undefined || call.signal !== undefined || call.membership !== undefined) return undefined;
    const { kind, sequence, inputs, outputs, root } = call;
    // It ends on all, but not well.
    if (root >= 0 && !end.contributors.includes(root)) return undefined;
    if (bytesOfCall(call, this.#init.size()) > MOST_GIVEN_BYTES) return this.#carry(call, end);
    const given = inputs.length <= 1 ? inputs[0] : givenBy(call);
    const byteLength = given?.byteLength ?? 0;
    // What others take of it is said by each, and not alike.
    if (kind === 'all-to-all') return undefined;
    const { head, fold } = this.#shapeOf(rounds, call, headOfSmall)!;
    const output = byteLength > 0 && fold !== undefined ? outputs[0] : undefined;
    const said = { sequence, kind, head, given: byteLength > 0 ? given : undefined, fold, output };
    if (!rounds.exchange(said)) return undefined;
    if (output === undefined && outputs.length > 0) {
      const { contributors } = end;
      try {
        takeGiven({ call, rank, contributors, order: orderOf(contributors) }, rounds.wordsOf(sequence));
      } catch {
        // There it fails again, and ends the call on all.
        return undefined;
      }
    }
    traces.call(kind);
    traces.signalled(kind);
    if (byteLength > 0) traces.wrote(kind, byteLength);
    return end;
  }

  #reachAll(rounds: GroupRounds): QuickEnd | undefined {
    const { rank, membership, reaches } = this.#init;
    const { active } = membership;
    if (!active.every((peer) => peer === rank || reaches(peer))) return undefined;
    // What is said of a call that is carried may be another in another view.
    this.#shapes.splice(0);
    this.#end = { contributors: active, rounds };
    return this.#end;
  }

  /** HAZARD: a shape has one length: an all-to-all of others goes the longer way, and says another word there. */
  #carry(call: OrderedCall, end: QuickEnd): QuickEnd | undefined {
    const { rounds } = end;
    const { traces } = this.#init;
    const { kind, inputs, outputs } = call;
    if (!rounds.carries || (kind === 'all-to-all' && !isEven(inputs, outputs))) return undefined;
    const shape = this.#shapeOf(rounds, call, recordOfCarried);
    if (shape?.carry === undefined) return undefined;
    const { head, carry } = shape;
    let sent: number | undefined;
    try {
      checkArrays(call);
      sent = rounds.carry(call, head, carry);
    } catch {
      // What failed fails again there, and ends the call on all.
    }
    if (sent === undefined) return undefined;
    traces.call(kind);
    traces.signalled(kind);
    if (sent > 0) traces.wrote(kind, sent);
    return end;
  }

  /** Undefined: `recordOf` has none. */
  #shapeOf(rounds: GroupRounds, call: EngineCall, recordOf: SaidOf): Shape | undefined {
    const { kind, dtype, reduceOp, root } = call;
    const length = elements(call);
    for (const shape of this.#shapes) {
      const isOf = shape.kind === kind && shape.dtype === dtype && shape.length === length;
      if (isOf && shape.reduceOp === reduceOp && shape.root === root) return shape;
    }
    const record = recordOf(call, rounds);
    if (record === undefined) return undefined;
    const { carry } = record;
    const fold = carry === undefined ? foldOf(rounds, call) : undefined;
    const shape: Shape = { kind, dtype, reduceOp, root, length, head: headOf(record), fold, carry };
    // Whoever gave an object may change it.
    if (typeof reduceOp !== 'object' && this.#shapes.unshift(shape) > SHAPES_KEPT) this.#shapes.pop();
    return shape;
  }
}
