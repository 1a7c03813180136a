/** Whether libfabric offers what the backing needs, and what that gives. */
import type { Capabilities, Need, PeerFacts, Probe } from '@ep/core';
import { type FabricOffer, native, unavailableHere } from '@ep/native';
import { type FabricConfig, resolveQuery } from './config.js';
import { withSettings } from './settings.js';

/** Requests of one rank are carried out in their order at each target, whatever order the network delivers in. `atomics` besides where the provider has them: `offers(transport, 'atomics')`. */
export type FabricNeeds = 'bundled' | 'prior' | 'inc' | 'add' | 'set' | 'get';

const NEEDS: readonly FabricNeeds[] = ['bundled', 'prior', 'inc', 'add', 'set', 'get'];

/** Whether the provider's devices reach memory by its physical pages: what is registered then counts against RLIMIT_MEMLOCK. */
export const pinsMemory = (provider: string): boolean => /^(efa|verbs)(;|$)/.test(provider);

export function fabricCapabilities({ maxMessageBytes, noAtomics, noGpu }: FabricOffer): Capabilities {
  return {
    needs: new Set<Need>(noAtomics === '' ? [...NEEDS, 'atomics'] : NEEDS),
    maxMessageBytes: Math.min(maxMessageBytes, Number.MAX_SAFE_INTEGER),
    // A put is a request of its own for two threads, and one message or more beside its bytes: over TCP a dispatch in chunks of 256 KiB takes a sixth longer.
    chunkBytes: 1 << 20,
    maxSignalSlots: 2 ** 32,
    initiators: new Set(['host', 'device'] as const),
    ...(noGpu === '' && { spaces: new Set(['host', 'device'] as const) }),
  };
}

/** Of what all ranks said of themselves; empty where there are. HAZARD: atomics of two kinds on one word are none: all ranks have the provider's, or nobody has any. */
export function whyNoAtomics(peers: readonly Pick<PeerFacts, 'rank' | 'host'>[]): string {
  const without = peers.find(({ host }) => host.noAtomics !== '');
  return without === undefined ? '' : `rank ${without.rank} has no atomics: ${without.host.noAtomics}`;
}

const [ELIBACC, ELIBBAD, ENODATA] = [79, 80, 61];

function remedyOf(errno: number): string {
  if (errno === ELIBACC)
    return 'install libfabric 1.17 or newer (Debian, Ubuntu: libfabric1), or give its path as `library`';
  if (errno === ELIBBAD) return 'update libfabric to 1.17 or newer (Debian 12, Ubuntu 23.04: libfabric1)';
  if (errno === ENODATA)
    return '`provider` and `address` name what to look for; `fi_info -l` (libfabric-bin) lists the providers';
  return 'see the reason';
}

/** Asks the library what it has, and opens an endpoint for a moment, the first time, to try what it says of atomics. Never throws. */
export async function probeFabric(config?: FabricConfig): Promise<Probe> {
  if (process.platform !== 'linux') {
    const reason = `ranks sleep and wake by Linux futexes; this is ${process.platform}`;
    return { available: false, code: 'EP_UNAVAILABLE', reason, remedy: 'run on Linux, or in a Linux container' };
  }
  try {
    const query = resolveQuery(config);
    const offer = withSettings(() => native().binding.probeFabric(query));
    const { provider, domain, ...detail } = offer;
    return {
      available: true,
      capabilities: fabricCapabilities(offer),
      devices: [
        { name: `${provider} on ${domain}`, detail: { provider, domain, pins: pinsMemory(provider), ...detail } },
      ],
    };
  } catch (error) {
    const known = unavailableHere(error);
    return {
      available: false,
      code: known.code,
      reason: known.message,
      remedy: remedyOf(Number(known.context.errno ?? 0)),
      cause: error,
    };
  }
}
