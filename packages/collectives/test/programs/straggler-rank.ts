/** One of several ranks, processes, of which one is stopped for a while: SIGSTOP is no death. */
import { CloseScope, isEpError, openFileStore, prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { initProcessGroup, type ProcessGroup } from '../../src/index.js';
import type { StragglerArguments, StragglerMessage } from '../failure/straggler.js';

const HUNG_MS = 20_000;
const { rank, worldSize, stopped, storePath, backend, busy } = JSON.parse(process.argv[2]!) as StragglerArguments;
const tell = (message: StragglerMessage): boolean => process.send!(message);
const told = (what: string): Promise<void> =>
  new Promise((resolve) => {
    process.on('message', (message) => {
      if (message === what) resolve();
    });
  });

const scope = new CloseScope();
const store = scope.add(await openFileStore(storePath));

async function openGroup(name: string): Promise<ProcessGroup> {
  const options = { store: prefixStore(store, name), rank, worldSize, timeoutMs: HUNG_MS };
  if (backend === 'shm') return scope.add(await initProcessGroup({ backend, ...options }));
  const member = { rank, worldSize, store: prefixStore(store, `transport ${name}`) };
  const transport = scope.add(await nvshmem.shm.open(member, { signal: new AbortController().signal }));
  return scope.add(await initProcessGroup({ backend: transport, ...options }));
}

/** Throws unless everybody takes part. */
async function checkSum(group: ProcessGroup): Promise<void> {
  const data = Int32Array.of(1);
  await group.allReduce(data, { op: 'sum' });
  if (data[0] !== worldSize) throw new Error(`expected the sum of ${worldSize} ranks, found ${data[0]}`);
}

try {
  const group = await openGroup('first');
  await checkSum(group);
  const go = told('go');
  const continued = told('continued');
  tell({ kind: 'ready' });
  await go;
  if (rank === stopped) process.kill(process.pid, 'SIGSTOP');
  if (busy) {
    try {
      // The stopped rank comes here when it is let go, long after the others' deadline.
      await group.allReduce(new Float32Array(300_000), { op: 'sum', timeoutMs: rank === stopped ? HUNG_MS : 1_000 });
      throw new Error('the operation was done without the stopped rank, or after all');
    } catch (error) {
      if (!isEpError(error)) throw error;
      const { awaited } = error.context as { readonly awaited?: readonly number[] };
      tell({ kind: 'ended', code: error.code, message: error.message, ...(awaited && { awaited }) });
    }
  }
  await continued;
  // A poisoned group is of no more use; another one of the same ranks is. A group in which nobody called is as it was.
  await checkSum(busy ? await openGroup('second') : group);
  await scope.close();
  tell({ kind: 'done' });
} catch (error) {
  tell({ kind: 'failed', why: error instanceof Error ? (error.stack ?? error.message) : String(error) });
}
process.disconnect();
