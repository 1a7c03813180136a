/** What operations cost, by the group's own books and by those of the kernel; what is left when they are over. */
import assert from 'node:assert/strict';
import { readdirSync } from 'node:fs';
import type { OpKind, OpTrace, ProcessGroup } from '../../../src/index.js';
import type { GroupCase } from './case.js';
import { ranksOf, sleep } from './oracle.js';

/** Several chunks for every engine. */
const LENGTH = 200_000;

const NOTHING: OpTrace = { calls: 0, bytes: 0, writes: 0, signals: 0 };

/** What the calls of `kind` in `body` added to this rank's books. */
async function costOf(
  group: ProcessGroup,
  kind: OpKind | 'send' | 'recv',
  body: () => Promise<unknown>,
): Promise<OpTrace> {
  const before = group.trace()[kind] ?? NOTHING;
  await body();
  const after = group.trace()[kind] ?? NOTHING;
  return {
    calls: after.calls - before.calls,
    bytes: after.bytes - before.bytes,
    writes: after.writes - before.writes,
    signals: after.signals - before.signals,
  };
}

const threads = (): number => readdirSync('/proc/self/task').length;

export const accountingCases: readonly GroupCase[] = [
  {
    id: 'trace/barrier',
    sentence: 'a barrier writes signals only, at most two for each peer and round of a tree',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const cost = await costOf(group, 'barrier', async () => {
        for (let i = 0; i < 10; i++) await group.barrier();
      });
      assert.equal(cost.calls, 10);
      assert.equal(cost.bytes, 0);
      assert.equal(cost.writes, 0);
      assert.ok(cost.signals >= 10 && cost.signals <= 10 * 2 * rank.worldSize, JSON.stringify(cost));
    },
  },
  {
    id: 'trace/broadcast',
    sentence: 'in a broadcast only the root writes payload, once for each rank at most',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const bytes = 4 * LENGTH;
      for (const root of ranksOf(rank.worldSize)) {
        const cost = await costOf(group, 'broadcast', () => group.broadcast(new Float32Array(LENGTH), { root }).wait());
        assert.equal(cost.calls, 1);
        if (rank.rank === root) {
          assert.ok(cost.bytes >= bytes && cost.bytes <= bytes * rank.worldSize, JSON.stringify(cost));
          assert.ok(cost.writes >= 1, JSON.stringify(cost));
        } else {
          assert.deepEqual([cost.bytes, cost.writes], [0, 0], JSON.stringify(cost));
        }
      }
    },
  },
  {
    id: 'trace/payload',
    sentence:
      'no operation writes more than the direct algorithm of Mooncake does: N times the call, or once to the root',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const { worldSize } = rank;
      const c = 4 * LENGTH;
      const root = worldSize - 1;
      const amRoot = rank.rank === root;
      const { hosts = ranksOf(worldSize) } = rank;
      // What is counted is what leaves a host: a sum of each other host, and the array of each rank of those.
      const given = new Set(hosts).size - 1;
      const away = hosts.filter((host) => host !== hosts[root]).length;
      // What a rank would write for itself, it need not: where each block is for one rank, its own goes nowhere.
      const others = (worldSize - 1) * c;
      const [one, whole] = [new Float32Array(LENGTH), new Float32Array(LENGTH * worldSize)];
      const parts = (): Float32Array[] => ranksOf(worldSize).map(() => new Float32Array(LENGTH));
      const most: readonly (readonly [OpKind, number, () => Promise<unknown>])[] = [
        ['all-reduce', worldSize * c, async () => group.allReduce(one, { op: 'sum' })],
        ['all-gather', worldSize * c, async () => group.allGatherIntoTensor(whole, one)],
        ['reduce-scatter', others, async () => group.reduceScatterTensor(one, whole, { op: 'sum' })],
        ['all-to-all', others, async () => group.allToAllSingle(new Float32Array(whole.length), whole)],
        ['reduce', c, async () => group.reduce(one, { root, op: 'sum' })],
        ['gather', amRoot ? 0 : c, async () => group.gather(one, amRoot ? { root, outputs: parts() } : { root })],
        ['scatter', amRoot ? others : 0, async () => group.scatter(one, amRoot ? { root, inputs: parts() } : { root })],
      ];
      for (const [kind, bytes, call] of most) {
        const cost = await costOf(group, kind, call);
        assert.equal(cost.calls, 1, kind);
        assert.ok(cost.bytes <= bytes, `${kind}: at most ${bytes} bytes: ${JSON.stringify(cost)}`);
        // Somebody must have written what the others now have.
        const total = (await rank.share(cost.bytes)).reduce((sum, value) => sum + value, 0);
        const least = kind === 'reduce' ? given * c : kind === 'gather' ? away * c : c;
        assert.ok(total >= least, `${kind}: ${total} bytes by all ranks, at least ${least}`);
      }
    },
  },
  {
    id: 'trace/messages',
    sentence: 'a message is written once by its sender, and its receiver writes signals only',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      if (rank.rank > 1) return;
      const kind = rank.rank === 0 ? 'send' : 'recv';
      const cost = await costOf(group, kind, async () =>
        rank.rank === 0 ? group.send(new Float32Array(LENGTH), 1) : group.recv(new Float32Array(LENGTH), 0),
      );
      assert.equal(cost.calls, 1);
      assert.equal(cost.bytes, rank.rank === 0 ? 4 * LENGTH : 0, JSON.stringify(cost));
    },
  },
  {
    id: 'idle/costs-nothing',
    sentence: 'a group, and a second one, that nobody uses take less than 1 % of a core each',
    async body(rank) {
      const groups = [await rank.open(), await rank.open()];
      for (const group of groups) await group.barrier();
      await rank.meet();
      // What spins after an operation has stopped by now; waiting in the store is over too.
      await sleep(400);
      // Ranks that are threads share a process: all of their groups together.
      const ranks = rank.mode === 'processes' ? 1 : rank.worldSize;
      const allowed = 10_000 * groups.length * ranks;
      // The least of some seconds: what else the machine does makes waking up dearer, never cheaper.
      const seconds: number[] = [];
      do {
        const before = process.cpuUsage();
        await sleep(1_000);
        const used = process.cpuUsage(before);
        seconds.push(used.user + used.system);
      } while (Math.min(...seconds) >= allowed && seconds.length < 5);
      assert.ok(Math.min(...seconds) < allowed, `${seconds.join(', ')} us of CPU in 1 s each, allowed ${allowed}`);
      await rank.meet();
    },
  },
  {
    id: 'close/nothing-left',
    sentence:
      'nothing is left of groups that were used and closed: no thread, descriptor, mapping, segment or pending operation',
    async body(rank) {
      const use = async (): Promise<void> => {
        const group = await rank.open();
        const inner = await group.newGroup(ranksOf(rank.worldSize));
        const data = new Float32Array(100_000).fill(1);
        await inner!.allReduce(data, { op: 'sum' });
        assert.equal(data[99_999], rank.worldSize);
        if (rank.worldSize > 1) {
          const next = (rank.rank + 1) % rank.worldSize;
          await Promise.all(
            group.batchIsendIrecv([
              { op: 'send', tensor: data, peer: next },
              {
                op: 'recv',
                tensor: new Float32Array(100_000),
                peer: (rank.rank + rank.worldSize - 1) % rank.worldSize,
              },
            ]),
          );
        }
        await group.allReduce(group.allocate('f32', 1_000), { op: 'max' });
        await inner!.destroy();
        await rank.release(group);
      };
      // The first round may start what stays for the life of the process.
      await use();
      await rank.meet();
      // Each rank collects its own garbage; ranks that are threads count all of it, so all must have done so before one counts.
      await rank.resources();
      await rank.meet();
      const before = { ...(await rank.resources()), threads: threads() };
      await rank.meet();
      for (let round = 0; round < 5; round++) await use();
      await rank.meet();
      for (const end = Date.now() + 3_000; ; await sleep(50)) {
        const after = { ...(await rank.resources()), threads: threads() };
        const [found, allowed] = [Object.entries(after), before as Readonly<Record<string, number>>];
        if (found.every(([name, count]) => count <= allowed[name]!)) break;
        if (Date.now() > end) assert.deepEqual(after, before);
      }
      await rank.meet();
    },
  },
];
