/** Ranks of one thread over the memory engine, which is obviously right: a case that fails here is itself wrong. */
import { barrier, CloseScope, exchange, MemoryStore } from '@ep/core';
import { initProcessGroup } from '../../src/index.js';
import { MemoryWorld } from '../memory-engine.js';
import type { GroupCase, GroupRank } from './cases/case.js';

const MEETING_MS = 10_000;

class Dead extends Error {}

async function runRank(
  { body }: GroupCase,
  rank: number,
  worldSize: number,
  world: MemoryWorld,
  keys: MemoryStore,
): Promise<void> {
  const scope = new CloseScope();
  const store = scope.add(keys.handle());
  let meetings = 0;
  let dead = false;
  const run: GroupRank = {
    rank,
    worldSize,
    mode: 'inline',
    backend: 'memory',
    sizes: 'small',
    store,
    open: async (options = {}) =>
      scope.add(await initProcessGroup({ backend: world.open, store, rank, worldSize, ...options })),
    release: (group) => group.destroy(),
    meet: async (ranks) => {
      const members = ranks ?? Array.from({ length: worldSize }, (_, one) => one);
      const meeting = { key: `meet/${meetings++}`, rank: members.indexOf(rank), worldSize: members.length };
      await barrier(store, meeting, { timeoutMs: MEETING_MS });
    },
    share: async <T>(value: T): Promise<readonly T[]> => {
      const bytes = Buffer.from(JSON.stringify(value));
      const parts = await exchange(
        store,
        { key: `share/${meetings++}`, rank, worldSize, bytes },
        { timeoutMs: MEETING_MS },
      );
      return parts.map((part) => JSON.parse(Buffer.from(part).toString()) as T);
    },
    report: () => {},
    random: Math.random,
    die: () => {
      dead = true;
      world.kill(rank);
      throw new Dead();
    },
    resources: () => Promise.resolve({ fileDescriptors: 0, mappings: 0, segments: 0, pending: 0 }),
  };
  try {
    await body(run);
  } catch (error) {
    if (!(error instanceof Dead)) throw error;
  } finally {
    if (!dead) await scope.close();
  }
}

/** Throws what the ranks threw. */
export async function runInline(one: GroupCase, worldSize: number): Promise<void> {
  const world = new MemoryWorld();
  const keys = new MemoryStore();
  const ranks = Array.from({ length: worldSize }, (_, rank) => runRank(one, rank, worldSize, world, keys));
  const ends = await Promise.allSettled(ranks);
  const failures = ends.flatMap((end, rank) =>
    end.status === 'rejected' ? [{ rank, reason: end.reason as Error }] : [],
  );
  if (failures.length === 0) return;
  const told = failures.map(({ rank, reason }) => `rank ${rank}: ${reason.stack ?? String(reason)}`);
  throw new Error(`${one.id}, ${worldSize} ranks:\n${told.join('\n')}`);
}
