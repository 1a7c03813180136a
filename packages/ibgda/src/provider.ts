/** Opens queue pairs between ranks: on ConnectX, on any RDMA device, or on a software NIC in each rank's process. */
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
import {
  type AnyIbgdaConfig,
  type DeviceIbgdaConfig,
  type ResolvedIbgdaConfig,
  resolveConfig,
  type SoftIbgdaConfig,
} from './config.js';
import { IbgdaEndpoint } from './endpoint.js';
import { type IbgdaBacking, type IbgdaNeeds, nicOptions, probeNic } from './probe.js';
import { IbgdaTransport } from './transport.js';

const { version: VERSION } = createRequire(import.meta.url)('@ep/ibgda/package.json') as { readonly version: string };

/**
 * Collective. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
async function openNic(
  backing: IbgdaBacking,
  member: Member,
  options: OpenOptions<AnyIbgdaConfig>,
): Promise<IbgdaTransport> {
  const transport = `ibgda:${backing}`;
  checkOpening(member, options, transport);
  const { rank, worldSize, store } = member;
  const config = resolveConfig(transport, options.config, worldSize);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  if (backing === 'soft' && config.network !== undefined) return openApart(member, config, config.network, limits);
  const { qpsPerPeer, link, ranksOnHost, timeoutMs } = config;
  const agree = { qpsPerPeer, ...(backing === 'soft' ? { link } : {}) };
  const joined = await joinRanks({ ...member, transport, version: VERSION, ranksOnHost, timeoutMs, agree }, limits);
  const { context, world } = joined;
  const { binding } = native();
  let nic: InstanceType<typeof binding.IbgdaNic> | undefined;
  try {
    nic = new binding.IbgdaNic(context, nicOptions(backing, config));
    if (config.faults !== undefined) nic.setFaults(config.faults);
    const key = `${transport}/connections`;
    nic.connect(await exchange(store, { rank, worldSize, key, bytes: nic.connection() }, limits));
    // HAZARD: before it, a peer's queue pair may not be ready to receive: what is sent there waits for a whole timeout.
    await world.barrier(limits);
    return new IbgdaTransport({ backing, rank, worldSize, ...joined, nic, config });
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
  config: ResolvedIbgdaConfig,
  network: NicNetwork,
  limits: WaitOptions,
): Promise<IbgdaTransport> {
  const { qpsPerPeer, link, ranksOnHost, timeoutMs } = config;
  const { rank, worldSize } = member;
  const joined = await joinApart(
    {
      ...member,
      transport: 'ibgda:soft',
      version: VERSION,
      agree: { qpsPerPeer, link },
      ranksOnHost,
      timeoutMs,
      network,
      makeNic: (context) => {
        const nic = new (native().binding.IbgdaNic)(context, nicOptions('soft', config));
        if (config.faults !== undefined) nic.setFaults(config.faults);
        return nic;
      },
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

const openSoft = (member: Member, options: OpenOptions<SoftIbgdaConfig>): Promise<IbgdaTransport> =>
  openNic('soft', member, options);

const openHardware = (member: Member, options: OpenOptions<DeviceIbgdaConfig>): Promise<IbgdaTransport> =>
  openNic('hardware', member, options);

const openVerbs = (member: Member, options: OpenOptions<DeviceIbgdaConfig>): Promise<IbgdaTransport> =>
  openNic('verbs', member, options);

/** The providers of this package, by backing. */
export const ibgda = {
  /** A software NIC in every rank's process executes the requests, byte for byte. Ranks of one Linux host, or with `network` of several. */
  soft: {
    name: 'ibgda:soft',
    probe: (config?: SoftIbgdaConfig): Promise<Probe> => probeNic('soft', config),
    open: openSoft,
  } satisfies TransportProvider<IbgdaNeeds, SoftIbgdaConfig>,
  /** ConnectX through libibverbs and libmlx5. Ranks of one host so far: they tell each other's death through shared memory. */
  hardware: {
    name: 'ibgda:hardware',
    probe: (config?: DeviceIbgdaConfig): Promise<Probe> => probeNic('hardware', config),
    open: openHardware,
  } satisfies TransportProvider<IbgdaNeeds, DeviceIbgdaConfig>,
  /**
   * Any device with RC queue pairs, through libibverbs: a thread of the rank's process reads the rings that kernels post to, and posts the requests itself. For
   * NICs without DevX or GPUDirect. Ranks of one host, as above.
   */
  verbs: {
    name: 'ibgda:verbs',
    probe: (config?: DeviceIbgdaConfig): Promise<Probe> => probeNic('verbs', config),
    open: openVerbs,
  } satisfies TransportProvider<IbgdaNeeds, DeviceIbgdaConfig>,
} as const;
