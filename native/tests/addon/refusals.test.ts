// What the addon must refuse: it is the last that can, since a kernel reads the addresses that it is given.
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type {
  DispatchDescription,
  NativeHostStream,
  NativeOperand,
  NativeRankContext,
  NativeSymmetricMemory,
} from '../../js/binding.js';
import { native } from '../../js/native.js';

const { binding, operations } = native();
const bytes = 8192;

let rank: NativeRankContext;
let memory: NativeSymmetricMemory;
let stream: NativeHostStream;
beforeAll(() => {
  rank = new binding.RankContext(0, 1, 1);
  rank.connect(rank.handle());
  memory = new binding.SymmetricMemory(rank, bytes, 8);
  memory.connect(memory.handle());
  stream = new binding.HostStream(0);
});
afterAll(() => {
  stream.close();
  memory.release();
  rank.close();
});

const description = (over: Partial<DispatchDescription>): DispatchDescription => ({
  handle: memory.deviceHandle(),
  parts: [],
  sums: [],
  arrivalSlot: 0,
  creditSlot: 1,
  nonTemporal: false,
  blocks: 1,
  ...over,
});

/** A dispatch of which nothing is awaited; `sources` as in `NativeHostStream.dispatch`. */
const launch = (over: Partial<DispatchDescription>, ...sources: readonly (NativeOperand | number)[]) =>
  stream.dispatch(new binding.Dispatch(description(over)), new Float64Array(2), 1000, false, ...sources);

it('ends an operation whose kernel has no memory for its stacks', async () => {
  const simt = { lanes: 1024, warpLanes: 32, seed: 1 };
  const end = await operations.run(() => launch({ blocks: 1024, simt }));
  expect(end.status).toBe(8);
  expect(end.message).toContain('simt executor');
});

describe('typed arrays', () => {
  const refusal = (message: string) => expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message });

  it('are refused as ranks unless they hold 32-bit integers', () => {
    for (const array of [new Float32Array(1), new Uint32Array(1), new BigInt64Array(1), new Uint8Array(4)]) {
      const ranks = array as unknown as Int32Array;
      expect(() => memory.waitWatch(0, 5, 0n, 1000, ranks)).toThrow(refusal('ranks must be an Int32Array'));
    }
  });

  it('are refused where their buffer was detached', () => {
    const gone = new Uint8Array(16);
    structuredClone(gone.buffer, { transfer: [gone.buffer] });
    expect(() => memory.putBytes(0, 0, gone)).toThrow(refusal('bytes is a typed array whose buffer was detached'));
    expect(() => memory.getBytes(0, 0, gone)).toThrow(refusal('into is a typed array whose buffer was detached'));
    memory.putBytes(0, 0, new Uint8Array(0)); // empty is not gone
  });
});

describe('rows whose end passes 2^64', () => {
  const words = (...values: bigint[]): BigUint64Array => BigUint64Array.from(values);
  // 2^24 times 2^40 is 2^64: as a product, row 2^24 of such a tensor lies at byte 0.
  const stride = 2 ** 40;
  const row = 1n << 24n;
  const host = new binding.HostMemory(bytes);
  const part = {
    rowBytes: 8,
    dstOffset: 0,
    dstRows: 4,
    program: new binding.DispatchProgram(words(row), words(0n), words(1n), new Int32Array(1), 1),
  };
  const sum = {
    source: host,
    srcOffset: 0,
    target: host,
    dstOffset: 2048,
    strideBytes: 8,
    rowElements: 2,
    dtype: 1,
    program: new binding.ReplicaSumProgram(words(0n), words(1n), words(0n, 1n), words(0n)),
  };
  const refused = (over: Partial<DispatchDescription>, ...sources: readonly (NativeOperand | number)[]) =>
    expect(() => launch(over, ...sources)).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringContaining('exceed') }),
    );

  it('are refused as the source of a part', () => refused({ parts: [part] }, host, 0, stride));

  it('are refused as staged rows', () => {
    const program = new binding.DispatchProgram(words(0n), words(0n), words(1n), new Int32Array(1), 1);
    const staging = { sendOffset: 0, recvOffset: 0, sendRows: 0, recvRows: 0 };
    const sendRows = 4097;
    const staged = { ...part, rowBytes: 1, program, staging: { ...staging, sendRows } };
    refused({ parts: [staged] }, host, 0, 2 ** 52);
  });

  it('are refused as home rows of a sum', () => {
    const program = new binding.ReplicaSumProgram(words(row), words(1n), words(0n, 0n), words());
    refused({ sums: [{ ...sum, strideBytes: stride, program }] });
  });

  it('are refused where the row itself is the last that 64 bits can number', () => {
    const program = new binding.ReplicaSumProgram(words((1n << 64n) - 1n), words(2n), words(0n, 0n), words());
    refused({ sums: [{ ...sum, program }] });
  });

  it('are refused as a replica', () => {
    const program = new binding.ReplicaSumProgram(words(0n), words(1n), words(0n, 1n), words(1n << 61n));
    refused({ sums: [{ ...sum, program }] });
  });

  it('are not confused with rows that fit', async () => {
    const fits = {
      ...part,
      program: new binding.DispatchProgram(words(1n), words(1n), words(1n), new Int32Array(1), 1),
    };
    const end = await operations.run(() => launch({ parts: [fits], sums: [sum] }, host, 0, 8));
    expect(end.status).toBe(0);
  });
});

describe('a call of a dispatch', () => {
  const program = new binding.DispatchProgram(
    BigUint64Array.of(1n),
    BigUint64Array.of(1n),
    BigUint64Array.of(1n),
    new Int32Array(1),
    1,
  );
  const host = new binding.HostMemory(bytes);
  const parts = [{ rowBytes: 8, dstOffset: 0, dstRows: 4, program }];
  const invalid = (message: string) =>
    expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringContaining(message) });

  it('takes three arguments for each source', () => {
    expect(() => launch({ parts })).toThrow(invalid('of 1 parts takes three arguments'));
    expect(() => launch({ parts }, host, 0, 8, host, 0, 8)).toThrow(invalid('of 1 parts takes three arguments'));
    expect(() => launch({ parts }, host, 0)).toThrow(invalid('of 1 parts takes three arguments'));
  });

  it('refuses rows that overlap, begin behind the source, or are of no native memory', () => {
    expect(() => launch({ parts }, host, 0, 4)).toThrow(invalid('strideBytes is smaller'));
    expect(() => launch({ parts }, host, bytes + 1, 8)).toThrow(invalid('lies beyond'));
    expect(() => launch({ parts }, {} as NativeOperand, 0, 8)).toThrow(invalid('source is neither'));
  });

  it('refuses counters that are no counts of this world', () => {
    const dispatch = new binding.Dispatch(description({}));
    for (const counters of [
      new Float64Array(1),
      new Float64Array(3),
      new BigUint64Array(2),
      Float64Array.of(0, -1),
      Float64Array.of(NaN, 0),
    ]) {
      expect(() => stream.dispatch(dispatch, counters as Float64Array, 1000, false)).toThrow(invalid('counters'));
    }
    expect(() => stream.dispatch({} as never, new Float64Array(2), 1000, false)).toThrow(invalid('not a Dispatch'));
  });

  it('refuses a memory that was closed, and does not hold it open', () => {
    const short = new binding.SymmetricMemory(rank, 4096, 8);
    short.connect(short.handle());
    const dispatch = new binding.Dispatch(description({ handle: short.deviceHandle() }));
    short.release();
    expect(() => stream.dispatch(dispatch, new Float64Array(2), 1000, false)).toThrow(
      expect.objectContaining({ code: 'EP_CLOSED' }),
    );
  });
});

describe('a call whose arguments lie in the frame', () => {
  const { frame } = native();
  const invalid = (message: string) =>
    expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringContaining(message) });
  const put = (peer: number, to: number, from: number, size: number, op = 0, slot = 0, value = 0n) => {
    frame.put(peer, to, from, size);
    frame.signal(peer, op, slot, value);
    memory.putFrame();
  };

  it('moves what it says, to the last byte', () => {
    const view = new Uint8Array(memory.window(0, 0, bytes));
    view.fill(7, 0, 8);
    put(0, bytes - 8, 0, 8, 1, 2, 5n);
    expect([...view.subarray(bytes - 8)]).toEqual(new Array(8).fill(7));
    frame.signal(0, 2, 2, (1n << 64n) - 1n);
    memory.signalFrame();
    expect(memory.peek(2)).toBe((1n << 64n) - 1n);
    binding.detach(view.buffer);
  });

  it('is refused where a range, a rank, a slot or an operation is wrong, and writes nothing', () => {
    const before = memory.peek(3);
    expect(() => put(0, bytes - 7, 0, 8)).toThrow(invalid('exceed a memory'));
    expect(() => put(0, 0, bytes - 7, 8)).toThrow(invalid('exceed a memory'));
    expect(() => put(0, bytes + 1, 0, 0)).toThrow(invalid('exceed a memory'));
    expect(() => put(0, 0, 0, 2 ** 53)).toThrow(invalid('byteLength'));
    expect(() => put(0, 0, 0, -1)).toThrow(invalid('byteLength'));
    expect(() => put(0, 0.5, 0, 1)).toThrow(invalid('byteOffset'));
    for (const peer of [1, -1, 0.5, Number.NaN]) expect(() => put(peer, 0, 0, 8, 1, 3, 1n)).toThrow(invalid('peer'));
    expect(() => put(0, 0, 0, 8, 1, 8, 1n)).toThrow(invalid('slot 8 of a pad with 8'));
    expect(() => put(0, 0, 0, 8, 3, 3, 1n)).toThrow(invalid('signal op 3'));
    frame.signal(0, 0, 3, 1n);
    expect(() => memory.signalFrame()).toThrow(invalid('signal op 0'));
    expect(memory.peek(3)).toBe(before);
  });
});

it('refuses steps to be measured of what they cannot be', () => {
  const host = new binding.HostMemory(bytes);
  const words = (...values: bigint[]): BigUint64Array => BigUint64Array.from(values);
  const program = new binding.DispatchProgram(words(0n), words(0n), words(1n), new Int32Array(1), 1);
  const steps = (rowBytes: number, stride: number, rounds: number, received: number) => {
    const dispatch = new binding.Dispatch(description({ parts: [{ rowBytes, dstOffset: 0, dstRows: 4, program }] }));
    return stream.dispatchSteps(dispatch, Float64Array.of(1, 0), 1000, rounds, host, 0, stride, received, host);
  };
  const invalid = (message: string) =>
    expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringContaining(message) });
  expect(() => steps(4, 4, 1, 4)).toThrow(invalid('whole 8-byte words'));
  expect(() => steps(8, 16, 1, 8)).toThrow(invalid('packed rows'));
  expect(() => steps(8, 8, 1, bytes + 8)).toThrow(invalid('receivedBytes'));
  expect(() => steps(8, 8, bytes, 8)).toThrow(invalid('do not fit the samples'));
});
