// Distances as JS is told them, from a sysfs of our own making; every shape of it is tested in tests/ibgda/topology_test.cpp.
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { native } from '../../js/native.js';

const root = mkdtempSync(join(tmpdir(), 'ep-sysfs-'));
afterAll(() => rmSync(root, { recursive: true }));

function link(target: string, path: string): void {
  mkdirSync(dirname(path), { recursive: true });
  symlinkSync(target, path);
}

function pci(path: string, classCode: string, vendor: string): string {
  const device = join(root, 'devices', path);
  mkdirSync(device, { recursive: true });
  writeFileSync(join(device, 'class'), `${classCode}\n`);
  writeFileSync(join(device, 'vendor'), `${vendor}\n`);
  writeFileSync(join(device, 'numa_node'), '0\n');
  link(device, join(root, 'bus/pci/devices', path.slice(path.lastIndexOf('/') + 1)));
  return device;
}

test('a card and a GPU behind one switch are near each other', () => {
  const behind = 'pci0000:10/0000:10:01.0/0000:11:00.0';
  pci(`${behind}/0000:12:00.0/0000:13:00.0`, '0x030200', '0x10de');
  const card = pci(`${behind}/0000:12:01.0/0000:14:00.0`, '0x020700', '0x15b3');
  const rdma = join(card, 'infiniband/mlx5_0');
  mkdirSync(rdma, { recursive: true });
  link(card, join(rdma, 'device'));
  link(rdma, join(root, 'class/infiniband/mlx5_0'));
  mkdirSync(join(root, 'devices/system/node/node0'), { recursive: true });

  const { nics, gpus, text } = native().binding.nicTopology(root);
  expect({ nics, gpus }).toEqual({ nics: ['mlx5_0'], gpus: ['0000:13:00.0'] });
  expect(text).toMatch(/^ +mlx5_0\ngpu 0000:13:00\.0 +switch\ncpu node 0 +node\n$/);
});

test('a machine without any has an empty table, and the root must be a string', () => {
  expect(native().binding.nicTopology(join(root, 'nowhere'))).toMatchObject({ nics: [], gpus: [] });
  expect(() => native().binding.nicTopology(5 as never)).toThrow('the root of sysfs is a string');
});
