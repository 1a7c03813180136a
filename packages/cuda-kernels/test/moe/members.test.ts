/** Ranks that die, and others that come in their place. Every way in which that goes wrong is in test/elastic. */
import { describe, expect, it } from 'vitest';
import { joinMoeBuffer } from '../../src/index.js';
import { inputsOf, openFor, optionsOf, runCall } from './case.js';
import { caseOf, closeAll, script, worldSize } from './script.js';
import { onRanks } from './world.js';

describe.each([
  ['low-latency', 'shm'],
  ['high-throughput', 'shm'],
  ['low-latency', 'ibgda'],
] as const)('%s over %s', (mode, way) => {
  it('takes another rank in after one was killed in the middle of a call', { timeout: 60_000 }, async () => {
    const { open, dispatch, combine, complete, replace } = script(mode, 'processes', way);
    await using world = await open();
    await complete(world, 0);
    await Promise.all(world.ranks.map((of) => dispatch(of, 1)));
    await world.ranks[2]!.kill();
    for (const { combinedLost } of await Promise.all(world.others(2).map((of) => combine(of))))
      expect([...combinedLost]).toEqual([0, 0, 1, 0]);
    await replace(world, 2);
    for (let call = 2; call < 5; call++) await complete(world, call);
    await closeAll(world);
  });
});

it('refuses by name where no rank can come back', { timeout: 60_000 }, async () => {
  const one = caseOf('low-latency');
  const inputs = inputsOf(one);
  await onRanks(worldSize, 'efa', async (opened) => {
    // As over a network, say.
    const transport = new Proxy(opened, {
      get: (of, key) => (key === 'renew' ? undefined : Reflect.get(of, key, of)),
    });
    await using buffer = await openFor(transport, one, inputs);
    const refused = {
      code: 'EP_UNSUPPORTED',
      message: expect.stringMatching(/updateMembers: efa.*lets no rank in anew/),
    };
    expect(() => buffer.updateMembers()).toThrowError(expect.objectContaining(refused));
    await expect(joinMoeBuffer(transport, optionsOf(one, inputs))).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
  });
});

it('goes by the membership of a group', { timeout: 60_000 }, async () => {
  const one = caseOf('low-latency');
  const inputs = inputsOf(one);
  await onRanks(worldSize, 'shm', async (transport) => {
    await using buffer = await openFor(transport, one, inputs);
    if (transport.rank === 2) return;
    const group = { activeRanks: [0, 1, 3] };
    expect(() => buffer.goOnWith({ activeRanks: [2] })).toThrowError(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }),
    );
    expect(buffer.goOnWith(group)).toEqual([2]);
    expect(buffer.goOnWith(group)).toEqual([]);
    expect([...buffer.losses]).toEqual([[2, 'EP_EVICTED']]);
    const { combinedLost } = await runCall(buffer, one, inputs);
    expect([...combinedLost]).toEqual([0, 0, 1, 0]);
  });
});

it.each(['shm', 'ibgda'] as const)('makes an end of layouts that were kept before, over %s', async (way) => {
  const one = caseOf('high-throughput');
  const inputs = inputsOf(one);
  await onRanks(worldSize, way, async (transport) => {
    await using buffer = await openFor(transport, one, inputs);
    const kept = await runCall(buffer, one, inputs, { keepLayout: true });
    buffer.leaveOut([(transport.rank + 1) % worldSize]);
    expect((await buffer.updateMembers()).length).toBe(worldSize);
    const old = () => runCall(buffer, one, inputs, { layout: kept.layout! });
    await expect(old()).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/older one/),
    });
    const again = await runCall(buffer, one, inputs, { keepLayout: true });
    await runCall(buffer, one, inputs, { layout: again.layout! });
  });
});
