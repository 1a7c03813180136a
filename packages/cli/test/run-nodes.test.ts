/** Which node of a job is which, and which options make one. Jobs of several nodes run in nodes/run-nodes.test.ts. */
import { describe, expect, it } from 'vitest';
import { runCommand } from '../src/run/command.js';
import { indexOfThisHost, type NodeRecord, planNodes } from '../src/run/nodes.js';

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

describe('the plan of a job', () => {
  const record = (id: string, ranks: number, more: Partial<NodeRecord> = {}): NodeRecord => ({
    id,
    host: id,
    ranks,
    holdsStore: false,
    port: 1,
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
      /do not fit one list of 2 hosts: 1 \(b\), 1 \(x\) came/,
    );
  });
});
