/** Allocations that cannot be: refused on every rank before anything is allocated, whichever limit it is and on whichever rank. */
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { native } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { footprint } from './footprint.mjs';
import { runRank } from './rank.mjs';

const MIB = 2 ** 20;

await runRank(async ({ rank, worldSize, store, args }) => {
  const signal = new AbortController().signal;
  const transport = await nvshmem.shm.open({ rank, worldSize, store }, { signal, config: { timeoutMs: 60_000 } });
  const before = footprint();
  const refused = async (byteLength, message) => {
    await assert.rejects(transport.allocate({ byteLength, signalSlots: 8 }), (error) => {
      assert.equal(error.code, 'EP_MEMORY_LIMIT');
      assert.match(error.message, message);
      return true;
    });
    assert.deepEqual(footprint(), before);
  };

  // Each part alone would fit; together they do not.
  if (rank === 0) await store.set('allocatable', Buffer.from(String(native().binding.hostFacts().allocatable)));
  const allocatable = Number(Buffer.from(await store.get('allocatable')).toString());
  await refused(
    Math.floor((allocatable / worldSize) * 1.5),
    /ranks with \d+ bytes .* do not fit: .* leaves \d+ bytes on rank/,
  );
  await refused(allocatable * 4, /do not fit/);

  if (rank === args.lowered) {
    const used = Number(/VmSize:\s+(\d+) kB/.exec(readFileSync('/proc/self/status', 'utf8'))[1]) * 1024;
    execFileSync('prlimit', ['--pid', String(process.pid), `--as=${used + 192 * MIB}`]);
    assert.equal(native().binding.hostFacts().addressSpaceLimit, used + 192 * MIB);
  }
  await transport.barrier();
  await refused(128 * MIB, new RegExp(`RLIMIT_AS leaves \\d+ bytes on rank ${args.lowered}`));

  // Nothing is broken by it.
  const memory = await transport.allocate({ byteLength: MIB, signalSlots: 8 });
  memory.view('u8', 0, MIB).fill(rank + 1);
  await transport.barrier();
  assert.equal(memory.peerView((rank + 1) % worldSize, 'u8', MIB - 1, 1)[0], ((rank + 1) % worldSize) + 1);
  await transport.barrier();
  await transport.close();
});
