import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { runEp } from './ep.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-wqe-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const write = `00000508 00123403 00000008 00000000
00007f00 11223344 0000abcd 00000000
00001c10 00005678 00007f00 aabb0010`;

function fileOf(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}

describe('ep wqe decode', () => {
  it('says what a work request means', async () => {
    const { code, stdout } = await runEp(['wqe', 'decode', ...write.split(/\s+/)]);
    expect(
      stdout,
    ).toBe(`  0x00  00000508 00123403 00000008 00000000  RDMA_WRITE index 5 qp 0x1234 ds 3, completion always
  0x10  00007f00 11223344 0000abcd 00000000  remote 0x7f0011223344 rkey 0xabcd
  0x20  00001c10 00005678 00007f00 aabb0010  7184 bytes at 0x7f00aabb0010 lkey 0x5678
`);
    expect(code).toBe(0);
  });

  it('reads what other tools print, and ends with status 1 where the format is broken', async () => {
    const dump = write
      .replace('0000abcd 00000000', '0000abcd 00000001')
      .split('\n')
      .map((row, i) => `${(16 * i).toString(16).padStart(8, '0')}: ${row.replace(/(..)(?=\S)/g, '$1 ')}`)
      .join('\n');
    const { code, stdout } = await runEp(['wqe', 'decode', '--file', fileOf('dump', dump), '--json']);
    expect(code).toBe(1);
    expect(JSON.parse(stdout)).toMatchObject({
      broken: true,
      items: [{ at: 0, wqe: { op: 'write', index: 5 }, violations: [{ offset: 31, field: 'raddr.reserved' }] }],
    });
  });

  it('reads completions and commands', async () => {
    const failed = `${'00'.repeat(54)}8815 08001234 0009 00d0`;
    const cqe = await runEp(['wqe', 'decode', '--as', 'cqe', failed]);
    expect(cqe.stdout).toContain('requester error 0x15 (transport retries exceeded');
    const command = await runEp(['wqe', 'decode', '--as', 'command', `05010000 00000000 00001234 ${'0'.repeat(8)}`]);
    expect(command.stdout).toContain('destroy-qp, 16 bytes');
    expect(command.stdout).toMatch(/command\.object +0x1234/);
  });

  it('reads a trace', async () => {
    const request = { t: 2500, end: 3000, port: 1, kind: 'request', qpn: 4660, index: 5, syndrome: 0x13 };
    const lines = [
      { t: 1000, port: 1, kind: 'doorbell', qpn: 4660, producer: 6 },
      { ...request, wqe: write.replace(/\s/g, '').padEnd(128, '0') },
    ];
    const path = fileOf('trace.jsonl', `${lines.map((line) => JSON.stringify(line)).join('\n')}\n`);
    const { code, stdout } = await runEp(['wqe', 'decode', '--file', path]);
    expect(code).toBe(0);
    expect(stdout).toContain('+0.000 us  doorbell  port 1  qpn 4660  producer 6');
    expect(stdout).toContain('+1.500 us  request  port 1  qpn 4660  index 5  failed: remote access');
    expect(stdout).toContain('RDMA_WRITE index 5 qp 0x1234');
  });

  it.each([
    [['0g'], 'expected hexadecimal digits, found "g"'],
    [['000'], 'expected whole bytes'],
    [['00'], '1 bytes are left at byte 0'],
    [[], 'expected either hexadecimal digits or --file'],
    [['--file', '/nowhere/at-all'], 'there is no such file'],
    [['--as', 'trace', '[]'], 'expected an object of a trace'],
    [['--as', 'cqe', '00'], 'expected completions of 64 bytes'],
  ])('refuses %j', async (args, message) => {
    const { code, stderr } = await runEp(['wqe', 'decode', ...args]);
    expect(code).toBe(1);
    expect(stderr).toContain(message);
  });
});
