/** A rank that makes calls of all kinds until it is killed or told to stop, and tells how each ended. In a worker thread or in a process. */
import { createHash } from 'node:crypto';
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { hostile } from '@ep/conformance/hostile';
import { isEpError, openFileStore, type Transport } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import type { EngineCall, OpKind } from '../../src/engine.js';
import { openPortableEngine } from '../../src/portable/engine.js';

export interface RankInit {
  readonly rank: number;
  readonly size: number;
  readonly storePath: string;
  /** `fabric`: on hosts of two ranks each. */
  readonly kind: 'hostile' | 'shm' | 'fabric';
  readonly seed: number;
  /** Ranks that are killed. */
  readonly victims: number;
}

/** One call: who contributed and what came out, or how it failed. */
export type Told = { readonly ready: true } | { readonly calls: readonly string[]; readonly view: readonly number[] };

/** After all losses were told, so many calls must work. */
const CALLS_AFTER = 5;
const KINDS = ['all-reduce', 'all-gather', 'barrier', 'reduce-scatter', 'all-to-all'] as const satisfies OpKind[];

const init = (isMainThread ? JSON.parse(process.argv[2]!) : workerData) as RankInit;
const tell = (message: Told): void => {
  if (parentPort) parentPort.postMessage(message);
  else process.send!(message);
};

function make(sequence: number, rank: number, size: number): EngineCall {
  const kind = KINDS[sequence % KINDS.length]!;
  // One chunk, or many.
  const length = sequence % 3 === 0 ? 1500 : 8;
  const array = (value: number): Float32Array => new Float32Array(length).fill(value);
  const each = (value: number): Float32Array[] => Array.from({ length: size }, (_, peer) => array(value * 100 + peer));
  const one = { inputs: [array(rank + 1)], outputs: [array(0)] };
  const arrays = {
    'all-reduce': one,
    'all-gather': { inputs: one.inputs, outputs: each(0) },
    barrier: { inputs: [], outputs: [] },
    'reduce-scatter': { inputs: each(rank + 1), outputs: one.outputs },
    'all-to-all': { inputs: each(rank + 1), outputs: each(0) },
  }[kind];
  const reduces = kind === 'all-reduce' || kind === 'reduce-scatter';
  return {
    kind,
    sequence,
    dtype: kind === 'barrier' ? 'u8' : 'f32',
    root: -1,
    timeoutMs: 60_000,
    ...arrays,
    ...(reduces && { reduceOp: 'sum' as const }),
  };
}

/** What must be the same on all ranks of what a call gave. */
function digest({ kind, outputs }: EngineCall): string {
  if (kind !== 'all-reduce' && kind !== 'all-gather') return '';
  const hash = createHash('sha256');
  for (const output of outputs) hash.update(new Uint8Array(output.buffer, output.byteOffset, output.byteLength));
  return hash.digest('hex').slice(0, 8);
}

const { rank, size, kind, seed, victims } = init;
const store = await openFileStore(init.storePath);
const { signal } = new AbortController();
const member = { rank, worldSize: size, store };
const open = {
  shm: () => nvshmem.shm.open(member, { signal }),
  hostile: () => hostile.open(member, { signal, config: { seed, maxDelayUs: 100 } }),
  fabric: () =>
    nvshmem.fabric.open(member, {
      signal,
      config: { provider: 'tcp;ofi_rxm', address: '127.0.0.1', ranksOnHost: size },
    }),
};
const transport: Transport<'bundled' | 'add'> & AsyncDisposable = await open[kind]();
const ranks = [...Array(size).keys()];
const engine = await openPortableEngine({
  transport,
  store,
  ranks,
  rank,
  name: 'world',
  timeoutMs: 30_000,
  stagingBytes: 2 ** 16,
  maxGroups: 2,
  ...(kind === 'fabric' && { hosts: ranks.map((member) => member - (member % 2)) }),
});
const calls: string[] = [];
/** A group of several hosts is ready once a call has gone in a round: one word, instead of one to each peer. */
let waits = kind === 'fabric';
if (!waits) tell({ ready: true });
for (let sequence = 1, after = 0; after <= CALLS_AFTER; sequence++) {
  const call = make(sequence, rank, size);
  const signals = engine.trace().barrier?.signals ?? 0;
  try {
    const { contributors } = await engine.run(call);
    calls.push(`${call.kind} of ${contributors} ${digest(call)}`);
    const told = (engine.trace().barrier?.signals ?? 0) - signals;
    if (waits && call.kind === 'barrier' && told === 1) {
      waits = false;
      tell({ ready: true });
    }
    if (contributors.length <= size - victims) after++;
  } catch (error) {
    calls.push(`${call.kind} ${isEpError(error) ? `${error.code} ${error.context.lost}` : String(error)}`);
    if (!isEpError(error) || error.code !== 'EP_PEER_LOST') break;
  }
}
tell({ calls, view: engine.view().active });
await engine.close();
await transport.close();
await store.close();
// The parent may want to hear of the end, not to wait for it.
if (!parentPort) process.disconnect();
