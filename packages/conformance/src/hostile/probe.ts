/** What the hostile transport offers: as little as a transport may. */
import { type Capabilities, isEpError, type Need, type Probe } from '@ep/core';
import { native } from '@ep/native';

export type HostileNeeds = 'bundled' | 'inc' | 'add';

const NEEDS: readonly HostileNeeds[] = ['bundled', 'inc', 'add'];

export function hostileCapabilities(): Capabilities {
  return {
    needs: new Set<Need>(NEEDS),
    maxMessageBytes: 2 ** 20,
    // As scarce as the counters of a network card.
    maxSignalSlots: 1024,
    initiators: new Set(['host', 'device'] as const),
  };
}

export async function probeHostile(): Promise<Probe> {
  try {
    native();
    return { available: true, capabilities: hostileCapabilities(), devices: [{ name: 'engine thread', detail: {} }] };
  } catch (error) {
    return {
      available: false,
      code: isEpError(error) ? error.code : 'EP_SYSTEM',
      reason: String(error),
      cause: error,
    };
  }
}
