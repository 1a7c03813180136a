import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, describe, expect, it, vi } from 'vitest';
import { readTraceDump, type TraceEntry } from '../../src/recorder/dump-format.js';
import { codeOf } from '../../src/recorder/ring.js';
import { openWorld } from '../unit/world.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-recorder-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));
afterEach(() => vi.unstubAllEnvs());

const shown = ({ op, kind, sequence, dtype, elements, bytes, root, reduceOp, peer, tag }: TraceEntry) =>
  [op, kind, sequence, `${dtype}[${elements}]`, bytes, root, reduceOp, peer, tag].filter((one) => one !== undefined);

describe('what groups record', () => {
  it('is every call, as it was made', async () => {
    const { each } = await openWorld(2);
    const entries = await each(async (group, rank) => {
      const values = Float32Array.of(1, 2, 3, 4);
      await group.barrier();
      await group.broadcast(values, { root: 1 });
      await group.allReduce(values, { op: 'max' });
      await group.reduceScatterTensor(new Float64Array(3), new Float64Array(6), { op: 'sum' });
      await group.allGatherIntoTensor(new Int16Array(4), new Int16Array(2));
      await group.gather(values, rank === 0 ? { root: 0, outputs: [values.slice(), values.slice()] } : { root: 0 });
      await (rank === 0 ? group.send(values, 1, { tag: 7 }) : group.recv(values, 0, { tag: 7 }));
      return group.flightRecorder().entries();
    });
    const collectives = [
      ['barrier', 'barrier', 1, 'u8[0]', 0],
      ['broadcast', 'broadcast', 2, 'f32[4]', 16, 1],
      ['allReduce', 'all-reduce', 3, 'f32[4]', 16, 'max'],
      ['reduceScatterTensor', 'reduce-scatter', 4, 'f64[3]', 24, 'sum'],
      ['allGatherIntoTensor', 'all-gather', 5, 'i16[2]', 4],
      ['gather', 'gather', 6, 'f32[4]', 16, 0],
    ];
    expect(entries[0]!.map(shown)).toEqual([...collectives, ['send', 'send', 1, 'f32[4]', 16, 1, 7]]);
    expect(entries[1]!.map(shown)).toEqual([...collectives, ['recv', 'recv', 1, 'f32[4]', 16, 0, 7]]);
    for (const entry of entries.flat()) expect(entry).toMatchObject({ group: 'world', state: 'done', epoch: 0 });
  });

  it('is of all groups of a rank in one dump, also of those that were destroyed', async () => {
    const { each } = await openWorld(3);
    await each(async (group, rank) => {
      const pair = await group.newGroup([2, 0]);
      await pair?.barrier();
      await pair?.close();
      const dump = readTraceDump(JSON.parse(readFileSync(group.flightRecorder().dump(folder), 'utf8')), 'dump');
      const own = dump.entries.filter((entry) => entry.op === 'barrier' && entry.group !== 'world');
      expect(own).toHaveLength(rank === 1 ? 0 : 1);
      const groups = dump.groups.filter((one) => one.name !== 'world');
      expect(groups).toMatchObject(
        rank === 1 ? [] : [{ ranks: [2, 0], rank: rank === 2 ? 0 : 1, closed: true, ended: 1 }],
      );
      expect(dump.groups[0]).toMatchObject({ name: 'world', ranks: [0, 1, 2], rank, closed: false, active: [0, 1, 2] });
    });
  });

  it('is dumped by every rank when a call fails, and not when a group is closed under calls', async () => {
    const path = join(folder, 'failures');
    vi.stubEnv('EP_TRACE_DIR', path);
    const { groups } = await openWorld(1);
    const received = groups[0]!.recv(new Int8Array(1), 0, { tag: 1 });
    await groups[0]!.close();
    expect(await received.catch(codeOf)).toBe('EP_ABORTED');
    expect(groups[0]!.flightRecorder().entries()).toMatchObject([{ kind: 'recv', state: 'aborted' }]);
    const { each } = await openWorld(2, { name: 'other' });
    const ends = await each((group, rank) =>
      (rank === 0 ? group.barrier() : group.broadcast(Int8Array.of(1), { root: 0 })).then(() => 'done', codeOf),
    );
    expect(ends).toEqual(['EP_MISMATCH', 'EP_MISMATCH']);
    await vi.waitFor(() => expect(readdirSync(path)).toHaveLength(2));
    for (const name of readdirSync(path)) {
      const dump = readTraceDump(JSON.parse(readFileSync(join(path, name), 'utf8')), name);
      expect(dump).toMatchObject({ world: 'other', reason: 'failure', cause: { code: 'EP_MISMATCH' } });
      expect(dump.entries.map((entry) => [entry.kind, entry.state, entry.code])).toEqual([
        [dump.rank === 0 ? 'barrier' : 'broadcast', 'failed', 'EP_MISMATCH'],
      ]);
    }
  });
});
