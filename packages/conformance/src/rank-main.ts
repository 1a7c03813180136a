/** The program of one rank, in a worker thread or in a process. It runs cases until it is told to quit. */
import { openFileStore } from '@ep/core';
import { hearLauncher, launchData } from './world/launch.js';
import { type FromRank, type RankIdentity, sendError, type ToRank } from './world/protocol.js';
import { runOrder } from './world/rank.js';

const identity = launchData() as RankIdentity;

async function receive(message: ToRank): Promise<void> {
  try {
    await runOrder(identity, message.order, openFileStore, tell);
    tell({ kind: 'ended' });
  } catch (error) {
    tell({ kind: 'ended', error: sendError(error) });
  }
}

const tell = hearLauncher<ToRank, FromRank>((message) => void receive(message));
tell({ kind: 'ready' });
