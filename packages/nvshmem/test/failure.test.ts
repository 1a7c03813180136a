/** Ranks that are killed, and what they leave behind. Real SIGKILL for processes, terminate() for threads. */
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { RANK_KINDS, startRanks } from './ranks.js';

const WAITS = ['barrier', 'team', 'word', 'peer', 'some', 'signal', 'pad', 'malloc', 'collective', 'storm', 'gathers'];
const REPEATS = 22;
/** From the kill to the end of the last survivor. Generous: a lost peer is seen within milliseconds on an idle machine. */
const BOUND_MS = 20_000;

const segmentsMapped = (): number =>
  readFileSync('/proc/self/maps', 'utf8')
    .split('\n')
    .filter((line) => line.includes('ep-segment')).length;

const segmentDescriptors = (): number =>
  readdirSync('/proc/self/fd').filter((fd) => {
    try {
      return readlinkSync(`/proc/self/fd/${fd}`).includes('ep-segment');
    } catch {
      return false;
    }
  }).length;

describe.each(RANK_KINDS)('ranks as %s', (kind) => {
  it.each(Array.from({ length: REPEATS }, (_, round) => ({ round, wait: WAITS[round % WAITS.length]! })))(
    'survivors of a killed rank get EP_PEER_LOST from $wait ($round)',
    async ({ round, wait }) => {
      const worldSize = 3;
      const victim = round % worldSize;
      const ranks = startRanks(kind, worldSize, 'survivor', { wait, victim, seed: round });
      for (let rank = 0; rank < worldSize; rank++) await ranks.noted(rank, 1);
      await new Promise((resolve) => setTimeout(resolve, (round * 7) % 13));
      const killed = performance.now();
      ranks.kill(victim);
      const ends = await ranks.ends;
      expect(performance.now() - killed).toBeLessThan(BOUND_MS);
      for (const [rank, end] of ends.entries()) {
        if (rank === victim) expect(end.died).toBe(true);
        else expect(end.error?.message ?? end.value).toBe('EP_PEER_LOST');
      }
    },
  );

  it('leaves no memory, descriptor or name behind', () => {
    // Threads lived in this process; processes took theirs with them. Neither has names in /dev/shm.
    expect({ mapped: segmentsMapped(), descriptors: segmentDescriptors() }).toEqual({ mapped: 0, descriptors: 0 });
    expect(readdirSync('/dev/shm').filter((name) => name.startsWith('ep'))).toEqual([]);
  });
});
