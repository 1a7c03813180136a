// One TypeScript rank of a job: meets the others at the store, shares or reads a file plan there, and prints what it saw.
import { createHash } from 'node:crypto';
import { openRendezvous, prefixStore } from '@ep/core';
import { digest, parseAttentionPlan, serialize } from '@ep/plan';
import { randomPlan } from '../attention/plans.mjs';

// The rank that plans; and whether all ranks are of this kind, so that they can shake hands.
const [planner, alone] = process.argv.slice(2);
const { store, rank, worldSize } = await openRendezvous('env://', {
  handshake: alone === 'alone',
  timeoutMs: 60_000,
});
const job = prefixStore(store, 'ep/job');
const ranks = Array.from({ length: worldSize }, (_, other) => other);

if (rank === Number(planner)) {
  const plan = randomPlan(7, worldSize);
  await job.set('plan', Buffer.from(serialize(plan)));
}
const text = Buffer.from(await job.get('plan')).toString();
const plan = parseAttentionPlan(text);
const seen = `${createHash('sha256').update(text).digest('hex')} ${digest(plan)} ${plan.shards.worldSize}`;
await job.set(`seen/${rank}`, Buffer.from(seen));
const all = await job.multiGet(ranks.map((other) => `seen/${other}`));
process.stdout.write(`${JSON.stringify({ rank, seen: all.map((value) => Buffer.from(value).toString()) })}\n`);

// Whoever holds the server leaves last.
if ((await job.add('done', 1)) === worldSize) await job.set('all done', Buffer.from(''));
await job.wait(['all done']);
await store.othersLeft?.({ timeoutMs: 60_000 });
await store.close();
