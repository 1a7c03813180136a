/** Opens endpoints of EFA between ranks: on EFA itself, or on a software NIC in each rank's process. */
import { createRequire } from 'node:module';
import {
  checkOpening,
  exchange,
  type Member,
  type OpenOptions,
  type Probe,
  type TransportProvider,
  type WaitOptions,
} from '@ep/core';
import { native } from '@ep/native';
import { joinApart, joinRanks, type NicNetwork } from '@ep/native/ranks';
import { type HardwareEfaConfig, type ResolvedEfaConfig, resolveConfig, type SoftEfaConfig } from './config.js';
import { EfaEndpoint } from './endpoint.js';
import { type EfaBacking, type EfaNeeds, nicOptions, probeNic } from './probe.js';
import { EfaTransport } from './transport.js';

const { version: VERSION } = createRequire(import.meta.url)('@ep/efa-gda/package.json') as { readonly version: string };

/**
 * Collective. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
async function openNic(
  backing: EfaBacking,
  member: Member,
  options: OpenOptions<SoftEfaConfig & HardwareEfaConfig>,
): Promise<EfaTransport> {
  const transport = `efa-gda:${backing}`;
  checkOpening(member, options, transport);
  const { rank, worldSize, store } = member;
  const config = resolveConfig(transport, options.config, worldSize);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  if (backing === 'soft' && config.network !== undefined) return openApart(member, config, config.network, limits);
  const { ranksOnHost, timeoutMs } = config;
  const joined = await joinRanks({ ...member, transport, version: VERSION, ranksOnHost, timeoutMs }, limits);
  const { context, world } = joined;
  const { binding } = native();
  let nic: InstanceType<typeof binding.EfaNic> | undefined;
  try {
    nic = new binding.EfaNic(context, nicOptions(backing, config));
    if (config.faults !== undefined) nic.setFaults(config.faults);
    const key = `${transport}/addresses`;
    nic.connect(await exchange(store, { rank, worldSize, key, bytes: nic.address() }, limits));
    // HAZARD: before it, a peer may not know this rank yet: what it is sent ends with "unknown peer".
    await world.barrier(limits);
    return new EfaTransport({ backing, rank, worldSize, ...joined, nic, config });
  } catch (error) {
    nic?.close();
    await world.close();
    context.close();
    throw error;
  }
}

/** The same where a network joins the NICs: nothing is shared, and the ranks may be on any hosts. */
async function openApart(
  member: Member,
  config: ResolvedEfaConfig,
  network: NicNetwork,
  limits: WaitOptions,
): Promise<EfaTransport> {
  const { ranksOnHost, timeoutMs } = config;
  const { rank, worldSize } = member;
  const joined = await joinApart(
    {
      ...member,
      transport: 'efa-gda:soft',
      version: VERSION,
      ranksOnHost,
      timeoutMs,
      network,
      makeNic: (context) => {
        const nic = new (native().binding.EfaNic)(context, nicOptions('soft', config));
        if (config.faults !== undefined) nic.setFaults(config.faults);
        return nic;
      },
      connection: (nic) => nic.address(),
      connect: (nic, addresses, keys) => nic.connect(addresses, keys),
      endpoint: (made) => new EfaEndpoint(made),
    },
    limits,
  );
  return new EfaTransport({ backing: 'soft', rank, worldSize, ...joined, config });
}

const openSoft = (member: Member, options: OpenOptions<SoftEfaConfig>): Promise<EfaTransport> =>
  openNic('soft', member, options);

const openHardware = (member: Member, options: OpenOptions<HardwareEfaConfig>): Promise<EfaTransport> =>
  openNic('hardware', member, options);

/** The providers of this package, by backing. */
export const efaGda = {
  /** A software EFA in every rank's process executes the requests, byte for byte, in any order. Ranks of one Linux host, or with `network` of several. */
  soft: {
    name: 'efa-gda:soft',
    probe: (config?: SoftEfaConfig): Promise<Probe> => probeNic('soft', config),
    open: openSoft,
  } satisfies TransportProvider<EfaNeeds, SoftEfaConfig>,
  /** EFA through libfabric. Ranks of one host so far: they tell each other's death through shared memory. */
  hardware: {
    name: 'efa-gda:hardware',
    probe: (config?: HardwareEfaConfig): Promise<Probe> => probeNic('hardware', config),
    open: openHardware,
  } satisfies TransportProvider<EfaNeeds, HardwareEfaConfig>,
} as const;
