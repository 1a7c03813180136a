/** Opens endpoints of EFA between ranks: on EFA itself, or on a software NIC in each rank's process. */
import { createRequire } from 'node:module';
import {
  checkOpening,
  type Member,
  type OpenOptions,
  type Probe,
  type TransportProvider,
  type WaitOptions,
} from '@ep/core';
import { type NativeEfaNic, type NativeRankContext, native, unavailable } from '@ep/native';
import {
  agreedFacts,
  byPlace,
  checkAmong,
  joinApart,
  joinRanks,
  meetAnew,
  type NicNetwork,
  rejoinRanks,
  throughStore,
  together,
} from '@ep/native/ranks';
import { type HardwareEfaConfig, type ResolvedEfaConfig, resolveConfig, type SoftEfaConfig } from './config.js';
import { EfaEndpoint } from './endpoint.js';
import { checkRenewable } from './members.js';
import { type EfaBacking, type EfaNeeds, nicOptions, probeNic } from './probe.js';
import { EfaTransport } from './transport.js';

const { version: VERSION } = createRequire(import.meta.url)('@ep/efa-gda/package.json') as { readonly version: string };

/**
 * Collective over the ranks of `config.activeRanks`, all unless given. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
async function openNic(
  backing: EfaBacking,
  member: Member,
  options: OpenOptions<SoftEfaConfig & HardwareEfaConfig>,
): Promise<EfaTransport> {
  const transport = `efa-gda:${backing}`;
  checkOpening(member, options, transport);
  const { rank, worldSize } = member;
  const config = resolveConfig(transport, options.config, worldSize);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  if (backing === 'soft' && config.network !== undefined) return openApart(member, config, config.network, limits);
  const { activeRanks } = config;
  checkAmong(activeRanks, rank, `${transport} configuration`);
  const introduction = throughStore({ ...member, activeRanks }, transport);
  const own = { rank, worldSize, ...joiningOf(transport, config) };
  const joined = await joinRanks({ ...own, activeRanks }, introduction, limits);
  const { context, world } = joined;
  const step = (what: string) => ({ where: `${transport}: open`, what, code: 'EP_RENDEZVOUS' }) as const;
  let nic: NativeEfaNic | undefined;
  try {
    nic = await together(world, step('open a NIC'), limits, () => makeNic(backing, context, config), close);
    const made = nic;
    // HAZARD: until all have done it, a peer may not know this rank yet: what it is sent ends with "unknown peer".
    await together(world, step('connect to the others'), limits, async () => {
      const told = await introduction.tell('addresses', { address: made.address() }, limits);
      const addresses = told.map(({ address }) => address);
      made.connect(byPlace(addresses, activeRanks, worldSize));
    });
    const { controls, round, id } = joined;
    const members = { world, controls, round, id, facts: agreedFacts(own), isNew: false };
    return new EfaTransport({ backing, rank, worldSize, ...joined, members, nic, config });
  } catch (error) {
    nic?.close();
    await world.close();
    context.close();
    throw error;
  }
}

/** What ranks must have chosen alike, and how they meet. */
const joiningOf = (transport: string, { ranksOnHost, timeoutMs }: ResolvedEfaConfig) => ({
  ...{ transport, version: VERSION, ranksOnHost, timeoutMs },
});

/**
 * In the place of a rank that died, or into one in which nobody has been yet (`config.activeRanks`), with the store of the world that it was of, while the others call `EfaTransport.readmit`. Rejects with `EP_TIMEOUT` where they do not, with
 * `EP_RENDEZVOUS` where they refuse this rank, and with `EP_UNSUPPORTED` over a network.
 */
async function rejoinNic(
  backing: EfaBacking,
  member: Member,
  options: OpenOptions<SoftEfaConfig & HardwareEfaConfig>,
): Promise<EfaTransport> {
  const where = `efa-gda:${backing}: rejoin`;
  checkOpening(member, options, where);
  const { rank, worldSize, store } = member;
  const config = resolveConfig(where, options.config, worldSize);
  checkRenewable(config, where);
  const timeoutMs = options.timeoutMs ?? config.timeoutMs;
  const begin = performance.now();
  const own = { rank, worldSize, ...joiningOf(`efa-gda:${backing}`, config) };
  const { signal } = options;
  const { context, liveness, world, controls, round, id } = await rejoinRanks({ ...own, store }, { signal, timeoutMs });
  try {
    const nic = await meetAnew(
      {
        ...{ world, worldSize, where },
        land: async () => {}, // it has put nothing yet
        prepare: () => makeNic(backing, context, config),
        say: (made) => made.address(),
        connect: (made, addresses) => made.connect(addresses),
        undo: close,
      },
      { signal, timeoutMs: Math.max(1, timeoutMs - (performance.now() - begin)) },
    );
    const members = { world, controls, round, id, facts: agreedFacts(own), isNew: true };
    return new EfaTransport({ backing, rank, worldSize, context, liveness, world, members, nic, config });
  } catch (error) {
    await world.close();
    context.close();
    throw error;
  }
}

function makeNic(backing: EfaBacking, context: NativeRankContext, config: ResolvedEfaConfig): NativeEfaNic {
  const nic = newNic(backing, context, config);
  try {
    if (config.faults !== undefined) nic.setFaults(config.faults);
    return nic;
  } catch (error) {
    nic.close();
    throw error;
  }
}

function newNic(backing: EfaBacking, context: NativeRankContext, config: ResolvedEfaConfig): NativeEfaNic {
  try {
    return new (native().binding.EfaNic)(context, nicOptions(backing, config));
  } catch (error) {
    throw backing === 'hardware' ? unavailable(error) : error;
  }
}

const close = (nic: NativeEfaNic): void => nic.close();

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
      rank,
      worldSize,
      introduction: throughStore(member, 'efa-gda:soft'),
      transport: 'efa-gda:soft',
      version: VERSION,
      ranksOnHost,
      timeoutMs,
      network,
      makeNic: (context) => makeNic('soft', context, config),
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

const rejoinSoft = (member: Member, options: OpenOptions<SoftEfaConfig>): Promise<EfaTransport> =>
  rejoinNic('soft', member, options);

const rejoinHardware = (member: Member, options: OpenOptions<HardwareEfaConfig>): Promise<EfaTransport> =>
  rejoinNic('hardware', member, options);

/** The providers of this package, by backing. */
export const efaGda = {
  /** A software EFA in every rank's process executes the requests, byte for byte, in any order. Ranks of one Linux host, or with `network` of several. */
  soft: {
    name: 'efa-gda:soft',
    probe: (config?: SoftEfaConfig): Promise<Probe> => probeNic('soft', config),
    open: openSoft,
    rejoin: rejoinSoft,
  } satisfies TransportProvider<EfaNeeds, SoftEfaConfig> & { rejoin: typeof rejoinSoft },
  /** EFA through libfabric. Ranks of one host so far: they tell each other's death through shared memory. */
  hardware: {
    name: 'efa-gda:hardware',
    probe: (config?: HardwareEfaConfig): Promise<Probe> => probeNic('hardware', config),
    open: openHardware,
    rejoin: rejoinHardware,
  } satisfies TransportProvider<EfaNeeds, HardwareEfaConfig> & { rejoin: typeof rejoinHardware },
} as const;
