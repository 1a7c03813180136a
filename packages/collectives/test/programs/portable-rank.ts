/** A rank that makes calls of all kinds until it is killed or told to stop, and tells how each ended. In a worker thread or in a process. */
import { createHash } from 'node:crypto';
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { hostile } from '@ep/conformance/hostile';
import { isEpError, openFileStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import type { EngineCall, OpKind } from '../../src/engine.js';
import { openPortableEngine } from '../../src/portable/engine.js';

export interface RankInit {
  readonly rank: number;
  readonly size: number;
  readonly storePath: string;
  readonly kind: 'hostile' | 'shm';
  readonly seed: number;
}

/** One call: who contributed and what came out, or how it failed. */
export type Told = { readonly ready: true } | { readonly calls: readonly string[]; readonly view: readonly number[] };

/** After the loss was told, so many calls must work. */
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

const { rank, size, kind, seed } = init;
const store = await openFileStore(init.storePath);
const { signal } = new AbortController();
const member = { rank, worldSize: size, store };
const transport =
  kind === 'shm'
    ? await nvshmem.shm.open(member, { signal })
    : await hostile.open(member, { signal, config: { seed, maxDelayUs: 100 } });
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
});
const calls: string[] = [];
tell({ ready: true });
for (let sequence = 1, after = 0; after <= CALLS_AFTER; sequence++) {
  const call = make(sequence, rank, size);
  try {
    const { contributors } = await engine.run(call);
    calls.push(`${call.kind} of ${contributors} ${digest(call)}`);
    if (contributors.length < size) after++;
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
