/** `ep run` on several hosts, which are several `ep run` on this one: they have nothing in common but the address at which they meet. */
import { createServer } from 'node:net';
import { describe, expect, it } from 'vitest';
import { type Finished, runEp, startEp } from '../ep.js';

const program = (source: string): string[] => ['--', process.execPath, '--input-type=module', '-e', source];
const SECRET = { EP_JOB_SECRET: 'a secret of these nodes' };

async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as { port: number };
  await new Promise((resolve) => server.close(resolve));
  return port;
}

/** Runs the same job on nodes with so many ranks each. */
async function onNodes(
  ranks: readonly number[],
  flags: readonly string[],
  source: string,
): Promise<readonly Finished[]> {
  const rdzv = ['--rdzv', `127.0.0.1:${await freePort()}`];
  return Promise.all(
    ranks.map((count) =>
      runEp(['run', '-n', String(count), ...rdzv, '--join-timeout', '60', ...flags, ...program(source)], SECRET),
    ),
  );
}

const linesOf = (all: readonly Finished[]): readonly string[] =>
  all.flatMap(({ stdout }) => stdout.split('\n').filter((line) => line !== ''));

describe('ep run on several nodes', () => {
  it('numbers the ranks through, and they meet at a store that asks for the secret', async () => {
    const source = `
      import { openRendezvous } from '@ep/core';
      const { store, rank, worldSize, localRank, localWorldSize, peers } = await openRendezvous('env://', { timeoutMs: 60_000 });
      const { GROUP_RANK, GROUP_WORLD_SIZE, ROLE_WORLD_SIZE, MASTER_ADDR, EP_STORE_HELD } = process.env;
      console.log(JSON.stringify({ rank, worldSize, localRank, localWorldSize, peers: peers.length, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_WORLD_SIZE, MASTER_ADDR, EP_STORE_HELD }));
      await store.close();`;
    const all = await onNodes([2, 1], ['--nodes', '2'], source);
    expect(all.map(({ code, stderr }) => ({ code, stderr }))).toEqual(Array(2).fill({ code: 0, stderr: '' }));
    const said = linesOf(all).map((line) => JSON.parse(line.replace(/^\[rank \d+\] /, '')));
    expect(said.map(({ rank }) => rank).sort()).toEqual([0, 1, 2]);
    for (const one of said) {
      const sizes = { worldSize: 3, peers: 3, GROUP_WORLD_SIZE: '2', ROLE_WORLD_SIZE: '3' };
      expect(one).toMatchObject({ ...sizes, MASTER_ADDR: '127.0.0.1', EP_STORE_HELD: '1' });
      expect(said.filter(({ GROUP_RANK }) => GROUP_RANK === one.GROUP_RANK)).toHaveLength(one.localWorldSize);
      expect(one.localRank).toBeLessThan(one.localWorldSize);
    }
    expect(new Set(said.map(({ GROUP_RANK }) => GROUP_RANK))).toEqual(new Set(['0', '1']));
  });

  it('stops all nodes when a rank fails, and ends with its status on each', async () => {
    const source = `
      if (process.env.RANK === '2') process.exit(7);
      setInterval(() => {}, 1000);`;
    for (const { code, stderr } of await onNodes([1, 1, 1], ['--nodes', '3', '--grace', '20'], source)) {
      expect(code).toBe(7);
      expect(stderr).toMatch(/^ep run: rank 2 on node 2 \(.+\) ended with status 7; all ranks were stopped$/m);
    }
  });

  it('gives one id of the job to the ranks of all nodes and attempts', async () => {
    const source = `
      const { TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT } = process.env;
      console.log('id', TORCHELASTIC_RUN_ID);
      if (TORCHELASTIC_RESTART_COUNT === '0') process.exitCode = 9;`;
    const all = await onNodes([1, 1], ['--nodes', '2', '--max-restarts', '1'], source);
    expect(all.map(({ code }) => code)).toEqual([0, 0]);
    const ids = linesOf(all).map((line) => line.replace(/^\[rank \d\] id /, ''));
    // A rank may be stopped before it has said anything, in the first attempt.
    expect(ids.length).toBeGreaterThan(2);
    expect(new Set(ids).size).toBe(1);
    expect(ids[0]).toMatch(/^[-0-9a-f]{36}$/);
  });

  it('goes on whatever keys its ranks write, and says so where they write into the part of the launchers', async () => {
    const source = (keys: string) => `
      import { openTcpStore } from '@ep/core';
      const { hostname: host, port } = new URL(process.env.EP_STORE.replace('tcp:', 'http:'));
      const store = await openTcpStore({ host, port: Number(port) });
      for (const key of ${keys}) await store.set(key, new TextEncoder().encode('a word'));
      await store.close();`;
    const own = `['job', 'attempt', 'over', '0/failed', '0/plan', '0/joined', '0/done/0', '0/done/1', '0/alive/1']`;
    const good = await onNodes([1, 1], ['--nodes', '2'], source(own));
    expect(good.map(({ code, stderr }) => ({ code, stderr }))).toEqual(Array(2).fill({ code: 0, stderr: '' }));
    const theirs = `${source(`['ep run/0/failed']`)} setInterval(() => {}, 1000);`;
    for (const { code, stderr } of await onNodes([1, 1], ['--nodes', '2'], theirs)) {
      expect(code).toBe(1);
      expect(stderr).toMatch(
        /^ep run: .*"0\/failed" in the store of the job holds 6 bytes that are not why a job ended/m,
      );
    }
  });

  it('names the nodes that were given the same number', async () => {
    for (const { code, stderr } of await onNodes([1, 1], ['--nodes', '2', '--node-rank', '0'], '')) {
      expect(code).toBe(1);
      expect(stderr).toMatch(/--node-rank 0 to 1, each once.*: 0 \(.+\), 0 \(.+\) came \[EP_RENDEZVOUS\]/);
    }
  });

  it('starts all ranks again, as often as it may, with keys of their own', async () => {
    const source = `
      import { openRendezvous } from '@ep/core';
      const { store, rank } = await openRendezvous('env://', { timeoutMs: 60_000 });
      const attempt = Number(process.env.TORCHELASTIC_RESTART_COUNT);
      if (rank === 1 && attempt < 2) process.exit(9);
      console.log('attempt', attempt);
      await store.close();
      if (attempt < 2) setInterval(() => {}, 1000);`;
    const good = await onNodes([1, 1], ['--nodes', '2', '--max-restarts', '2'], source);
    expect(good.map(({ code }) => code)).toEqual([0, 0]);
    expect(linesOf(good).filter((line) => line.includes('attempt 2'))).toHaveLength(2);
    for (const { stderr } of good) expect(stderr).toMatch(/start again, 1 of 2\n.*start again, 2 of 2\n/);
    const bad = await onNodes([1, 1], ['--nodes', '2', '--max-restarts', '1'], source);
    expect(bad.map(({ code }) => code)).toEqual([9, 9]);
  });

  it('goes on with the nodes that are there, and keeps one that comes late for a restart', async () => {
    const rdzv = ['--rdzv', `127.0.0.1:${await freePort()}`, '--nodes', '1:3', '--last-call', '1'];
    // Ends when there is another attempt; until then it waits for one.
    const source = `
      console.log('world', process.env.WORLD_SIZE, process.env.TORCHELASTIC_RESTART_COUNT);
      if (process.env.TORCHELASTIC_RESTART_COUNT === '0') process.on('SIGUSR2', () => process.exit(3));
      if (process.env.TORCHELASTIC_RESTART_COUNT === '0') setInterval(() => {}, 1000);`;
    const args = ['run', '-n', '1', ...rdzv, '--max-restarts', '1', ...program(source)];
    const env = { ...SECRET, EP_TRACE_DIR: '.' };
    const first = startEp(args, env);
    await first.seen(/world 1 0/);
    const late = startEp(['run', '--json', ...args.slice(1)], env);
    await late.seen(/without this one, which waits for a restart/);
    // Passed on to the ranks.
    first.child.kill('SIGUSR2');
    const [a, b] = await Promise.all([first.finished, late.finished]);
    expect([a.code, b.code]).toEqual([0, 0]);
    expect(a.stdout).toMatch(/world 2 1/);
    expect(b.stdout).toMatch(/world 2 1/);
  });

  it('knows that a node has gone when its connection closes, long before it was silent for 15 s', async () => {
    const rdzv = ['--rdzv', `127.0.0.1:${await freePort()}`, '--nodes', '2'];
    const source = `console.log('here on', process.env.GROUP_RANK); setInterval(() => {}, 1000);`;
    const nodes = [0, 1].map(() => startEp(['run', '-n', '1', ...rdzv, ...program(source)], SECRET));
    const firsts = await Promise.all(nodes.map(async (node) => (await node.seen(/here on \d/)).includes('here on 0')));
    const [holder, other] = firsts[0] ? nodes : [...nodes].reverse();
    other!.child.kill('SIGKILL');
    const [{ code, stderr }] = await Promise.all([holder!.finished, other!.finished]);
    expect(code).toBe(1);
    expect(stderr).toMatch(/node 1 \(.+\) has gone: its connection to the store was closed; all ranks were stopped/);
  });

  it.each([
    ['SIGTERM', 143],
    ['SIGINT', 130],
  ] as const)('passes %s on to the ranks of all nodes, which all end with %i', async (signal, status) => {
    const rdzv = ['--rdzv', `127.0.0.1:${await freePort()}`, '--nodes', '2'];
    const args = ['run', '-n', '1', ...rdzv, ...program(`console.log('here'); setInterval(() => {}, 1000);`)];
    const nodes = [startEp(args, SECRET), startEp(args, SECRET)];
    for (const node of nodes) await node.seen(/here/);
    nodes[1]!.child.kill(signal);
    const [other, told] = await Promise.all(nodes.map(({ finished }) => finished));
    expect([told!.code, other!.code]).toEqual([status, status]);
    expect(other!.stderr).toMatch(new RegExp(`stopped by ${signal} on node`));
  });

  it('ends on all nodes as on the one whose output nobody reads any more', async () => {
    const rdzv = ['--rdzv', `127.0.0.1:${await freePort()}`, '--nodes', '2'];
    const args = ['run', '-n', '1', ...rdzv, ...program(`setInterval(() => console.log('here'), 10);`)];
    const nodes = [startEp(args, SECRET), startEp(args, SECRET)];
    for (const node of nodes) await node.seen(/here/);
    nodes[1]!.child.stdout?.destroy();
    const [other, told] = await Promise.all(nodes.map(({ finished }) => finished));
    expect([told!.code, other!.code]).toEqual([141, 141]);
    expect(other!.stderr).toMatch(/the job was stopped on node \d \(.+\): nobody reads its stdout any more/);
  });
});
