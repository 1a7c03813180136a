/** Parts that a NIC pins, with RLIMIT_MEMLOCK at 1 MiB: what is too much for it is refused on every rank, by the same words as other limits. */
import assert from 'node:assert/strict';
import { native } from '@ep/native';
import { allocateMemory, checkPinnable, joinRanks, throughStore } from '@ep/native/ranks';
import { footprint } from './footprint.mjs';
import { runRank } from './rank.mjs';

const KIB = 2 ** 10;
const SLOTS = 8;

await runRank(async ({ rank, worldSize, store }) => {
  const signal = AbortSignal.timeout(60_000);
  const joined = await joinRanks(
    { rank, worldSize, transport: 'pinned', version: '0', ranksOnHost: worldSize, timeoutMs: 60_000 },
    throughStore({ rank, worldSize, store }, 'pinned'),
    { signal },
  );
  const { pinnable } = native().binding.hostFacts();
  assert.equal(pinnable, KIB * KIB);
  const before = footprint();
  const released = [];
  // Peers map each other, as by shared memory; `pins` alone says that a NIC comes on top.
  const allocate = (byteLength, pins) =>
    allocateMemory(
      {
        rank,
        worldSize,
        ...joined,
        timeoutMs: 60_000,
        onRelease: () => released.push(byteLength),
        reach: {
          pins,
          byteLength: () => 64,
          describe: (memory) => {
            const blob = new Uint8Array(64);
            blob.set(memory.handle());
            return blob;
          },
          connect: (memory, blobs) => {
            const length = memory.handle().byteLength;
            const handles = new Uint8Array(worldSize * length);
            for (const [peer, blob] of blobs.entries()) handles.set(blob.subarray(0, length), peer * length);
            memory.connect(handles);
          },
          failure: 'map the parts',
          release: () => {},
        },
      },
      { byteLength, signalSlots: SLOTS },
      { signal },
    );

  // Each rank is a process: both parts may be as large as the limit, signal words included.
  await assert.rejects(allocate(pinnable - 8 * SLOTS + 1, true), (error) => {
    assert.equal(error.code, 'EP_MEMORY_LIMIT');
    assert.match(
      error.message,
      /1 rank with \d+ bytes and 8 signal slots each do not fit: RLIMIT_MEMLOCK leaves 1048576 bytes on rank 0; raise it/,
    );
    assert.equal(error.context.left, pinnable);
    return true;
  });
  assert.deepEqual(footprint(), before);
  const fits = await allocate(pinnable - 8 * SLOTS, true);
  await fits.close();
  const unpinned = await allocate(4 * pinnable, false);
  await unpinned.close();
  assert.deepEqual(released, [pinnable - 8 * SLOTS, 4 * pinnable]);

  checkPinnable(pinnable, 'adopt');
  assert.throws(() => checkPinnable(pinnable + 1, 'adopt'), {
    code: 'EP_MEMORY_LIMIT',
    message: /^adopt: 1048577 bytes/,
  });
  await joined.world.barrier({ signal });
  await joined.world.close();
  joined.liveness.stop();
  joined.context.close();
});
