import type { Outcome } from '@ep/native';
import { expect, test } from 'vitest';
import { outcomeText } from '../src/outcome-text.js';

const outcome = (stage: number, expected: bigint, found: bigint): Outcome => ({
  status: 8,
  rank: 3,
  stage,
  expected,
  found,
});

test('a wait names whom it awaited for what', () => {
  expect(outcomeText(outcome(2, 7n, 5n), 'timed out waiting for')).toBe(
    'timed out waiting for rank 3 to send its chunks: expected count 7, found 5',
  );
});

test('a broken queue pair is named with its WQE, syndrome and remote address', () => {
  const found = (0x1234n << 32n) | (77n << 16n) | (0x88n << 8n) | 0x13n;
  expect(outcomeText(outcome(6, 0x7f00_1000n, found), 'lost')).toBe(
    'queue pair 0x1234 to rank 3 failed at WQE 77: syndrome 0x13, vendor syndrome 0x88, remote address 0x7f001000',
  );
  expect(outcomeText(outcome(6, 0n, (0x1234n << 32n) | (5n << 16n)), 'lost')).toBe(
    'queue pair 0x1234 to rank 3 was given up by a poster that waited for room for WQE 5',
  );
});

test('a NIC that reaches nobody blames no peer', () => {
  expect(outcomeText(outcome(6, 0n, 0n), 'ended')).toBe(
    "this rank's own NIC reaches nobody, rank 3 for one: its port is down, it has refused an earlier request, or the device has failed",
  );
});

test('a source that is not registered is named by its bytes', () => {
  expect(outcomeText(outcome(7, 0x1000n, 640n), 'ended')).toBe(
    'a put to rank 3 reads 640 bytes at 0x1000, which no memory registered with the transport holds',
  );
});

test('blocks that outnumber their queue pairs are told what to change', () => {
  expect(outcomeText(outcome(8, 2n, 5n), 'ended')).toBe(
    '5 blocks post to 2 queue pairs of a peer, which blocks may not share: launch fewer blocks, make more queue pairs, or share them between blocks',
  );
});
