/** Opening the first group. */
import { checkInteger, checkTimeout, defaultTimeoutMs, invalid } from '@ep/core';
import { engineFactory } from './backends.js';
import { meet } from './meeting.js';
import type { InitOptions } from './options.js';
import { openGroup, type ProcessGroup } from './process-group.js';
import { FlightRecorder } from './recorder/recorder.js';

const WHERE = 'initProcessGroup';

/**
 * Collective. Opens the group of all ranks; `env://` unless told where they meet, see `InitOptions`. With a `store` it does not wait for the others: each
 * is awaited by what needs it. Throws `EP_INVALID_ARGUMENT`, or `EP_RENDEZVOUS` naming ranks that did not come to `initMethod` or exist twice.
 */
export async function initProcessGroup(options: InitOptions = {}): Promise<ProcessGroup> {
  const factory = engineFactory(options.backend ?? 'shm');
  const timeoutMs =
    options.timeoutMs === undefined ? defaultTimeoutMs(options.env) : checkTimeout(options.timeoutMs, WHERE);
  const { name = 'world', ranksOnHost, signal } = options;
  if (typeof name !== 'string' || name === '') {
    throw invalid('name', { where: WHERE, expected: 'a string that is not empty', found: name });
  }
  if (ranksOnHost !== undefined) checkInteger(ranksOnHost, 'ranksOnHost', WHERE, 1);
  signal?.throwIfAborted();
  const { store, rank, worldSize, attempt, leave, abandon } = await meet(options, timeoutMs);
  try {
    // A group opened under the name of one that was destroyed must not find what that one left in the store.
    const life = await store.add(`ep/groups/${attempt}/${name}/${rank}`, 1);
    const id = `${name}${attempt === 0 ? '' : `@${attempt}`}${life === 1 ? '' : `#${life}`}`;
    const recorder = new FlightRecorder({ world: id, rank, size: worldSize });
    const world = { factory, store, recorder, ...(ranksOnHost !== undefined && { ranksOnHost }) };
    const ranks = Array.from({ length: worldSize }, (_, member) => member);
    return await openGroup(world, { name, id, rank, ranks, timeoutMs, signal, release: leave });
  } catch (error) {
    await abandon();
    throw error;
  }
}
