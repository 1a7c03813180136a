/**
 * In which order a rank sends its shards. A plan has them as they lie in the source, which may be the same order of destinations on every rank: all of them would write to one receiver at a time, and
 * have no more than what its link takes. So destinations take turns, each rank begins with the one behind it, and each destination has the same part of its chunks sent, rounded up, when a turn is over: where all have
 * about as much, links and receivers are all busy until the end.
 */
import type { RankDispatch } from '@ep/plan';

/** What is sent, in this order; a shard may come in several pieces. Rows and ranks, as in a plan. */
export type Sends = Pick<RankDispatch, 'srcOffset' | 'dstOffset' | 'length' | 'dstRank'>;

/** Of each destination: so many that a link that is late by one of them costs little, and few beside the chunks of a large dispatch. */
const TURNS = 16;

interface Target {
  readonly rank: number;
  readonly entries: number[];
  /** Of all its entries. */
  chunks: number;
  sent: number;
  /** Of `entries`, and the rows of that one that have been sent. */
  at: number;
  row: number;
}

/** HAZARD: pieces end with a chunk: receivers have been told how many chunks come. */
export function inTurns(sends: Sends, rank: number, worldSize: number, chunkRows: number): Sends {
  const targets = new Map<number, Target>();
  for (const [entry, to] of sends.dstRank.entries()) {
    const rows = sends.length[entry]!;
    if (rows === 0) continue;
    let target = targets.get(to);
    if (target === undefined) {
      target = { rank: to, entries: [], chunks: 0, sent: 0, at: 0, row: 0 };
      targets.set(to, target);
    }
    target.entries.push(entry);
    target.chunks += Math.ceil(rows / chunkRows);
  }
  if (targets.size <= 1) return sends;
  const behind = ({ rank: to }: Target): number => (to - rank - 1 + worldSize) % worldSize;
  const inOrder = [...targets.values()].sort((a, b) => behind(a) - behind(b));
  const [srcOffset, dstOffset, length, dstRank]: number[][] = [[], [], [], []];
  for (let turn = 1; turn <= TURNS; turn++) {
    for (const target of inOrder) {
      const until = Math.ceil((target.chunks * turn) / TURNS);
      while (target.sent < until) {
        const entry = target.entries[target.at]!;
        const left = sends.length[entry]! - target.row;
        const rows = Math.min(left, (until - target.sent) * chunkRows);
        srcOffset!.push(sends.srcOffset[entry]! + target.row);
        dstOffset!.push(sends.dstOffset[entry]! + target.row);
        length!.push(rows);
        dstRank!.push(target.rank);
        target.sent += Math.ceil(rows / chunkRows);
        target.row = rows === left ? 0 : target.row + rows;
        if (rows === left) target.at++;
      }
    }
  }
  return {
    srcOffset: Int32Array.from(srcOffset!),
    dstOffset: Int32Array.from(dstOffset!),
    length: Int32Array.from(length!),
    dstRank: Int32Array.from(dstRank!),
  };
}
