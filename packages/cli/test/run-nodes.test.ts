/** Which node of a job is which, and which options make one. Jobs of several nodes run in nodes/run-nodes.test.ts. */
import { lookup } from 'node:dns/promises';
import { networkInterfaces } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { openTcpStore } from '@ep/core';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { runCommand } from '../src/run/command.js';
import { freePort } from '../src/run/launch.js';
import { type NodeJobOptions, runNode } from '../src/run/node-job.js';
import { type JobPlan, type NodeRecord, planNodes, recordOf } from '../src/run/node-records.js';
import { indexOfThisHost, localAddressOf, NodeMeeting, type Rendezvous, spansHosts } from '../src/run/nodes.js';

vi.mock('node:dns/promises', async (load) => {
  const real = await load<typeof import('node:dns/promises')>();
  return { ...real, lookup: vi.fn(real.lookup) };
});
vi.mock('node:os', async (load) => {
  const real = await load<typeof import('node:os')>();
  return { ...real, networkInterfaces: vi.fn(real.networkInterfaces) };
});

const { networkInterfaces: realInterfaces } = await vi.importActual<typeof import('node:os')>('node:os');
const { lookup: realLookup } = await vi.importActual<typeof import('node:dns/promises')>('node:dns/promises');

const refusal = async (flags: readonly string[]): Promise<string> => {
  let said = '';
  const command = runCommand()
    .exitOverride()
    .configureOutput({ writeErr: (text) => (said += text) });
  try {
    await command.parseAsync([...flags, '--', 'true'], { from: 'user' });
  } catch (error) {
    return `${said}${error instanceof Error ? error.message : String(error)}`;
  }
  throw new Error('it was not refused');
};

describe('the options of several nodes', () => {
  it.each([
    [['--nodes', '2', '-n', '1'], /need --rdzv/],
    [['--rdzv', 'a:1', '-n', '1'], /give either --hosts, or --nodes/],
    [['--rdzv', 'a:1', '--hosts', 'a:1,b:1', '-n', '1'], /leave out -n/],
    [['--rdzv', 'a:1', '--nodes', '2'], /--nodes needs -n/],
    [['--rdzv', 'a:1', '--nodes', '2', '-n', '1', '--node-rank', '2'], /not one of 2 hosts/],
    [['--rdzv', 'a', '--nodes', '2', '-n', '1'], /expected <host>:<port>/],
    [['--rdzv', 'a:1', '--nodes', '3:2', '-n', '1'], /expected a number of hosts/],
    [['--rdzv', 'a:1', '--hosts', 'a,b'], /expected hosts with their ranks/],
    [['--rdzv', '198.51.100.1:1', '--hosts', '198.51.100.1:1,198.51.100.2:1'], /none of the hosts .* is this one/],
    [['--rdzv', '198.51.100.1:1', '--nodes', '2', '-n', '1'], /there is no job secret/],
    [['-n', '1', '--max-restarts', '1'], /are of jobs with --hosts or --nodes/],
    [[], /say how many ranks with -n/],
  ] as const)('refuses %j', async (flags, text) => {
    expect(await refusal(flags)).toMatch(text);
  });
});

describe('this host among the others', () => {
  it('is the one whose address is ours', async () => {
    const [here, there] = [
      { host: '127.0.0.1', ranks: 1 },
      { host: '198.51.100.1', ranks: 1 },
    ];
    expect(await indexOfThisHost([there, here])).toBe(1);
    await expect(indexOfThisHost([here, here])).rejects.toThrow(
      /2 of the hosts .* are this one .*: say which with --node-rank/,
    );
  });
});

describe('the rendezvous', () => {
  afterEach(() => {
    vi.mocked(networkInterfaces).mockReset().mockImplementation(realInterfaces);
    vi.mocked(lookup).mockReset().mockImplementation(realLookup);
    vi.unstubAllEnvs();
  });

  /** All names stand for these addresses; the first `failures` lookups fail. */
  function resolving(addresses: readonly string[], failures = 0): void {
    let looks = 0;
    vi.mocked(lookup).mockImplementation((async () => {
      if (++looks <= failures) throw Object.assign(new Error('getaddrinfo ENOTFOUND'), { code: 'ENOTFOUND' });
      return addresses.map((address) => ({ address, family: address.includes(':') ? 6 : 4 }));
    }) as unknown as typeof lookup);
  }

  const open = async (host: string, others: boolean) => {
    vi.stubEnv('EP_JOB_SECRET', 'a secret of these nodes');
    const { signal } = new AbortController();
    const address = { host, port: await freePort() };
    return NodeMeeting.open(address, { joinMs: 30_000, others: () => others, signal });
  };

  it('is at an address that other hosts reach, where the name has one besides loopback addresses', async () => {
    const eth0 = [{ address: '198.51.100.7' }, { address: '::1' }];
    vi.mocked(networkInterfaces).mockReturnValue({ eth0 } as unknown as ReturnType<typeof networkInterfaces>);
    resolving(['127.0.1.1', '::1', '203.0.113.1', '198.51.100.7']);
    expect(await localAddressOf('a')).toBe('198.51.100.7');
    resolving(['203.0.113.1']);
    expect(await localAddressOf('a')).toBeUndefined();
  });

  it.each(['127.0.1.1', '::1'])(
    'is refused at a name that stands for %s alone, unless no other host is to come, or it was given so',
    async (address) => {
      const eth0 = [{ address: '198.51.100.7' }];
      vi.mocked(networkInterfaces).mockReturnValue({ eth0 } as unknown as ReturnType<typeof networkInterfaces>);
      resolving([address]);
      await expect(open('a', true)).rejects.toMatchObject({
        code: 'EP_INVALID_ARGUMENT',
        message: expect.stringMatching(
          new RegExp(`a stands for ${address} .*, for example --rdzv 198\\.51\\.100\\.7:\\d+$`),
        ),
        context: { host: 'a', address },
      });
      resolving(['127.0.0.1']);
      for (const [host, others] of [
        ['a', false],
        ['localhost', true],
        ['127.0.0.1', true],
      ] as const) {
        const meeting = await open(host, others);
        expect(meeting.holdsStore).toBe(true);
        await meeting.close();
      }
    },
  );

  it('counts as loopback what a list of hosts holds, if all of them are', async () => {
    resolving(['127.0.1.1']);
    expect(
      await spansHosts([
        { host: 'a', ranks: 1 },
        { host: 'b', ranks: 1 },
      ]),
    ).toBe(false);
    vi.mocked(lookup).mockImplementationOnce((async () => [
      { address: '203.0.113.1', family: 4 },
    ]) as unknown as typeof lookup);
    expect(
      await spansHosts([
        { host: 'a', ranks: 1 },
        { host: 'b', ranks: 1 },
      ]),
    ).toBe(true);
    resolving([], 1);
    expect(
      await spansHosts([
        { host: 'a', ranks: 1 },
        { host: 'b', ranks: 1 },
      ]),
    ).toBe(true);
    expect(await spansHosts([{ host: 'a', ranks: 1 }])).toBe(false);
  });

  it('is held by this host once its name has become known, too', async () => {
    resolving(['127.0.0.1'], 2);
    const meeting = await open('late.invalid', false);
    expect(meeting.holdsStore).toBe(true);
    await meeting.close();
    expect(vi.mocked(lookup).mock.calls.length).toBeGreaterThan(2);
  });
});

describe('the node that holds the store', () => {
  afterEach(() => {
    vi.unstubAllEnvs();
  });

  /** It runs here, the others are made of what the test calls: they come as soon as they hear of the store. */
  async function holding<T>(
    options: Partial<NodeJobOptions>,
    body: (held: { rdzv: Rendezvous; other: NodeMeeting; signal: AbortSignal; ended: Promise<number> }) => Promise<T>,
  ): Promise<T> {
    vi.stubEnv('EP_JOB_SECRET', 'a secret of these nodes');
    const over = new AbortController();
    const { signal } = over;
    const rdzv = { host: '127.0.0.1', port: await freePort() };
    const counts = { ranks: 1, least: 1, most: 1, maxRestarts: 0 };
    const times = { joinMs: 20_000, lastCallMs: 0, graceMs: 1000 };
    const program = { program: process.execPath, args: ['-e', ''], onEvent: () => {}, onNote: () => {} };
    const ended = runNode({ rdzv, ...counts, ...times, ...program, signal, ...options });
    ended.catch(() => {});
    try {
      const other = await NodeMeeting.open(rdzv, { joinMs: 20_000, others: () => false, signal });
      try {
        return await body({ rdzv, other, signal, ended });
      } finally {
        await other.close();
      }
    } finally {
      over.abort('SIGTERM');
      await ended.catch(() => {});
    }
  }

  it('is a part of its own job, however soon more nodes come than there are to be', async () => {
    const args = ['-e', 'process.exit(process.env.TORCHELASTIC_RESTART_COUNT === "0" ? 3 : 0)'];
    await holding({ args, maxRestarts: 1 }, async ({ other, signal, ended }) => {
      await other.opened(1, 20_000, signal);
      await other.join(1, recordOf({ host: 'soon', ranks: 1, maxRestarts: 1 }, 1, false, undefined));
      const { nodes } = (await other.plan(1, signal)) as JobPlan;
      expect(nodes.map(({ holdsStore }) => holdsStore)).toEqual([true]);
      expect(await other.over(signal)).toBe(0);
      await other.close();
      expect(await ended).toBe(0);
    });
  });

  const spec = { host: 'other', ranks: 1, maxRestarts: 0 };

  it('does not count a node that has gone before there were enough', async () => {
    await holding({ least: 3, most: 3, joinMs: 3000 }, async ({ other, signal, ended }) => {
      await other.attempt(signal);
      await other.join(0, recordOf(spec, 1, false, undefined));
      // Longer than the one that gathers looks away: it has seen this one.
      await sleep(500);
      await other.close();
      await expect(ended).rejects.toMatchObject({
        code: 'EP_RENDEZVOUS',
        message: expect.stringMatching(
          /^1 of 3 nodes joined at 127\.0\.0\.1:\d+ within 3000 ms: .+; gone again: other$/,
        ),
      });
    });
  });

  it('ends with the status of a node that was stopped while it waits for the others, and tells it to all', async () => {
    await holding({ least: 3, most: 3 }, async ({ other, signal, ended }) => {
      await other.attempt(signal);
      await other.join(0, recordOf(spec, 1, false, undefined));
      const failure = { code: 130, text: 'the job was stopped by SIGINT on other', stopped: true };
      await other.fail(0, failure);
      expect(await other.plan(0, signal)).toEqual({ failure });
      await other.close();
      expect(await ended).toBe(130);
    });
  });

  it('tells all, when it is stopped itself while it waits for them', async () => {
    const stop = new AbortController();
    await holding({ least: 3, most: 3, signal: stop.signal }, async ({ other, signal, ended }) => {
      await other.attempt(signal);
      await other.join(0, recordOf(spec, 1, false, undefined));
      stop.abort('SIGINT');
      expect(await other.plan(0, signal)).toMatchObject({ failure: { code: 130, stopped: true } });
      await other.close();
      expect(await ended).toBe(130);
    });
  });

  it('waits at a restart for nodes that stop their ranks for longer than nodes wait to join', async () => {
    const args = ['-e', 'process.exit(process.env.TORCHELASTIC_RESTART_COUNT === "0" ? 3 : 0)'];
    const times = { least: 2, most: 2, joinMs: 1500, graceMs: 20_000 };
    await holding({ args, maxRestarts: 1, ...times }, async ({ other, signal, ended }) => {
      const restarted = { ...spec, maxRestarts: 1 };
      const first = recordOf(restarted, 1, false, undefined);
      await other.join(0, first);
      const { nodes } = (await other.plan(0, signal)) as JobPlan;
      const speaking = new AbortController();
      const node = nodes.findIndex(({ id }) => id === first.id);
      const spoken = other.speak(0, node, speaking.signal);
      await other.failure(0, signal);
      speaking.abort();
      await spoken;
      await sleep(2500);
      await other.opened(1, 1500, signal);
      const again = recordOf(restarted, 1, false, undefined);
      await other.join(1, again);
      expect(((await other.plan(1, signal)) as JobPlan).nodes).toHaveLength(2);
      await other.done(1, node, 0);
      expect(await other.over(signal)).toBe(0);
      await other.close();
      expect(await ended).toBe(0);
    });
  });

  it('says why it refused a host, once', async () => {
    const notes: string[] = [];
    await holding({ least: 2, most: 2, onNote: (text) => notes.push(text) }, async ({ rdzv }) => {
      for (const secret of ['another secret of a job', 'another secret of a job', 'one more secret of a job']) {
        const late = openTcpStore({ ...rdzv, secret, timeoutMs: 20_000 });
        await expect(late).rejects.toMatchObject({ code: 'EP_SECRET' });
      }
      await vi.waitFor(() => expect(notes.length).toBeGreaterThan(0), { timeout: 10_000 });
      expect(notes).toEqual([expect.stringMatching(/^the store refused 127\.0\.0\.1: .*secret/)]);
    });
  });

  it('is named where it begins no attempt', async () => {
    await holding({ least: 2, most: 2 }, async ({ other, signal }) => {
      await expect(other.opened(1, 100, signal)).rejects.toMatchObject({
        code: 'EP_TIMEOUT',
        message: expect.stringMatching(
          /^ep run: the node that holds the store at 127\.0\.0\.1:\d+ did not begin attempt 1 within 100 ms/,
        ),
      });
    });
  });
});

describe('a node that waits for others', () => {
  afterEach(() => {
    vi.unstubAllEnvs();
  });

  it('tells all, when it is stopped, and ends with the status that counts for all', async () => {
    vi.stubEnv('EP_JOB_SECRET', 'a secret of these nodes');
    const stop = new AbortController();
    const never = new AbortController().signal;
    const rdzv = { host: '127.0.0.1', port: await freePort() };
    const meeting = await NodeMeeting.open(rdzv, { joinMs: 20_000, others: () => false, signal: never });
    const store = await openTcpStore({ ...rdzv, timeoutMs: 20_000 });
    try {
      await meeting.openJob();
      await meeting.openAttempt(0);
      const counts = { ranks: 1, least: 3, most: 3, maxRestarts: 0 };
      const times = { joinMs: 20_000, lastCallMs: 0, graceMs: 1000 };
      const program = { program: process.execPath, args: [], onEvent: () => {}, onNote: () => {} };
      const ended = runNode({ rdzv, ...counts, ...times, ...program, signal: stop.signal });
      await store.wait(['ep run/0/node/0']);
      stop.abort('SIGINT');
      expect(await ended).toBe(130);
      await meeting.gather(0, { ...counts, ...times, signal: never }, undefined);
      const text = expect.stringMatching(/^the job was stopped by SIGINT on /);
      expect(await meeting.plan(0, never)).toEqual({ failure: { code: 130, stopped: true, text } });
    } finally {
      await store.close();
      await meeting.close();
    }
  });
});

describe("a store that is no launcher's", () => {
  it('is named as such, once the nodes have waited', async () => {
    vi.stubEnv('EP_JOB_SECRET', 'a secret of these nodes');
    const rdzv = { host: '127.0.0.1', port: await freePort() };
    const foreign = await openTcpStore({ ...rdzv, isServer: true, timeoutMs: 20_000 });
    try {
      const { signal } = new AbortController();
      const meeting = await NodeMeeting.open(rdzv, { joinMs: 2000, others: () => false, signal });
      try {
        await expect(meeting.jobId(signal)).rejects.toMatchObject({
          code: 'EP_RENDEZVOUS',
          message: expect.stringMatching(
            /^ep run: the store at 127\.0\.0\.1:\d+ is held by something that is no ep run/,
          ),
        });
      } finally {
        await meeting.close();
      }
    } finally {
      await foreign.close();
      vi.unstubAllEnvs();
    }
  });
});

describe('the plan of a job', () => {
  const record = (id: string, ranks: number, more: Partial<NodeRecord> = {}): NodeRecord => ({
    id,
    host: id,
    ranks,
    holdsStore: false,
    port: 1,
    maxRestarts: 0,
    ...more,
  });

  it('begins where the store is, and goes on in the order of joining', () => {
    const { nodes, worldSize } = planNodes(
      [record('b', 2), record('a', 3, { holdsStore: true }), record('c', 1)],
      undefined,
    );
    expect(nodes.map(({ id, firstRank }) => [id, firstRank])).toEqual([
      ['a', 0],
      ['b', 3],
      ['c', 5],
    ]);
    expect(worldSize).toBe(6);
  });

  it('follows the list of hosts, and refuses nodes that do not fit it', () => {
    const hosts = [
      { host: 'a', ranks: 1 },
      { host: 'b', ranks: 2 },
    ];
    const b = record('b', 2, { index: 1 });
    const planned = planNodes([b, record('a', 1, { index: 0, holdsStore: true })], hosts);
    expect(planned.nodes.map(({ id }) => id)).toEqual(['a', 'b']);
    expect(() => planNodes([b, record('x', 2, { index: 1 })], hosts)).toThrow(
      /do not fit the list a:1,b:2 of the one that holds the store: 1 \(b:2\), 1 \(x:2\) came/,
    );
  });

  it('names the ranks of a host that differ between two lists, and restarts that differ', () => {
    const hosts = [
      { host: 'a', ranks: 1 },
      { host: 'b', ranks: 1 },
    ];
    const a = record('a', 1, { index: 0, holdsStore: true });
    expect(() => planNodes([a, record('b', 2, { index: 1 })], hosts)).toThrow(
      /do not fit the list a:1,b:1 of the one that holds the store: 0 \(a:1\), 1 \(b:2\) came/,
    );
    expect(() => planNodes([a, record('b', 1, { index: 1, maxRestarts: 3 })], hosts)).toThrow(
      expect.objectContaining({
        code: 'EP_RENDEZVOUS',
        message: 'ep run: --max-restarts is 0 on a and 3 on b: give the same on all hosts',
      }),
    );
  });

  it('has the places that --node-rank gave, each once, or refuses the nodes by name', () => {
    const [a, b] = [record('a', 1, { index: 1, holdsStore: true }), record('b', 2, { index: 0 })];
    expect(planNodes([a, b], undefined).nodes.map(({ id }) => id)).toEqual(['b', 'a']);
    for (const [others, came] of [
      [[record('b', 2, { index: 1 })], '1 (a), 1 (b)'],
      [[record('b', 2)], 'no --node-rank (b), 1 (a)'],
      [[record('b', 2, { index: 2 })], '1 (a), 2 (b)'],
    ] as const) {
      const refusal = {
        code: 'EP_RENDEZVOUS',
        message: `ep run: the nodes do not have --node-rank 0 to 1, each once, or none at all: ${came} came`,
      };
      expect(() => planNodes([a, ...others], undefined)).toThrow(expect.objectContaining(refusal));
    }
  });
});
