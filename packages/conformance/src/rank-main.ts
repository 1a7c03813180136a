/** The program of one rank, in a worker thread or in a process. It runs cases until it is told to quit. */
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { openFileStore } from '@ep/core';
import { type FromRank, type RankIdentity, sendError, type ToRank } from './world/protocol.js';
import { runOrder } from './world/rank.js';

const identity = (isMainThread ? JSON.parse(process.argv[2] ?? '{}') : workerData) as RankIdentity;
const port = isMainThread ? undefined : parentPort!;

function tell(message: FromRank): void {
  if (port) port.postMessage(message);
  else process.send!(message);
}

async function receive(message: ToRank): Promise<void> {
  if (message.kind === 'quit') {
    if (port) port.close();
    else process.disconnect();
    return;
  }
  try {
    await runOrder(identity, message.order, openFileStore, tell);
    tell({ kind: 'ended' });
  } catch (error) {
    tell({ kind: 'ended', error: sendError(error) });
  }
}

if (port) port.on('message', receive);
else process.on('message', (message) => void receive(message as ToRank));
// A parent that is gone cannot be told anything.
process.on('disconnect', () => process.exit());
tell({ kind: 'ready' });
