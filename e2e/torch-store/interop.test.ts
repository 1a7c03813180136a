/** Our store and torch's TCPStore at one server, which is torch's or ours. */
import { openTcpStore, openTcpStoreServer, prefixStore, type Store } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { TorchPeer } from './peer.js';
import { torch, torchLabel } from './torch.js';

const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);
const text = (value: Uint8Array): string => new TextDecoder().decode(value);
const hex = (value: string): string => Buffer.from(value).toString('hex');
const HOST = '127.0.0.1';
const LIMIT = { timeout: 180_000 };
const missing = !('python' in torch);
const python = 'python' in torch ? torch.python : '';

/** Every operation from both sides on the same keys. */
async function converse(ours: Store, theirs: TorchPeer, queues: boolean): Promise<void> {
  await ours.set('a', bytes('from ours'));
  expect(await theirs.call('get', 'a')).toBe(hex('from ours'));
  await theirs.call('set', 'b', '00ff0a0d');
  expect([...(await ours.get('b'))]).toEqual([0, 255, 10, 13]);
  const waiting = ours.get('late');
  await theirs.call('set', 'late', hex('now'));
  expect(text(await waiting)).toBe('now');
  const awaited = theirs.call('wait', ['later'], 60_000);
  await ours.set('later', bytes(''));
  await awaited;
  expect((await ours.get('later')).byteLength).toBe(0);
  expect([await ours.add('n', 5), await theirs.call('add', 'n', -7), await ours.add('n', 0)]).toEqual([5, -2, -2]);
  expect(await theirs.call('get', 'n')).toBe(hex('-2'));
  expect(text(await ours.compareSet('cs', bytes(''), bytes('one')))).toBe('one');
  expect(await theirs.call('compare_set', 'cs', 'one', 'two')).toBe(hex('two'));
  expect(text(await ours.compareSet('cs', bytes('one'), bytes('three')))).toBe('two');
  expect(text(await ours.compareSet('absent', bytes('x'), bytes('y')))).toBe('x');
  expect([await ours.check(['a', 'b']), await ours.check(['a', 'zz']), await theirs.call('check', 'a', 'zz')]).toEqual([
    true,
    false,
    false,
  ]);
  await ours.append('ap', bytes('xy'));
  await theirs.call('append', 'ap', 'z');
  expect(text(await ours.get('ap'))).toBe('xyz');
  await ours.multiSet([
    ['m1', bytes('1')],
    ['m2', bytes('')],
  ]);
  expect(await theirs.call('multi_get', 'm2', 'm1')).toEqual(['', hex('1')]);
  await theirs.call('multi_set', ['m3', 'm4'], ['3', '4']);
  expect((await ours.multiGet(['m4', 'a', 'm3'])).map(text)).toEqual(['4', 'from ours', '3']);
  expect(await ours.numKeys()).toBe(await theirs.call('num_keys'));
  expect([await ours.delete('a'), await theirs.call('delete', 'a'), await ours.check(['a'])]).toEqual([
    true,
    false,
    false,
  ]);
  await expect(ours.wait(['b', 'zz'], { timeoutMs: 200 })).rejects.toMatchObject({
    code: 'EP_TIMEOUT',
    context: { missing: ['zz'] },
  });
  await expect(theirs.call('wait', ['zz'], 200)).rejects.toThrow(/^DistStoreError: wait timeout after 200ms/);
  expect(text(await ours.get('cs'))).toBe('two');
  expect(await theirs.call('get', 'cs')).toBe(hex('two'));
  await theirs.call('prefixed', 'k', 'v');
  expect(text(await prefixStore(prefixStore(ours, 'in'), 'out').get('k'))).toBe('v');
  await ours.set('word', bytes('abc'));
  await expect(ours.add('word', 1)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  const large = new Uint8Array(2 ** 23).fill(7);
  await ours.set('large', large);
  expect((await theirs.call('get', 'large')) === Buffer.from(large).toString('hex')).toBe(true);
  const keys = await theirs.call('list_keys').catch((error: Error) => error.message);
  if (Array.isArray(keys)) expect(keys).toEqual(expect.arrayContaining(['b', 'cs', 'large', 'm1']));
  if (queues) expect(await theirs.call('queue', 'q', 'value')).toEqual([1, hex('value')]);
}

describe.each(['libuv', 'legacy'] as const)(`with ${torchLabel}, %s backend`, (backend) => {
  it.skipIf(missing)('our client and its, at its server', LIMIT, async () => {
    await using server = await TorchPeer.start(python, 'server', 0, backend);
    await using theirs = await TorchPeer.start(python, 'client', server.port, backend);
    await using ours = await openTcpStore({ host: HOST, port: server.port });
    await converse(ours, theirs, backend === 'libuv');
    const wait = ours.get('never').catch((error) => error);
    await new Promise((resolve) => setTimeout(resolve, 100));
    server.kill();
    expect(await wait).toMatchObject({ code: 'EP_PEER_LOST' });
    expect((await wait).message).toContain('while this waited for get of "never"');
  });

  it.skipIf(missing)('our client and its, at our server', LIMIT, async () => {
    await using server = await openTcpStoreServer({ port: 0 });
    await using theirs = await TorchPeer.start(python, 'client', server.port, backend);
    await using ours = await openTcpStore({ host: HOST, port: server.port });
    await converse(ours, theirs, backend === 'libuv');
    const lost = theirs.call('wait', ['never'], 60_000).catch((error: Error) => error.message);
    await new Promise((resolve) => setTimeout(resolve, 100));
    await server.close();
    expect(await lost).toMatch(/^Dist\w+Error: /);
  });
});
