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

  it('reads a trace of the software EFA', async () => {
    const request = { t: 2500, end: 3000, port: 1, kind: 'request', qpn: 256, number: 5, status: 7 };
    const lines = [
      { t: 1000, port: 1, kind: 'doorbell', qpn: 256, number: 6, writer: 2 },
      { ...request, wqe: efaWrite.join('') },
    ];
    const path = fileOf('efa.jsonl', `${lines.map((line) => JSON.stringify(line)).join('\n')}\n`);
    const { code, stdout } = await runEp(['wqe', 'decode', '--nic', 'efa', '--file', path]);
    expect(stdout).toContain('+0.000 us  doorbell  port 1  qpn 256  number 6  writer 2');
    expect(stdout).toContain('+1.500 us  request  port 1  qpn 256  number 5  failed: remote');
    expect(stdout).toContain('RDMA_WRITE request 0x102 to qp 0x304');
    expect(code).toBe(0);
  });

  const efaWrite = `0201821c 04030100 00000000 06050000 0a090807 00000000 00000000 00000000
    00100000 44332211 88776655 997f0000 00100000 ccbbaa00 00ffeedd 127e0000`.split(/\s+/);

  it('says what a work request of EFA means', async () => {
    const { code, stdout } = await runEp(['wqe', 'decode', '--nic', 'efa', ...efaWrite]);
    expect(
      stdout,
    ).toBe(`  0x00  0201821c 04030100 00000000 06050000  RDMA_WRITE request 0x102 to qp 0x304 ah 0x506, phase 0, completion
  0x10  0a090807 00000000 00000000 00000000  qkey 0x0708090a
  0x20  00100000 44332211 88776655 997f0000  4096 bytes, remote 0x7f9955667788 rkey 0x11223344
  0x30  00100000 ccbbaa00 00ffeedd 127e0000  4096 bytes at 0x7e12ddeeff00 lkey 0xaabbcc
`);
    expect(code).toBe(0);
  });

  it('takes EFA entries of the size that it is told', async () => {
    const inline = `0700a21d 22000400 00000000 03000000 78563412 ${'0'.repeat(24)} 04000000 99000000 0010000000000000 00004444`;
    const bytes = inline.replace(/\s/g, '').padEnd(256, '0');
    const wide = await runEp(['wqe', 'decode', '--nic', 'efa', '--entry-bytes', '128', bytes]);
    expect(wide.stdout).toContain('4 bytes inline');
    expect(wide.code).toBe(0);
    const narrow = await runEp(['wqe', 'decode', '--nic', 'efa', '--json', bytes]);
    expect(narrow.code).toBe(1);
    expect(JSON.parse(narrow.stdout)).toMatchObject({
      broken: true,
      items: [
        { at: 0, violations: [{ field: 'meta.inline' }] },
        { at: 64, violations: [{ field: 'meta.meta_desc' }, { field: 'meta.first' }, { field: 'meta.last' }] },
      ],
    });
    const queue = ['--as', 'cqe', '--entry-bytes', '8', '0201002304030000', '0201072304030000'];
    const short = await runEp(['wqe', 'decode', '--nic', 'efa', ...queue]);
    expect(short.stdout).toContain('completion 0\n');
    expect(short.stdout).toContain('failed RDMA_WRITE request 0x102, status 7 (remote: bad address or key)');
    const buffer = await runEp([
      'wqe',
      'decode',
      '--nic',
      'efa',
      '--as',
      'receive',
      '8877665599 7f0000 0201 0010 ccbbaac0',
    ]);
    expect(buffer.stdout).toContain('request 0x102: 4096 bytes at 0x7f9955667788 lkey 0xaabbcc, first, last');
  });

  it.each([
    [['0g'], 1, 'expected hexadecimal digits, found "g"'],
    [['000'], 1, 'expected whole bytes'],
    [['00'], 1, '1 bytes are left at byte 0'],
    [[], 2, 'expected either hexadecimal digits or --file'],
    [['--file', '/nowhere/at-all'], 1, 'there is no such file'],
    [['--as', 'trace', '[]'], 1, 'expected an object of a trace'],
    [['--as', 'cqe', '00'], 1, 'expected completions of 64 bytes'],
    [['--as', 'receive', '00'], 2, '--as must be wqe, cqe, command, trace, found "receive"'],
    [['--entry-bytes', '64', '00'], 2, '--entry-bytes is for --nic efa'],
    [['--nic', 'efa', '--as', 'command', '00'], 2, '--as must be wqe, cqe, receive, trace, found "command"'],
    [['--nic', 'efa', '--entry-bytes', '64', '{}'], 2, '--entry-bytes is not for traces'],
    [['--nic', 'efa', '00'], 1, 'must be work requests of 64 bytes each, found "1 bytes"'],
    [['--nic', 'efa', '--as', 'cqe', '00'.repeat(24)], 1, 'completions of 16 bytes each (or --entry-bytes 8)'],
    [['--nic', 'efa', '--as', 'cqe', '--entry-bytes', '64', '00'], 2, '--entry-bytes must be 8, 16, 32, found 64'],
  ])('refuses %j with status %i', async (args, status, message) => {
    const { code, stderr } = await runEp(['wqe', 'decode', ...args]);
    expect(code).toBe(status);
    expect(stderr).toContain(message);
  });
});
