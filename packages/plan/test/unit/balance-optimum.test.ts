/** `balance` is greedy. Where every assignment of every row can be tried, this says how far from the fewest bytes it stays. */
import { generator } from '@ep/fuzz';
import { expect, it } from 'vitest';
import { balance, shardsOfDocuments } from '../../src/index.js';

interface Instance {
  readonly worldSize: number;
  readonly lengths: readonly number[];
  readonly home: readonly number[];
  readonly qRowBytes: number;
  readonly kvRowBytes: number;
}

const TOLERANCE = 0.25;

/** Documents of one shard each, few enough rows for `worldSize ** rows` assignments. */
function instanceOf(seed: number): Instance {
  const pick = generator(seed * 7919);
  const worldSize = 2 + pick(2);
  const lengths: number[] = [];
  const home: number[] = [];
  let left = worldSize === 2 ? 12 : 8;
  for (let documents = 1 + pick(3); documents > 0 && left > 0; documents--) {
    const length = 1 + pick(Math.min(left, 6));
    left -= length;
    lengths.push(length);
    home.push(pick(worldSize));
  }
  return { worldSize, lengths, home, qRowBytes: 1 + pick(4), kvRowBytes: 1 + pick(4) };
}

/** Load and bytes of every assignment of rows to servers, with a document's keys sent once to a server, up to its last row there. */
function* assignments({ worldSize, lengths, home, qRowBytes, kvRowBytes }: Instance) {
  const rows = lengths.flatMap((length, document) => Array.from({ length }, (_, row) => ({ document, row })));
  for (let code = 0; code < worldSize ** rows.length; code++) {
    const load = new Float64Array(worldSize);
    const keys = lengths.map(() => new Int32Array(worldSize));
    let bytes = 0;
    let rest = code;
    for (const { document, row } of rows) {
      const server = rest % worldSize;
      rest = (rest - server) / worldSize;
      load[server]! += row + 1;
      if (server !== home[document]) bytes += qRowBytes;
      keys[document]![server] = Math.max(keys[document]![server]!, row + 1);
    }
    for (const [document, ofServers] of keys.entries())
      for (const [server, count] of ofServers.entries()) if (server !== home[document]) bytes += kvRowBytes * count;
    yield { most: Math.max(...load), bytes };
  }
}

it('moves 8 % more bytes than needed on average over what can be enumerated, at most twice as many, and mostly the fewest', () => {
  const instances = Array.from({ length: 300 }, (_, i) => instanceOf(i + 1));
  const ratios: number[] = [];
  let missed = 0;
  for (const instance of instances) {
    const { worldSize, lengths, home, qRowBytes, kvRowBytes } = instance;
    const { shards } = shardsOfDocuments({
      worldSize,
      documentOffsets: Int32Array.from({ length: lengths.length + 1 }, (_, i) => i),
      homeRank: Int32Array.from(home),
      lengths: Int32Array.from(lengths),
    });
    const found = balance(shards, { qRowBytes, kvRowBytes, tolerance: TOLERANCE });
    const total = lengths.reduce((sum, length) => sum + (length * (length + 1)) / 2, 0);
    const wanted = ((1 + TOLERANCE) * total) / worldSize;
    const reached = Math.max(...found.loadAfter);
    let fewest = Number.POSITIVE_INFINITY;
    let evenest = Number.POSITIVE_INFINITY;
    for (const { most, bytes } of assignments(instance)) {
      evenest = Math.min(evenest, most);
      if (most <= Math.max(reached, wanted)) fewest = Math.min(fewest, bytes);
    }
    // Nothing can be better than the optimum: if it is, the figures are wrong.
    expect(found.movedBytes).toBeGreaterThanOrEqual(fewest);
    if (fewest === 0) expect(found.movedBytes).toBe(0);
    else ratios.push(found.movedBytes / fewest);
    if (evenest <= wanted && reached > wanted) missed++;
  }
  const mean = ratios.reduce((sum, ratio) => sum + ratio, 0) / ratios.length;
  expect(mean).toBeLessThan(1.11);
  expect(Math.max(...ratios)).toBeLessThanOrEqual(2);
  expect(ratios.filter((ratio) => ratio === 1).length).toBeGreaterThan(0.5 * ratios.length);
  // A balance that exists for so few rows, and that single moves do not lead to.
  expect(missed).toBeLessThanOrEqual(7);
});
