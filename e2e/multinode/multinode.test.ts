/** Ranks on two hosts, which are network namespaces: nothing but a network joins them. */
import { nvshmem } from '@ep/nvshmem';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { namespacesMissing, type Report, TwoHosts } from './hosts.js';

const probe = await nvshmem.fabric.probe();
const missing = namespacesMissing() || (probe.available ? '' : probe.reason);

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
    two = await TwoHosts.make();
  });
  afterAll(() => two.close());

  it('dispatch attention as the oracle says, with two ranks each', async () => {
    const before = two.hosts[0].bytesSent();
    const data = { seeds: [0, 1, 2, 3], dtype: 'bf16', qRow: 64, kvRow: 32 };
    valuesOf(await two.run('oracle', 2, { data }));
    expect(two.hosts[0].bytesSent() - before).toBeGreaterThan(20_000);
  });

  it('go on when the link is cut for 300 ms', async () => {
    const data = { rounds: 100, config: { heartbeatMs: 100, silenceMs: 5000 } };
    const cut = () => {
      two.hosts[0].link('down');
      setTimeout(() => two.hosts[0].link('up'), 300);
    };
    const longest = valuesOf<number>(await two.run('rounds', 1, { data, ready: () => setTimeout(cut, 200) }));
    expect(Math.min(...longest), 'nobody noticed the cut').toBeGreaterThan(250);
  });

  it('lose each other when the link is cut for good, in time and by name, and go on by themselves', async () => {
    const silenceMs = 1500;
    const reports = await two.run('silence', 2, {
      data: { config: { heartbeatMs: 100, silenceMs } },
      ready: () => two.hosts[1].link('down'),
    });
    two.hosts[1].link('up');
    const values = valuesOf<{ codes: string[]; lost: number[]; ms: number; failed: boolean }>(reports);
    for (const [rank, { codes, lost, ms, failed }] of values.entries()) {
      expect(codes).toEqual(Array(4).fill('EP_PEER_LOST'));
      expect(lost).toEqual(rank < 2 ? [2, 2, 3, 3] : [0, 0, 1, 1]);
      expect(ms).toBeLessThan(silenceMs + 5000);
      expect(failed).toBe(true);
    }
  });
});
