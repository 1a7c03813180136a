/** Collectives on tensors of a GPU: kernels of all ranks that put into each other's staging memory and wait for counted signals (native: ep/device/group_call.h). */
import { EpError, exchange, formatRanks, isEpError, linkSignals, Resource, type Store } from '@ep/core';
import {
  EP_GROUP_EXCHANGE,
  EP_GROUP_FOLD,
  EP_GROUP_FOLD_ALL,
  type GpuGroupCall,
  type GpuQueue,
  type GraphMember,
  type GraphReplay,
  type NativeGpuGroup,
  type NativeGpuGroupArena,
  type NativeGpuOperand,
  native,
  type Outcome,
} from '@ep/native';
import type { GroupTransport } from '../backends.js';
import type { DeviceCall, EngineEnd, GroupEngine } from '../engine.js';
import type { PortableEngine } from '../portable/group.js';
import { describeError } from '../portable/records.js';
import { factorOf, reductionCode, TYPE_CODES } from '../shm/codes.js';
import type { DeviceArena } from './arena.js';
import type { DeviceElements } from './elements.js';
import { CallFailures } from './failures.js';
import { Freight } from './freight.js';
import { ringBytesOf } from './ring.js';
import type { DeviceSection } from './sections.js';
import { signatureOf } from './signature.js';

/** A group that is about to have calls on the device. */
export interface DeviceInit {
  readonly transport: GroupTransport;
  /** Of this group. */
  readonly store: Store;
  /** World rank of each member. */
  readonly ranks: readonly number[];
  readonly name: string;
  readonly arena: DeviceArena;
  /** That its calls go on. */
  readonly queue: GpuQueue;
  /** The arena is this group's, and closed with it. */
  readonly owns: boolean;
  readonly timeoutMs: number;
  readonly signal: AbortSignal | undefined;
}

type Piece = DeviceElements | undefined;

/** What a kernel is told of a call: pieces by rank. */
interface Pieces {
  readonly mode: number;
  readonly out?: Piece;
  readonly sends: readonly Piece[];
  readonly takes: readonly Piece[];
}

/** Of the table at `EngineCall`. */
function piecesOf({ kind, root, inputs, outputs }: DeviceCall, rank: number, size: number): Pieces {
  const none: readonly Piece[] = Array<Piece>(size).fill(undefined);
  const only = (one: Piece): readonly Piece[] => none.map((_, at) => (at === root ? one : undefined));
  const all = (one: Piece): readonly Piece[] => none.map(() => one);
  const isRoot = rank === root;
  const [input, output] = [inputs[0], outputs[0]];
  switch (kind) {
    case 'barrier':
      return { mode: EP_GROUP_EXCHANGE, sends: none, takes: none };
    case 'broadcast':
      return {
        mode: EP_GROUP_EXCHANGE,
        sends: isRoot ? without(all(input), rank) : none,
        takes: isRoot ? none : only(output),
      };
    case 'all-gather':
      return { mode: EP_GROUP_EXCHANGE, sends: all(input), takes: outputs };
    case 'gather':
      return { mode: EP_GROUP_EXCHANGE, sends: only(input), takes: isRoot ? outputs : none };
    case 'scatter':
      return { mode: EP_GROUP_EXCHANGE, sends: isRoot ? inputs : none, takes: only(output) };
    case 'all-to-all':
      return { mode: EP_GROUP_EXCHANGE, sends: inputs, takes: outputs };
    case 'reduce':
      return { mode: EP_GROUP_FOLD, out: output, sends: only(input), takes: isRoot ? all(output) : none };
    case 'reduce-scatter':
      return { mode: EP_GROUP_FOLD, out: output, sends: inputs, takes: all(output) };
    case 'all-reduce':
      return { mode: EP_GROUP_FOLD_ALL, out: output, sends: without(none, 0, input), takes: none };
  }
}

const without = (list: readonly Piece[], at: number, instead?: Piece): readonly Piece[] =>
  list.map((one, i) => (i === at ? instead : one));

function flattened({ out, sends, takes }: Pieces): (NativeGpuOperand | number)[] {
  const flat: (NativeGpuOperand | number)[] = [];
  for (const one of [out, ...sends, ...takes]) {
    if (one === undefined || one.length === 0) flat.push(0, 0, 0);
    else flat.push(one.place.operand, one.place.byteOffset, one.byteLength);
  }
  return flat;
}

/** What a group has on its device. */
interface Places {
  readonly section: DeviceSection;
  readonly group: NativeGpuGroup;
  /** Of the section's slots: [2 banks][blocks][sources] of them. */
  readonly slotBytes: number;
}

class DeviceGroupEngine extends Resource implements GroupEngine, GraphMember {
  readonly name: string;
  readonly rank: number;
  readonly size: number;
  readonly device: NonNullable<GroupEngine['device']>;
  readonly run: GroupEngine['run'];
  readonly send: GroupEngine['send'];
  readonly recv: GroupEngine['recv'];
  readonly view: GroupEngine['view'];
  readonly allocate: GroupEngine['allocate'];
  readonly trace: GroupEngine['trace'];
  readonly connections: GroupEngine['connections'];
  readonly #host: GroupEngine;
  readonly #init: DeviceInit;
  readonly #section: DeviceSection;
  readonly #native: NativeGpuGroup;
  readonly #failures: CallFailures;
  readonly #contributors: EngineEnd;
  readonly #freight: Freight;
  readonly #pending = new Set<Promise<unknown>>();
  /** Of the calls under way: each its own, since a signal that all of them shared would warn of so many listeners. */
  readonly #cuts = new Set<AbortController>();
  /** Of calls that were launched: a refused one is none, and nobody counts replays. */
  #sequence = 0;

  constructor(host: PortableEngine, init: DeviceInit, { section, group, slotBytes }: Places) {
    const { arena, ranks, transport, queue } = init;
    const { memory, copies } = arena;
    super(`group on GPU ${memory.device}`);
    this.#host = host;
    this.#init = init;
    this.#section = section;
    this.#native = group;
    const byteOffset = arena.byteOffset(section.index);
    this.#failures = new CallFailures({ rank: host.rank, ranks, transport, memory, byteOffset, slotBytes });
    this.#freight = new Freight({
      memory,
      byteOffset: arena.ringsOffset(section.index),
      ringBytes: ringBytesOf(arena.ringsBytes, host.size),
      rank: host.rank,
      ranks,
      queue,
      copies,
    });
    host.carry(this.#freight);
    this.name = host.name;
    this.rank = host.rank;
    this.size = host.size;
    this.#contributors = { contributors: Object.freeze(Array.from({ length: host.size }, (_, rank) => rank)) };
    this.run = host.run;
    this.device = {
      run: (call) => (queue.capturing ? this.#capture(call) : this.#run(call)),
      send: (call) => this.#message('send', () => host.send(call)),
      recv: (call) => this.#message('recv', () => host.recv(call)),
      capturing: () => queue.capturing,
    };
    this.send = host.send;
    this.recv = host.recv;
    this.view = host.view;
    this.allocate = host.allocate;
    this.trace = host.trace;
    this.connections = host.connections;
    const cutAll = (): void => {
      for (const cut of this.#cuts) cut.abort(new EpError('EP_ABORTED', 'the group was closed'));
    };
    this.closing.addEventListener('abort', cutAll, { once: true });
  }

  /** HAZARD: until the device is through with it, nobody may take the section. */
  beginReplay(operation: string): GraphReplay {
    this.checkOpen(operation);
    this.#failures.check(operation);
    const cut = new AbortController();
    let over = (): void => {};
    const running = new Promise<void>((resolve) => {
      over = resolve;
    });
    this.#cuts.add(cut);
    this.#pending.add(running);
    return {
      cuts: [cut.signal],
      end: (failure) => {
        if (failure !== undefined) this.#failures.poison(failure.reason);
        this.#cuts.delete(cut);
        this.#pending.delete(running);
        over();
      },
    };
  }

  /** The call becomes a part of the graph; when a replay of it gives up, and why it has failed, whoever launches it is told. */
  #capture(given: DeviceCall): EngineEnd {
    this.checkOpen(given.kind);
    this.#failures.check(given.kind);
    const { queue } = this.#init;
    const { description, pieces } = this.#described(given);
    queue.nativeStream(given.kind).groupCall(this.#native, description, ...pieces);
    queue.join(this);
    return this.#contributors;
  }

  #described(call: DeviceCall): {
    readonly description: GpuGroupCall;
    readonly pieces: readonly (NativeGpuOperand | number)[];
  } {
    const pieces = piecesOf(call, this.rank, this.size);
    const { timeoutMs } = call;
    const description = {
      mode: pieces.mode,
      element: TYPE_CODES[call.dtype],
      fold: reductionCode(call.reduceOp),
      factor: factorOf(call.reduceOp),
      signature: signatureOf(call),
      even: call.kind !== 'all-to-all',
      longest: (call.inputs[0] ?? call.outputs[0])?.byteLength ?? 0,
      timeoutMs: Number.isFinite(timeoutMs) ? timeoutMs : -1,
    };
    return { description, pieces: flattened(pieces) };
  }

  async #run(given: DeviceCall): Promise<EngineEnd> {
    this.checkOpen(given.kind);
    this.#failures.check(`call ${given.sequence}: ${given.kind}`);
    const call = { ...given, sequence: this.#sequence + 1 };
    const { description, pieces } = this.#described(call);
    call.signal?.throwIfAborted();
    let launched = false;
    const cut = new AbortController();
    const linked = linkSignals(call.signal, cut.signal);
    const running = this.#init.queue.follow((stream) => {
      const operation = stream.groupCall(this.#native, description, ...pieces);
      launched = true;
      this.#sequence++;
      return operation;
    }, linked.signal);
    this.#cuts.add(cut);
    const ending = this.#end(call, running);
    this.#pending.add(ending);
    try {
      return await ending;
    } catch (error) {
      if (launched || !isEpError(error) || (error.code !== 'EP_INVALID_ARGUMENT' && error.code !== 'EP_CLOSED')) {
        this.#failures.poison(error);
      }
      throw error;
    } finally {
      this.#pending.delete(ending);
      this.#cuts.delete(cut);
      linked.unlink();
    }
  }

  async #end(call: DeviceCall, running: Promise<Outcome>): Promise<EngineEnd> {
    const outcome = await running;
    if (outcome.status === 0) return this.#contributors;
    throw await this.#failures.errorOf(call, outcome);
  }

  async #message<T>(op: string, post: () => Promise<T>): Promise<T> {
    if (!this.#init.queue.capturing) return post();
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `${op}: the stream is being captured, and messages, which ranks agree on as they go, cannot be part of a graph`,
    );
  }

  protected override async release(): Promise<void> {
    await Promise.allSettled(this.#pending);
    const { arena, owns, queue } = this.#init;
    try {
      await this.#host.close();
    } finally {
      await this.#freight.close();
      this.#native.release();
      arena.leave(queue);
      if (owns) await arena.close();
      else await giveBack(arena, this.#section, this.size);
    }
  }
}

/** HAZARD: after everything of this rank that goes to the section has ended. */
async function giveBack(arena: DeviceArena, section: DeviceSection, size: number): Promise<void> {
  try {
    await arena.sections.giveBack(section, size);
  } catch (error) {
    // Without a store the section stays taken, which harms nobody who could still ask.
    if (!isEpError(error)) throw error;
  }
}

const SECTION = 'device/section';
const bytesOf = (value: unknown): Uint8Array => new Uint8Array(Buffer.from(JSON.stringify(value)));
const parsed = (bytes: Uint8Array): unknown => JSON.parse(Buffer.from(bytes).toString());

/** Rank 0 of the group finds a section and tells the others, or why there is none. */
async function agreeOnSection(host: PortableEngine, init: DeviceInit): Promise<DeviceSection> {
  const { arena, store, name, ranks, timeoutMs, signal } = init;
  if (host.rank === 0) {
    try {
      const section = await arena.sections.take(name, ranks);
      await store.set(SECTION, bytesOf(section));
      return section;
    } catch (error) {
      await store.set(SECTION, bytesOf(describeError(error)));
      throw error;
    }
  }
  const told = parsed(await store.get(SECTION, { timeoutMs, ...(signal && { signal }) })) as
    | DeviceSection
    | ReturnType<typeof describeError>;
  if ('index' in told) return told;
  throw new EpError(told.code === 'EP_CAPACITY' ? told.code : 'EP_RENDEZVOUS', told.text, { context: told.context });
}

/** Collective over the members of a group. `EP_CAPACITY` where they have no section of device memory in common. Closes `host` where it fails. */
export async function openDeviceEngine(host: PortableEngine, init: DeviceInit): Promise<GroupEngine> {
  const { arena, store, ranks, owns, queue, timeoutMs, signal } = init;
  let group: NativeGpuGroup | undefined;
  let entered: NativeGpuGroupArena | undefined;
  try {
    const section = await agreeOnSection(host, init);
    let refused: unknown;
    try {
      entered = arena.enter(queue);
      group = new (native().binding.GpuGroup)({
        arena: entered,
        section: section.index,
        byteOffset: arena.byteOffset(section.index),
        byteLength: arena.stagingBytes,
        ranks: Int32Array.from(ranks),
      });
    } catch (error) {
      refused = error;
    }
    // HAZARD: before it ends nobody writes to a member's words, which may not be zero yet. And all hear of one that cannot.
    const own = group === undefined ? { why: String(refused) } : { blocks: entered!.shape().blocks };
    const meeting = { key: 'device/group', rank: host.rank, worldSize: host.size, bytes: bytesOf(own) };
    const told = (await exchange(store, meeting, { timeoutMs, ...(signal && { signal }) })).map(
      (bytes) => parsed(bytes) as { readonly blocks?: number; readonly why?: string },
    );
    const odd = told.flatMap(({ why }, rank) => (why === undefined ? [] : [rank]));
    if (odd.length > 0) {
      if (!owns) await giveBack(arena, section, host.size);
      if (refused !== undefined) throw refused;
      const found = odd.map((rank) => told[rank]!.why).join('; ');
      throw new EpError('EP_MISMATCH', `group ${init.name}: ${formatRanks(odd)}: ${found}`, {
        context: { ranks: odd, expected: 'a group on the device', found },
      });
    }
    const common = Math.min(...told.map(({ blocks }) => blocks!));
    return new DeviceGroupEngine(host, init, { section, group: group!, slotBytes: group!.layOut(common) });
  } catch (error) {
    group?.release();
    if (entered !== undefined) arena.leave(queue);
    await host.close();
    if (owns) await arena.close();
    throw error;
  }
}
