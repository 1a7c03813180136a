/** How ranks find each other whose NICs a network joins: they are introduced, and from then on all goes through the NICs. */
import { hostFacts, type Member, type Rank, type WaitOptions } from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { native } from '../native.js';
import type { Introduction } from './introduction.js';
import { type LinkedTeam, openLinkedTeam, type TeamEndpoint, teamMemory } from './linked-team.js';
import { Liveness } from './liveness.js';
import type { NicNetwork } from './network.js';
import { checkSecret, fingerprint, linkKeys, networkOfProcess, newNonce } from './secret.js';

/** What the addon's NIC does while ranks meet; `close` included, for those that do not. */
export interface LinkedNic {
  addMemory(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  route(memory: NativeSymmetricMemory, parts: readonly Uint8Array[]): void;
  removeMemory(memory: NativeSymmetricMemory): void;
  close(): void;
}

export interface NetworkWorld<Nic extends LinkedNic> extends Omit<Member, 'store'> {
  readonly introduction: Introduction;
  /** Names it to the other ranks. */
  readonly transport: string;
  readonly version: string;
  /** What all ranks must have chosen alike, beside transport, version, ABI and the network's times. */
  readonly agree?: Readonly<Record<string, string | number | boolean>>;
  readonly ranksOnHost: number;
  /** Of the world's own calls that give none, in milliseconds. */
  readonly timeoutMs: number;
  readonly network: NicNetwork;
  /** May throw; the others then hear why. */
  readonly makeNic: (context: NativeRankContext) => Nic;
  /** What the others need to reach this rank. */
  readonly connection: (nic: Nic) => Uint8Array;
  /** Given what all ranks said, and keys of both directions for each, by rank. */
  readonly connect: (nic: Nic, connections: readonly Uint8Array[], keys: readonly Uint8Array[]) => void;
  readonly endpoint: (made: {
    readonly peer: Rank;
    readonly nic: Nic;
    readonly context: NativeRankContext;
    readonly liveness: Liveness;
    readonly timeoutMs: number;
  }) => TeamEndpoint;
}

/** Compares what all ranks must have alike. A rank that has no NIC takes part, so that the others hear why instead of waiting for it. */
async function meet<Nic extends LinkedNic>(
  world: NetworkWorld<Nic>,
  context: NativeRankContext,
  limits: WaitOptions,
): Promise<Nic> {
  const { transport, version, network } = world;
  let nic: Nic | undefined;
  let refusal: unknown;
  try {
    nic = world.makeNic(context);
  } catch (error) {
    refusal = error;
  }
  try {
    const { heartbeatMs, silenceMs } = network;
    const times = `tcp, heartbeat ${heartbeatMs} ms, silence ${silenceMs} ms`;
    const why = refusal instanceof Error ? refusal.message : String(refusal);
    const agree = {
      transport,
      version,
      abi: native().binding.abi,
      network: nic === undefined ? `none: ${why}` : times,
      secret: fingerprint(network.secret),
      ...world.agree,
    };
    const facts = { agree, host: { ...hostFacts(), network: networkOfProcess() } };
    const peers = await world.introduction.compare(facts, limits);
    checkSecret(transport, peers, network.secret);
  } catch (error) {
    nic?.close();
    throw refusal ?? error;
  }
  if (nic === undefined) throw refusal;
  return nic;
}

/** Exchanges addresses and the memory of the team, which then works through the NICs alone. */
async function link<Nic extends LinkedNic>(
  world: NetworkWorld<Nic>,
  nic: Nic,
  context: NativeRankContext,
  limits: WaitOptions,
): Promise<{ readonly liveness: Liveness; readonly world: LinkedTeam }> {
  const { rank, worldSize, introduction, timeoutMs } = world;
  const size = teamMemory(worldSize);
  const memory = new (native().binding.SymmetricMemory)(context, size.byteLength, size.signalSlots);
  const own = { nonce: newNonce(), memory: nic.addMemory(memory), connection: world.connection(nic) };
  const told = await introduction.tell('connections', own, limits);
  const nonces = told.map(({ nonce }) => nonce);
  const connections = told.map(({ connection }) => connection);
  world.connect(nic, connections, linkKeys(rank, nonces, world.network.secret));
  nic.route(
    memory,
    told.map((theirs) => theirs.memory),
  );
  // HAZARD: before it, a peer may not be ready to receive: what it is sent fails, or waits for a whole timeout.
  await introduction.tell('connected', {}, limits);
  const liveness = new Liveness(context, rank, worldSize);
  const endpoint = (peer: Rank) => world.endpoint({ peer, nic, context, liveness, timeoutMs });
  const opening = { rank, worldSize, context, liveness, timeoutMs, memory, nic, endpoint };
  return { liveness, world: await openLinkedTeam(opening, limits) };
}

/**
 * Collective. An introduction serves one call of one world and transport. Rejects with `EP_RENDEZVOUS` naming the odd ranks, with `EP_SECRET` where ranks on several hosts have none. The
 * caller closes `world`, then `nic`, then `context`.
 */
export async function joinApart<Nic extends LinkedNic>(world: NetworkWorld<Nic>, limits: WaitOptions) {
  const context = new (native().binding.RankContext)(world.rank, world.worldSize, world.ranksOnHost);
  let nic: Nic | undefined;
  try {
    nic = await meet(world, context, limits);
    return { context, nic, ...(await link(world, nic, context, limits)) };
  } catch (error) {
    nic?.close();
    context.close();
    throw error;
  }
}
