/** Small dispatch steps, one after the other, on one rank: by a native loop, and called from JS. Every received word is checked. */
import { availableParallelism } from 'node:os';
import { type Tensor, type Transport, tensor } from '@ep/core';
import { allocateHost, nativePlaceOf } from '@ep/native';
import { stallsIn } from '@ep/native/ranks';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { bindSpecs } from '../src/binding-spec.js';
import { prepareCall } from '../src/call.js';
import { HostStream, leaseBytesFor, openDispatcher, type PartSpec } from '../src/index.js';
import { memoryBytes, signalSlots } from '../src/layout.js';

const TIMEOUT_MS = 120_000;
const [ROWS_PER_PAIR, WORDS] = [2, 32];
const ROW_BYTES = 4 * WORDS;
/** As many calls are made first: V8 compiles in threads of its own, and while it does they take the ranks' cores for milliseconds. */
const WARM_UP = 12_000;

/** Each of two runs of steps is preceded by as much: a second together. */
const STALL_MS = 500;

export interface StepTimes {
  readonly bytes: number;
  /** Nanoseconds for which this rank was kept from the clock before the steps; nothing where ranks outnumber cores and it left its core to another one. */
  readonly stalls?: Float64Array;
  /** Of each step, microseconds. */
  readonly native: Float64Array;
  readonly javascript: Float64Array;
}

/** A few rows from every rank to every rank. */
function evenSteps(worldSize: number): readonly PartSpec[] {
  const n = worldSize * worldSize;
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: new Int32Array(n).fill(ROWS_PER_PAIR),
    homeRank: Int32Array.from({ length: n }, (_, i) => Math.floor(i / worldSize)),
    documentOffsets: Int32Array.from({ length: n + 1 }, (_, i) => i),
  });
  const servers = Int32Array.from({ length: n }, (_, i) => i % worldSize);
  return [{ name: 'q', plan: planAttention(shards, servers).fwdQ, dtype: 'u32', rowShape: [WORDS] }];
}

export async function measureSteps(
  transport: Transport<'bundled' | 'add'>,
  steps: number,
  barrier: () => Promise<void>,
): Promise<StepTimes> {
  await barrier();
  // One a core: two on a core would stall each other.
  const stalls = transport.rank < availableParallelism() ? stallsIn(STALL_MS) : undefined;
  await barrier();
  const parts = evenSteps(transport.worldSize);
  const data = new Uint32Array(allocateHost(ROWS_PER_PAIR * transport.worldSize * ROW_BYTES));
  return {
    bytes: data.byteLength,
    ...(stalls === undefined ? {} : { stalls }),
    native: await nativeSteps(transport, parts, data, steps),
    javascript: await javascriptSteps(transport, parts, data, steps),
  };
}

async function nativeSteps(
  transport: Transport<'bundled' | 'add'>,
  parts: readonly PartSpec[],
  data: Uint32Array,
  steps: number,
): Promise<Float64Array> {
  const { rank, worldSize } = transport;
  const layout = { worldSize, leases: 1, leaseBytes: leaseBytesFor(parts), stagingBytes: 0 };
  const memory = await transport.allocate({
    byteLength: memoryBytes(layout),
    signalSlots: signalSlots(layout),
    timeoutMs: TIMEOUT_MS,
  });
  const [[, spec] = []] = bindSpecs(
    { step: parts },
    { rank, worldSize, chunkBytes: 2 ** 18, leaseBytes: layout.leaseBytes },
  );
  const place = { layout, memory, transportName: transport.name, lease: 0 };
  const { dispatch } = prepareCall(spec!, place, {
    handle: transport.device(memory).bytes,
    blocks: 1,
    simt: undefined,
  });
  const chunks = new Float64Array(2 * worldSize);
  chunks.set(spec!.chunksFrom);
  const samples = new Float64Array(allocateHost(8 * steps));
  const [source, target] = [nativePlaceOf(data)!, nativePlaceOf(samples)!];
  const stream = new HostStream();
  const end = await stream.launch((on) =>
    on.dispatchSteps(
      dispatch,
      chunks,
      TIMEOUT_MS,
      steps,
      source.operand,
      source.byteOffset,
      ROW_BYTES,
      data.byteLength,
      target.operand,
    ),
  );
  if (end.status !== 0)
    throw new Error(`native status ${end.status} of rank ${end.rank}: expected ${end.expected}, found ${end.found}`);
  await stream.close();
  await memory.close();
  return samples.map((nanoseconds) => nanoseconds / 1000);
}

async function javascriptSteps(
  transport: Transport<'bundled' | 'add'>,
  parts: readonly PartSpec[],
  data: Uint32Array,
  steps: number,
): Promise<Float64Array> {
  const source: Tensor = tensor('u32', [data.length / WORDS, WORDS], data);
  const dispatcher = await openDispatcher(transport, { leaseBytes: leaseBytesFor(parts), timeoutMs: TIMEOUT_MS });
  const { call } = await dispatcher.bind({ call: parts });
  const microseconds = new Float64Array(steps);
  for (let i = -WARM_UP; i < steps; i++) {
    const mark = i + WARM_UP;
    data.fill(mark);
    const begin = performance.now();
    const lease = await call.run({ q: source });
    const took = (performance.now() - begin) * 1000;
    // HAZARD: the same code warm and measured. A branch that only the measured calls take makes V8 compile this loop anew in the middle of them, on all ranks at once.
    microseconds[Math.max(i, 0)] = took;
    const received = lease.tensors.q!.data as Uint32Array;
    if (received.some((word) => word !== mark))
      throw new Error(`rank ${transport.rank} step ${mark} received another step's rows`);
    lease.release();
  }
  await dispatcher.close();
  return microseconds;
}
