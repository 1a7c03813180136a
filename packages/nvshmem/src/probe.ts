/** Whether shared memory works here, and what it offers. */
import { type Capabilities, EpError, isEpError, type Need, type Probe } from '@ep/core';
import { native } from '@ep/native';

/** Everything: peers' memory is mapped, so each operation is loads, stores and locked instructions. */
export type ShmNeeds = Need;

const NEEDS: readonly Need[] = ['bundled', 'prior', 'inc', 'add', 'set', 'get', 'atomics', 'load-store'];

export function shmCapabilities(): Capabilities {
  return {
    needs: new Set(NEEDS),
    maxMessageBytes: Number.MAX_SAFE_INTEGER,
    maxSignalSlots: 2 ** 32,
    initiators: new Set(['host', 'device'] as const),
  };
}

/** Makes and drops a small segment: it fails here where an allocation would fail later. Never throws. */
export async function probeShm(): Promise<Probe> {
  if (process.platform !== 'linux') {
    return {
      available: false,
      code: 'EP_UNAVAILABLE',
      reason: `shared segments are Linux memfds; this is ${process.platform}`,
      remedy: 'run on Linux, or in a Linux container',
    };
  }
  try {
    const { binding } = native();
    const facts = binding.hostFacts();
    const rank = new binding.RankContext(0, 1, 1);
    rank.close();
    return {
      available: true,
      capabilities: shmCapabilities(),
      devices: [
        {
          name: 'host memory',
          detail: {
            usableCores: facts.usableCores,
            allocatableBytes: facts.allocatable ?? 'unknown',
            limitedBy: facts.allocatableSource,
          },
        },
      ],
    };
  } catch (error) {
    const known = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error });
    return {
      available: false,
      code: known.code,
      reason: known.message,
      remedy:
        known.code === 'EP_NATIVE_LOAD'
          ? 'see the remedies in the reason'
          : '`ep doctor` shows the limits of this machine',
      cause: error,
    };
  }
}
