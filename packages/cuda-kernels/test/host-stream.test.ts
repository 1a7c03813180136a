import { allocateHost } from '@ep/native';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { HostStream } from '../src/host-stream.js';

/** So large that a stream works for a while on the copies of one test: what does not wait for them is too early. */
const BYTES = 4 << 20;
const COPIES = 200;

const bytes = (): Uint8Array => new Uint8Array(allocateHost(BYTES));
/** Where it begins, in the middle and where it ends: which copy was here last. */
const marks = (array: Uint8Array): readonly number[] => [array[0]!, array[BYTES / 2]!, array[BYTES - 1]!];

let first: HostStream;
let second: HostStream;
let source: Uint8Array;
let middle: Uint8Array;
let target: Uint8Array;
beforeEach(() => {
  [first, second] = [new HostStream(), new HostStream()];
  [source, middle, target] = [bytes().fill(7), bytes(), bytes()];
});
afterEach(async () => {
  await first.close();
  await second.close();
});

/** Copies that keep the stream at work; only the last of them brings what is waited for. */
function workOn(stream: HostStream): readonly Promise<void>[] {
  const stale = bytes().fill(1);
  const copies = Array.from({ length: COPIES }, () => stream.copy(stale, middle));
  return [...copies, stream.copy(source, middle)];
}

describe('events of host streams', () => {
  it('let a copy of one stream start only after the copies of another', async () => {
    const copies = workOn(first);
    const event = first.record();
    expect(event.done).toBe(false);
    second.wait(event);
    await second.copy(middle, target);
    expect(event.done).toBe(true);
    expect(marks(target)).toEqual([7, 7, 7]);
    await Promise.all(copies);
  });

  it('hand memory to and fro between two streams, all launched at once', async () => {
    const rounds = 8;
    const [ping, pong] = [bytes(), bytes()];
    const inputs = Array.from({ length: rounds }, (_, round) => bytes().fill(10 + round));
    const outputs = Array.from({ length: rounds }, bytes);
    const copies: Promise<void>[] = [];
    for (let round = 0; round < rounds; round++) {
      copies.push(first.copy(inputs[round]!, ping), first.copy(ping, pong));
      second.wait(first.record());
      copies.push(second.copy(pong, outputs[round]!));
      // The next round must not write what this one still reads.
      first.wait(second.record());
    }
    await Promise.all(copies);
    expect(outputs.map(marks)).toEqual(inputs.map(marks));
  });

  it('that have happened hold nothing up', async () => {
    const event = first.record();
    await first.synchronize();
    expect(event.done).toBe(true);
    second.wait(event);
    await second.copy(source, target);
    expect(marks(target)).toEqual([7, 7, 7]);
  });

  it('are refused if they are of something else', () => {
    for (const event of [undefined, null, { done: true }]) {
      expect(() => second.wait(event as never)).toThrow(
        expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringContaining('event') }),
      );
    }
    expect(second.depth).toBe(0);
  });
});

describe('a host stream', () => {
  it('is synchronized when everything launched before has ended', async () => {
    const copies = workOn(first);
    await first.synchronize();
    expect(marks(middle)).toEqual([7, 7, 7]);
    await Promise.all(copies);
  });

  it('counts in depth what was launched and has not ended', async () => {
    expect(first.depth).toBe(0);
    const copies = workOn(first);
    expect(first.depth).toBe(COPIES + 1);
    first.record();
    expect(first.depth).toBe(COPIES + 2);
    expect(second.depth).toBe(0);
    await Promise.all(copies);
    await first.synchronize();
    expect(first.depth).toBe(0);
  });

  it('ends what was launched before it closes, and launches nothing afterwards', async () => {
    const copies = workOn(first);
    await first.close();
    expect(marks(middle)).toEqual([7, 7, 7]);
    await Promise.all(copies);
    expect(() => first.record()).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
    await expect(first.synchronize()).rejects.toMatchObject({ code: 'EP_CLOSED' });
  });
});
