/** The engine of one group on one rank: its channels, and what is told over them. */
import { setTimeout } from 'node:timers/promises';
import { createStorage, type DType, EpError, isEpError, Resource, type Storage } from '@ep/core';
import type { EngineCall, EngineEnd, GroupEngine, GroupView, RecvCall, RecvEnd, SendCall } from '../engine.js';
import type { Arena, Section } from './arena.js';
import { Channel, type LaneSource } from './channel.js';
import { Collectives, type PlannedCall } from './collectives.js';
import { orderOf } from './fold-order.js';
import type { HostLevel } from './host-level.js';
import { layOut } from './layout.js';
import { LEFT, LEFT_DETAIL, readyKey, sectionKey } from './meeting.js';
import { Membership } from './membership.js';
import { Messages } from './messages.js';
import { type PortableEngineOptions, WHERE } from './options.js';
import type { Placement } from './placement.js';
import { type DataPlan, Plan } from './plan.js';
import { Pulse } from './pulse.js';
import { type ControlRecord, decodeRecord, describeError, encodeRecord } from './records.js';
import { Traces } from './traces.js';
import { goesInTwoLevels, TwoLevelPlan } from './two-levels.js';

const FIRST_PAUSE_MS = 10;
const LONGEST_PAUSE_MS = 1000;
/** A member that reads nothing any more delays close() at most this long, and so does a store that does not answer: it may be on a host that was lost. */
const LONGEST_DRAIN_MS = 5000;

/** False where it takes longer; nobody hears what becomes of it then. */
async function inTime(work: Promise<void>, ms: number): Promise<boolean> {
  const over = new AbortController();
  const late = setTimeout(ms, false, { signal: over.signal }).catch(() => false);
  try {
    return await Promise.race([work.then(() => true), late]);
  } finally {
    over.abort();
  }
}

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
  readonly placement: Placement;
  /** Where the group goes in two levels. */
  readonly host: HostLevel | undefined;
}

export class PortableEngine extends Resource implements GroupEngine {
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
      planOf: (data) => this.#planOf(data),
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
    const { arena, options } = this.#init;
    const longestMs = Math.min(options.timeoutMs, LONGEST_DRAIN_MS);
    const storeAnswers = await this.#leave(longestMs);
    const deadline = performance.now() + longestMs;
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
    await this.#init.host?.close();
    arena.users--;
    // HAZARD: a member that died never comes here, one whose puts may still land must not: the section would be taken for free.
    if (this.#broken || landed.includes(false) || !storeAnswers) return;
    try {
      await inTime(this.#giveBack(), longestMs);
    } catch (error) {
      // Without a store the section stays taken, which harms nobody who could still ask.
      if (!isEpError(error)) throw error;
    }
  }

  async #giveBack(): Promise<void> {
    const { arena, section, options, key } = this.#init;
    if (!(await arena.giveBack(section, this.size))) return;
    for (let rank = 0; rank < this.size; rank++) await options.store.delete(readyKey(key, rank));
    await options.store.delete(sectionKey(key));
  }

  /** Tells the members; false where the store has not answered in time. */
  async #leave(longestMs: number): Promise<boolean> {
    const late = new AbortController();
    try {
      return await inTime(this.#leaveStore(late.signal), longestMs);
    } catch (error) {
      // Of a store or a transport that is closed already: peers find that out by themselves.
      if (!isEpError(error)) throw error;
      return false;
    } finally {
      late.abort();
      for (const peer of this.#channels.keys()) this.#tell(peer, { kind: 'bye' });
    }
  }

  /**
   * A peer that has opened the group is told, also if this rank has not come to connect to it; one that opens it later finds it in the store. Each side
   * writes before it reads there, so one of them sees the other. `late`: nobody waits for this any more, and channels are closed.
   */
  async #leaveStore(late: AbortSignal): Promise<void> {
    const { options, key } = this.#init;
    const { transport, ranks, rank, store } = options;
    await store.set(readyKey(key, rank), LEFT);
    for (const [peer, channel] of this.#channels.entries()) {
      if (channel === undefined || channel.connected || channel.lost) continue;
      if (!(await store.check([readyKey(key, peer)])) || late.aborted) continue;
      const endpoint = await transport.connect(ranks[peer]!);
      if (!late.aborted) channel.connect(endpoint);
    }
  }

  #planOf(data: PlannedCall): DataPlan {
    const { placement, host } = this.#init;
    if (host !== undefined && goesInTwoLevels(data, host)) return new TwoLevelPlan(data, host);
    return new Plan({ ...data, order: orderOf(placement, data.contributors) });
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
        onLost: (error) => this.#lose(peer, error.message),
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
        const state = await store.get(readyKey(key, peer), { signal, timeoutMs: Number.POSITIVE_INFINITY });
        if (state.byteLength === LEFT.byteLength) this.#lose(peer, LEFT_DETAIL);
        else channel.connect(endpoint);
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
        this.#lose(from, LEFT_DETAIL);
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
