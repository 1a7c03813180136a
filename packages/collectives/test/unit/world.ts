/** Groups of one process over the memory engine. */
import { type EpCode, type EpError, isEpError, memoryStore } from '@ep/core';
import { expect, onTestFinished } from 'vitest';
import { type InitOptions, initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { MemoryWorld } from '../memory-engine.js';

export interface TestWorld {
  readonly memory: MemoryWorld;
  readonly groups: readonly ProcessGroup[];
  /** The same on all ranks at once. */
  readonly each: <T>(body: (group: ProcessGroup, rank: number) => T | PromiseLike<T>) => Promise<Awaited<T>[]>;
}

/** Closed when the test is over; what its operations left behind is the test's to look at. */
export async function openWorld(size: number, options: InitOptions = {}): Promise<TestWorld> {
  const memory = new MemoryWorld();
  const store = memoryStore();
  const ranks = Array.from({ length: size }, (_, rank) => rank);
  const groups = await Promise.all(
    ranks.map((rank) =>
      initProcessGroup({ backend: memory.open, store, rank, worldSize: size, timeoutMs: 5000, ...options }),
    ),
  );
  onTestFinished(async () => {
    const cut = AbortSignal.abort(new Error('the test is over'));
    await Promise.allSettled(groups.map((group) => group.close({ signal: cut })));
    await store.close();
  });
  return { memory, groups, each: (body) => Promise.all(groups.map(async (group, rank) => body(group, rank))) };
}

/** The error of `body`, thrown or rejected, which must have this code. */
export async function failure(code: EpCode, body: () => unknown): Promise<EpError> {
  const error: unknown = await Promise.resolve()
    .then(body)
    .then(
      () => undefined,
      (reason: unknown) => reason,
    );
  if (!isEpError(error)) expect.fail(`expected ${code}, got ${error === undefined ? 'no error' : String(error)}`);
  expect(error.code).toBe(code);
  return error;
}

export const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));
