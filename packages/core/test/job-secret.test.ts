/** Who has no job secret, or another one, is kept out of a TCP store, and is told so; whoever has it notices a server that does not. */
import { createHmac } from 'node:crypto';
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { once } from 'node:events';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import {
  CloseScope,
  type JobSecret,
  jobKey,
  openRendezvous,
  openTcpStore,
  openTcpStoreServer,
  resolveJobSecret,
  type TcpStoreLimits,
} from '../src/index.js';

const HOST = '127.0.0.1';
const SECRET = 'a secret of thirty bytes or so';
const TORCH_HELLO = Buffer.from('00cef7853c0d2a3c0000', 'hex');
/** 101, "EPS1", a nonce. */
const HELLO = Buffer.concat([Buffer.from('6545505331', 'hex'), Buffer.alloc(32, 7)]);

let scope: CloseScope;
beforeEach(() => {
  scope = new CloseScope();
});
afterEach(() => scope.close());

const serve = async (secret: JobSecret, limits: Partial<TcpStoreLimits> = {}) =>
  scope.add(await openTcpStoreServer({ port: 0, secret, limits }));
const open = async (port: number, secret: JobSecret | undefined, timeoutMs = 20_000) =>
  scope.add(await openTcpStore({ host: HOST, port, timeoutMs, ...(secret !== undefined && { secret }) }));

async function raw(port: number): Promise<{ readonly socket: Socket; read(count: number): Promise<Buffer> }> {
  const socket = connect(port, HOST);
  socket.on('error', () => {});
  scope.defer(() => socket.destroy());
  let held: Buffer = Buffer.alloc(0);
  socket.on('data', (chunk: Buffer) => {
    held = Buffer.concat([held, chunk]);
    socket.emit('more');
  });
  await once(socket, 'connect');
  return {
    socket,
    async read(count) {
      while (held.length < count) await once(socket, 'more');
      const taken = held.subarray(0, count);
      held = held.subarray(count);
      return taken;
    },
  };
}

async function reported(body: () => Promise<unknown>): Promise<readonly string[]> {
  const reasons: string[] = [];
  const note = (message: unknown): void => void reasons.push((message as { reason: string }).reason);
  subscribe('ep:store:dropped', note);
  try {
    await body();
  } finally {
    unsubscribe('ep:store:dropped', note);
  }
  return reasons;
}

describe('a TCP store with a job secret', () => {
  it('serves who has it, given or from the environment, on every connection', async () => {
    const { port } = await serve(SECRET);
    const one = await open(port, SECRET);
    const other = await open(port, new TextEncoder().encode(SECRET));
    const waits = ['a', 'b', 'c', 'd'].map((key) => other.get(key));
    for (const key of ['a', 'b', 'c', 'd']) await one.set(key, new TextEncoder().encode(key));
    expect((await Promise.all(waits)).map((value) => new TextDecoder().decode(value))).toEqual(['a', 'b', 'c', 'd']);
    const { store } = await openRendezvous(`tcp://${HOST}:${port}?rank=1&world_size=2`, {
      handshake: false,
      env: { EP_JOB_SECRET: SECRET },
    });
    expect(await store.check(['a'])).toBe(true);
    await store.close();
  });

  it.each([
    ['another one', 'another secret of some length', /it has another job secret/],
    ['none', 'none', /it asks for the job secret, and this side has none: set EP_JOB_SECRET/],
    ['nothing said', undefined, /it asks for the job secret, and this side has none/],
  ] as const)('refuses a client with %s at once, and both sides say why', async (_, secret, why) => {
    const { port } = await serve(SECRET);
    const begin = performance.now();
    const reasons = await reported(async () => {
      await expect(open(port, secret)).rejects.toMatchObject({
        code: 'EP_SECRET',
        scope: 'transport',
        message: expect.stringMatching(why),
      });
    });
    expect(performance.now() - begin).toBeLessThan(5000);
    expect(reasons).toHaveLength(1);
    expect(reasons[0]).toMatch(secret?.startsWith('another') ? /another job secret/ : /began without the job secret/);
  });

  it('answers a client of PyTorch with a number that its ping did not have, which that client warns of', async () => {
    const { port } = await serve(SECRET);
    const { socket, read } = await raw(port);
    socket.write(TORCH_HELLO);
    expect((await read(4)).toString()).toBe('EPS?');
    await once(socket, 'end');
  });

  it('tells a client with a secret that the server has none', async () => {
    const { port } = await serve('none');
    await expect(open(port, SECRET)).rejects.toMatchObject({
      code: 'EP_SECRET',
      message: expect.stringMatching(/it has no job secret, this side has one/),
    });
  });

  it('does not take a server that cannot prove it, nor one that answers with what it was sent', async () => {
    const sockets: Socket[] = [];
    const answer = async (how: (proof: Buffer) => Buffer) => {
      const server = createServer((socket) => {
        sockets.push(socket);
        let held = Buffer.alloc(0);
        socket.on('error', () => {});
        socket.on('data', (chunk) => {
          held = Buffer.concat([held, chunk]);
          if (held.length === 37) socket.write(Buffer.concat([Buffer.from([1]), Buffer.alloc(32, 9)]));
          if (held.length === 69) socket.write(Buffer.concat([Buffer.from([3]), how(held.subarray(37))]));
        });
      }).listen(0, HOST);
      await once(server, 'listening');
      scope.defer(() => {
        for (const socket of sockets) socket.destroy();
        server.close();
      });
      return (server.address() as { port: number }).port;
    };
    for (const how of [(proof: Buffer) => proof, () => Buffer.alloc(32)]) {
      await expect(open(await answer(how), SECRET)).rejects.toMatchObject({
        code: 'EP_SECRET',
        message: expect.stringMatching(/it does not know the job secret/),
      });
    }
    expect(sockets.length).toBeGreaterThanOrEqual(2);
  });

  it('takes no request before the proof, and a proof only for its own challenge', async () => {
    const server = await serve(SECRET);
    const key = jobKey(new TextEncoder().encode(SECRET), 'store');
    const prove = (challenge: Buffer) =>
      createHmac('sha256', key).update('store client\0').update(HELLO.subarray(5)).update(challenge).digest();
    const first = await raw(server.port);
    first.socket.write(HELLO);
    const challenge = (await first.read(33)).subarray(1);
    first.socket.write(prove(challenge));
    expect((await first.read(33))[0]).toBe(3);
    first.socket.write(TORCH_HELLO);
    expect((await first.read(4)).readUInt32LE()).toBe(0x3c2a);
    // Recorded, and said again.
    const second = await raw(server.port);
    second.socket.write(HELLO);
    expect((await second.read(33)).subarray(1).equals(challenge)).toBe(false);
    second.socket.write(Buffer.concat([prove(challenge), TORCH_HELLO]));
    expect((await second.read(1))[0]).toBe(4);
    await once(second.socket, 'end');
    // A request in the place of a proof.
    const third = await raw(server.port);
    third.socket.write(Buffer.concat([HELLO, Buffer.from('01'.padEnd(64, '0'), 'hex')]));
    expect((await third.read(34)).at(-1)).toBe(4);
  });

  it('drops who begins and does not go on, or goes on talking after a refusal', async () => {
    const server = await serve(SECRET, { stallMs: 100 });
    const slow = await raw(server.port);
    slow.socket.write(HELLO);
    await slow.read(33);
    const loud = await raw(server.port);
    loud.socket.write(TORCH_HELLO);
    const talk = setInterval(() => loud.socket.write(Buffer.alloc(1000)), 10);
    try {
      const begin = performance.now();
      while (server.connections > 0) {
        expect(performance.now() - begin).toBeLessThan(10_000);
        await new Promise((resolve) => setTimeout(resolve, 10));
      }
    } finally {
      clearInterval(talk);
    }
  });

  it('is asked for where other hosts could take part, unless somebody says none', async () => {
    const missing = (what: RegExp) => ({ code: 'EP_SECRET', message: expect.stringMatching(what) });
    await expect(openTcpStoreServer({ port: 0, bind: '0.0.0.0' })).rejects.toMatchObject(
      missing(/0\.0\.0\.0:0 can be reached from other hosts, and there is no job secret: .*EP_JOB_SECRET/),
    );
    await expect(openTcpStore({ host: '192.0.2.1', port: 1, timeoutMs: 50 })).rejects.toMatchObject(
      missing(/192\.0\.2\.1:1 is on another host/),
    );
    const server = scope.add(await openTcpStoreServer({ port: 0, bind: '0.0.0.0', secret: 'none' }));
    await open(server.port, undefined);
    await expect(openTcpStore({ host: '192.0.2.1', port: 1, timeoutMs: 50, secret: 'none' })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
    });
  });
});

describe('the job secret of the environment', () => {
  it('is read from EP_JOB_SECRET, else from the file, and never shown', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'ep-secret-'));
    try {
      const path = join(folder, 'secret');
      await writeFile(path, `${SECRET}\n`);
      const bytes = new TextEncoder().encode(SECRET);
      expect(resolveJobSecret(undefined, { EP_JOB_SECRET_FILE: path })).toEqual(bytes);
      expect(resolveJobSecret(undefined, { EP_JOB_SECRET: 'none', EP_JOB_SECRET_FILE: path })).toBe('none');
      expect(resolveJobSecret(SECRET, { EP_JOB_SECRET: 'none' })).toEqual(bytes);
      expect(resolveJobSecret(undefined, {})).toBeUndefined();
      expect(() => resolveJobSecret(undefined, { EP_JOB_SECRET_FILE: join(folder, 'no') })).toThrow(/ENOENT/);
    } finally {
      await rm(folder, { recursive: true });
    }
    const short = () => resolveJobSecret(undefined, { EP_JOB_SECRET: 'hunter2-hunter2' });
    expect(short).toThrow(/EP_JOB_SECRET must be 16 to 4096 bytes .* found "15 bytes"/);
    expect(short).not.toThrow(/hunter2/);
  });

  it('gives another key for each purpose and salt', () => {
    const secret = new TextEncoder().encode(SECRET);
    const keys = [jobKey(secret, 'a'), jobKey(secret, 'b'), jobKey(secret, 'a', new Uint8Array(1).fill(1))];
    expect(new Set(keys.map((key) => key.toString('hex'))).size).toBe(3);
    expect(keys[0]).toEqual(jobKey(secret, 'a'));
  });
});
