/** Probing, meeting, capabilities, adoption. */
import assert from 'node:assert/strict';
import { isDeepStrictEqual } from 'node:util';
import { type Need, offers } from '@ep/core';
import type { TransportCase } from './case.js';
import { refused } from './expect.js';

const NEEDS: readonly Need[] = ['bundled', 'prior', 'inc', 'add', 'set', 'get', 'atomics', 'load-store'];

export const setUpCases: readonly TransportCase[] = [
  {
    id: 'probe/data',
    sentence: 'probing gives data, changes nothing, and agrees with what open() gives',
    async body(rank) {
      const probes = await Promise.all([rank.provider.probe(rank.config), rank.provider.probe(rank.config)]);
      const transport = await rank.open();
      for (const probe of probes) {
        assert.ok(probe.available);
        assert.ok(probe.devices.length > 0);
        assert.deepEqual(probe.capabilities, transport.capabilities);
      }
      await rank.meet();
    },
  },
  {
    id: 'capabilities/narrow',
    sentence: 'offers() says of each need whether the transport has it; every transport has bundled and inc',
    async body(rank) {
      const transport = await rank.open();
      for (const need of NEEDS) assert.equal(offers(transport, need), transport.capabilities.needs.has(need));
      assert.ok(offers(transport, 'bundled'));
      assert.ok(offers(transport, 'inc'));
      assert.ok(transport.capabilities.maxMessageBytes >= 1);
      assert.ok(transport.capabilities.maxSignalSlots >= 2 * rank.worldSize, 'counters for every peer, both ways');
      await rank.meet();
    },
  },
  {
    id: 'open/names-missing',
    sentence: 'when a rank never comes, open() ends in time and names it',
    async body(rank) {
      const absent = rank.worldSize - 1;
      // Together: a rank that only starts late would be named as well.
      await rank.meet();
      if (rank.rank !== absent) {
        const error = await refused(['EP_RENDEZVOUS', 'EP_TIMEOUT'], () => rank.open({ timeoutMs: 800 }));
        assert.match(error.message, new RegExp(`rank ${absent}\\b`));
      }
      await rank.meet();
    },
  },
  {
    id: 'open/names-odd-configuration',
    sentence:
      'when one rank is configured otherwise, open() rejects on all ranks, names it and what differs, and the next open() succeeds',
    async body(rank) {
      const { worldSize, config, otherConfig } = rank;
      assert.ok(otherConfig, 'the suite gives no other configuration');
      const odd = worldSize - 1;
      const error = await refused('EP_RENDEZVOUS', () =>
        rank.open({ config: rank.rank === odd ? otherConfig : config, timeoutMs: 20_000 }),
      );
      // Of two ranks neither is the odd one.
      assert.deepEqual(error.context.ranks, worldSize > 2 ? [odd] : [0, odd], error.message);
      assert.match(error.message, new RegExp(`\\b${odd}\\b`));
      // Only what was chosen otherwise differs, and each difference is told with both values.
      const fields = Object.entries(error.context.fields as Record<string, readonly unknown[]>);
      assert.deepEqual(
        fields.map(([field, camps]) => [field, camps.length]),
        Object.keys(otherConfig)
          .filter((field) => !isDeepStrictEqual(Reflect.get(otherConfig, field), Reflect.get(config, field)))
          .map((field) => [field, 2]),
      );
      for (const [field] of fields) assert.match(error.message, new RegExp(`\\b${field} is `));
      // Nothing of the failed meeting is in the way.
      await rank.open();
      await rank.meet();
    },
  },
  {
    id: 'open/aborted',
    sentence: "a caller's abort ends open() with its own reason",
    async body(rank) {
      const controller = new AbortController();
      const reason = { mine: rank.rank };
      if (rank.rank === 0) {
        const opening = rank.open({ signal: controller.signal }).then(
          () => assert.fail('expected open() to reject'),
          (error) => assert.equal(error, reason),
        );
        setTimeout(() => controller.abort(reason), 20);
        await opening;
      }
      await rank.meet();
    },
  },
  {
    id: 'open/refuses-wrong-members',
    sentence: 'a rank outside of the world is refused at once',
    async body(rank) {
      for (const [number, size] of [
        [-1, 2],
        [2, 2],
        [0, 0],
        [0.5, 2],
      ] as const) {
        await refused('EP_INVALID_ARGUMENT', () =>
          rank.provider.open(
            { rank: number, worldSize: size, store: rank.store },
            { signal: rank.signal, config: rank.config, timeoutMs: 300 },
          ),
        );
      }
      await rank.meet();
    },
  },
  {
    id: 'adopt/registers-or-says',
    sentence: 'adopt() registers memory of the caller, or says what to do instead',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 4096, signalSlots: 1 });
      try {
        const adopted = await transport.adopt({ address: memory.addresses?.bytes ?? 4096n, byteLength: 4096 });
        assert.equal(adopted.byteLength, 4096);
        await adopted.close();
      } catch (error) {
        const { message } = await refused('EP_UNSUPPORTED', () => Promise.reject(error));
        assert.match(message, /allocate/);
      }
      await rank.meet();
    },
  },
];
