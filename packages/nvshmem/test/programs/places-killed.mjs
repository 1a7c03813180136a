/** Ranks below `args.stay` open a world with one place more; all others of the test come into that place one after the other, and all of them but the last are killed somewhere on their way. */
import assert from 'node:assert/strict';
import { nvshmem } from '@ep/nvshmem';
import { runRank } from './rank.mjs';

const { signal } = new AbortController();

await runRank(async ({ rank, worldSize: ranks, store, args, note }) => {
  const place = args.stay;
  const worldSize = args.stay + 1;
  const turn = (comer) => `turn/${comer}`;
  const last = ranks - 1;
  if (rank >= place) {
    await store.get(turn(rank), { timeoutMs: 30_000 });
    note('comes');
    const transport = await nvshmem.shm.rejoin({ rank: place, worldSize, store }, { signal, timeoutMs: 60_000 });
    if (rank < last) await new Promise((resolve) => setTimeout(resolve, 60_000));
    await transport.barrier();
    await transport.close();
    return 'done';
  }
  const activeRanks = Array.from({ length: args.stay }, (_, one) => one);
  const transport = await nvshmem.shm.open({ rank, worldSize, store }, { signal, config: { activeRanks } });
  const memory = await transport.allocate({ byteLength: 64, signalSlots: worldSize });
  let sent = 0n;
  const reach = async () => {
    sent += 1n;
    for (const peer of activeRanks) {
      await (await transport.connect(peer)).signal(memory, { slot: rank, op: 'add', value: 1n });
    }
    // Who died on the way in ends no wait for anybody.
    for (const peer of activeRanks) await memory.signals.until(peer, { cmp: 'ge', value: sent });
  };
  // Once one of them was in the world, its death is that of a rank.
  let lost = [];
  for (let comer = place; comer <= last; comer++) {
    if (rank === 0) await store.set(turn(comer), new Uint8Array(1));
    try {
      await transport.readmit({ store, joining: [place], timeoutMs: comer === last ? 60_000 : 1500 });
    } catch (error) {
      assert.ok(comer < last, error.stack);
      assert.ok(error.code === 'EP_TIMEOUT' || error.code === 'EP_PEER_LOST', error.stack);
      assert.deepEqual(transport.lostRanks(), lost);
      assert.equal(transport.failed.aborted, lost.length > 0);
      if (lost.length === 0) await reach();
      continue;
    }
    if (comer === last) break;
    // It was in the world: now it is lost, and the next one comes in its place.
    await assert.rejects(transport.barrier({ timeoutMs: 60_000 }), { code: 'EP_PEER_LOST' });
    lost = [place];
    assert.deepEqual(transport.lostRanks(), lost);
  }
  await reach();
  await transport.barrier();
  await transport.close();
  return 'done';
});
