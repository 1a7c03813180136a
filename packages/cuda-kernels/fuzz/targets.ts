/** What callers hand to `bind`: kernels read and write wherever it says. And what ranks of a buffer for experts tell those that come back. */
import { join } from 'node:path';
import { elementBytes, elementCount, isEpError } from '@ep/core';
import { bytesTarget, type FuzzSuite, spoilObject } from '@ep/fuzz';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { bindSpecs, leaseBytesFor, type PartSpec } from '../src/binding-spec.js';
import { formatMember, membershipOf, parseMember } from '../src/moe/members.js';

const { shards } = shardsOfDocuments({
  worldSize: 3,
  documentOffsets: Int32Array.of(0, 2, 3, 5),
  homeRank: Int32Array.of(0, 1, 2, 1, 2),
  lengths: Int32Array.of(3, 5, 4, 2, 6),
});
const plan = planAttention(shards, Int32Array.of(1, 1, 0, 2, 0));
const q = { dtype: 'bf16', rowShape: [2, 8] } as const;
const kv = { dtype: 'f32', rowShape: [8] } as const;
const bases: readonly Readonly<Record<string, readonly PartSpec[]>>[] = [
  {
    forward: [
      { name: 'q', plan: plan.fwdQ, ...q },
      { name: 'kv', plan: plan.fwdKv, ...kv },
    ],
  },
  { outputs: [{ name: 'o', plan: plan.revQ, ...q }], replicas: [{ name: 'dkv', plan: plan.revKv, ...kv }] },
  { gradients: [{ name: 'dkv', plan: plan.revKvCompact, reduce: plan.reduction, ...kv }] },
];
const leaseBytes = Math.max(...bases.flatMap((specs) => Object.values(specs).map(leaseBytesFor)));
const MOST_ROWS = 2 ** 31;

const refused = (error: unknown): boolean => isEpError(error) && error.code.startsWith('EP_');

/** What kernels of this rank would touch lies in the lease and in the sources. */
function check(parts: readonly PartSpec[], rank: number): void {
  let bytes = 0;
  for (const { plan, reduce, dtype, rowShape } of parts) {
    const rowBytes = elementCount(rowShape) * elementBytes(dtype);
    for (let e = 0; e < plan.dstRank.length; e++) {
      const end = plan.dstOffset[e]! + plan.length[e]!;
      if (plan.dstOffset[e]! < 0 || end > plan.recvTokens[plan.dstRank[e]!]!)
        throw new Error(`a dispatch was bound that writes rows up to ${end}`);
    }
    bytes += Math.max(...plan.recvTokens) * rowBytes;
    if (reduce === undefined) continue;
    for (let g = reduce.shardOffsets[rank]!; g < reduce.shardOffsets[rank + 1]!; g++) {
      if (reduce.homeRow[g]! < 0 || reduce.homeRow[g]! + reduce.lengths[g]! > MOST_ROWS)
        throw new Error(`a reduction was bound that writes row ${reduce.homeRow[g]}`);
      for (let s = reduce.slotOffsets[g]!; s < reduce.slotOffsets[g + 1]!; s++) {
        const end = reduce.compactRow[s]! + reduce.lengths[g]!;
        if (reduce.compactRow[s]! < 0 || end > plan.recvTokens[rank]!)
          throw new Error(`a reduction was bound that reads rows up to ${end}`);
      }
    }
  }
  if (bytes > leaseBytes) throw new Error(`a dispatch of ${bytes} bytes was bound in leases of ${leaseBytes}`);
}

/** The first byte names what is edited: dispatches, or only what says where gradients are summed, which edits of everything seldom reach. */
function edited(input: Buffer): Readonly<Record<string, readonly PartSpec[]>> {
  const edits = input.subarray(2);
  const kind = (input[0] ?? 0) % (bases.length + 1);
  if (kind < bases.length) return spoilObject(bases[kind]!, edits);
  const reduce = spoilObject(plan.reduction, edits);
  return { gradients: [{ name: 'dkv', plan: plan.revKvCompact, reduce, ...kv }] };
}

/** Whoever is new goes by what rank 0 says, and by nothing else. */
function joinBy(said: Buffer): void {
  const facts = parseMember(said, 0);
  const newcomer = formatMember({ calls: 0, options: facts.options, lost: [] });
  const all = new Map([
    [0, { isNew: false, facts: said }],
    [1, { isNew: true, facts: newcomer }],
  ]);
  for (const again of [false, true]) {
    const found = membershipOf(all, 'fuzz', again);
    const sound = found.calls === facts.calls && found.calls >= 0 && found.present.join() === '0,1';
    if (!sound || found.joined.join() !== '1' || !found.back.includes(1)) throw new Error(JSON.stringify(found));
  }
}

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    // The second byte is the rank.
    bytesTarget('bind', refused, (input) => {
      const specs = edited(input);
      const rank = (input[1] ?? 0) % shards.worldSize;
      bindSpecs(specs, { rank, worldSize: shards.worldSize, chunkBytes: 64, leaseBytes });
      for (const parts of Object.values(specs)) check(parts, rank);
    }),
    bytesTarget('member', refused, joinBy),
  ],
};
