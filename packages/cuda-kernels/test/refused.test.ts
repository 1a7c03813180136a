/** A rank that cannot do its part of an opening: the others hear why instead of waiting for it, and nothing stays open. */
import { type AllocateOptions, EpError, type SymmetricMemory } from '@ep/core';
import { expect, it, vi } from 'vitest';
import {
  type DispatchTransport,
  HostStream,
  openCompatDispatcher,
  openDispatcher,
  openMoeBuffer,
} from '../src/index.js';
import { onRanks } from './moe/world.js';
import { replaced } from './replaced.js';

const limits = { timeoutMs: 20_000 };
const moe = { mode: 'low-latency', experts: 4, maxTokens: 2, topK: 2, hidden: 64 } as const;

it.each<readonly [string, (transport: DispatchTransport) => Promise<unknown>]>([
  ['openDispatcher', (transport) => openDispatcher(transport, { ...limits, leaseBytes: 4096 })],
  ['openCompatDispatcher', (transport) => openCompatDispatcher(transport, { ...limits, queryBytes: 4096 })],
  ['openMoeBuffer', (transport) => openMoeBuffer(transport, { ...limits, ...moe })],
])('%s', { timeout: 60_000 }, async (where, open) => {
  const failure = new EpError('EP_SYSTEM', 'no queue pair is left');
  const closing = vi.spyOn(HostStream.prototype, 'close');
  const errors = await onRanks(3, 'shm', async (transport) => {
    const memories: SymmetricMemory[] = [];
    const allocate = async (options: AllocateOptions) => {
      const memory = await transport.allocate(options);
      memories.push(memory);
      return memory;
    };
    const device = () => {
      throw failure;
    };
    const given = replaced(transport, transport.rank === 1 ? { allocate, device } : { allocate });
    const error: unknown = await open(given).catch((reason: unknown) => reason);
    // Before the transport closes, which would close it, too.
    expect(memories.map(({ closed }) => closed)).toEqual([true]);
    return error;
  });
  const text = `${where}: refused by rank 1 (no queue pair is left)`;
  const told = { code: 'EP_MISMATCH', message: text, context: { ranks: [1] } };
  expect(errors).toMatchObject([told, failure, told]);
  expect(errors[1]).toBe(failure);
  // Of the two ranks that had one.
  expect(closing.mock.contexts.length).toBeGreaterThanOrEqual(2);
  closing.mockRestore();
});
