import { describeTransport, resolveModule, World } from '@ep/conformance';
import { it } from 'vitest';

const provider = { module: '@ep/ibgda', name: 'ibgda.soft' };

describeTransport('ibgda (soft)', {
  provider,
  otherConfig: { qpsPerPeer: 3 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 4],
    ['processes', 3],
  ],
  expected: new URL('./conformance.expected.json', import.meta.url),
});

// What the hostile transport makes fail needs the order that a queue pair has.
it('lets a protocol pass that assumes order', async () => {
  const world = new World('threads', 2);
  try {
    await world.run({
      suite: { module: resolveModule('@ep/conformance/naive'), name: 'naiveCases' },
      id: 'naive/last-signal',
      provider: { module: resolveModule(provider.module), name: provider.name },
      config: {},
      limitMs: 60_000,
      seed: 1,
    });
  } finally {
    await world.close();
  }
});
