/** What `ep bench shm` times as barriers of JS has to be one. */
import { describe, expect, it } from 'vitest';
import { type RoundMarks, timedRounds } from '../bench/rounds.js';

/** Of ranks in this process, of which this one is rank 0. */
function marksOf(words: number[]): RoundMarks {
  return {
    worldSize: words.length,
    enter(round) {
      words[0] = round;
    },
    entered: (peer) => words[peer]!,
  };
}

describe('timed rounds', () => {
  it('pass where every rank has entered each round, and count on from those before', async () => {
    const words = [0, 0];
    const out = new Float64Array(50).fill(-1);
    for (const first of [0, 50]) {
      await timedRounds(out, first, marksOf(words), async () => {
        words[1] = words[0]!;
      });
    }
    expect(words).toEqual([100, 100]);
    expect(out.every((nanoseconds) => nanoseconds >= 0)).toBe(true);
  });

  it('fail in the first round of a barrier that returns at once', async () => {
    const words = [7, 7];
    const ended = timedRounds(new Float64Array(50), 7, marksOf(words), async () => {});
    await expect(ended).rejects.toThrow('left barrier 8 while rank 1 had entered 7');
  });

  it('fail where a barrier lets one round go', async () => {
    const words = [0, 0, 0];
    const ended = timedRounds(new Float64Array(50), 0, marksOf(words), async () => {
      words.fill(words[0]!, 1, words[0] === 31 ? 2 : 3);
    });
    await expect(ended).rejects.toThrow('left barrier 31 while rank 2 had entered 30');
  });
});
