/** Point to point. */
import assert from 'node:assert/strict';
import type { GroupCase } from './case.js';
import { failsWith } from './expect.js';
import { expectElements, pattern, ranksOf, sleep, vector } from './oracle.js';

export const messageCases: readonly GroupCase[] = [
  {
    id: 'p2p/ring',
    sentence: 'messages go round the ring, of every kind of length, one round after the other',
    async body(rank) {
      const group = await rank.open();
      const { worldSize } = rank;
      const [next, previous] = [(rank.rank + 1) % worldSize, (rank.rank + worldSize - 1) % worldSize];
      for (const [round, length] of [1, 3, 1_024, 16_385, 70_001, 300_000].entries()) {
        const received = new Float32Array(length);
        const sent = group.send(pattern('f32', length, rank.rank, round), next);
        await group.recv(received, previous);
        await sent;
        expectElements('f32', received, pattern('f32', length, previous, round), `round ${round}`);
      }
    },
  },
  {
    id: 'p2p/four-in-order',
    sentence: 'four messages to one peer arrive in the order in which they were sent',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      if (rank.rank === 0) for (let i = 0; i < 4; i++) await group.send(new Int32Array([i, i * i]), 1);
      if (rank.rank === 1) {
        for (let i = 0; i < 4; i++) {
          const data = new Int32Array(2);
          await group.recv(data, 0);
          assert.deepEqual([...data], [i, i * i]);
        }
      }
    },
  },
  {
    id: 'p2p/thousand-in-order',
    sentence: 'so do a thousand, all posted at once, to a receiver that comes late',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const count = 1_000;
      const length = (i: number): number => (i % 100 === 99 ? 5_000 : i % 7);
      if (rank.rank === 0) {
        await Promise.all(ranksOf(count).map((i) => group.send(pattern('u32', length(i), 0, i), 1)));
      } else if (rank.rank === 1) {
        await sleep(100);
        const arrays = ranksOf(count).map((i) => new Uint32Array(length(i)));
        await Promise.all(arrays.map((data) => group.recv(data, 0)));
        for (const [i, data] of arrays.entries())
          expectElements('u32', data, pattern('u32', length(i), 0, i), `message ${i}`);
      }
    },
  },
  {
    id: 'p2p/tags-out-of-order',
    sentence: 'messages are matched by tag, in whatever order they are received',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const tags = [5, 0, 7, 5, 2 ** 31 - 1];
      if (rank.rank === 0) {
        await Promise.all(tags.map((tag, i) => group.send(new Float64Array([tag, i]), 1, { tag })));
      } else if (rank.rank === 1) {
        // Two of tag 5: the first sent is the first received.
        for (const [tag, place] of [
          [7, 2],
          [5, 0],
          [2 ** 31 - 1, 4],
          [5, 3],
          [0, 1],
        ] as const) {
          const data = new Float64Array(2);
          await group.recv(data, 0, { tag });
          assert.deepEqual([...data], [tag, place]);
        }
      }
    },
  },
  {
    id: 'p2p/any-source',
    sentence: 'recvAnySource takes from whoever sends, says from whom, and loses nothing of many senders',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const each = 50;
      if (rank.rank !== 0) {
        for (let i = 0; i < each; i++) await group.send(new Int32Array([rank.rank, i]), 0, { tag: 3 });
        return;
      }
      const seen = ranksOf(rank.worldSize).map(() => 0);
      for (let i = 0; i < each * (rank.worldSize - 1); i++) {
        const data = new Int32Array(2);
        const { source: from } = await group.recvAnySource(data, { tag: 3 });
        assert.equal(data[0], from, 'the source that was told');
        assert.equal(data[1], seen[from]!++, `order of rank ${from}`);
      }
      assert.deepEqual(
        seen,
        ranksOf(rank.worldSize).map((one) => (one === 0 ? 0 : each)),
      );
    },
  },
  {
    id: 'p2p/self',
    sentence: 'a rank sends to itself, small and large, in order',
    async body(rank) {
      const group = await rank.open();
      const lengths = [0, 1, 100_000];
      const sends = lengths.map((length, i) => group.send(pattern('i32', length, rank.rank, i), rank.rank));
      for (const [i, length] of lengths.entries()) {
        const data = new Int32Array(length);
        await group.recv(data, rank.rank);
        expectElements('i32', data, pattern('i32', length, rank.rank, i), `message ${i}`);
      }
      await Promise.all(sends);
    },
  },
  {
    id: 'p2p/zero-bytes',
    sentence: 'a message without elements arrives too, in its place among others',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      if (rank.rank === 0) {
        await group.send(new Float32Array([1]), 1);
        await group.send(new Float32Array(0), 1);
        await group.send(new Float32Array([2]), 1);
      } else if (rank.rank === 1) {
        const [first, second] = [new Float32Array(1), new Float32Array(1)];
        await group.recv(first, 0);
        await group.recv(new Float32Array(0), 0);
        await group.recv(second, 0);
        assert.deepEqual([first[0], second[0]], [1, 2]);
      }
    },
  },
  {
    id: 'p2p/large',
    sentence: 'messages of 8 MB, larger than any pool, pass in both directions at once',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      if (rank.rank > 1) return;
      const length = 2 ** 21 + 1;
      const peer = 1 - rank.rank;
      const received = new Int32Array(length);
      const sent = group.send(pattern('i32', length, rank.rank), peer);
      await group.recv(received, peer);
      await sent;
      expectElements('i32', received, pattern('i32', length, peer), 'large message');
    },
  },
  {
    id: 'p2p/batch',
    sentence: 'batchIsendIrecv posts sends and receives with everybody at once, in any order',
    async body(rank) {
      const group = await rank.open();
      const received = ranksOf(rank.worldSize).map(() => new Float32Array(501));
      const sends = ranksOf(rank.worldSize).map((peer) => ({
        op: 'send' as const,
        tensor: pattern('f32', 501, rank.rank, peer),
        peer,
      }));
      const receives = received.map((tensor, peer) => ({ op: 'recv' as const, tensor, peer }));
      const batch = rank.rank % 2 === 0 ? [...sends, ...receives] : [...receives, ...sends];
      await Promise.all(group.batchIsendIrecv(batch));
      for (const [peer, data] of received.entries()) {
        expectElements('f32', data, pattern('f32', 501, peer, rank.rank), `of rank ${peer}`);
      }
    },
  },
  {
    id: 'p2p/beside-collectives',
    sentence: 'messages and collectives under way at once, posted in different orders, do not disturb each other',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const { worldSize } = rank;
      const [next, previous] = [(rank.rank + 1) % worldSize, (rank.rank + worldSize - 1) % worldSize];
      for (let round = 0; round < 10; round++) {
        const received = new Int32Array(20_000);
        const reduced = new Int32Array(30_000).fill(rank.rank);
        const messages = (): PromiseLike<unknown>[] => [
          group.recv(received, previous),
          group.send(pattern('i32', 20_000, rank.rank, round), next),
        ];
        const collectives = (): PromiseLike<unknown>[] => [group.allReduce(reduced, { op: 'sum' }), group.barrier()];
        const works = rank.rank % 2 === 0 ? [...messages(), ...collectives()] : [...collectives(), ...messages()];
        await Promise.all(works);
        expectElements('i32', received, pattern('i32', 20_000, previous, round), `round ${round}`);
        assert.equal(reduced[29_999], (worldSize * (worldSize - 1)) / 2);
      }
    },
  },
  {
    id: 'p2p/all-pairs',
    sentence: 'every rank sends to every other at once, several messages, which the receivers take last sender first',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const others = ranksOf(rank.worldSize).filter((one) => one !== rank.rank);
      const rounds = ranksOf(5);
      const sends = others.flatMap((peer) =>
        rounds.map((i) => group.send(pattern('i16', 3_001, rank.rank * 16 + peer, i), peer)),
      );
      for (const peer of [...others].reverse()) {
        for (const i of rounds) {
          const data = new Int16Array(3_001);
          await group.recv(data, peer);
          expectElements('i16', data, pattern('i16', 3_001, peer * 16 + rank.rank, i), `message ${i} of ${peer}`);
        }
      }
      await Promise.all(sends);
    },
  },
  {
    id: 'p2p/refuses-what-does-not-fit',
    sentence:
      'a message longer than the array of its receiver, or of another dtype, is an error on both sides that says so',
    ranks: 2,
    async body(rank) {
      const wrong = [
        { send: new Float32Array(9), recv: new Float32Array(8) },
        { send: new Float32Array(8), recv: new Int32Array(8) },
      ];
      for (const { send, recv } of wrong) {
        const group = await rank.open({ timeoutMs: 10_000 });
        if (rank.rank === 0) await failsWith('EP_MISMATCH', () => group.send(send, 1));
        if (rank.rank === 1) await failsWith('EP_MISMATCH', () => group.recv(recv, 0));
        await rank.meet();
      }
    },
  },
  {
    id: 'p2p/timeout-names-peer',
    sentence: 'a receive that nobody answers ends in time and names the peer; collectives go on',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      if (rank.rank === 0) {
        const error = await failsWith('EP_TIMEOUT', () => group.recv(new Float32Array(4), 1, { timeoutMs: 200 }));
        assert.match(error.message, /\b1\b/);
      }
      const data = new Int32Array([1]);
      await group.allReduce(data, { op: 'sum' });
      assert.equal(data[0], rank.worldSize);
    },
  },
  {
    id: 'p2p/timeout-counts-from-activation',
    sentence: 'a message behind others that wait for their receiver does not lose its time there',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      if (rank.rank === 0) {
        // The first waits long, the second's deadline is shorter than that wait.
        const first = group.send(new Float32Array(2_000_000), 1, { timeoutMs: 20_000 });
        const second = group.send(new Float32Array([7]), 1, { timeoutMs: 150 });
        await Promise.all([first, second]);
      } else if (rank.rank === 1) {
        await sleep(400);
        const [large, small] = [new Float32Array(2_000_000), new Float32Array(1)];
        const first = group.recv(large, 0);
        const second = group.recv(small, 0);
        await Promise.all([first, second]);
        assert.equal(small[0], 7);
      }
    },
  },
  {
    id: 'p2p/every-dtype',
    sentence: 'messages of every dtype keep their bits',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const dtypes = ['f64', 'f16', 'bf16', 'f8e4m3', 'f8e5m2', 'ue8m0', 'i64', 'u64', 'u16', 'i8', 'u8'] as const;
      for (const dtype of dtypes) {
        const data = pattern(dtype, 77, rank.rank);
        if (rank.rank === 0) await group.send(vector(dtype, data), 1);
        if (rank.rank === 1) {
          await group.recv(vector(dtype, data), 0);
          expectElements(dtype, data, pattern(dtype, 77, 0), dtype);
        }
      }
    },
  },
];
