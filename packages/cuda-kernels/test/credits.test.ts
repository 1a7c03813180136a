/** What becomes of credits, which a dispatcher gives and nobody can await. */
import { createWork, EpError, type Rank, tensor, WorkOwner } from '@ep/core';
import { planAttention } from '@ep/plan';
import { expect, it } from 'vitest';
import { openDispatcher } from '../src/index.js';
import { onRanks } from './moe/world.js';
import { replaced } from './replaced.js';

const documents = {
  worldSize: 1,
  shardOffsets: Int32Array.of(0, 1),
  lengths: Int32Array.of(4),
  documents: 1,
  document: new Int32Array(1),
  position: Int32Array.of(0),
};
const plan = planAttention(documents, new Int32Array(1));
const part = { name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [8] } as const;

it('one that never gets to a lost rank is not told when the transport closes', async () => {
  await onRanks(1, 'shm', async (transport) => {
    // As of an endpoint, which checks it when it closes.
    const owner = new WorkOwner('endpoint to rank 0');
    const credits: ReturnType<typeof createWork<void>>[] = [];
    const signal = () => {
      const credit = createWork<void>({ op: 'signal', sequence: credits.length, owner });
      credits.push(credit);
      return credit.work;
    };
    const connect = async (peer: Rank) => replaced(await transport.connect(peer), { signal });
    const dispatcher = await openDispatcher(replaced(transport, { connect }), { leaseBytes: 4096 });
    const { forward } = await dispatcher.bind({ forward: [part] });
    (await forward.run({ q: tensor('f32', [4, 8]) })).release();
    expect(credits).toHaveLength(1);
    credits[0]!.reject(new EpError('EP_PEER_LOST', 'rank 0 is gone', { context: { lost: [0] } }));
    expect(() => owner.check()).not.toThrow();
    await dispatcher.close();
  });
});
