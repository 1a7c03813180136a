/**
 * One rank of a data-parallel training that goes on when a rank dies, and takes in who comes in its place. Started by main.mjs.
 *
 * The group stays, with its memory, whoever comes and goes: survivors take a newcomer in with `recoverRanks` while it waits in `joinGroup`, and all of them then
 * learn from whoever has done most steps. A death at any moment, also in the middle of that, ends the call it hits alike on all who are left.
 */
import { writeSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { initProcessGroup } from '@ep/collectives';
import { isEpError, openTcpStore } from '@ep/core';
import { Fault } from './fault.mjs';
import { Training } from './training.mjs';

/** Survivors train this many steps before they take in replacements. */
const STEPS_SHORT_HANDED = 4;
/** Between two questions whether they have come. */
const PAUSE_MS = 5;
const TIMEOUT_MS = 30_000;

const { rank, worldSize, port, isReplacement, steps, hidden, batch, death } = JSON.parse(process.argv[2]);

const training = new Training({ rank, hidden, batch, fault: new Fault(death) });
const { model } = training;

const now = () => Number(process.hrtime.bigint()) / 1e6;
const tell = (event) => writeSync(1, `${JSON.stringify({ rank, at: now(), ...event })}\n`);

async function takeStep(group, slots) {
  const active = await training.takeStep(group, slots);
  tell({ event: 'step', step: training.losses.length - 1, loss: training.losses.at(-1), active });
}

const isLoss = (error) => isEpError(error) && error.code === 'EP_PEER_LOST';

/** Gives everybody what the one knows who has done most steps. */
async function catchUp(group) {
  for (;;) {
    try {
      const done = new Int32Array(worldSize).fill(-1);
      await group.allGatherIntoTensor(done, Int32Array.of(training.losses.length));
      const root = done.indexOf(Math.max(...done));
      training.losses = await group.broadcastObject(rank === root ? training.losses : undefined, { root });
      await group.broadcast(model.weights, { root });
      await group.broadcast(model.velocity, { root });
      return;
    } catch (error) {
      if (!isLoss(error)) throw error;
    }
  }
}

const lostOf = (group) => group.ranks.filter((other) => !group.activeRanks.includes(other));

/** On the survivors: waits until all who were lost have come back, and takes them in. */
async function refill(group) {
  for (;;) {
    const lost = lostOf(group);
    const states = await group.peerState(lost);
    if (states.every((state) => state === 'joining')) return group.recoverRanks(lost);
    await delay(PAUSE_MS);
  }
}

const store = await openTcpStore({ host: '127.0.0.1', port, timeoutMs: TIMEOUT_MS });
const group = await initProcessGroup({ store, rank, worldSize, timeoutMs: TIMEOUT_MS, isExtension: isReplacement });
if (isReplacement) {
  await group.joinGroup();
  await catchUp(group);
  tell({ event: 'joined', step: training.losses.length });
} else {
  // From here on the death of a rank is noticed. One that never came would be awaited until the timeout.
  await group.barrier();
}
const slots = training.slotsOf(group);
let refillAt = Infinity;
for (;;) {
  if (training.losses.length === refillAt) {
    await refill(group);
    await catchUp(group);
    refillAt = Infinity;
  }
  if (training.losses.length === steps) break;
  try {
    await takeStep(group, slots);
  } catch (error) {
    if (!isLoss(error)) throw error;
    tell({ event: 'lost', step: training.losses.length, lost: lostOf(group), active: group.activeRanks });
    refillAt = Math.min(refillAt, training.losses.length + STEPS_SHORT_HANDED, steps);
  }
}

tell({ event: 'done', losses: training.losses, ...training.digests() });
await group.destroy();
await store.close();
