/** The engine of one group on one rank: its channels, and what is told over them. */
import { setImmediate, setTimeout } from 'node:timers/promises';
import {
  createStorage,
  type DType,
  EpError,
  isEpError,
  linkSignals,
  loopIsDue,
  Resource,
  type Storage,
} from '@ep/core';
import type { Freight } from '../device/freight.js';
import type {
  Data,
  Elastic,
  EngineCall,
  EngineEnd,
  GroupEngine,
  GroupView,
  MembershipCall,
  MembershipEnd,
  PeerState,
  RecvCall,
  RecvEnd,
  SendCall,
} from '../engine.js';
import { forget } from './admission.js';
import type { Arena } from './arena.js';
import type { ChannelInit } from './channel.js';
import { Collectives } from './collectives.js';
import { farewell, type PlannedCall } from './collectives-init.js';
import { Comers, type JoinLimits } from './comers.js';
import { evictedKey, lifeOf, takeOut } from './evictions.js';
import { orderOf } from './fold-order.js';
import { forgetRounds } from './group-rounds.js';
import type { HostLevel } from './host-level.js';
import { Links } from './links.js';
import { LEFT, LEFT_DETAIL, membersOf, readyKey, sectionKey } from './meeting.js';
import { type Commit, Membership } from './membership.js';
import { Messages } from './messages.js';
import { type PortableEngineOptions, WHERE } from './options.js';
import type { Placement } from './placement.js';
import { type DataPlan, Plan } from './plan.js';
import { Pulse } from './pulse.js';
import { type ControlRecord, decodeRecord, describeError, encodeRecord, parseSet, RecordSource } from './records.js';
import type { Section } from './sections.js';
import { Stragglers } from './stragglers.js';
import { Traces } from './traces.js';
import { goesInTwoLevels, TwoLevelPlan } from './two-levels.js';
import { ViewRounds } from './view-rounds.js';

/** A member that reads nothing any more delays close() at most this long, and so does a store that does not answer: it may be on a host that was lost. */
const LONGEST_DRAIN_MS = 5000;
const OUT_DETAIL = 'the members go on without it';
const OUTSIDE_DETAIL = 'it takes no part yet';
const REPLACED_DETAIL = 'it is gone, and another process comes in its place';

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
  readonly elastic: Elastic;
  readonly #init: EngineInit;
  readonly #membership: Membership;
  readonly #stragglers: Stragglers;
  readonly #collectives: Collectives;
  readonly #messages: Messages;
  readonly #traces = new Traces();
  readonly #links: Links;
  readonly #pulse = new Pulse({
    look: () => this.#links.look(),
    hold: () => this.#links.hold(),
    onError: (error) => this.#break(error),
  });
  readonly #comers: Comers;
  readonly #rounds: ViewRounds;
  /** The last record that was told: what all are told is written once. */
  #told: { readonly record: ControlRecord; readonly bytes: Uint8Array } | undefined;
  #size: number;
  #broken = false;
  #stopListening: (() => void) | undefined;
  /** This rank is no member any more, but its transport works. */
  #out: EpError<'EP_EVICTED'> | undefined;
  /**
   * HAZARD: engines of hosts are left as they are by calls that were cut, and ranks that come back have made other calls of them: so none goes in two levels after a repair or an
   * admission, which all ranks know of alike.
   */
  #oneLevel = false;

  constructor(init: EngineInit) {
    const { transport, ranks, rank, name, joins = false } = init.options;
    const { size = ranks.length } = init.options;
    const active = membersOf(init.options);
    super(`${WHERE} ${name}`);
    this.#init = init;
    this.name = transport.name;
    this.rank = rank;
    // One that comes later may be beyond those of the beginning.
    this.#size = Math.max(size, rank + 1);
    this.#oneLevel = active.length < ranks.length;
    const tell = (peer: number, record: ControlRecord): void => this.#tell(peer, record);
    this.#membership = new Membership({
      rank,
      size: ranks.length,
      active: joins ? [rank] : active,
      tell: (peer, record) => {
        this.#collectives.relay(peer, parseSet(record.dead));
        tell(peer, record);
      },
      completed: () => this.#collectives.completed,
      onAwaited: () => this.#collectives.onAwaited(),
      onCommit: (commit) => this.#onCommit(commit),
      onRepair: (from, completed) => this.#collectives.onRepair(from, completed),
      onExpelled: (by) => void this.#goOut(`rank ${by} goes on without it`),
    });
    const sizeNow = (): number => this.#size;
    this.#rounds = new ViewRounds({ ...init, membership: this.#membership, size: sizeNow });
    this.#stragglers = new Stragglers({
      tell,
      waits: () => this.#collectives.busy,
      look: () => this.#pulse.look(),
    });
    this.#collectives = new Collectives({
      rank,
      membership: this.#membership,
      size: sizeNow,
      traces: this.#traces,
      tell,
      planOf: (data, longest) => this.#planOf(data, longest),
      orderOf: (contributors) => orderOf(init.placement, contributors),
      rounds: this.#rounds.current,
      reaches: (peer) => this.#links.at(peer)!.connected || this.#membership.isGone(peer),
      send: (peer, source) => this.#links.at(peer)!.send('collective', source),
      kick: () => this.#links.each((channel) => channel.kick('collective')),
      look: () => this.#pulse.look(),
      lookLately: () => this.#pulse.lookLately(),
      drain: () => this.#links.each((channel) => channel.drain('collective')),
      evict: (peers) => this.#evict(peers),
      leave: () => void this.#goOut('it called deactivate() with itself'),
      ...(init.options.evicts === true && {
        findLate: (awaited: readonly number[], idleToo: boolean) => this.#stragglers.among(awaited, idleToo),
      }),
    });
    this.elastic = {
      capacity: ranks.length,
      refresh: (limits) => this.#comers.refresh(limits),
      change: (call) => this.#change(call),
      join: (limits) => this.#join(limits),
    };
    this.#messages = new Messages({
      rank,
      size: ranks.length,
      traces: this.#traces,
      isGone: (peer) => this.#membership.isGone(peer),
      tell,
      send: (peer, stream) => this.#links.at(peer)!.send('message', stream),
    });
    this.#links = new Links({
      ...init,
      readersOf: (peer) => this.#readersOf(peer),
      onEvent: () => this.#pulse.look(),
      quiet: () => this.#pulse.quiet(),
      onLost: (peer, why) => this.#lose(peer, why),
      onConnected: () => this.#collectives.onReach(),
      onBroken: (peer, error) => {
        // Of a member that was taken out alive, and has closed since.
        if (this.#membership.isGone(peer)) this.#links.at(peer)!.lose();
        else this.#break(error);
      },
    });
    this.#comers = new Comers({
      ...init,
      links: this.#links,
      membership: this.#membership,
      onGivenUp: (peer) => this.#agree(() => this.#membership.lose(peer)),
      size: sizeNow,
      onEnter: (sequence, size) => {
        this.#size = size;
        this.#oneLevel = true;
        this.#rounds.renew();
        this.#out = undefined;
        this.#collectives.reopen(sequence);
        this.#messages.reopen();
      },
    });
    init.arena.users++;
  }

  get size(): number {
    return this.#size;
  }

  /** Follows all peers from now on, and begins to connect. Nobody waits for it. */
  begin(): void {
    this.#links.stopped.addEventListener('abort', () => this.#cutOff(this.#closedError()), { once: true });
    this.closing.addEventListener('abort', () => this.#cutOff(this.#closedError()), { once: true });
    const { transport, ranks } = this.#init.options;
    // HAZARD: from then on nothing tells any more that the one before has died.
    this.#stopListening = transport.succession?.onReplace((replaced) => {
      for (const [peer, member] of ranks.entries()) if (replaced.includes(member)) this.#lose(peer, REPLACED_DETAIL);
    });
    for (const peer of ranks.keys()) {
      this.#links.follow(peer);
      if (this.#membership.isGone(peer)) this.#links.explain(peer, OUTSIDE_DETAIL);
      else this.#links.connect(peer, readyKey(this.#init.key, peer));
    }
    this.#rounds.begin();
  }

  readonly run = (call: EngineCall): EngineEnd | Promise<EngineEnd> => {
    this.checkOpen(call.kind);
    const end = this.#collectives.run(call);
    // Calls that end inline would keep from this thread what is told by events: deaths, aborts, timers.
    return end instanceof Promise || !loopIsDue() ? end : setImmediate(end);
  };

  readonly send = async (call: SendCall<Data>): Promise<void> => {
    this.checkOpen('send');
    await this.#messages.send(call);
  };

  readonly recv = async (call: RecvCall<Data>): Promise<RecvEnd> => {
    this.checkOpen('recv');
    return this.#messages.recv(call);
  };

  /** From now on messages are also of tensors on its GPU; it is closed after this engine. */
  carry(freight: Freight): void {
    this.#messages.carry(freight);
  }

  readonly view = (): GroupView => {
    const { changes, active } = this.#membership;
    return { epoch: changes, active: this.#out === undefined ? active : active.filter((one) => one !== this.rank) };
  };

  readonly allocate = <D extends DType>(dtype: D, length: number): Storage[D] => {
    this.checkOpen('allocate');
    return createStorage(dtype, length);
  };

  readonly trace = () => this.#traces.snapshot();

  readonly connections: GroupEngine['connections'] = () =>
    this.#links.all.slice(0, this.#size).map((channel, rank) => {
      if (channel === undefined) return { rank, state: 'self' };
      const state = this.#membership.isGone(rank) ? 'lost' : channel.connected ? 'connected' : 'connecting';
      const detail = this.#links.detail(rank);
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
      this.#links.all.map((_, peer) =>
        this.#links
          .land(peer, () => waits(peer), left)
          .then(
            () => true,
            () => false,
          ),
      ),
    );
    await this.#links.stop();
    this.#stopListening?.();
    await inTime(this.#comers.idle(), longestMs);
    await this.#init.host?.close();
    await inTime(this.#rounds.close(), longestMs);
    arena.users--;
    if (this.#broken || !storeAnswers) return;
    try {
      await inTime(this.#giveBack(landed), longestMs);
    } catch (error) {
      // Without a store the section stays taken, which harms nobody who could still ask.
      if (!isEpError(error)) throw error;
    }
  }

  /** `landed`, by rank: whether all has that was put there. */
  async #giveBack(landed: readonly boolean[]): Promise<void> {
    const { arena, section, options, key } = this.#init;
    const { ranks } = options;
    const others = [...ranks.keys()].filter((peer) => peer !== this.rank);
    await this.#rounds.giveBack(landed);
    // Also of those whose end this rank has not come across: nobody asks it any more.
    const cutOff = await arena.sections.cutOffFrom(section, others);
    // HAZARD: a member whose puts may still land must not come further: the section would be taken for free.
    if (others.some((peer) => !landed[peer] && !cutOff.includes(peer))) return;
    const knows = others.some((peer) => this.#membership.isGone(peer));
    if (!(await arena.sections.giveBack(section, this.rank, cutOff, knows))) return;
    for (const rank of ranks.keys()) {
      await options.store.delete(readyKey(key, rank));
      await forget(options.store, key, rank);
      if (arena.rounds !== undefined) await forgetRounds(options.store, key, rank);
    }
    await options.store.delete(evictedKey(key));
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
      this.#sayBye();
    }
  }

  /** HAZARD: a peer that was told of a call in a round alone may lack it still, and hears of it from nobody else once this rank is gone. */
  #sayBye(): void {
    for (const peer of this.#links.all.keys()) {
      for (const { record } of this.#rounds.current()?.owed(peer) ?? []) this.#tell(peer, record);
      this.#tell(peer, { kind: 'bye', completed: this.#collectives.completed });
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
    for (const [peer, channel] of this.#links.all.entries()) {
      if (channel === undefined || channel.connected || channel.lost || this.#membership.isGone(peer)) continue;
      if (!(await store.check([readyKey(key, peer)])) || late.aborted) continue;
      const endpoint = await transport.connect(ranks[peer]!);
      if (!late.aborted) channel.connect(endpoint);
    }
  }

  #planOf(data: PlannedCall, longest: number | undefined): DataPlan {
    const { placement, host } = this.#init;
    if (longest !== undefined) return this.#rounds.current()!.planOf(data, longest);
    if (host !== undefined && !this.#oneLevel && goesInTwoLevels(data, host)) return new TwoLevelPlan(data, host);
    return new Plan({ ...data, order: orderOf(placement, data.contributors) });
  }

  /** HAZARD: what a rank that is being admitted says may come before this rank knows that it is: that must wait, where what others say who are no members is dropped. */
  #readersOf(peer: number): ChannelInit['readers'] {
    return {
      control: (slot, release) => {
        if (this.#comers.expects(peer)) return false;
        const record = decodeRecord(slot);
        // First, so that the answer can take it along.
        release();
        this.#receive(peer, record);
        return true;
      },
      collective: (slot, release) => {
        if (this.#comers.expects(peer)) return false;
        if (!this.#membership.isGone(peer)) return this.#collectives.onChunk(peer, slot, release);
        release();
        return true;
      },
      message: (slot, release) => !this.#comers.expects(peer) && this.#messages.onChunk(peer, slot, release),
    };
  }

  #tell(peer: number, record: ControlRecord): void {
    const channel = this.#links.at(peer);
    if (channel === undefined || this.#membership.isGone(peer)) return;
    if (this.#told?.record !== record) this.#told = { record, bytes: encodeRecord(record) };
    channel.send('control', new RecordSource(this.#told.bytes));
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
      case 'evicted':
        this.#goOut(`rank ${from} goes on without it`, record.completed);
        break;
      case 'ask':
        this.#stragglers.onAsk(from, record);
        break;
      case 'here':
        this.#stragglers.onHere(from, record);
        break;
      case 'bye':
        this.#lose(from, LEFT_DETAIL, record.completed);
        break;
      case 'offer':
        this.#messages.onOffer(from, record);
        break;
      case 'grant':
        this.#messages.onGrant(from, record.id);
        break;
      case 'piece':
        this.#messages.onPiece(from, record);
        break;
      case 'taken':
        this.#messages.onTaken(from, record.at);
        break;
      case 'cancel':
        this.#messages.onCancel(from, record);
        break;
      case 'refuse':
        this.#messages.onRefuse(from, record);
        break;
    }
  }

  /** It died, or closed after the call `completed`: nothing goes there any more. */
  #lose(peer: number, why: string, completed = 0): void {
    this.#links.at(peer)?.lose();
    this.#links.explain(peer, why);
    if (this.#membership.isGone(peer)) return;
    this.#agree(() => this.#collectives.onGone(peer, completed));
  }

  /**
   * What is known of members that are gone ends messages here as well, whoever has found it. HAZARD: those that are not lost to this rank may be alive, and wait for its word. What
   * they had put is still taken out of the slots, unread: their engines close only when their last words have gone.
   */
  #agree(learn: () => void): void {
    const gone = this.#links.all.map((_, peer) => this.#membership.isGone(peer));
    const before = this.#collectives.last;
    learn();
    const { last } = this.#collectives;
    for (const [peer, channel] of this.#links.all.entries()) {
      if (channel === undefined || gone[peer] || !this.#membership.isGone(peer)) continue;
      if (!channel.lost) {
        this.#links.explain(peer, OUT_DETAIL);
        // HAZARD: what was learnt may have completed one more call with it, and forfeited others, and those who are left may have completed the next without it.
        for (const record of farewell(peer, last, before)) {
          channel.send('control', new RecordSource(encodeRecord(record)));
        }
      }
      this.#messages.onLost(peer);
      this.#collectives.onLost(peer);
    }
  }

  async #evict(peers: readonly number[]): Promise<void> {
    const { options, key } = this.#init;
    const nameOf = (rank: number): string => lifeOf(rank, this.#comers.lifeOf(rank));
    if (!(await takeOut(options.store, evictedKey(key), peers.map(nameOf), nameOf(this.rank)))) {
      throw this.#goOut('the members had taken it out before');
    }
    this.#agree(() => {
      for (const peer of peers) this.#membership.lose(peer);
    });
  }

  /** `completed`: a call that all have completed who were members then. */
  #goOut(why: string, completed = 0): EpError {
    if (this.#out !== undefined) return this.#out;
    const { name } = this.#init.options;
    const out = new EpError('EP_EVICTED', `${WHERE} ${name}: rank ${this.rank} is out of the group: ${why}`, {
      context: { rank: this.rank },
    });
    this.#out = out;
    this.#collectives.end(completed, out);
    this.#rounds.leave();
    this.#messages.fail(out);
    return out;
  }

  #onCommit(commit: Commit): void {
    this.#oneLevel ||= commit.repair !== undefined || commit.admitted !== undefined;
    if (commit.size !== undefined) this.#size = commit.size;
    // Before calls go on: theirs are those of the new view.
    this.#rounds.renew();
    if (commit.admitted !== undefined && commit.admitted.length > 0)
      this.#comers.welcome(commit.admitted, commit.completed);
    this.#collectives.onCommit(commit);
    for (const [rank] of commit.admitted ?? []) queueMicrotask(() => this.#meet(rank));
  }

  /** What a rank has said before this rank knew that it is a member; or that it died by then. */
  #meet(rank: number): void {
    const channel = this.#links.at(rank)!;
    if (channel.lost) this.#agree(() => this.#membership.lose(rank));
    else channel.drainAll();
  }

  async #change({ sequence, timeoutMs, signal, ...asked }: MembershipCall): Promise<MembershipEnd> {
    this.checkOpen('membership');
    const { found } = this.#comers;
    const end = await this.#collectives.run({
      kind: 'barrier',
      dtype: 'u8',
      root: -1,
      inputs: [],
      outputs: [],
      sequence,
      timeoutMs,
      signal,
      membership: { ...asked, found },
    });
    const { contributors } = end;
    const states = this.#init.options.ranks.map((_, rank): PeerState => {
      if (contributors.includes(rank)) return 'active';
      const attempt = end.found?.get(rank);
      return attempt === undefined ? 'absent' : attempt > 0 ? 'joining' : 'connected';
    });
    const admitted = asked.admitted.every((rank) => states[rank] === 'active' || states[rank] === 'joining');
    return { contributors, sequence: end.sequence ?? sequence, admitted, states };
  }

  async #join(limits: JoinLimits): Promise<number> {
    const linked = linkSignals(limits.signal, this.closing);
    try {
      return await this.#comers.join({ ...limits, signal: linked.signal });
    } finally {
      linked.unlink();
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
    this.#sayBye();
    this.#links.each((channel) => channel.lose());
  }

  #cutOff(error: unknown): void {
    this.#collectives.fail(error);
    this.#messages.fail(error);
  }

  #closedError(): EpError {
    return new EpError('EP_ABORTED', `${WHERE} ${this.#init.options.name} was closed`);
  }
}
