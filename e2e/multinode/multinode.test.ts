/** Ranks on two hosts, which nothing but a network joins: those that were given, or else network namespaces, whose links fail as well. */
import { execFile } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, vi } from 'vitest';
import { found, itUnless, type Job, LAUNCHED, type Report, SECRET, type TwoHosts } from './hosts.js';

const { missing, linksMissing, slurmMissing } = found;
const twoEach = found.slotsMissing(2);
/** A file that both see is there on one machine only. */
const fileMissing = linksMissing && 'no file is known that both hosts see';

function valuesOf<T>(reports: readonly Report[]): readonly T[] {
  return reports.map(({ rank, value, error, exit }) => {
    if (error !== undefined || exit !== undefined)
      throw new Error(`rank ${rank}: ${error?.message ?? `ended: ${exit}`}`);
    return value as T;
  });
}

describe.skipIf(missing)(`two hosts${missing && ` (skipped: ${missing})`}`, () => {
  let two: TwoHosts;
  beforeAll(async () => {
    two = await found.make();
  });
  afterAll(() => two?.close());
  const addresses = (): readonly [string, string] => [two.hosts[0].address, two.hosts[1].address];
  const inPattern = (address: string): string => address.replaceAll('.', '\\.');

  itUnless(twoEach)('dispatch attention as the oracle says, with two ranks each', async () => {
    const before = linksMissing ? 0 : two.links[0].bytesSent();
    const data = { seeds: [0, 1, 2, 3], dtype: 'bf16', qRow: 64, kvRow: 32 };
    valuesOf(await two.run('oracle', 2, { data }));
    if (!linksMissing) expect(two.links[0].bytesSent() - before).toBeGreaterThan(20_000);
  });

  itUnless(twoEach)('reduce through the memory of each host first, so that half of the bytes cross', async () => {
    const length = 2 ** 20;
    const before = linksMissing ? 0 : two.links[0].bytesSent();
    const values = valuesOf<{ wrong: number; hosts: number[] }>(await two.run('reduce', 2, { data: { length } }));
    for (const value of values) expect(value).toEqual({ wrong: -1, hosts: [0, 0, 2, 2] });
    if (linksMissing) return;
    const sent = two.links[0].bytesSent() - before;
    // Each rank of a host gives half of a half of what its host has come to, and the same of the result: once the array in all. In one level it is twice.
    expect(sent).toBeGreaterThan(4 * length);
    expect(sent).toBeLessThan(1.4 * 4 * length);
  });

  itUnless(twoEach)('reduce between unlike hosts, for all and to a root, so that each array crosses once', async () => {
    const [length, turns] = [2 ** 19, 3];
    const before = linksMissing ? 0 : two.links[1].bytesSent();
    const values = valuesOf<{ hosts: number[] }>(await two.run('rooted', [1, 2], { data: { length, turns } }));
    for (const { hosts } of values) expect(hosts).toEqual([0, 1, 1]);
    if (linksMissing) return;
    const sent = two.links[1].bytesSent() - before;
    // The first host has one rank and the second two: once in each all-reduce, and in the reduction to rank 0. In one level it is a third more, and twice.
    expect(sent).toBeGreaterThan((turns + 1) * 4 * length);
    expect(sent).toBeLessThan(1.2 * (turns + 1) * 4 * length);
  });

  itUnless()('turn away at once a host with another job secret', async () => {
    const secrets = ['a secret of this job', 'a secret of another job'] as const;
    const env = { EP_TIMEOUT_MS: '2000' };
    const [, other] = await two.run('oracle', 1, { secrets, env });
    expect(other!.error).toMatchObject({ code: 'EP_SECRET' });
    expect(other!.error!.message).toMatch(RegExp(`${inPattern(addresses()[0])}:29511 .*it has another job secret`));
  });

  itUnless(fileMissing)('ask for a secret also where they meet without a network', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'ep-multinode-'));
    try {
      const data = { file: join(folder, 'store') };
      for (const { error } of await two.run('oracle', 1, { data, secrets: ['', ''] })) {
        expect(error).toMatchObject({ code: 'EP_SECRET' });
        expect(error!.message).toMatch(/2 ranks are on 2 hosts.*EP_JOB_SECRET/);
      }
      const trusting = { file: join(folder, 'another'), seeds: [0], dtype: 'bf16', qRow: 64, kvRow: 32 };
      valuesOf(await two.run('oracle', 1, { data: trusting, secrets: ['none', 'none'] }));
    } finally {
      await rm(folder, { recursive: true });
    }
  });

  itUnless(twoEach)('run one job by ep run on each, which find themselves in a list of hosts', async () => {
    const [first, second] = addresses();
    const flags = ['--hosts', `${first}:2,${second}:1`, '--rdzv', `${first}:29512`, '--join-timeout', '60'];
    // The other one first: it waits for the store.
    const nodes = [two.launch(1, flags), two.launch(0, flags)];
    expect(await Promise.all(nodes.map(({ ended }) => ended)), nodes.map(({ output }) => output).join('')).toEqual([
      0, 0,
    ]);
    for (const said of [/gathered 0 0,1,2/g, /reduced 0 right/g])
      expect(
        nodes
          .map(({ output }) => output)
          .join('')
          .match(said),
      ).toHaveLength(3);
    expect(nodes[0]!.output).toMatch(/\[rank 2\] reduced/);
    const begin = performance.now();
    const alone = two.launch(1, [...flags.slice(0, 4), '--join-timeout', '3']);
    expect(await alone.ended).toBe(1);
    expect(performance.now() - begin).toBeLessThan(20_000);
    const [there, here] = addresses().map(inPattern);
    expect(alone.output).toMatch(RegExp(`no server at ${there}:29512 .*ECONNREFUSED.*\\(tried from ${here}, \\w+\\)`));
  });

  itUnless(slurmMissing || twoEach)('are started by srun, without a flag', async () => {
    const env = { EP_JOB_SECRET: SECRET, EP_STORE_BIND: '0.0.0.0' };
    const step = ['--overlap', '--nodes=2', '--ntasks-per-node=2'];
    const { stdout } = await promisify(execFile)('srun', [...step, process.execPath, LAUNCHED], {
      env: { ...process.env, ...env },
    });
    expect(stdout.match(/gathered 0 0,1,2,3$/gm)).toHaveLength(4);
    expect(stdout.match(/reduced 0 right$/gm)).toHaveLength(4);
  });

  itUnless(linksMissing)('go on with the host that is left when the other is lost without a word', async () => {
    const flags = [
      '--nodes',
      '1:2',
      '-n',
      '1',
      '--rdzv',
      `${addresses()[0]}:29513`,
      '--last-call',
      '5',
      '--max-restarts',
      '1',
    ];
    const [first, second] = [two.launch(0, flags, 'stay'), two.launch(1, flags, 'stay')];
    await vi.waitUntil(() => [first, second].every(({ output }) => output.includes('reduced 0 right')), {
      timeout: 60_000,
    });
    two.links[1].link('down');
    try {
      expect(await first.ended, first.output).toBe(0);
      expect(first.output).toMatch(/node 1 \(.*\) was not heard for 15 s.*all ranks start again, 1 of 1/);
      expect(first.output).toMatch(/gathered 1 0$/m);
      expect(first.output).toMatch(/reduced 1 right/);
      expect(await second.ended, second.output).toBe(1);
      expect(second.output).toMatch(/the node that holds the store is lost/);
    } finally {
      two.links[1].link('up');
    }
  });

  itUnless(linksMissing)('go on when the link is cut for 300 ms', async () => {
    const data = { rounds: 100, config: { heartbeatMs: 100, silenceMs: 5000 } };
    const cut = () => {
      two.links[0].link('down');
      setTimeout(() => two.links[0].link('up'), 300);
    };
    const longest = valuesOf<number>(await two.run('rounds', 1, { data, ready: () => setTimeout(cut, 200) }));
    expect(Math.min(...longest), 'nobody noticed the cut').toBeGreaterThan(250);
  });

  itUnless(linksMissing)(
    'lose each other when the link is cut for good, in time and by name, and go on by themselves',
    async () => {
      const silenceMs = 1500;
      const reports = await two.run('silence', 2, {
        data: { config: { heartbeatMs: 100, silenceMs } },
        ready: () => two.links[1].link('down'),
      });
      two.links[1].link('up');
      const values = valuesOf<{ codes: string[]; lost: number[]; ms: number; failed: boolean }>(reports);
      for (const [rank, { codes, lost, ms, failed }] of values.entries()) {
        expect(codes).toEqual(Array(4).fill('EP_PEER_LOST'));
        expect(lost).toEqual(rank < 2 ? [2, 2, 3, 3] : [0, 0, 1, 1]);
        expect(ms).toBeLessThan(silenceMs + 5000);
        expect(failed).toBe(true);
      }
    },
  );

  itUnless(twoEach)(
    'hear of a killed process on another host at once, long before its silence would tell',
    async () => {
      const victim = 3;
      let killedAt = Number.NaN;
      const config = { heartbeatMs: 1000, silenceMs: 30_000 };
      const reports = await two.run('killed', 2, {
        data: { victim, config },
        ready: (job) => {
          killedAt = Date.now();
          job.kill(victim);
        },
      });
      type Ends = { ends: { code: string; at: number }[]; lines: number; sum: number; lost: number[] };
      for (const { ends, lines, sum, lost } of valuesOf<Ends>(reports.filter(({ rank }) => rank !== victim))) {
        expect(lines).toBe(2);
        expect([sum, lost]).toEqual([3, [victim]]);
        for (const { code, at } of ends) {
          expect(code).toBe('EP_PEER_LOST');
          // By one clock.
          if (!linksMissing) expect(at - killedAt).toBeLessThan(5000);
        }
      }
    },
  );

  // One memory and one handle for both ways.
  describe('by shared memory within a host, and a network between them', () => {
    const data = { shared: true };

    itUnless(twoEach)('choose for each peer, and say so', async () => {
      const values = valuesOf<{ table: string; kind: string }>(await two.run('routes', 2, { data }));
      const near = (ranks: string) => `nvshmem:shm     ranks ${ranks}`;
      const far = (ranks: string) => `nvshmem:fabric  ranks ${ranks}`;
      const [first, second] = [`${near('0-1')}\n${far('2-3')}`, `${far('0-1')}\n${near('2-3')}`];
      expect(values.map(({ table }) => table)).toEqual([first, first, second, second]);
      for (const { kind } of values) expect(kind).toBe('memory:load-store+proxy');
    });

    for (const over of ['fabric', 'ibgda', 'efa'] as const) {
      itUnless(twoEach)(`dispatch attention as the oracle says, with two ranks each (${over})`, async () => {
        const before = linksMissing ? 0 : two.links[0].bytesSent();
        const plan = { over, seeds: [0, 1], dtype: 'bf16', qRow: 64, kvRow: 32 };
        valuesOf(await two.run('oracle', 2, { data: { ...data, ...plan } }));
        if (!linksMissing) expect(two.links[0].bytesSent() - before).toBeGreaterThan(10_000);
      });
    }

    for (const workload of ['experts', 'groups']) {
      itUnless(twoEach)(`carry ${workload}`, async () => {
        const ready = (job: Job) => setTimeout(() => job.enough(), 500);
        const values = valuesOf<{ steps: number; left: number[] }>(
          await two.run('endure', 2, { data: { ...data, workload }, ready }),
        );
        for (const { steps, left } of values) {
          expect(left).toEqual([0, 1, 2, 3]);
          expect(steps).toBeGreaterThan(3);
        }
      });
    }

    itUnless(twoEach)('go on without a rank that was killed, on its own host and on the other', async () => {
      const gone = { 0: [1], 2: [1], 3: [1] };
      const config = { heartbeatMs: 100, silenceMs: 1500 };
      const reports = await two.run('endure', 2, {
        data: { ...data, config, workload: 'experts', gone },
        ready: (job) => job.kill(1),
      });
      expect(reports[1]!.exit).toBe('SIGKILL');
      for (const { left } of valuesOf<{ left: number[] }>(reports.filter(({ rank }) => rank !== 1)))
        expect(left).toEqual([0, 2, 3]);
    });

    itUnless(linksMissing)('go on by themselves when the link is cut for good', async () => {
      const gone = { 0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1] };
      const config = { heartbeatMs: 100, silenceMs: 1500 };
      const reports = await two.run('endure', 2, {
        data: { ...data, config, workload: 'experts', gone },
        ready: () => two.links[1].link('down'),
      });
      two.links[1].link('up');
      for (const [rank, { left }] of valuesOf<{ left: number[] }>(reports).entries())
        expect(left).toEqual(rank < 2 ? [0, 1] : [2, 3]);
    });
  });

  // The queue pairs of kernels and of JS, executed by software NICs that only a network joins.
  describe.each(['ibgda', 'efa'])('by software NICs (%s)', (over) => {
    itUnless(twoEach)('dispatch attention as the oracle says, with two ranks each', async () => {
      const before = linksMissing ? 0 : two.links[0].bytesSent();
      const data = { over, seeds: [0, 1], dtype: 'bf16', qRow: 64, kvRow: 32 };
      valuesOf(await two.run('oracle', 2, { data }));
      if (!linksMissing) expect(two.links[0].bytesSent() - before).toBeGreaterThan(10_000);
    });

    itUnless(twoEach)('send tokens to experts and back as the oracle says, with two ranks each', async () => {
      const before = linksMissing ? 0 : two.links[0].bytesSent();
      const kind = over === 'ibgda' ? 'ibgda:soft (memory:ibgda)' : 'efa-gda:soft (memory:efa)';
      for (const [rank, ways] of valuesOf<string[][]>(await two.run('experts', 2, { data: { over } })).entries()) {
        const own = Array.from({ length: 4 }, (_, peer) => (peer === rank ? 'own memory' : kind));
        // In both modes.
        expect(ways).toEqual([own, own]);
      }
      if (!linksMissing) expect(two.links[0].bytesSent() - before).toBeGreaterThan(50_000);
    });

    const becomes = over === 'ibgda' ? 'carry experts on without' : 'end calls of experts that miss';
    itUnless(twoEach)(`${becomes} a rank that was killed, on its own host and on the other`, async () => {
      const gone = { 0: [1], 2: [1], 3: [1] };
      const reports = await two.run('endure', 2, {
        data: { over, workload: 'experts', gone },
        ready: (job) => job.kill(1),
      });
      expect(reports[1]!.exit).toBe('SIGKILL');
      const others = reports.filter(({ rank }) => rank !== 1);
      for (const { left, losses } of valuesOf<{ left: number[]; losses: { lost: number[] }[] }>(others)) {
        expect(left).toEqual([0, 2, 3]);
        // Over EFA no call goes on without one.
        expect(losses.map(({ lost }) => lost)).toEqual(over === 'ibgda' ? [] : [[1]]);
      }
    });

    itUnless(fileMissing)('ask for a secret', async () => {
      const folder = await mkdtemp(join(tmpdir(), 'ep-multinode-'));
      try {
        const data = { over, file: join(folder, 'store') };
        for (const { error } of await two.run('oracle', 1, { data, secrets: ['', ''] }))
          expect(error).toMatchObject({ code: 'EP_SECRET' });
      } finally {
        await rm(folder, { recursive: true });
      }
    });

    itUnless(linksMissing)('go on when the link is cut for 300 ms', async () => {
      const data = { over, rounds: 60, config: { heartbeatMs: 100, silenceMs: 5000 } };
      const cut = () => {
        two.links[0].link('down');
        setTimeout(() => two.links[0].link('up'), 300);
      };
      const longest = valuesOf<number>(await two.run('rounds', 1, { data, ready: () => setTimeout(cut, 200) }));
      expect(Math.min(...longest), 'nobody noticed the cut').toBeGreaterThan(250);
    });

    itUnless(linksMissing)(
      'lose each other when the link is cut for good, in time and by name, and go on by themselves',
      async () => {
        const silenceMs = 1500;
        const reports = await two.run('silence', 2, {
          data: { over, config: { heartbeatMs: 100, silenceMs } },
          ready: () => two.links[1].link('down'),
        });
        two.links[1].link('up');
        const values = valuesOf<{ codes: string[]; lost: number[]; ms: number; failed: boolean }>(reports);
        for (const [rank, { codes, lost, ms, failed }] of values.entries()) {
          expect(codes).toEqual(Array(4).fill('EP_PEER_LOST'));
          expect(lost).toEqual(rank < 2 ? [2, 2, 3, 3] : [0, 0, 1, 1]);
          expect(ms).toBeLessThan(silenceMs + 5000);
          expect(failed).toBe(true);
        }
      },
    );
  });
});
