/** A channel over a memory that tells of a loss before it tells of what came earlier: transports may. */
import { type Endpoint, type EpCode, EpError, type SymmetricMemory } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { Channel } from '../../src/portable/channel.js';
import { fullBit, layOut } from '../../src/portable/layout.js';
import { decodeRecord, encodeRecord } from '../../src/portable/records.js';
import { pause } from './world.js';

/** A peer has said that a call is done; what the channel tells comes to `told`. `more` lets it say good-bye. */
function channelOf(until: () => Promise<bigint>) {
  const layout = layOut(2 ** 16, 2);
  const section = new Uint8Array(2 ** 16);
  section.set(encodeRecord({ kind: 'done', sequence: 5 }), layout.receiveOffset(1, 'control', 0));
  section.set(encodeRecord({ kind: 'bye', completed: 0 }), layout.receiveOffset(1, 'control', 1));
  let word = 1n << BigInt(fullBit('control', 0));
  const memory = {
    signals: { slots: 2, peek: () => word, until },
    local: () => ({}),
    remote: () => ({}),
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
        const { kind } = decodeRecord(slot);
        told.push(kind);
        if (kind === 'bye') channel.lose();
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
  const more = (): void => {
    word += 1n << BigInt(fullBit('control', 1));
  };
  return { channel, told, more };
}

const lost = () => new EpError('EP_PEER_LOST', 'rank 1 died', { context: { lost: [1] } });

it('reads what a peer said before it was lost, and nothing after', async () => {
  const { channel, told, more } = channelOf(() => Promise.reject(lost()));
  await channel.watch(new AbortController().signal);
  more();
  expect(channel.look()).toBe(false);
  expect(told).toEqual(['done', 'rank 1 died']);
});

describe('a put that fails before anybody looked', () => {
  const failing = (code: EpCode, more: boolean) => {
    const made = channelOf(() => new Promise(() => {}));
    const { channel } = made;
    if (more) made.more();
    const error = code === 'EP_PEER_LOST' ? lost() : new EpError(code, 'refused');
    channel.connect({ put: () => createRejected(error) } as unknown as Endpoint<'bundled' | 'add'>);
    const fill = (): number => 8;
    channel.send('control', { finished: false, fill });
    return made.told;
  };
  const createRejected = (error: unknown) => Object.assign(Promise.reject(error), { status: 'failed' });

  it.each(['EP_PEER_LOST', 'EP_REMOTE_ACCESS'] as const)(
    'with %s is no news of a peer that said good-bye',
    async (code) => {
      const told = failing(code, true);
      await pause(0);
      expect(told).toEqual(['done', 'bye']);
    },
  );

  it.each([
    ['EP_PEER_LOST', 'rank 1 died'],
    ['EP_REMOTE_ACCESS', 'EpError: refused'],
  ] as const)('with %s is told after what the peer said', async (code, text) => {
    const told = failing(code, false);
    await pause(0);
    expect(told.slice(0, 2)).toEqual(['done', text]);
  });
});
