import { describeTransport, resolveModule, World } from '@ep/conformance';
import { it } from 'vitest';

const provider = { module: '@ep/nvshmem', name: 'nvshmem.shm' };

describeTransport('nvshmem (shm)', {
  provider,
  otherConfig: { ranksOnHost: 99 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 4],
    ['processes', 3],
  ],
  expected: new URL('./conformance.expected.json', import.meta.url),
});

// The other half of the hostile transport's teeth: what fails there is not simply broken, it needs the order that shared memory has.
it('lets a protocol pass that assumes order, which the hostile transport does not', async () => {
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
