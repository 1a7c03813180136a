/**
 * Contexts that are wrong on purpose: each breaks one promise in a way that somebody's implementation did or might, and the case that tells of it must fail over it.
 */
import type { Need, SymmetricMemory, TransportProvider, WaitOptions } from '@ep/core';
import type { GinCall } from '@ep/native';
import type { GinContext, GinOptions, GinTransport } from './gin-case.js';

type Run = (calls: readonly GinCall[], options?: WaitOptions) => Promise<readonly bigint[]>;

interface Break {
  readonly id: string;
  readonly sentence: string;
  /** Of `ginCases`: those that must fail. */
  readonly fails: readonly string[];
  /** Of a software NIC: what brings the mistake to light at once, and harms nobody else. */
  readonly faults?: string;
  readonly options?: (options: GinOptions) => GinOptions;
  /** Other calls in the place of some, for each context anew. */
  readonly calls?: () => (call: GinCall) => readonly GinCall[];
  /** Other counts than the calls gave. */
  readonly counts?: () => (calls: readonly GinCall[], found: readonly bigint[]) => readonly bigint[];
  readonly run?: (inner: Run) => Run;
  /** All contexts of a transport are one. */
  readonly one?: boolean;
}

const without = (call: GinCall, field: string): GinCall =>
  Object.fromEntries(Object.entries(call).filter(([name]) => name !== field)) as unknown as GinCall;

const dropping =
  (...ops: readonly GinCall['op'][]) =>
  () =>
  (call: GinCall) =>
    ops.includes(call.op) ? [] : [call];

const gives = (call: GinCall): boolean => /^(read|look)/.test(call.op);

export const ginBreaks: readonly Break[] = [
  {
    id: 'signal-apart',
    sentence: 'the signal is a request of its own, behind that of the bytes',
    fails: ['gin/put-signal'],
    faults: 'delay stage=land ns=50000000 count=1',
    calls: () => (call) =>
      call.op === 'put' && call.signal !== undefined
        ? [without(without(call, 'signal'), 'add'), { ...call, op: 'signal' }]
        : [call],
  },
  {
    id: 'wide-values',
    sentence: 'values travel as words of eight bytes',
    fails: ['gin/put-value'],
    calls: () => (call) => [call.op === 'putValue' ? { ...call, bytes: 8 } : call],
  },
  {
    id: 'add-once',
    sentence: 'adding N is one arrival',
    fails: ['gin/add'],
    calls: () => (call) => [without(call, 'add')],
  },
  {
    id: 'counter-at-post',
    sentence: 'a counter ticks when its put is posted',
    fails: ['gin/counter'],
    calls: () => (call) => (call.op === 'waitCounter' ? [] : [call]),
    counts: () => {
      let posted = 0n;
      return (calls, found) => {
        posted += BigInt(calls.filter((call) => call.op === 'put' && call.counter !== undefined).length);
        const asked = calls.filter(gives);
        return found.map((count, i) => (asked[i]!.op.endsWith('Counter') ? posted : count));
      };
    },
  },
  {
    id: 'counter-signals',
    sentence: "a put with a counter goes to the peer's queue pair of that number, and ticks its signal (D3)",
    fails: ['gin/counter-apart'],
    calls: () => (call) => [
      call.op === 'put' && call.signal === undefined && call.counter === 0 ? { ...call, signal: 0 } : call,
    ],
  },
  {
    id: 'flush-nothing',
    sentence: 'a flush returns at once',
    fails: ['gin/flush', 'gin/flush-rings', 'gin/get'],
    // Without it, a NIC on a core of its own may be done before anybody looks.
    faults: 'delay stage=land ns=20000000',
    calls: dropping('flush'),
  },
  {
    id: 'never-rings',
    sentence: 'whoever aggregates has to flush',
    fails: ['gin/aggregate'],
    calls: () => {
      let left = false;
      return (call) => {
        left = (left && call.op !== 'flush') || ('aggregate' in call && call.aggregate === true);
        return [left && 'peer' in call ? { ...call, aggregate: true } : call];
      };
    },
  },
  {
    id: 'short-get',
    sentence: 'a get leaves out the last byte',
    fails: ['gin/get', 'gin/flush'],
    calls: () => (call) => [call.op === 'get' && call.bytes > 0 ? { ...call, bytes: call.bytes - 1 } : call],
  },
  {
    id: 'stale-address',
    sentence: 'an address knows of no reset',
    fails: ['gin/addresses'],
    counts: () => {
      let reset = 0n;
      let last = 0n;
      return (calls, found) => {
        if (calls.some((call) => call.op === 'resetSignal')) reset += last;
        const asked = calls.filter(gives);
        last = found[asked.findIndex((call) => call.op === 'readSignal')] ?? last;
        return found.map((count, i) => (asked[i]!.op === 'lookSignal' ? count + reset : count));
      };
    },
  },
  {
    id: 'no-reset',
    sentence: 'a reset stores to memory that the NIC overwrites with its own count (D4)',
    fails: ['gin/reset', 'gin/addresses'],
    calls: dropping('resetSignal', 'resetCounter'),
  },
  {
    id: 'reset-all',
    sentence: 'a reset begins all signals again',
    fails: ['gin/reset'],
    calls: () => (call) => (call.op === 'resetSignal' ? [0, 1].map((signal) => ({ ...call, signal })) : [call]),
  },
  { id: 'one-context', sentence: 'contexts share their queue pairs', fails: ['gin/own-counts'], one: true },
  {
    id: 'clamps',
    sentence: 'ids are taken modulo what there is',
    fails: ['gin/refusals'],
    calls: () => (call) => [
      'signal' in call && call.signal !== undefined ? { ...call, signal: call.signal % 2 } : call,
    ],
  },
  {
    id: 'one-sharing',
    sentence: 'the way of sharing is ignored',
    fails: ['gin/sharing'],
    options: ({ signals, counters }) => ({ signals, counters }),
  },
  {
    id: 'spare-ids',
    sentence: 'a context has one signal and one counter at least',
    fails: ['gin/of-nothing'],
    options: (options) => ({
      ...options,
      signals: Math.max(1, options.signals),
      counters: Math.max(1, options.counters),
    }),
  },
  {
    id: 'any-numbers',
    sentence: 'contexts are made of one size, whatever ranks ask for',
    fails: ['gin/alike'],
    options: (options) => ({ ...options, signals: 4, counters: 4 }),
  },
  {
    id: 'deaf',
    sentence: "waits know neither their caller's deadline nor his abort",
    fails: ['gin/waits-end'],
    run: (inner) => (calls) => inner(calls),
  },
];

function breakContext(inner: GinContext, broken: Break): GinContext {
  const change = broken.calls?.() ?? ((call: GinCall) => [call]);
  const counts = broken.counts?.() ?? ((_: readonly GinCall[], found: readonly bigint[]) => found);
  return {
    run: (memory: SymmetricMemory, calls, options) => {
      const plain: Run = async (made, limits) => counts(calls, await inner.run(memory, made.flatMap(change), limits));
      return (broken.run?.(plain) ?? plain)(calls, options);
    },
    readSignal: (id) => inner.readSignal(id),
    readCounter: (id) => inner.readCounter(id),
    close: () => inner.close(),
  };
}

/** A provider of transports with `openGin`, whose contexts are broken. Everything else is the wrapped one's. */
export function breakProvider(inner: TransportProvider<Need>, broken: Break): TransportProvider<Need> {
  return {
    name: inner.name,
    probe: (config) => inner.probe(config),
    open: async (member, options) => {
      const transport = (await inner.open(member, options)) as GinTransport;
      let first: Promise<GinContext> | undefined;
      const openGin = async (wanted: GinOptions): Promise<GinContext> => {
        const made = async () => breakContext(await transport.openGin(broken.options?.(wanted) ?? wanted), broken);
        if (broken.one !== true) return made();
        first ??= made();
        return first;
      };
      return new Proxy(transport, {
        get: (target, name) => {
          if (name === 'openGin') return openGin;
          const value = Reflect.get(target, name, target) as unknown;
          return typeof value === 'function' ? value.bind(target) : value;
        },
      });
    },
  };
}
