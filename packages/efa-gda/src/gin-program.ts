/** Lists of calls to the GIN facade: into `ep_gin_step`s in native memory, and what became of them. */
import { checkInteger, EpError, invalid, type Rank } from '@ep/core';
import {
  codeOfStatus,
  EP_NIC_FOUND_INDEX,
  EP_NIC_FOUND_QPN,
  EP_NIC_FOUND_SYNDROME,
  EP_STAGE_NIC,
  EP_STAGE_RANGE,
  type GinCall,
  type NativeHostMemory,
  native,
  type Outcome,
} from '@ep/native';
import {
  EP_GIN_AGGREGATE,
  EP_GIN_COUNTED,
  EP_GIN_ENDED,
  EP_GIN_FLUSH,
  EP_GIN_GET,
  EP_GIN_LOOK_COUNTER,
  EP_GIN_LOOK_SIGNAL,
  EP_GIN_PUT,
  EP_GIN_PUT_VALUE,
  EP_GIN_READ_COUNTER,
  EP_GIN_READ_SIGNAL,
  EP_GIN_RESET_COUNTER,
  EP_GIN_RESET_SIGNAL,
  EP_GIN_SIGNAL,
  EP_GIN_WAIT_COUNTER,
  EP_GIN_WAIT_SIGNAL,
  type GinStep,
  ginStepLayout,
  readGinStep,
  writeGinStep,
} from '@ep/native/abi';
import { waitError } from '@ep/native/ranks';
import { pairError } from './failure.js';

const mostCalls = 2 ** 16;

const codes: Readonly<Record<GinCall['op'], number>> = {
  put: EP_GIN_PUT,
  putValue: EP_GIN_PUT_VALUE,
  get: EP_GIN_GET,
  signal: EP_GIN_SIGNAL,
  flush: EP_GIN_FLUSH,
  waitSignal: EP_GIN_WAIT_SIGNAL,
  waitCounter: EP_GIN_WAIT_COUNTER,
  readSignal: EP_GIN_READ_SIGNAL,
  readCounter: EP_GIN_READ_COUNTER,
  lookSignal: EP_GIN_LOOK_SIGNAL,
  lookCounter: EP_GIN_LOOK_COUNTER,
  resetSignal: EP_GIN_RESET_SIGNAL,
  resetCounter: EP_GIN_RESET_COUNTER,
};

const gives: readonly string[] = ['readSignal', 'readCounter', 'lookSignal', 'lookCounter'];

/** Every field that some call has. */
type AnyCall = Readonly<
  Record<'op', GinCall['op']> &
    Partial<Record<'peer' | 'from' | 'to' | 'bytes' | 'signal' | 'add' | 'counter', number>> & {
      value?: bigint;
      aggregate?: boolean;
    }
>;

/** Numbers are only looked at for being numbers: ranges are the facade's, which knows the context and the memory. */
function stepOf(call: AnyCall, where: string): GinStep {
  const op = codes[call.op];
  if (op === undefined) throw invalid('op', { where, expected: Object.keys(codes).join(', '), found: call.op });
  const { value = 0n, signal, counter } = call;
  if (typeof value !== 'bigint') throw invalid('value', { where, expected: 'a bigint', found: value });
  const word = (name: string, found = 0): number => checkInteger(found, name, where, 0, 0xffff_ffff);
  const offset = (name: string, found = 0): bigint => BigInt(checkInteger(found, name, where));
  const put = call.op === 'put' && counter !== undefined ? EP_GIN_COUNTED : 0;
  return {
    op,
    peer: checkInteger(call.peer ?? 0, 'peer', where, -(2 ** 31), 2 ** 31 - 1),
    to: offset('to', call.to),
    from: offset('from', call.from),
    bytes: offset('bytes', call.bytes),
    value: BigInt.asUintN(64, value),
    found: 0n,
    signal: word('signal', signal),
    add: signal === undefined ? 0 : word('add', call.add ?? 1),
    counter: word('counter', counter),
    flags: put | (call.aggregate === true ? EP_GIN_AGGREGATE : 0),
  };
}

/** What the facade compares the numbers of a call with. */
export interface GinLimits {
  readonly worldSize: number;
  readonly signals: number;
  readonly counters: number;
  /** Of each rank's part of the memory. */
  readonly byteLength: number;
}

const withPeer: readonly string[] = ['put', 'putValue', 'get', 'signal'];
const widths: readonly number[] = [1, 2, 4, 8];

/** The number that the facade refused, by its name and as it was given; kernels tell of their own form of it. Undefined: none is out of range. */
function refusedOf(call: AnyCall, where: string, limits: GinLimits): EpError | undefined {
  const { op, peer = 0, bytes = 0, to = 0, from = 0, add = 1 } = call;
  const outside = (what: string, found: number, end: number): EpError | undefined => {
    if (found >= 0 && found < end) return undefined;
    const expected = end === 0 ? 'absent: there are none' : `an integer from 0 to ${end - 1}`;
    return invalid(what, { where, expected, found });
  };
  const signals =
    op.endsWith('Signal') || (withPeer.includes(op) && op !== 'get' && call.signal !== undefined && add !== 0);
  const counts = op.endsWith('Counter') || (op === 'put' && call.counter !== undefined);
  const id =
    (withPeer.includes(op) ? outside('peer', peer, limits.worldSize) : undefined) ??
    (signals ? outside('signal', call.signal ?? 0, limits.signals) : undefined) ??
    (counts ? outside('counter', call.counter ?? 0, limits.counters) : undefined);
  if (id !== undefined || op === 'signal' || !withPeer.includes(op)) return id;
  if (op === 'putValue' && !widths.includes(bytes)) {
    return invalid('bytes', { where, expected: widths.join(', '), found: bytes });
  }
  return (
    outside('bytes', bytes, limits.byteLength + 1) ??
    outside('to', to, limits.byteLength - bytes + 1) ??
    (op === 'putValue' ? undefined : outside('from', from, limits.byteLength - bytes + 1))
  );
}

/** The steps of one run. */
export class GinProgram {
  readonly memory: NativeHostMemory;
  readonly #calls: readonly GinCall[];
  readonly #view: DataView;

  /** Throws `EP_INVALID_ARGUMENT` for what is no list of calls. */
  constructor(calls: readonly GinCall[], where: string) {
    if (!Array.isArray(calls) || calls.length > mostCalls) {
      throw invalid('calls', { where, expected: `a list of at most ${mostCalls} calls`, found: calls });
    }
    const bytes = ginStepLayout.byteLength * Math.max(calls.length, 1);
    this.memory = new (native().binding.HostMemory)(bytes);
    this.#calls = [...calls];
    this.#view = new DataView(this.memory.window(0, bytes));
    for (const [i, call] of calls.entries()) {
      if (typeof call !== 'object' || call === null) {
        throw invalid(`call ${i}`, { where, expected: 'an object with op', found: call });
      }
      writeGinStep(this.#view, i * ginStepLayout.byteLength, stepOf(call as AnyCall, `${where}: call ${i}`));
    }
  }

  get count(): number {
    return this.#calls.length;
  }

  /** Of the calls that give a count, in their order. */
  found(): readonly bigint[] {
    return this.#calls.flatMap(({ op }, i) => (gives.includes(op) ? [this.#step(i).found] : []));
  }

  /** What ended the run. `life` of a rank: `EP_LIFE_*`. */
  error(
    where: string,
    outcome: Outcome,
    { timeoutMs, life, limits }: { timeoutMs: number; life: (peer: Rank) => number; limits: GinLimits },
  ): EpError {
    const ended = this.#calls.findIndex((_, i) => (this.#step(i).flags & EP_GIN_ENDED) === 0);
    const at = ended < 0 ? where : `${where}: call ${ended} (${this.#calls[ended]!.op})`;
    const { stage, rank, expected, found, status } = outcome;
    if (stage === EP_STAGE_RANGE && codeOfStatus(status) === 'EP_INVALID_ARGUMENT') {
      const refused = ended < 0 ? undefined : refusedOf(this.#calls[ended] as AnyCall, at, limits);
      return refused ?? new EpError('EP_INVALID_ARGUMENT', `${at}: ${found} is out of range, at most ${expected}`);
    }
    if (stage === EP_STAGE_NIC) {
      const bits = (shift: number, width: number) => Number(BigInt.asUintN(width, BigInt(found) >> BigInt(shift)));
      const failure = {
        status,
        efaStatus: bits(EP_NIC_FOUND_SYNDROME, 8),
        qpn: bits(EP_NIC_FOUND_QPN, 24),
        wqe: bits(EP_NIC_FOUND_INDEX, 16),
        remoteAddress: BigInt(expected),
        peer: rank,
      };
      return pairError(at, rank, failure, life(rank));
    }
    return waitError(at, outcome, { timeoutMs, progress: `expected ${expected}, found ${found}` });
  }

  #step(index: number): GinStep {
    return readGinStep(this.#view, index * ginStepLayout.byteLength);
  }
}
