import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { describe, expect, it } from 'vitest';
import {
  CloseScope,
  type OpenedRendezvous,
  openRendezvous,
  openTcpStoreServer,
  parseRendezvousUrl,
  TcpStore,
} from '../src/index.js';

const range = (n: number): readonly number[] => Array.from({ length: n }, (_, i) => i);

async function freePort(): Promise<number> {
  await using server = await openTcpStoreServer({ port: 0 });
  return server.port;
}

async function closeAll(opened: readonly OpenedRendezvous[]): Promise<void> {
  for (const { store } of [...opened].reverse()) {
    if (store instanceof TcpStore) expect(await store.othersLeft({ timeoutMs: 5000 })).toBe(true);
    await store.close();
  }
}

describe('the URL', () => {
  it('names the store and this rank', () => {
    expect(parseRendezvousUrl('tcp://127.0.0.1:29500?rank=1&world_size=4')).toEqual({
      rank: 1,
      worldSize: 4,
      store: { kind: 'tcp', host: '127.0.0.1', port: 29500 },
    });
    expect(parseRendezvousUrl('tcp://[::1]:80', { rank: 0, worldSize: 1 }).store).toEqual({
      kind: 'tcp',
      host: '::1',
      port: 80,
    });
    expect(parseRendezvousUrl('file:///a%20b/c?rank=0&world_size=1').store).toEqual({ kind: 'file', path: '/a b/c' });
    const env = { RANK: '7', WORLD_SIZE: '9', MASTER_ADDR: 'h', MASTER_PORT: '1' };
    expect(parseRendezvousUrl('env://', { env })).toMatchObject({ rank: 7, worldSize: 9 });
    expect(parseRendezvousUrl('env://?rank=2', { env })).toMatchObject({ rank: 2, worldSize: 9 });
  });

  it.each<[string, object, RegExp]>([
    ['http://h:1?rank=0&world_size=1', {}, /url must be env:\/\//],
    ['tcp://h?rank=0&world_size=1', {}, /url must be/],
    ['tcp://h:1/x?rank=0&world_size=1', {}, /url must be/],
    ['tcp://u:p@h:1?rank=0&world_size=1', {}, /url must be/],
    ['file://host/x?rank=0&world_size=1', {}, /url must be/],
    ['file:///?rank=0&world_size=1', {}, /url must be/],
    ['env://x', {}, /url must be/],
    ['tcp://h:1?rank=0', {}, /world_size must be/],
    ['tcp://h:1?world_size=2', {}, /rank must be/],
    ['tcp://h:1?rank=2&world_size=2', {}, /rank must be an integer from 0 to 1, found 2/],
    ['tcp://h:1?rank=x&world_size=2', {}, /rank of the URL must be a decimal integer, found "x"/],
    ['tcp://h:1?rank=0&world_size=2', { rank: 1 }, /rank must be 0, as in the URL, found 1/],
    ['tcp://h:1?rank=0&world_size=2&ttl=3', {}, /other than rank and world_size, found "ttl"/],
  ])('%s is refused', (url, options, message) => {
    expect(() => parseRendezvousUrl(url, options)).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) }),
    );
  });
});

describe('meets', () => {
  it.each(['tcp', 'file', 'env over tcp', 'env over file'])('over %s', async (kind) => {
    await using scope = new CloseScope();
    const directory = mkdtempSync(join(tmpdir(), 'ep-url-'));
    scope.defer(() => rmSync(directory, { recursive: true }));
    const port = await freePort();
    const path = join(directory, 'store');
    const open = (rank: number) => {
      if (kind === 'tcp') return openRendezvous(`tcp://127.0.0.1:${port}?rank=${rank}&world_size=3`);
      if (kind === 'file') return openRendezvous(pathToFileURL(path).href, { rank, worldSize: 3 });
      const env = {
        RANK: `${rank}`,
        WORLD_SIZE: '3',
        LOCAL_RANK: `${rank}`,
        MASTER_ADDR: '127.0.0.1',
        MASTER_PORT: `${port}`,
      };
      return openRendezvous('env://', { env: kind === 'env over tcp' ? env : { ...env, EP_STORE: `file:${path}` } });
    };
    const opened = await Promise.all([...range(3)].reverse().map(open)).then((all) => all.reverse());
    for (const [rank, { peers, worldSize, ...found }] of opened.entries()) {
      expect([found.rank, worldSize]).toEqual([rank, 3]);
      expect(peers!.map((peer) => peer.rank)).toEqual([0, 1, 2]);
      await found.store.set(`from ${rank}`, Uint8Array.of(rank));
    }
    for (const { store } of opened)
      expect((await store.multiGet(range(3).map((rank) => `from ${rank}`))).map(([byte]) => byte)).toEqual([0, 1, 2]);
    await closeAll(opened);
  });

  it("at the launcher's own store, once for each of its attempts", async () => {
    await using agent = await openTcpStoreServer({ port: 0 });
    for (const attempt of [0, 1]) {
      const opened = await Promise.all(
        range(2).map((rank) =>
          openRendezvous('env://', {
            env: {
              RANK: `${rank}`,
              WORLD_SIZE: '2',
              MASTER_ADDR: '127.0.0.1',
              MASTER_PORT: `${agent.port}`,
              TORCHELASTIC_USE_AGENT_STORE: 'True',
              TORCHELASTIC_RESTART_COUNT: `${attempt}`,
            },
          }),
        ),
      );
      expect(opened.map(({ store }) => (store as TcpStore).server)).toEqual([undefined, undefined]);
      await closeAll(opened);
    }
  });
});

describe('names', () => {
  const at = async (ranks: readonly number[], worldSize: number, timeoutMs = 1500) => {
    const port = await freePort();
    const runs = ranks.map((rank) => openRendezvous(`tcp://127.0.0.1:${port}`, { rank, worldSize, timeoutMs }));
    return Promise.all(
      runs.map((run) =>
        run.then(
          () => undefined,
          (error) => error,
        ),
      ),
    );
  };

  it('missing ranks, on all that came', async () => {
    for (const error of await at([0, 2], 4)) {
      expect(error).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [1, 3] } });
      expect(error.message).toMatch(/^rendezvous: ranks 1, 3 of 4 did not come within the 1500 ms of rank \d$/);
    }
  });

  it('missing ranks, also to those that would have waited longer than the one that holds the store', async () => {
    const port = await freePort();
    const run = (rank: number, timeoutMs: number) =>
      openRendezvous(`tcp://127.0.0.1:${port}`, { rank, worldSize: 3, timeoutMs }).catch((error) => error);
    for (const error of await Promise.all([run(0, 1500), run(2, 20_000)]))
      expect(error).toMatchObject({
        code: 'EP_RENDEZVOUS',
        message: 'rendezvous: rank 1 of 3 did not come within the 1500 ms of rank 0',
      });
  });

  it('rank 0, where it is the one that holds the store', async () => {
    const [error] = await at([1], 2, 80);
    expect(error).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [0] } });
    expect(error.message).toMatch(
      /^rendezvous: rank 0 of 2, which holds the store, did not come or has left: tcp store: no server/,
    );
  });

  it('two processes that run as one rank', async () => {
    for (const error of await at([0, 1, 1], 3, 5000)) {
      expect(error).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [1] } });
      expect(error.message).toMatch(/rank 1 was claimed twice by process \d+ on .* and by process/);
    }
    const errors = (await at([0, 0], 2)).map((error) => error?.message).sort();
    expect(errors[0]).toMatch(/^rendezvous: rank 1 of 2 did not come/);
    expect(errors[1]).toMatch(/^rendezvous: the address of rank 0 is taken: two processes run as rank 0, or another/);
  });

  it('a rank that comes when the others have given up, to itself', async () => {
    await using scope = new CloseScope();
    const directory = mkdtempSync(join(tmpdir(), 'ep-url-'));
    scope.defer(() => rmSync(directory, { recursive: true }));
    const url = pathToFileURL(join(directory, 'store')).href;
    const run = (rank: number) => openRendezvous(url, { rank, worldSize: 2, timeoutMs: 30 }).catch((error) => error);
    const early = await run(0);
    const late = await run(1);
    for (const error of [early, late])
      expect(error).toMatchObject({
        code: 'EP_RENDEZVOUS',
        message: 'rendezvous: rank 1 of 2 did not come within the 30 ms of rank 0',
      });
  });

  it('nobody where other programs take part, and rank 0 counts who joined', async () => {
    const port = await freePort();
    const error = await openRendezvous(`tcp://127.0.0.1:${port}?rank=0&world_size=3`, {
      handshake: false,
      timeoutMs: 60,
    }).catch((e) => e);
    expect(error).toMatchObject({ code: 'EP_TIMEOUT', context: { joined: 1, worldSize: 3 } });
  });
});
