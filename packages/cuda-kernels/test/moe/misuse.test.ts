/** What callers may do wrong with a call: it is refused, or has no effect, and the buffer goes on. */
import { type EpCode, isEpError, tensor } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { type MoeBuffer, openMoeBuffer } from '../../src/index.js';
import { onRanks } from './world.js';

const worldSize = 2;
const [experts, topK, hidden, tokens] = [4, 2, 64, 3];
const choices = Int32Array.of(0, 1, 1, 2, 3, 0);
const weights = new Float32Array(tokens * topK).fill(0.5);

const x = (rank: number) =>
  tensor(
    'f32',
    [tokens, hidden],
    Float32Array.from({ length: tokens * hidden }, (_, i) => rank * 100 + i),
  );

const onBuffers = (mode: 'low-latency' | 'high-throughput', body: (buffer: MoeBuffer, rank: number) => Promise<void>) =>
  onRanks(worldSize, 'shm', async (transport) => {
    const buffer = await openMoeBuffer(transport, {
      mode,
      experts,
      maxTokens: tokens,
      topK,
      hidden,
      dtype: 'f32',
      calls: 1,
    });
    try {
      await body(buffer, transport.rank);
    } finally {
      await buffer.close();
    }
  });

function refusal(body: () => unknown): EpCode | undefined {
  try {
    body();
  } catch (error) {
    return isEpError(error) ? error.code : undefined;
  }
  return undefined;
}

it('zeroCopyCombine is refused on all ranks where memory is not shared, and where results are cast', async () => {
  const options = { mode: 'low-latency', experts, maxTokens: tokens, topK, hidden } as const;
  await onRanks(worldSize, 'ibgda', async (transport) => {
    const opening = openMoeBuffer(transport, { ...options, zeroCopyCombine: true });
    await expect(opening).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
  });
  await onRanks(worldSize, 'shm', async (transport) => {
    const cast = openMoeBuffer(transport, { ...options, combinePayload: 'logfmt10', zeroCopyCombine: true });
    await expect(cast).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    const one = openMoeBuffer(transport, { ...options, timeoutMs: 20_000, zeroCopyCombine: transport.rank === 0 });
    await expect(one).rejects.toMatchObject({ code: 'EP_MISMATCH' });
  });
});

/** The experts do nothing: every token gets itself back, since its weights are a half each. */
async function roundTrip(buffer: MoeBuffer, rank: number, spoil?: (of: Record<string, ArrayBufferView>) => void) {
  const received = await buffer.dispatch(x(rank), choices);
  const { counts, blockStart, layoutRange, sourceToken, sourceChoice } = received;
  spoil?.({ counts, blockStart, layoutRange, sourceToken, sourceChoice });
  const { y } = await buffer.combine(received.x, received.handle, { weights });
  expect([...(y.data as Float32Array).subarray(0, tokens * hidden)]).toEqual([...x(rank).data]);
}

describe.each(['low-latency', 'high-throughput'] as const)('%s', (mode) => {
  it('combines by its own copy of what it says of the rows that came', { timeout: 60_000 }, async () => {
    await onBuffers(mode, async (buffer, rank) => {
      await roundTrip(buffer, rank, (arrays) => {
        for (const array of Object.values(arrays))
          new Uint8Array(array.buffer, array.byteOffset, array.byteLength).fill(0x7f);
      });
      await roundTrip(buffer, rank, (arrays) => {
        for (const { buffer: bytes } of Object.values(arrays)) {
          if (bytes.byteLength > 0) structuredClone(bytes, { transfer: [bytes as ArrayBuffer] });
        }
      });
      await roundTrip(buffer, rank);
    });
  });

  it('begins the second half of a call once', { timeout: 60_000 }, async () => {
    await onBuffers(mode, async (buffer, rank) => {
      const sent = await buffer.dispatchSend(x(rank), choices);
      const received = await sent.receive();
      expect(refusal(() => sent.receive())).toBe('EP_INVALID_ARGUMENT');
      const back = await buffer.combineSend(received.x, received.handle, { weights });
      await back.receive();
      const held = await buffer.dispatch(x(rank), choices);
      expect(refusal(() => back.receive())).toBe('EP_INVALID_ARGUMENT');
      // The slot is still that of the call which holds it.
      expect(refusal(() => buffer.dispatch(x(rank), choices))).toBe('EP_BUSY');
      await held.handle.release();
      await roundTrip(buffer, rank);
    });
  });

  it('refuses a token that names an expert twice, before anything moves', { timeout: 60_000 }, async () => {
    await onBuffers(mode, async (buffer, rank) => {
      const twice = Int32Array.from(choices).fill(2, 2, 4);
      let code: unknown;
      try {
        await buffer.dispatch(x(rank), twice);
      } catch (error) {
        code = isEpError(error) ? error.code : error;
      }
      expect(code).toBe('EP_INVALID_ARGUMENT');
      await roundTrip(buffer, rank);
    });
  });
});

it('refuses a layout that has dropped the rows of a rank which takes part', { timeout: 60_000 }, async () => {
  await onBuffers('high-throughput', async (buffer, rank) => {
    const first = await buffer.dispatch(x(rank), choices, { keepLayout: true });
    await first.handle.release();
    const again = await buffer.dispatch(x(rank), first.layout!);
    await again.handle.release();
    if (rank === 0) {
      const alone = await buffer.dispatch(x(rank), first.layout!, { activeRanks: [1, 0] });
      expect([...alone.lostRanks]).toEqual([0, 1]);
      await alone.handle.release();
      expect(refusal(() => buffer.dispatch(x(rank), first.layout!))).toBe('EP_INVALID_ARGUMENT');
      // Without that rank it serves on, and what was refused did not count.
      const more = await buffer.dispatch(x(rank), first.layout!, { activeRanks: [1, 0] });
      expect([...more.counts]).toEqual([...alone.counts]);
      await more.handle.release();
    }
  });
});

it('low latency refuses what only the other form has: room for fewer rows, and layouts', async () => {
  await onRanks(1, 'shm', async (transport) => {
    const options = { mode: 'low-latency', experts, maxTokens: tokens, topK, hidden, dtype: 'f32' } as const;
    await expect(openMoeBuffer(transport, { ...options, recvRows: 100 })).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: 'openMoeBuffer: recvRows must be absent in low-latency mode, which has room for all rows, found 100',
    });
  });
  await onBuffers('low-latency', async (buffer, rank) => {
    const keep = { keepLayout: true };
    expect(refusal(() => buffer.dispatch(x(rank), choices, keep))).toBe('EP_INVALID_ARGUMENT');
    expect(refusal(() => buffer.dispatchSend(x(rank), choices, keep))).toBe('EP_INVALID_ARGUMENT');
    // What was refused did not count.
    await roundTrip(buffer, rank);
  });
});
