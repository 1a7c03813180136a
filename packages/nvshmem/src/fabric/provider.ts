/** Opens the backing `fabric`: ranks meet at the store once; from then on all goes through the network. */
import {
  checkOpening,
  EpError,
  exchange,
  hostFacts,
  type Member,
  type OpenOptions,
  type Rank,
  rendezvous,
  type TransportProvider,
  type WaitOptions,
} from '@ep/core';
import { type FabricOffer, type NativeFabricNic, type NativeRankContext, native, unavailable } from '@ep/native';
import {
  checkSecret,
  fingerprint,
  hostOfProcess,
  hostsOf,
  type LinkedTeam,
  Liveness,
  linkKeys,
  NONCE_BYTES,
  networkOfProcess,
  newNonce,
  openLinkedTeam,
  teamMemory,
} from '@ep/native/ranks';
import { VERSION } from '../version.js';
import { type FabricConfig, type ResolvedFabricConfig, resolveConfig } from './config.js';
import { FabricEndpoint } from './endpoint.js';
import { type FabricNeeds, probeFabric, whyNoAtomics } from './probe.js';
import { ofMissingAddress, ofMissingRanks } from './reachability.js';
import { withSettings } from './settings.js';
import { FabricTransport } from './transport.js';

const NAME = 'nvshmem:fabric';
/** As in native/core/fabric/wire.hpp: requests have no room for a higher rank. */
const MOST_RANKS = 4096;

interface Opening {
  readonly member: Member;
  readonly config: ResolvedFabricConfig;
  readonly limits: WaitOptions;
  readonly context: NativeRankContext;
}

interface Met {
  readonly nic: NativeFabricNic;
  readonly offer: FabricOffer;
  readonly hosts: readonly Rank[];
}

/** Compares what all ranks must have alike. A rank that finds no fabric takes part, so that the others hear why instead of waiting for it. */
async function meet({ member, config, limits, context }: Opening): Promise<Met> {
  const { binding } = native();
  let nic: NativeFabricNic | undefined;
  let refusal: unknown;
  try {
    nic = withSettings(() => new binding.FabricNic(context, config));
  } catch (error) {
    refusal = unavailable(ofMissingAddress(error, config.address));
  }
  try {
    const provider = nic?.offer().provider ?? `none: ${refusal instanceof Error ? refusal.message : String(refusal)}`;
    const { heartbeatMs, silenceMs } = config;
    const secret = fingerprint(config.secret);
    const agree = { transport: NAME, version: VERSION, abi: binding.abi, provider, heartbeatMs, silenceMs, secret };
    const noAtomics = nic?.offer().noAtomics ?? '';
    const facts = { agree, host: { ...hostFacts(), network: networkOfProcess(), place: hostOfProcess(), noAtomics } };
    const peers = await rendezvous(member.store, { ...member, facts, key: `${NAME}/rendezvous` }, limits);
    checkSecret(NAME, peers, config.secret);
    if (nic !== undefined) {
      const offer = { ...nic.offer(), noAtomics: whyNoAtomics(peers) };
      return { nic, offer, hosts: hostsOf(peers) };
    }
  } catch (error) {
    nic?.close();
    throw refusal ?? error;
  }
  throw refusal;
}

/** Exchanges addresses and the memory of the team, which then works through the fabric alone. */
async function join(opening: Opening, { nic, offer, hosts }: Met, liveness: Liveness): Promise<LinkedTeam> {
  const { member, config, limits, context } = opening;
  const { rank, worldSize, store } = member;
  const { timeoutMs } = config;
  const size = teamMemory(worldSize);
  const memory = new (native().binding.SymmetricMemory)(context, size.byteLength, size.signalSlots);
  const [address, part, handle] = [nic.address(), nic.addMemory(memory), context.handle()];
  const place = nic.listen();
  const bytes = Buffer.concat([newNonce(), handle, part, place, address]);
  const beginOfPart = NONCE_BYTES + handle.byteLength;
  const beginOfPlace = beginOfPart + part.byteLength;
  const beginOfAddress = beginOfPlace + place.byteLength;
  const blobs = await exchange(store, { rank, worldSize, key: `${NAME}/addresses`, bytes }, limits);
  for (const [peer, blob] of blobs.entries()) {
    if (blob.byteLength > beginOfAddress) continue;
    throw new EpError('EP_RENDEZVOUS', `rank ${peer} published ${blob.byteLength} bytes, which hold no address`);
  }
  const nonces = blobs.map((blob) => blob.subarray(0, NONCE_BYTES));
  // The end of a process is seen in shared memory on this host, and told by a connection from another one.
  const isFar = (peer: Rank): boolean => hosts[peer] !== hosts[rank];
  const nowhere = new Uint8Array(handle.byteLength);
  const handles = blobs.map((blob, peer) => (isFar(peer) ? nowhere : blob.subarray(NONCE_BYTES, beginOfPart)));
  nic.witness(Buffer.concat(handles));
  nic.setLines(
    blobs.map((blob) => blob.subarray(beginOfPlace, beginOfAddress)),
    Uint8Array.from(blobs, (_, peer) => (isFar(peer) ? 1 : 0)),
  );
  // HAZARD: before the engine's thread starts: others may be at the first barrier already, and write there.
  nic.route(
    memory,
    blobs.map((blob) => blob.subarray(beginOfPart, beginOfPlace)),
  );
  nic.connect(
    blobs.map((blob) => blob.subarray(beginOfAddress)),
    linkKeys(rank, nonces, config.secret),
  );
  const { noAtomics } = offer;
  const endpoint = (peer: Rank) => new FabricEndpoint({ peer, nic, context, liveness, timeoutMs, noAtomics });
  try {
    return await openLinkedTeam({ rank, worldSize, context, liveness, timeoutMs, memory, nic, endpoint }, limits);
  } catch (error) {
    throw ofMissingRanks(error, { rank, nic, endpoints: blobs.map((blob) => blob.subarray(beginOfAddress)) });
  }
}

/**
 * Collective. A store serves one open of one world: for a second one, also after `close()`, every rank passes a part of the store with a name of its
 * own, `prefixStore(store, 'second')`. Rejects with `EP_RENDEZVOUS` naming the odd ranks.
 */
async function openFabric(member: Member, options: OpenOptions<FabricConfig>): Promise<FabricTransport> {
  checkOpening(member, options, NAME, MOST_RANKS);
  const { rank, worldSize } = member;
  const config = resolveConfig(options.config, worldSize);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  const context = new (native().binding.RankContext)(rank, worldSize, config.ranksOnHost);
  const opening = { member, config, limits, context };
  let nic: NativeFabricNic | undefined;
  try {
    const met = await meet(opening);
    nic = met.nic;
    const liveness = new Liveness(context, rank, worldSize);
    const world = await join(opening, met, liveness);
    return new FabricTransport({ rank, worldSize, ...met, context, liveness, world, config });
  } catch (error) {
    nic?.close();
    context.close();
    throw error;
  }
}

/** Ranks on any hosts, over whatever libfabric offers; host memory. */
export const fabric = {
  name: NAME,
  probe: probeFabric,
  open: openFabric,
} satisfies TransportProvider<FabricNeeds, FabricConfig> & { open: typeof openFabric };
