// What the addon must refuse: it is the last that can, since a kernel reads the addresses that it is given.
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { DispatchDescription, NativeHostStream, NativeRankContext, NativeSymmetricMemory } from '../../js/binding.js';
import { native } from '../../js/native.js';

const { binding, operations } = native();
const bytes = 4096;

let rank: NativeRankContext;
let memory: NativeSymmetricMemory;
let stream: NativeHostStream;
beforeAll(() => {
  rank = new binding.RankContext(0, 1, 1);
  rank.connect(rank.handle());
  memory = new binding.SymmetricMemory(rank, bytes, 8);
  memory.connect(memory.handle());
  stream = new binding.HostStream(0);
});
afterAll(() => {
  stream.close();
  memory.release();
  rank.close();
});

const description = (over: Partial<DispatchDescription>): DispatchDescription => ({
  handle: memory.deviceHandle(),
  parts: [],
  sums: [],
  arrivalSlot: 0,
  creditSlot: 1,
  arrivals: new BigUint64Array(1),
  credits: new BigUint64Array(1),
  nonTemporal: false,
  blocks: 1,
  timeoutMs: 1000,
  ...over,
});

it('ends an operation whose kernel has no memory for its stacks', async () => {
  const simt = { lanes: 1024, warpLanes: 32, seed: 1 };
  const end = await operations.run(() => stream.dispatch(description({ blocks: 1024, simt })));
  expect(end.status).toBe(8);
  expect(end.message).toContain('simt executor');
});
