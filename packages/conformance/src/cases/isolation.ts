/** Things that live beside each other. */
import assert from 'node:assert/strict';
import type { Need, SymmetricMemory, Transport } from '@ep/core';
import type { CaseRank, TransportCase } from './case.js';
import { checkPattern, fillPattern } from './expect.js';

async function exchangeRounds(
  rank: CaseRank,
  transport: Transport<Need>,
  memory: SymmetricMemory,
  tag: number,
  rounds: number,
): Promise<void> {
  const endpoint = await transport.connect(rank.next);
  const length = 500;
  for (let round = 0; round < rounds; round++) {
    const [from, to] = [round * length, (rounds + round) * length];
    fillPattern(memory, from, length, rank.rank, tag * 50 + round);
    endpoint.put(memory.local(from, length), memory.remote(rank.next, to, length), {
      signal: { slot: round, op: 'inc' },
    });
    await memory.signals.until(round, { cmp: 'ge', value: 1n });
    checkPattern(memory, to, length, rank.previous, tag * 50 + round, `tag ${tag}, round ${round}`);
  }
  await endpoint.flush();
}

export const isolationCases: readonly TransportCase[] = [
  {
    id: 'isolation/two-memories',
    sentence: 'two memories of one transport, used at one time, never see each other',
    async body(rank) {
      const transport = await rank.open();
      const first = await transport.allocate({ byteLength: 20_000, signalSlots: 20 });
      const second = await transport.allocate({ byteLength: 20_000, signalSlots: 20 });
      await Promise.all([
        exchangeRounds(rank, transport, first, 1, 20),
        exchangeRounds(rank, transport, second, 2, 20),
      ]);
      for (let slot = 0; slot < 20; slot++) {
        assert.equal(first.signals.peek(slot), 1n);
        assert.equal(second.signals.peek(slot), 1n);
      }
      await rank.meet();
    },
  },
  {
    id: 'isolation/two-transports',
    sentence: 'two transports in one process, used at one time, never see each other; closing one leaves the other',
    async body(rank) {
      const transports = [await rank.open(), await rank.open()] as const;
      const memories = await Promise.all(
        transports.map((transport) => transport.allocate({ byteLength: 20_000, signalSlots: 40 })),
      );
      await Promise.all(transports.map((one, tag) => exchangeRounds(rank, one, memories[tag]!, tag + 1, 20)));
      await rank.meet();
      await transports[0].close();
      const endpoint = await transports[1].connect(rank.next);
      await endpoint.signal(memories[1]!, { slot: 39, op: 'inc' });
      await memories[1]!.signals.until(39, { cmp: 'ge', value: 1n });
      await rank.meet();
    },
  },
  {
    id: 'isolation/closed-beside-open',
    sentence: 'closing one memory leaves puts into another one alone',
    async body(rank) {
      const transport = await rank.open();
      const kept = await transport.allocate({ byteLength: 20_000, signalSlots: 20 });
      for (let i = 0; i < 3; i++) {
        const passing = await transport.allocate({ byteLength: 4096, signalSlots: 1 });
        await rank.meet();
        await passing.close();
      }
      await exchangeRounds(rank, transport, kept, 3, 20);
      await rank.meet();
    },
  },
];
