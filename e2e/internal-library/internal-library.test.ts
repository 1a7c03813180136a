import { expect, test } from 'vitest';
import { planRing } from './src/index.js';

test('a library of the workspace plans with @ep/plan', () => {
  const { fwdQ, revQ } = planRing([[3, 2], [], [7]]);
  expect([...fwdQ.recvTokens]).toEqual([7, 5, 0]);
  expect([...revQ.recvTokens]).toEqual([5, 0, 7]);
  expect([...fwdQ.dstRank]).toEqual([1, 1, 0]);
});
