/** Opens queue pairs between ranks: on ConnectX, on any RDMA device, or on a software NIC in each rank's process. */
import { createRequire } from 'node:module';
import {
  checkOpening,
  checkOpeningOf,
  invalid,
  type Member,
  type OpenOptions,
  type Probe,
  type Rank,
  type TransportProvider,
  type WaitOptions,
} from '@ep/core';
import { type NativeIbgdaNic, type NativeRankContext, native, unavailable } from '@ep/native';
import {
  agreedFacts,
  byPlace,
  checkAmong,
  type Introduction,
  joinApart,
  joinRanks,
  meetAnew,
  type NetworkWorld,
  rejoinRanks,
  throughStore,
  together,
} from '@ep/native/ranks';
import {
  type AnyIbgdaConfig,
  type DeviceIbgdaConfig,
  type ResolvedIbgdaConfig,
  resolveConfig,
  type SoftIbgdaConfig,
} from './config.js';
import { IbgdaEndpoint } from './endpoint.js';
import { type ExchangingMember, throughExchange } from './introduction.js';
import { checkRenewable } from './members.js';
import { type IbgdaBacking, type IbgdaNeeds, nicOptions, probeNic } from './probe.js';
import { IbgdaTransport } from './transport.js';

const { version: VERSION } = createRequire(import.meta.url)('@ep/ibgda/package.json') as { readonly version: string };

/** Who joins: by a store, or by the caller's own exchange of what the ranks tell each other. */
export type IbgdaMember = (Member & { readonly exchange?: undefined }) | ExchangingMember;

function introductionOf(
  member: IbgdaMember,
  transport: string,
  activeRanks: readonly Rank[] | undefined,
): Introduction {
  if (member.exchange === undefined) return throughStore({ ...member, activeRanks }, transport);
  if (activeRanks === undefined) return throughExchange(member, transport);
  const where = `${transport} configuration`;
  throw invalid('activeRanks', { where, expected: 'absent beside exchange', found: activeRanks });
}

function checkMember(member: IbgdaMember, options: OpenOptions, where: string): void {
  if (member?.exchange === undefined) {
    checkOpening(member, options, where);
    return;
  }
  checkOpeningOf(member, options, where);
  const { exchange, store } = member;
  if (typeof exchange !== 'function') throw invalid('exchange', { where, expected: 'a function', found: exchange });
  if (store !== undefined) throw invalid('store', { where, expected: 'absent beside exchange', found: store });
}

/**
 * Collective over the ranks of `config.activeRanks`, all unless given. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks; with `exchange` instead of a store, also for what is no such data.
 */
async function openNic(
  backing: IbgdaBacking,
  member: IbgdaMember,
  options: OpenOptions<AnyIbgdaConfig>,
): Promise<IbgdaTransport> {
  const transport = `ibgda:${backing}`;
  checkMember(member, options, transport);
  const { rank, worldSize } = member;
  const config = resolveConfig(transport, options.config, worldSize);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  const { network, activeRanks } = config;
  checkAmong(activeRanks, rank, `${transport} configuration`);
  const introduction = introductionOf(member, transport, activeRanks);
  const own = { rank, worldSize, ...joiningOf(backing, config) };
  if (backing === 'soft' && network !== undefined) return openApart({ ...own, introduction, network }, config, limits);
  const joined = await joinRanks({ ...own, activeRanks }, introduction, limits);
  const { context, world } = joined;
  const step = (what: string) => ({ where: `${transport}: open`, what, code: 'EP_RENDEZVOUS' }) as const;
  let nic: NativeIbgdaNic | undefined;
  try {
    nic = await together(world, step('open a NIC'), limits, () => makeNic(backing, context, config), close);
    const made = nic;
    // HAZARD: until all have done it, a peer's queue pair may not be ready to receive: what is sent there waits for a whole timeout.
    await together(world, step('connect to the others'), limits, async () => {
      const told = await introduction.tell('connections', { connection: made.connection() }, limits);
      const connections = told.map(({ connection }) => connection);
      made.connect(byPlace(connections, activeRanks, worldSize));
    });
    const { controls, round, id } = joined;
    const members = { world, controls, round, id, facts: agreedFacts(own), isNew: false };
    return new IbgdaTransport({ backing, rank, worldSize, ...joined, members, nic, config });
  } catch (error) {
    nic?.close();
    await world.close();
    context.close();
    throw error;
  }
}

/** What ranks must have chosen alike, and how they meet. */
function joiningOf(backing: IbgdaBacking, config: ResolvedIbgdaConfig) {
  const { qpsPerPeer, link, ranksOnHost, timeoutMs, device } = config;
  const kernels = device === undefined ? 'host' : 'gpu';
  const agree = { qpsPerPeer, kernels, ...(backing === 'soft' ? { link } : {}) };
  return { transport: `ibgda:${backing}`, version: VERSION, agree, ranksOnHost, timeoutMs };
}

/**
 * In the place of a rank that died, or into one in which nobody has been yet (`config.activeRanks`), with the store of the world that it was of, while the others call `IbgdaTransport.readmit`. Rejects with `EP_TIMEOUT` where they do not, with
 * `EP_RENDEZVOUS` where they refuse this rank, and with `EP_UNSUPPORTED` over a network and for kernels on a GPU.
 */
async function rejoinNic(
  backing: IbgdaBacking,
  member: Member,
  options: OpenOptions<AnyIbgdaConfig>,
): Promise<IbgdaTransport> {
  const where = `ibgda:${backing}: rejoin`;
  checkOpening(member, options, where);
  const { rank, worldSize, store } = member;
  const config = resolveConfig(where, options.config, worldSize);
  checkRenewable(config, where);
  const timeoutMs = options.timeoutMs ?? config.timeoutMs;
  const begin = performance.now();
  const own = { rank, worldSize, ...joiningOf(backing, config) };
  const { context, liveness, world, controls, round, id } = await rejoinRanks(
    { ...own, store },
    { signal: options.signal, timeoutMs },
  );
  try {
    const nic = await meetAnew(
      {
        ...{ world, worldSize, where },
        prepare: () => makeNic(backing, context, config),
        say: (made) => made.connection(),
        connect: (made, connections) => made.connect(connections),
        undo: close,
      },
      { signal: options.signal, timeoutMs: Math.max(1, timeoutMs - (performance.now() - begin)) },
    );
    const members = { world, controls, round, id, facts: agreedFacts(own), isNew: true };
    return new IbgdaTransport({ backing, rank, worldSize, context, liveness, world, members, nic, config });
  } catch (error) {
    await world.close();
    context.close();
    throw error;
  }
}

function makeNic(backing: IbgdaBacking, context: NativeRankContext, config: ResolvedIbgdaConfig): NativeIbgdaNic {
  const nic = newNic(backing, context, config);
  try {
    if (config.faults !== undefined) nic.setFaults(config.faults);
    return nic;
  } catch (error) {
    nic.close();
    throw error;
  }
}

function newNic(backing: IbgdaBacking, context: NativeRankContext, config: ResolvedIbgdaConfig): NativeIbgdaNic {
  try {
    return new (native().binding.IbgdaNic)(context, nicOptions(backing, config));
  } catch (error) {
    throw backing === 'soft' ? error : unavailable(error);
  }
}

const close = (nic: NativeIbgdaNic): void => nic.close();

type Apart = Omit<NetworkWorld<NativeIbgdaNic>, 'makeNic' | 'connection' | 'connect' | 'endpoint'>;

/** The same where a network joins the NICs: nothing is shared, and the ranks may be on any hosts. */
async function openApart(own: Apart, config: ResolvedIbgdaConfig, limits: WaitOptions): Promise<IbgdaTransport> {
  const { rank, worldSize } = own;
  const joined = await joinApart<NativeIbgdaNic>(
    {
      ...own,
      makeNic: (context) => makeNic('soft', context, config),
      connection: (nic) => nic.connection(),
      connect: (nic, connections, keys) => nic.connect(connections, keys),
      endpoint: ({ nic, ...made }) => {
        const { atomics, maskedSwap } = nic.port();
        return new IbgdaEndpoint({ ...made, nic, atomics, maskedSwap });
      },
    },
    limits,
  );
  return new IbgdaTransport({ backing: 'soft', rank, worldSize, ...joined, config });
}

const openSoft = (member: IbgdaMember, options: OpenOptions<SoftIbgdaConfig>): Promise<IbgdaTransport> =>
  openNic('soft', member, options);

const openHardware = (member: IbgdaMember, options: OpenOptions<DeviceIbgdaConfig>): Promise<IbgdaTransport> =>
  openNic('hardware', member, options);

const openVerbs = (member: IbgdaMember, options: OpenOptions<DeviceIbgdaConfig>): Promise<IbgdaTransport> =>
  openNic('verbs', member, options);

const rejoinSoft = (member: Member, options: OpenOptions<SoftIbgdaConfig>): Promise<IbgdaTransport> =>
  rejoinNic('soft', member, options);

const rejoinHardware = (member: Member, options: OpenOptions<DeviceIbgdaConfig>): Promise<IbgdaTransport> =>
  rejoinNic('hardware', member, options);

const rejoinVerbs = (member: Member, options: OpenOptions<DeviceIbgdaConfig>): Promise<IbgdaTransport> =>
  rejoinNic('verbs', member, options);

/** The providers of this package, by backing. */
export const ibgda = {
  /** A software NIC in every rank's process executes the requests, byte for byte. Ranks of one Linux host, or with `network` of several. */
  soft: {
    name: 'ibgda:soft',
    probe: (config?: SoftIbgdaConfig): Promise<Probe> => probeNic('soft', config),
    open: openSoft,
    rejoin: rejoinSoft,
  } satisfies TransportProvider<IbgdaNeeds, SoftIbgdaConfig> & { rejoin: typeof rejoinSoft },
  /** ConnectX through libibverbs and libmlx5. Ranks of one host so far: they tell each other's death through shared memory. */
  hardware: {
    name: 'ibgda:hardware',
    probe: (config?: DeviceIbgdaConfig): Promise<Probe> => probeNic('hardware', config),
    open: openHardware,
    rejoin: rejoinHardware,
  } satisfies TransportProvider<IbgdaNeeds, DeviceIbgdaConfig> & { rejoin: typeof rejoinHardware },
  /**
   * Any device with RC queue pairs, through libibverbs: a thread of the rank's process reads the rings that kernels post to, and posts the requests itself. For
   * NICs without DevX or GPUDirect. Ranks of one host, as above.
   */
  verbs: {
    name: 'ibgda:verbs',
    probe: (config?: DeviceIbgdaConfig): Promise<Probe> => probeNic('verbs', config),
    open: openVerbs,
    rejoin: rejoinVerbs,
  } satisfies TransportProvider<IbgdaNeeds, DeviceIbgdaConfig> & { rejoin: typeof rejoinVerbs },
} as const;
