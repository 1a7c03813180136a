/** The TCP store under loss, limits and abuse; what all stores promise is in @ep/conformance. */
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { once } from 'node:events';
import { connect, createServer, type Socket } from 'node:net';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import {
  CloseScope,
  listen,
  openTcpStore,
  openTcpStoreServer,
  type TcpStore,
  type TcpStoreLimits,
} from '../src/index.js';
import { routeTo, whyUnreachable } from '../src/stores/tcp/reachability.js';
import { requestParts } from '../src/stores/tcp/wire.js';

const HOST = '127.0.0.1';
const bytes = (text: string) => new TextEncoder().encode(text);
const text = (value: Uint8Array) => new TextDecoder().decode(value);
const sleep = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));
const HELLO = Buffer.from('00cef7853c', 'hex');

let scope: CloseScope;
beforeEach(() => {
  scope = new CloseScope();
});
afterEach(() => scope.close());

async function unused(): Promise<number> {
  const server = await openTcpStoreServer({ port: 0 });
  await server.close();
  return server.port;
}

async function serve(limits?: Partial<TcpStoreLimits>) {
  const server = scope.add(await openTcpStoreServer({ port: 0, ...(limits && { limits }) }));
  const open = async (timeoutMs = 20_000): Promise<TcpStore> =>
    scope.add(await openTcpStore({ host: HOST, port: server.port, timeoutMs }));
  const raw = async (...sent: readonly Uint8Array[]): Promise<Socket> => {
    const socket = connect(server.port, HOST);
    socket.on('error', () => {});
    scope.defer(() => socket.destroy());
    await once(socket, 'connect');
    if (sent.length > 0) socket.write(Buffer.concat(sent));
    return socket;
  };
  return { server, open, raw };
}

async function dropped(socket: Socket): Promise<void> {
  socket.resume();
  if (!socket.closed) await once(socket, 'close');
}

async function until(condition: () => boolean): Promise<void> {
  for (let left = 1000; !condition(); left--) {
    if (left === 0) throw new Error('it did not come true within 5 s');
    await sleep(5);
  }
}

describe('opening', () => {
  it('waits for a server that starts later', async () => {
    const { server } = await serve();
    const { port } = server;
    await server.close();
    const early = openTcpStore({ host: HOST, port, timeoutMs: 20_000 });
    await sleep(50);
    scope.add(await openTcpStoreServer({ port }));
    const store = scope.add(await early);
    await store.set('k', bytes('v'));
    expect(text(await store.get('k'))).toBe('v');
  });

  it('names the address and the errno when nobody listens, and rejects with the reason of an abort', async () => {
    const { server } = await serve();
    const { port } = server;
    await server.close();
    await expect(openTcpStore({ host: HOST, port, timeoutMs: 60 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      message: `tcp store: no server at 127.0.0.1:${port} within 60 ms: the last attempt ended with ECONNREFUSED: the host is there and nobody listens at this port: the server has not started, ended, or listens at another address (tried from 127.0.0.1, lo)`,
    });
    const reason = { mine: true };
    const controller = new AbortController();
    const opening = openTcpStore({ host: HOST, port, signal: controller.signal });
    setTimeout(() => controller.abort(reason), 20);
    await expect(opening).rejects.toBe(reason);
  });

  it('knows of no interface from which it tried a name that does not resolve', async () => {
    const at = { host: 'nowhere.invalid', port: 1 };
    expect(await routeTo(at.host, at.port)).toBeUndefined();
    const cause = Object.assign(new Error('connect ENETUNREACH'), { code: 'ENETUNREACH' });
    expect(await whyUnreachable(at, 'nothing', cause)).toBe(
      'the last attempt ended with ENETUNREACH: no interface of this host leads there (no route of this host leads there)',
    );
    const port = await unused();
    await expect(openTcpStore({ host: HOST, port, timeoutMs: 60.123 })).rejects.toThrow(/ within 60 ms: /);
  });

  it('gives up a server that accepts and says nothing', async () => {
    const mute = createServer((socket) => socket.resume()).listen(0, HOST);
    await once(mute, 'listening');
    const { port } = mute.address() as { port: number };
    await expect(openTcpStore({ host: HOST, port, timeoutMs: 60 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      message: `tcp store: no server at 127.0.0.1:${port} within 60 ms: it took the connection and did not answer (tried from 127.0.0.1, lo)`,
    });
    await new Promise((resolve) => mute.close(resolve));
  });

  it('waits on the rank of the server until all have joined, and says how many had', async () => {
    const joining = openTcpStore({ host: HOST, port: 0, isServer: true, worldSize: 2, timeoutMs: 60 });
    await expect(joining).rejects.toMatchObject({ code: 'EP_TIMEOUT', context: { joined: 1, worldSize: 2 } });
    const { server } = await serve();
    const { port } = server;
    await server.close();
    const ranks = await Promise.all(
      [0, 1, 2].map((rank) =>
        openTcpStore({ host: HOST, port, isServer: rank === 0, worldSize: 3, timeoutMs: 20_000 }),
      ),
    );
    for (const store of ranks) scope.add(store);
    expect(await ranks[1]!.numKeys()).toBe(1);
  });

  it('listens at loopback unless told otherwise, and asks where for a host that others reach', async () => {
    const { server } = await serve();
    expect(server.host).toBe(HOST);
    await expect(openTcpStore({ host: '10.1.2.3', port: 0, isServer: true })).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/give bind \(EP_STORE_BIND\), for example "0\.0\.0\.0"/),
    });
    await expect(openTcpStoreServer({ port: server.port })).rejects.toMatchObject({
      code: 'EP_SYSTEM',
      native: { name: 'EADDRINUSE' },
    });
  });
});

describe('loss', () => {
  it('closing the server ends waits and requests, and says who and what was awaited', async () => {
    const { server, open } = await serve();
    const store = await open();
    const waits = [store.get('never'), store.wait(['one', 'two'])].map((wait) => wait.catch((error) => error));
    await sleep(30);
    await server.close();
    const [got, waited] = await Promise.all(waits);
    expect(got).toMatchObject({ code: 'EP_PEER_LOST' });
    expect(got.message).toContain(`the server at ${HOST}:${server.port} closed the connection`);
    expect(got.message).toContain('while this waited for get of "never"');
    expect(waited.message).toContain('while this waited for wait of "one", "two"');
    await expect(store.set('k', bytes(''))).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
    await expect(store.get('k')).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
  });

  it('the store of the rank that holds the server closes it', async () => {
    const host = await openTcpStore({ host: HOST, port: 0, isServer: true });
    const other = scope.add(await openTcpStore({ host: HOST, port: host.port }));
    const wait = other.get('never').catch((error) => error);
    await sleep(30);
    await host.close();
    expect(await wait).toMatchObject({ code: 'EP_PEER_LOST' });
  });

  it('a client that is lost leaves its wait and its connection nowhere', async () => {
    const { server, open, raw } = await serve();
    const store = await open();
    const socket = await raw(HELLO, ...requestParts({ kind: 'wait', keys: ['/k'] }));
    await until(() => server.connections === 3);
    socket.destroy();
    await until(() => server.connections === 2);
    await store.set('k', bytes('v'));
    expect(text(await store.get('k'))).toBe('v');
  });

  it('a server that hangs ends requests and waits at their time limits', async () => {
    const sockets: Socket[] = [];
    const hanging = createServer((socket) => {
      sockets.push(socket);
      socket.once('data', (chunk) => socket.write(chunk.subarray(6, 10)));
    }).listen(0, HOST);
    await once(hanging, 'listening');
    const { port } = hanging.address() as { port: number };
    const store = await openTcpStore({ host: HOST, port, timeoutMs: 80 });
    await expect(store.add('n', 1)).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      message: `tcp store: the server at 127.0.0.1:${port} did not answer add to "n" within 80 ms; it may have done it`,
    });
    await expect(store.wait(['k'], { timeoutMs: 30 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      context: { missing: ['k'] },
    });
    await store.close();
    const patient = await openTcpStore({ host: HOST, port, timeoutMs: 60_000 });
    const pending = [patient.add('n', 1), patient.set('k', bytes('v'))].map((call) => call.catch((error) => error));
    const begin = performance.now();
    await patient.close();
    expect(performance.now() - begin).toBeLessThan(5000);
    for (const error of await Promise.all(pending)) expect(error).toMatchObject({ code: 'EP_ABORTED' });
    for (const socket of sockets) socket.destroy();
    await new Promise((resolve) => hanging.close(resolve));
  });

  it('leaves no socket and no timer behind', async () => {
    const held = () => process.getActiveResourcesInfo().filter((name) => /TCP|Timeout/.test(name)).length;
    await sleep(50);
    const before = held();
    const host = await openTcpStore({ host: HOST, port: 0, isServer: true, worldSize: 1 });
    const other = await openTcpStore({ host: HOST, port: host.port });
    const controller = new AbortController();
    const waits = [
      other.get('a', { timeoutMs: 5 }),
      other.get('b', { signal: controller.signal }),
      other.get('c'),
      other.get('d'),
    ].map((wait) => wait.catch(() => {}));
    await sleep(30);
    controller.abort(new Error('enough'));
    await other.close();
    await host.close();
    await Promise.all(waits);
    await until(() => held() <= before);
  });
});

describe('the server', () => {
  const cases: readonly (readonly [string, string, RegExp])[] = [
    ['no validate first', '07', /numKeys before validate/],
    ['a wrong magic number', '0000000000', /the magic number is 0/],
    ['a second validate', '00cef7853c00cef7853c', /a second validate/],
    ['an unknown code', '00cef7853cff', /code 255 is unknown/],
    ['a string of 2^40 bytes', '00cef7853c030000000000010000', /length of a string is 1099511627776/],
    ['a string of 2^64-1 bytes', '00cef7853c03ffffffffffffffff', /18446744073709551615/],
    ['2^40 keys', '00cef7853c050000000000010000', /number of items is/],
    ['a second wait', `00cef7853c${'0601000000000000000100000000000000'.concat('78').repeat(2)}`, /a second wait/],
  ];
  it.each(cases)('drops a client that sends %s, and nobody else', async (_, hex, reason) => {
    const reports: string[] = [];
    scope.defer(listen('ep:store:dropped', (report) => reports.push(report.reason)));
    const { open, raw } = await serve();
    const store = await open();
    await dropped(await raw(Buffer.from(hex, 'hex')));
    expect(reports).toEqual([expect.stringMatching(reason)]);
    await store.set('k', bytes('v'));
    expect(text(await store.get('k'))).toBe('v');
  });

  it('drops clients that begin and do not go on, and lets those be that have nothing to say', async () => {
    const { server, open, raw } = await serve({ stallMs: 200 });
    const store = await open();
    const silent = await raw();
    const half = await raw(HELLO, Buffer.from('0105', 'hex'));
    const idle = await raw(HELLO);
    await Promise.all([dropped(silent), dropped(half)]);
    await sleep(300);
    expect([idle.closed, server.connections]).toEqual([false, 3]);
    expect(await store.check(['k'])).toBe(false);
  });

  it('stops looking at the requests of a client that does not read, keeps serving others, and then drops it', async () => {
    const reports: string[] = [];
    scope.defer(listen('ep:store:dropped', (report) => reports.push(report.reason)));
    const { server, open, raw } = await serve({ stallMs: 400, unreadBytes: 1 << 16 });
    const store = await open();
    await store.set('k', new Uint8Array(1 << 20));
    const greedy = await raw(HELLO);
    greedy.pause();
    const get = Buffer.concat(requestParts({ kind: 'get', key: '/k' }));
    greedy.write(Buffer.concat(Array.from({ length: 2000 }, () => get)));
    expect(text(await store.get('k')).length).toBe(1 << 20);
    await until(() => server.connections === 2);
    const [, unread] = /^did not read its (\d+) bytes of answers for 400 ms$/.exec(reports[0] ?? '') ?? [];
    // What may wait, and the one answer that went over it.
    expect(Number(unread)).toBeLessThanOrEqual((1 << 16) + (1 << 20) + 8);
  });

  it('holds no more than it may', async () => {
    const { open } = await serve({ storeBytes: 10_000, stringBytes: 6000 });
    const store = await open();
    await store.set('a', new Uint8Array(5000));
    const other = await open();
    await expect(other.set('b', new Uint8Array(6000))).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
    const third = await open();
    await expect(third.append('a', new Uint8Array(2000))).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
    expect((await store.get('a')).byteLength).toBe(5000);
  });

  it('takes no more connections than it may', async () => {
    const { server, open, raw } = await serve({ connections: 3 });
    const store = await open();
    const third = await raw(HELLO);
    await until(() => server.connections === 3);
    await dropped(await raw(HELLO));
    expect(third.closed).toBe(false);
    expect(await store.numKeys()).toBe(0);
  });

  it('lets a barrier through when all have come, wakes one popper for each push, and lists keys', async () => {
    const { raw } = await serve();
    const sockets = await Promise.all([raw(HELLO), raw(HELLO)]);
    const heard = ['', ''];
    for (const [i, socket] of sockets.entries())
      socket.on('data', (chunk) => {
        heard[i] += chunk.toString('hex');
      });
    const say = (i: number, ...requests: Parameters<typeof requestParts>[0][]) =>
      sockets[i]!.write(Buffer.concat(requests.flatMap((request) => [...requestParts(request)])));
    say(0, { kind: 'barrier', key: '/b', worldSize: 2n });
    await sleep(30);
    expect(heard).toEqual(['', '']);
    say(1, { kind: 'barrier', key: '/b', worldSize: 2n });
    await until(() => heard.join() === '00,00');
    say(0, { kind: 'wait', keys: ['/q'] });
    await sleep(20);
    say(1, { kind: 'wait', keys: ['/q'] });
    await sleep(20);
    const pusher = await raw(HELLO, ...requestParts({ kind: 'queuePush', key: '/q', value: Buffer.from('x') }));
    await until(() => heard[0] === '0000');
    await sleep(30);
    expect(heard[1]).toBe('00');
    say(1, { kind: 'cancelWait' });
    await until(() => heard[1] === '0001');
    say(1, { kind: 'listKeys' });
    await until(() => heard[1] === `0001${'0100000000000000'}${'0200000000000000'}2f62`);
    pusher.destroy();
  });
});

describe('the client', () => {
  it('refuses sums that no number holds, and takes them back', async () => {
    const { open } = await serve();
    const store = await open();
    await store.set('n', bytes(String(Number.MAX_SAFE_INTEGER)));
    await expect(store.add('n', 1)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT', message: /safe integer/ });
    expect(text(await store.get('n'))).toBe(String(Number.MAX_SAFE_INTEGER));
    await store.set('n', bytes('none'));
    const others = store.get('later');
    await expect(store.add('n', 1)).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: /no decimal integer/,
    });
    await store.set('later', bytes('still here'));
    expect(text(await others)).toBe('still here');
  });

  it('refuses what no server of torch takes before it is sent', async () => {
    const { open } = await serve();
    const store = await open();
    await expect(store.set('k', new Uint8Array(2 ** 23 + 1))).rejects.toMatchObject({ code: 'EP_CAPACITY' });
    await expect(store.check(Array.from({ length: 131_073 }, () => 'k'))).rejects.toMatchObject({
      code: 'EP_CAPACITY',
    });
    await expect(store.set('\ud800', bytes(''))).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    expect(await store.numKeys()).toBe(0);
  });

  it('uses its connections again after waits that came, timed out and were aborted', async () => {
    const { open } = await serve();
    const store = await open();
    let connects = 0;
    const count = (): void => {
      connects++;
    };
    subscribe('net.client.socket', count);
    scope.defer(() => unsubscribe('net.client.socket', count));
    for (let round = 0; round < 20; round++) {
      await store.wait(['never'], { timeoutMs: 2 }).catch(() => {});
      const controller = new AbortController();
      const aborted = store.get('never', { signal: controller.signal }).catch((error) => error);
      const come = store.get(`k${round}`);
      await store.set(`k${round}`, bytes('v'));
      controller.abort('enough');
      expect([await aborted, text(await come)]).toEqual(['enough', 'v']);
    }
    // One wait has the spare connection; the other one, and a third while an aborted wait is taken back, need their own.
    expect(connects).toBeLessThanOrEqual(5);
  });

  it('waits again for a key that was deleted and set anew, and reads no value that it never had', async () => {
    const { open } = await serve();
    const [reader, writer] = [await open(), await open()];
    for (let round = 0; round < 20; round++) {
      const key = `k${round}`;
      const both = [reader.get(key), reader.multiGet([key, key])] as const;
      await writer.set(key, bytes('first'));
      await writer.delete(key);
      await writer.set(key, bytes('second'));
      const [one, many] = await Promise.all(both);
      for (const value of [one, ...many]) expect(text(value)).toMatch(/^(first|second)$/);
    }
    await writer.set('empty', bytes(''));
    expect((await reader.multiGet(['empty', 'k0', 'empty'])).map(text)).toEqual(['', 'second', '']);
  });

  it('ends with an error when the server sends what nobody asked for', async () => {
    const lying = createServer((socket) => {
      socket.on('error', () => {});
      socket.once('data', (chunk) => {
        socket.write(chunk.subarray(6, 10));
        socket.on('data', () => socket.write(Buffer.from('0000000000000000ff', 'hex')));
      });
    }).listen(0, HOST);
    await once(lying, 'listening');
    const { port } = lying.address() as { port: number };
    const store = await openTcpStore({ host: HOST, port });
    await expect(store.check(['k'])).resolves.toBe(true);
    await expect(store.numKeys()).rejects.toMatchObject({ code: 'EP_TRANSPORT_FAILED', message: /sent nonsense/ });
    await store.close();
    await new Promise((resolve) => lying.close(resolve));
  });
});
