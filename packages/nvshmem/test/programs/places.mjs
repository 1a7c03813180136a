/** A world that begins with `args.first` ranks; the others come one after the other, while those that are here put to each other. */
import assert from 'node:assert/strict';
import { nvshmem } from '@ep/nvshmem';
import { runRank } from './rank.mjs';

const { signal } = new AbortController();

await runRank(async ({ rank, worldSize, store, args }) => {
  const member = { rank, worldSize, store };
  const activeRanks = Array.from({ length: args.first }, (_, one) => one);
  const isFirst = rank < args.first;
  const transport = isFirst
    ? await nvshmem.shm.open(member, { signal, config: { activeRanks } })
    : await nvshmem.shm.rejoin(member, { signal, timeoutMs: 60_000 });
  for (let here = isFirst ? args.first : rank + 1; ; here++) {
    assert.deepEqual(
      [...transport.world.ranks],
      Array.from({ length: here }, (_, one) => one),
    );
    const memory = await transport.allocate({ byteLength: 64, signalSlots: worldSize });
    for (let peer = 0; peer < here; peer++) {
      const endpoint = await transport.connect(peer);
      await endpoint.signal(memory, { slot: rank, op: 'add', value: BigInt(here) });
    }
    for (let peer = 0; peer < here; peer++) {
      const test = { cmp: 'ge', value: BigInt(here) };
      assert.equal(await memory.signals.until(peer, test), BigInt(here));
    }
    assert.deepEqual(transport.lostRanks(), []);
    await memory.close();
    if (here === worldSize) break;
    await transport.readmit({ store, joining: [here], timeoutMs: 60_000 });
  }
  await transport.barrier();
  await transport.close();
});
