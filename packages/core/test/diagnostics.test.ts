import { expect, it } from 'vitest';
import { createWork, listen, publish, WorkOwner } from '../src/index.js';

it('messages are made only when somebody listens', () => {
  let made = 0;
  const send = () =>
    publish('ep:rendezvous', () => {
      made++;
      return { rank: 0, worldSize: 1, durationMs: 1 };
    });
  send();
  const seen: number[] = [];
  const stop = listen('ep:rendezvous', ({ rank }) => seen.push(rank));
  send();
  stop();
  send();
  expect([made, seen]).toEqual([1, [0]]);
});

it('a failure that nobody waits for is told at once, long before its owner is used again', () => {
  const seen: unknown[] = [];
  const stop = listen('ep:work:unobserved', (message) => seen.push(message));
  const owner = new WorkOwner('endpoint to rank 1');
  createWork({ op: 'put', sequence: 4, owner }).reject('gone');
  stop();
  expect(seen).toEqual([{ owner: 'endpoint to rank 1', op: 'put', sequence: 4, reason: 'gone' }]);
});
