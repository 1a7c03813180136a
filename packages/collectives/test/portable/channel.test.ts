/** A channel over a memory that tells of a loss before it tells of what came earlier: transports may. */
import { EpError, type SymmetricMemory } from '@ep/core';
import { expect, it } from 'vitest';
import { Channel } from '../../src/portable/channel.js';
import { fullBit, layOut } from '../../src/portable/layout.js';
import { decodeRecord, encodeRecord } from '../../src/portable/records.js';

it('reads what a peer said before it was lost, and nothing after', async () => {
  const layout = layOut(2 ** 16, 2);
  const section = new Uint8Array(2 ** 16);
  section.set(encodeRecord({ kind: 'done', sequence: 5 }), layout.receiveOffset(1, 'control', 0));
  section.set(encodeRecord({ kind: 'bye' }), layout.receiveOffset(1, 'control', 1));
  let word = 1n << BigInt(fullBit('control', 0));
  const memory = {
    signals: {
      slots: 2,
      peek: () => word,
      until: () => Promise.reject(new EpError('EP_PEER_LOST', 'rank 1 died', { context: { lost: [1] } })),
    },
  } as unknown as SymmetricMemory;
  const told: string[] = [];
  const channel: Channel = new Channel({
    self: 0,
    peer: 1,
    memory,
    layout,
    sectionOffset: 0,
    section,
    ownSlot: 1,
    peerSlot: 0,
    peerRank: 1,
    base: 0n,
    readers: {
      control: (slot, release) => {
        told.push(decodeRecord(slot).kind);
        release();
        return true;
      },
      collective: () => true,
      message: () => true,
    },
    onEvent: () => void channel.look(),
    quiet: () => Promise.resolve(),
    onLost: ({ message }) => told.push(message),
    onBroken: (error) => told.push(String(error)),
  });
  await channel.watch(new AbortController().signal);
  word += 1n << BigInt(fullBit('control', 1));
  expect(channel.look()).toBe(false);
  expect(told).toEqual(['done', 'rank 1 died']);
});
