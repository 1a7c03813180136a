/**
 * A group engine over any transport that has puts with a counted signal: no order between puts, no atomics, no access to peers' memory is used.
 *
 * What is guaranteed, beside the contract of engine.ts:
 * - Calls. One runs at a time; each begins with an exchange of what is called and ends when every contributor has all of its data, so a call that
 *   completed on one rank has its data on all. Results are folded in ascending rank order from the same chunks everywhere: the same bits on all ranks.
 * - Death. Each loss of members is told by exactly one collective call, the same on all survivors: the first that none of them completed, also if it is
 *   made long after. It ends with EP_PEER_LOST; its outputs are undefined. A loss that is found while survivors still agree is part of the same agreement or of
 *   the next. Outputs for members that are gone are left as they are; a call whose root is gone ends with EP_PEER_LOST. A member that closes its engine has left, and
 *   is lost to later calls in the same way.
 * - A stopped rank is not dead: calls that need it end by their time limit and poison the group. A poisoned group still carries messages between two ranks.
 * - Messages fail alone, on both sides, and never poison. A receive's array is not written after it has ended.
 * - What a lost rank still writes lands in slots that only it had, and is not read.
 * - Bounded memory: `stagingBytes` per group and rank (half to send from, half to receive), however much is in flight; offers that nobody takes cost
 *   an object each.
 */
import { setTimeout } from 'node:timers/promises';
import {
  checkInteger,
  createStorage,
  type DType,
  EpError,
  formatRanks,
  invalid,
  isEpError,
  Resource,
  type Storage,
  type Store,
  type Transport,
} from '@ep/core';
import type { EngineCall, EngineEnd, GroupEngine, GroupView, RecvCall, RecvEnd, SendCall } from '../engine.js';
import { type Arena, arenaOf, type Section } from './arena.js';
import { Channel, type LaneSource, type Portable } from './channel.js';
import { Collectives } from './collectives.js';
import { layOut } from './layout.js';
import { Membership } from './membership.js';
import { Messages } from './messages.js';
import { Pulse } from './pulse.js';
import { type ControlRecord, decodeRecord, describeError, encodeRecord } from './records.js';
import { Traces } from './traces.js';

export interface PortableEngineOptions {
  /** The first engine on a transport must be opened by all of its ranks, later ones by their members. */
  readonly transport: Transport<Portable>;
  /** Ranks of the transport, in group order. */
  readonly ranks: readonly number[];
  /** Of this process in the group. */
  readonly rank: number;
  /** The first engine's serves all later ones of the transport to find sections: it is closed after all of them. */
  readonly store: Store;
  readonly name: string;
  /** For opening and closing; calls bring their own. */
  readonly timeoutMs: number;
  /** Ends the opening. */
  readonly signal?: AbortSignal | undefined;
  /** Of every group, per rank. 4 MiB, or 64 KiB per rank of the world, unless given by the first engine on the transport. */
  readonly stagingBytes?: number;
  /** How many groups can be open on the transport: 16, or as many as its signal slots allow (worldSize slots each), unless given by the first engine. */
  readonly maxGroups?: number;
}

const FIRST_PAUSE_MS = 10;
const LONGEST_PAUSE_MS = 1000;
/** A member that reads nothing any more delays close() at most this long. */
const LONGEST_DRAIN_MS = 5000;
const WHERE = 'portable engine';

/** A record on its way. */
class RecordSource implements LaneSource {
  finished = false;
  readonly #bytes: Uint8Array;

  constructor(record: ControlRecord) {
    this.#bytes = encodeRecord(record);
  }

  readonly fill = (slot: Uint8Array): number => {
    slot.set(this.#bytes);
    this.finished = true;
    return this.#bytes.byteLength;
  };
}

interface EngineInit {
  readonly options: PortableEngineOptions;
  readonly arena: Arena;
  readonly section: Section;
  readonly key: string;
}

class PortableEngine extends Resource implements GroupEngine {
  readonly name: string;
  readonly rank: number;
  readonly size: number;
  readonly #init: EngineInit;
  readonly #membership: Membership;
  readonly #collectives: Collectives;
  readonly #messages: Messages;
  readonly #traces = new Traces();
  /** By group rank; none to itself. */
  readonly #channels: readonly (Channel | undefined)[];
  /** What keeps a channel from being used. */
  readonly #details = new Map<number, string>();
  readonly #pulse = new Pulse(
    () => this.#look(),
    (error) => this.#break(error),
  );
  readonly #stop = new AbortController();
  readonly #background: Promise<void>[] = [];
  /** A member died, or the transport failed: what was put may land at any time. */
  #unclean = false;
  #broken = false;

  constructor(init: EngineInit) {
    const { transport, ranks, rank, name } = init.options;
    super(`${WHERE} ${name}`);
    this.#init = init;
    this.name = transport.name;
    this.rank = rank;
    this.size = ranks.length;
    const tell = (peer: number, record: ControlRecord): void => this.#tell(peer, record);
    this.#membership = new Membership({
      rank,
      size: ranks.length,
      tell,
      completed: () => this.#collectives.completed,
      onCommit: (lost, completed) => this.#collectives.onCommit(lost, completed),
      onExpelled: (by) =>
        this.#break(
          new EpError('EP_TRANSPORT_FAILED', `${WHERE} ${name}: rank ${by} takes this rank, ${rank}, for dead`),
        ),
    });
    this.#collectives = new Collectives({
      rank,
      membership: this.#membership,
      traces: this.#traces,
      tell,
      send: (peer, source) => this.#channels[peer]!.send('collective', source),
      kick: () => this.#each((channel) => channel.kick('collective')),
      drain: () => this.#each((channel) => channel.drain('collective')),
    });
    this.#messages = new Messages({
      rank,
      size: ranks.length,
      traces: this.#traces,
      isGone: (peer) => this.#membership.isGone(peer),
      tell,
      send: (peer, stream) => this.#channels[peer]!.send('message', stream),
    });
    this.#channels = this.#openChannels();
    init.arena.users++;
  }

  /** Follows all peers from now on, and begins to connect. Nobody waits for it. */
  begin(): void {
    const { signal } = this.#stop;
    signal.addEventListener('abort', () => this.#cutOff(this.#closedError()), { once: true });
    this.closing.addEventListener('abort', () => this.#cutOff(this.#closedError()), { once: true });
    for (const [peer, channel] of this.#channels.entries()) {
      if (channel === undefined) continue;
      this.#background.push(channel.watch(signal), this.#connect(peer, channel, signal));
    }
  }

  readonly run = (call: EngineCall): EngineEnd | Promise<EngineEnd> => {
    this.checkOpen(call.kind);
    return this.#collectives.run(call);
  };

  readonly send = async (call: SendCall): Promise<void> => {
    this.checkOpen('send');
    await this.#messages.send(call);
  };

  readonly recv = async (call: RecvCall): Promise<RecvEnd> => {
    this.checkOpen('recv');
    return this.#messages.recv(call);
  };

  readonly view = (): GroupView => ({ epoch: this.#membership.epoch, active: this.#membership.active });

  readonly allocate = <D extends DType>(dtype: D, length: number): Storage[D] => {
    this.checkOpen('allocate');
    return createStorage(dtype, length);
  };

  readonly trace = () => this.#traces.snapshot();

  readonly connections: GroupEngine['connections'] = () =>
    this.#channels.map((channel, rank) => {
      if (channel === undefined) return { rank, state: 'self' };
      const state = this.#membership.isGone(rank) ? 'lost' : channel.connected ? 'connected' : 'connecting';
      const detail = this.#details.get(rank);
      return state === 'connected' || detail === undefined ? { rank, state } : { rank, state, detail };
    });

  /** Says good-bye, lets all that was put land, and gives the section back. What does not work any more is left. */
  protected override async release(): Promise<void> {
    const { arena, section, options, key } = this.#init;
    const { store, timeoutMs } = options;
    for (const peer of this.#channels.keys()) this.#tell(peer, { kind: 'bye' });
    const deadline = performance.now() + Math.min(timeoutMs, LONGEST_DRAIN_MS);
    const left = (): number => Math.max(1, deadline - performance.now());
    const waits = (peer: number): boolean =>
      !this.#broken && !this.#membership.isGone(peer) && performance.now() < deadline;
    const landed = await Promise.all(
      this.#channels.map(async (channel, peer) => {
        const endpoint = channel?.endpoint;
        if (channel === undefined || endpoint === undefined) return true;
        while (!channel.idle('control') && waits(peer)) {
          await setTimeout(1);
        }
        try {
          await endpoint.flush({ timeoutMs: left() });
          return true;
        } catch {
          return false;
        }
      }),
    );
    this.#stop.abort();
    await Promise.all(this.#background);
    arena.users--;
    if (this.#unclean || landed.includes(false)) return;
    try {
      if (await arena.giveBack(section, this.size)) {
        for (let rank = 0; rank < this.size; rank++) await store.delete(readyKey(key, rank));
        await store.delete(sectionKey(key));
      }
    } catch (error) {
      // Without a store the section stays taken, which harms nobody who could still ask.
      if (!isEpError(error)) throw error;
    }
  }

  #openChannels(): readonly (Channel | undefined)[] {
    const { arena, section, options } = this.#init;
    const { memory, sectionBytes } = arena;
    const { ranks, rank } = options;
    const layout = layOut(sectionBytes, ranks.length);
    const view = memory.view('u8', section.byteOffset, sectionBytes);
    return ranks.map((peerRank, peer) => {
      if (peer === rank) return undefined;
      const ownSlot = section.firstSlot + peer;
      return new Channel({
        self: rank,
        peer,
        memory,
        layout,
        sectionOffset: section.byteOffset,
        section: view,
        ownSlot,
        peerSlot: section.firstSlot + rank,
        peerRank,
        base: memory.signals.peek(ownSlot),
        readers: {
          control: (slot, release) => {
            const record = decodeRecord(slot);
            // First, so that the answer can take it along.
            release();
            this.#receive(peer, record);
            return true;
          },
          collective: (slot, release) => this.#collectives.onChunk(peer, slot, release),
          message: (slot, release) => this.#messages.onChunk(peer, slot, release),
        },
        onEvent: () => this.#pulse.look(),
        quiet: () => this.#pulse.quiet(),
        onLost: (error) => {
          this.#unclean = true;
          this.#lose(peer, error.message);
        },
        onBroken: (error) => this.#break(error),
      });
    });
  }

  /** Until it is there, records to the peer wait in its lane. */
  async #connect(peer: number, channel: Channel, signal: AbortSignal): Promise<void> {
    const { options, key } = this.#init;
    const { transport, ranks, store } = options;
    for (let pause = FIRST_PAUSE_MS; !signal.aborted && !channel.lost; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      try {
        this.#details.set(peer, 'connecting the transport');
        const endpoint = await transport.connect(ranks[peer]!, { signal });
        this.#details.set(peer, 'it has not opened the group');
        await store.get(readyKey(key, peer), { signal, timeoutMs: Number.POSITIVE_INFINITY });
        channel.connect(endpoint);
        return;
      } catch (error) {
        if (signal.aborted) return;
        this.#details.set(peer, error instanceof Error ? error.message : String(error));
      }
      await setTimeout(pause, undefined, { signal }).catch(() => {});
    }
  }

  #tell(peer: number, record: ControlRecord): void {
    const channel = this.#channels[peer];
    if (channel === undefined || this.#membership.isGone(peer)) return;
    channel.send('control', new RecordSource(record));
  }

  #receive(from: number, record: ControlRecord): void {
    // Of the dead, nothing is heard any more: agreements depend on it.
    if (this.#membership.isGone(from)) return;
    switch (record.kind) {
      case 'call':
        this.#collectives.onCall(from, record);
        break;
      case 'done':
        this.#collectives.onDone(from, record);
        break;
      case 'poison':
        this.#collectives.onPoison(from, record);
        break;
      case 'state':
      case 'view':
        this.#agree(() => this.#membership.receive(from, record));
        break;
      case 'bye':
        this.#lose(from, 'it closed the group');
        break;
      case 'offer':
        this.#messages.onOffer(from, record);
        break;
      case 'grant':
        this.#messages.onGrant(from, record.id);
        break;
      case 'cancel':
        this.#messages.onCancel(from, record);
        break;
      case 'refuse':
        this.#messages.onRefuse(from, record);
        break;
    }
  }

  #lose(peer: number, why: string): void {
    if (this.#membership.isGone(peer)) return;
    this.#details.set(peer, why);
    this.#agree(() => this.#membership.lose(peer));
  }

  /** What others know of the dead ends messages, and channels, here as well. */
  #agree(learn: () => void): void {
    const before = this.#channels.map((_, peer) => this.#membership.isGone(peer));
    learn();
    for (const [peer, channel] of this.#channels.entries()) {
      if (before[peer] || !this.#membership.isGone(peer)) continue;
      channel?.lose();
      this.#messages.onLost(peer);
      this.#collectives.onLost(peer);
    }
  }

  /** The transport does not do what it should: the others must not wait for this rank. */
  #break(error: unknown): void {
    if (this.#broken) return;
    this.#broken = true;
    this.#unclean = true;
    const { name } = this.#init.options;
    const { text } = describeError(error);
    const broken = isEpError(error)
      ? error
      : new EpError('EP_TRANSPORT_FAILED', `${WHERE} ${name}: ${text}`, { cause: error });
    this.#cutOff(broken);
    for (const peer of this.#channels.keys()) this.#tell(peer, { kind: 'bye' });
    this.#each((channel) => channel.lose());
  }

  #cutOff(error: unknown): void {
    this.#collectives.fail(error);
    this.#messages.fail(error);
  }

  #closedError(): EpError {
    return new EpError('EP_ABORTED', `${WHERE} ${this.#init.options.name} was closed`);
  }

  #look(): boolean {
    let seen = false;
    this.#each((channel) => {
      seen = channel.look() || seen;
    });
    return seen;
  }

  #each(action: (channel: Channel) => void): void {
    for (const channel of this.#channels) if (channel !== undefined) action(channel);
  }
}

const sectionKey = (key: string): string => `${key}/section`;
const readyKey = (key: string, rank: number): string => `${key}/ready/${rank}`;

/** Rank 0 of the group finds a section and tells the others, or why there is none. */
async function agreeOnSection(arena: Arena, key: string, options: PortableEngineOptions): Promise<Section> {
  const { rank, store, name, timeoutMs, signal } = options;
  if (rank === 0) {
    try {
      const section = await arena.take(name);
      await store.set(sectionKey(key), Buffer.from(JSON.stringify({ index: section.index, token: section.token })));
      return section;
    } catch (error) {
      await store.set(sectionKey(key), Buffer.from(JSON.stringify(describeError(error))));
      throw error;
    }
  }
  const bytes = await store.get(sectionKey(key), { timeoutMs, ...(signal && { signal }) });
  const told = JSON.parse(Buffer.from(bytes).toString()) as
    | { readonly index: number; readonly token: string }
    | ReturnType<typeof describeError>;
  if ('index' in told) return arena.section(told.index, told.token);
  throw new EpError(told.code === 'EP_CAPACITY' ? told.code : 'EP_RENDEZVOUS', told.text, { context: told.context });
}

function checkMembers({ transport, ranks, rank }: PortableEngineOptions): void {
  checkInteger(rank, 'rank', WHERE, 0, ranks.length - 1);
  for (const member of ranks) checkInteger(member, 'ranks', WHERE, 0, transport.worldSize - 1);
  if (new Set(ranks).size !== ranks.length) {
    throw invalid('ranks', { where: WHERE, expected: 'a list without repetition', found: ranks });
  }
  if (ranks[rank] !== transport.rank) {
    throw invalid('rank', {
      where: WHERE,
      expected: `the place of rank ${transport.rank} of ${transport.name} among ${formatRanks(ranks)}`,
      found: rank,
    });
  }
}

/**
 * Resolves when the members have agreed on a section of the arena, for which only rank 0 of the group is awaited; peers are connected to in the background. Rejects
 * with `EP_INVALID_ARGUMENT`, `EP_CAPACITY` (no section is free, or too little staging), `EP_TIMEOUT`, or what the transport or the store throw.
 */
export async function openPortableEngine(options: PortableEngineOptions): Promise<GroupEngine> {
  checkMembers(options);
  const { transport, store, name, rank, timeoutMs, signal, stagingBytes, maxGroups } = options;
  const arena = await arenaOf({ transport, store, timeoutMs, signal, stagingBytes, maxGroups });
  layOut(arena.sectionBytes, options.ranks.length);
  const key = arena.keyOf(name, options.ranks);
  const section = await agreeOnSection(arena, key, options);
  const engine = new PortableEngine({ options, arena, section, key });
  // HAZARD: after the constructor, which reads the words that count from now on; nobody writes to this rank before.
  await store.set(readyKey(key, rank), new Uint8Array(1));
  engine.begin();
  return engine;
}
