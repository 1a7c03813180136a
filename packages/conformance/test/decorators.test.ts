/** Decorators pass the suite unchanged, record what went through, and fail exactly the calls that were planned. */
import { describeTransport } from '@ep/conformance';
import { type TraceEntry, withFaults, withTrace } from '@ep/conformance/decorators';
import { hostile } from '@ep/conformance/hostile';
import { memoryStore } from '@ep/core';
import { expect, it } from 'vitest';

describeTransport('hostile, traced, with an empty fault plan', {
  provider: { module: '@ep/conformance/decorators', name: 'decorated' },
  config: { seed: 7 },
  otherConfig: { seed: 8 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [['threads', 2]],
  expected: new URL('./hostile.expected.json', import.meta.url),
});

it('record each call, and fail the planned one alone', async () => {
  const entries: TraceEntry[] = [];
  const provider = withTrace(withFaults(hostile, [{ rank: 0, call: 1 }]), (entry) => entries.push(entry));
  await using store = memoryStore();
  const { signal } = new AbortController();
  await using transport = await provider.open({ rank: 0, worldSize: 1, store }, { signal });
  const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
  const endpoint = await transport.connect(0);
  await endpoint.signal(memory, { slot: 0, op: 'inc' });
  expect(() => endpoint.signal(memory, { slot: 0, op: 'inc' })).toThrow(/planned fault of call 1 of rank 0/);
  await endpoint.signal(memory, { slot: 0, op: 'inc' });
  await endpoint.flush();
  expect(memory.signals.peek(0)).toBe(2n);
  expect(entries.map(({ op, sequence }) => [op, sequence])).toEqual([
    ['signal', 0],
    ['signal', 1],
    ['flush', undefined],
  ]);
});
