/**
 * What the reference gets wrong, shown on models of its protocols; the repaired rule on the same model; and which test holds our engines to it.
 * Numbers are those of the list "Do better" in the notes on the reference.
 */
import { describe, expect, it } from 'vitest';
import { processGroupCases } from '../conformance/cases/index.js';
import { explore } from './explore.js';
import { contributors, messageTimeouts, parityAfterView, receiveChunk, signalWords, tasks } from './models.js';
import { decision, type Loss, reconciliation, stuckPeer } from './waiting.js';

const ids = processGroupCases.map((one) => one.id);

/** The cases that our engines pass, over each of them, where the naive protocol fails. */
const held = (...cases: readonly string[]): void => expect(ids).toEqual(expect.arrayContaining([...cases]));

describe('1: signal words', () => {
  it('of the constant one let the late signal of a removed rank stand for another rank', () => {
    const found = explore(signalWords('constant'));
    expect(found.broken?.what).toMatch(/that of the removed rank/);
    expect(found.broken?.moves).toEqual([
      'A gives the rank up and clears the word',
      'the late signal lands',
      'A takes the payload',
    ]);
  });

  it('that carry epoch and operation do not, in any order of events', () => {
    expect(explore(signalWords('keyed')).broken).toBeUndefined();
    held('failure/last-rank', 'failure/queue');
  });
});

describe('1b: the counter of operations', () => {
  it('that a view resets under an operation in flight leaves two living ranks waiting for each other for ever', () => {
    const { deadlock } = explore(parityAfterView('reset'));
    expect(deadlock).toBeDefined();
    expect(deadlock).toContain('the view comes to A');
  });

  it('that a view leaves alone does not, in any order of events', () => {
    const found = explore(parityAfterView('kept'));
    expect(found.deadlock).toBeUndefined();
    expect(found.states).toBeGreaterThan(40);
    held('failure/rank-0', 'failure/queue');
  });
});

describe('2: the ranks whose data are in a result', () => {
  it('differ between survivors where each of them decides by itself', () => {
    expect(explore(contributors('local')).broken?.what).toMatch(/A ended with(out)? X, B ended with(out)? X/);
  });

  it('are the same on all where they agree before they end, and nobody waits for ever', () => {
    const found = explore(contributors('agreed'));
    expect(found.broken).toBeUndefined();
    expect(found.deadlock).toBeUndefined();
    held('failure/queue', 'failure/idle');
  });
});

describe('2b: the time in which survivors find out', () => {
  const loss: Loss = { reportsMs: [0, 3, 12], windowMs: 30_000, otherMs: 1 };

  it('is the whole window, for other groups of the worker as well, where nothing closes it early', () => {
    expect(reconciliation('window', loss)).toEqual({ lost: 30_000, other: 30_001 });
  });

  it('is over when all have told, and nobody else waits', () => {
    expect(reconciliation('reported', loss)).toEqual({ lost: 12, other: 1 });
    // In time: test/failure, at most 500 ms in 99 of 100 deaths.
    held('failure/last-rank', 'failure/queue', 'groups/two-worlds');
  });
});

describe('3: a peer that lives, and is stuck', () => {
  it('is waited for without end where a probe that finds it alive begins the time anew', () => {
    const found = explore(stuckPeer('probe'));
    expect(found.deadlock).toBeUndefined();
    expect(found.endless).toEqual([]);
  });

  it('is named when the time is up', () => {
    const found = explore(stuckPeer('deadline'));
    expect(found).toEqual({ states: 3 });
    // Stopped by a signal: test/failure/straggler, test/elastic: `stopped`.
    held('timeout/names-ranks', 'timeout/monitored-barrier', 'elastic/late-is-out');
  });
});

describe('4: operations that were not awaited', () => {
  it('fail when there are two slots and a third comes', () => {
    expect(explore(tasks('slots', 3)).broken?.moves).toEqual(Array(3).fill('the caller posts one'));
  });

  it('queue up', () => {
    const found = explore(tasks('queue', 100));
    expect(found.broken).toBeUndefined();
    expect(found.deadlock).toBeUndefined();
    held('work/thousand');
  });
});

describe('5: what is missing there', () => {
  it('is here: AVG, f16 and bf16; lists of blocks; uneven splits; coalesced calls', () => {
    held(
      'all-reduce/every-dtype-and-op',
      'reduce-scatter/every-dtype-and-op',
      'all-to-all/uneven',
      'all-reduce/coalesced',
    );
  });
});

describe('6: messages', () => {
  const burst = { messages: 5, receiverMs: 100, serviceMs: 60, timeoutMs: 200 };

  it('time out behind others when the clock starts at the call', () => {
    expect(messageTimeouts('enqueue', burst)).toEqual([1, 2, 3, 4]);
  });

  it('do not when it starts where the receiver may be awaited', () => {
    expect(messageTimeouts('activation', burst)).toEqual([]);
    held('p2p/timeout-counts-from-activation');
  });

  it('are overwritten by a late write when the chunk of a timed-out receive is used again at once', () => {
    expect(explore(receiveChunk('reused')).broken?.what).toMatch(/overwritten by the late one/);
  });

  it('are not when it waits until its sender is fenced', () => {
    const found = explore(receiveChunk('quarantined'));
    expect(found.broken).toBeUndefined();
    expect(found.deadlock).toBeUndefined();
    held('p2p/timeout-names-peer');
  });
});

describe('7: who decides on a loss', () => {
  it('aborts with all others where that is rank 0, and rank 0 is lost', () => {
    expect(explore(decision('coordinator')).broken?.what).toMatch(/who decides is who was lost/);
  });

  it('is whoever is left', () => {
    const found = explore(decision('survivors'));
    expect([found.broken, found.deadlock, found.endless]).toEqual([undefined, undefined, undefined]);
    held('failure/rank-0', 'failure/two-at-once', 'elastic/taken-out');
  });
});
