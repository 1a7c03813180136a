/** Collectives on tensors of a GPU: kernels of all ranks that put into each other's staging memory and wait for counted signals (native: ep/device/group_call.h). */
import { checkInteger, EpError, exchange, formatRanks, isEpError, linkSignals, Resource, type Store } from '@ep/core';
import {
  codeOfStatus,
  EP_GROUP_EXCHANGE,
  EP_GROUP_FOLD,
  EP_GROUP_FOLD_ALL,
  EP_GROUP_MOST_BLOCKS,
  EP_GROUP_MOST_RANKS,
  EP_STAGE_ARRIVAL,
  EP_STAGE_RANGE,
  type GpuGroupCall,
  type GpuQueue,
  groupHeadLayout,
  type NativeGpuGroup,
  type NativeGpuOperand,
  native,
  type Outcome,
} from '@ep/native';
import { DeviceMemory } from '@ep/native/ranks';
import type { GroupTransport } from '../backends.js';
import type { DeviceCall, EngineEnd, GroupEngine } from '../engine.js';
import type { DeviceOptions } from '../options.js';
import type { PortableEngine } from '../portable/group.js';
import { describeCall, differentCalls } from '../portable/signature.js';
import { factorOf, reductionCode, TYPE_CODES } from '../shm/codes.js';
import type { DeviceElements } from './elements.js';
import { Freight } from './freight.js';
import { ringBytesOf } from './ring.js';
import { describeSignature, signatureOf } from './signature.js';

const WHERE = 'initProcessGroup: device';
const DEFAULT_STAGING_BYTES = 32 * 2 ** 20;
const DEFAULT_LANES = 512;

interface DeviceInit extends DeviceOptions {
  readonly transport: GroupTransport;
  readonly store: Store;
  readonly timeoutMs: number;
  readonly signal: AbortSignal | undefined;
}

/** A transport that can say which of its ranks have died, as `nvshmem.cuda` can. */
interface KnowsLost {
  readonly lostRanks: () => readonly number[];
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
  readonly memory: DeviceMemory;
  readonly group: NativeGpuGroup;
  readonly rings: DeviceMemory;
  /** Of `memory`: [2 banks][blocks][sources] of them. */
  readonly slotBytes: number;
}

class DeviceGroupEngine extends Resource implements GroupEngine {
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
  readonly #transport: GroupTransport;
  readonly #memory: DeviceMemory;
  readonly #native: NativeGpuGroup;
  /** That messages travel through. */
  readonly #rings: DeviceMemory;
  readonly #stream: GpuQueue;
  readonly #slotBytes: number; // of the staging memory: [2 banks][blocks][sources] of them
  readonly #contributors: EngineEnd;
  readonly #freight: Freight;
  readonly #pending = new Set<Promise<unknown>>();
  /** Of the calls under way: each its own, since a signal that all of them shared would warn of so many listeners. */
  readonly #cuts = new Set<AbortController>();
  /** Of calls on the device: a refused one is none. */
  #sequence = 0;
  #failed: { readonly reason: unknown } | undefined;

  constructor(host: PortableEngine, init: DeviceInit, { memory, group, rings, slotBytes }: Places) {
    super(`group on GPU ${memory.device}`);
    this.#host = host;
    this.#transport = init.transport;
    this.#memory = memory;
    this.#native = group;
    this.#rings = rings;
    const ringBytes = ringBytesOf(rings.byteLength, host.size);
    this.#freight = new Freight({
      memory: rings,
      byteOffset: 0,
      ringBytes,
      rank: host.rank,
      size: host.size,
      queue: init.stream,
    });
    host.carry(this.#freight);
    this.#stream = init.stream;
    this.#slotBytes = slotBytes;
    this.name = host.name;
    this.rank = host.rank;
    this.size = host.size;
    this.#contributors = { contributors: Object.freeze(Array.from({ length: host.size }, (_, rank) => rank)) };
    this.run = host.run;
    this.device = { run: (call) => this.#run(call), send: host.send, recv: host.recv };
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

  async #run(given: DeviceCall): Promise<EngineEnd> {
    this.checkOpen(given.kind);
    const where = `call ${given.sequence}: ${given.kind}`;
    if (this.#failed !== undefined) throw this.#poisoned(where);
    const call = { ...given, sequence: this.#sequence + 1 };
    const pieces = piecesOf(call, this.rank, this.size);
    const { signal, timeoutMs } = call;
    signal?.throwIfAborted();
    const description: GpuGroupCall = {
      mode: pieces.mode,
      element: TYPE_CODES[call.dtype],
      fold: reductionCode(call.reduceOp),
      factor: factorOf(call.reduceOp),
      signature: signatureOf(call),
      even: call.kind !== 'all-to-all',
      longest: (call.inputs[0] ?? call.outputs[0])?.byteLength ?? 0,
      timeoutMs: Number.isFinite(timeoutMs) ? timeoutMs : -1,
    };
    let launched = false;
    const cut = new AbortController();
    const linked = linkSignals(signal, cut.signal);
    const running = this.#stream.follow((stream) => {
      const operation = stream.groupCall(this.#native, description, ...flattened(pieces));
      launched = true;
      this.#sequence++;
      return operation;
    }, linked.signal);
    this.#cuts.add(cut);
    const ending = this.#end(call, where, running);
    this.#pending.add(ending);
    try {
      return await ending;
    } catch (error) {
      if (launched || !isEpError(error) || (error.code !== 'EP_INVALID_ARGUMENT' && error.code !== 'EP_CLOSED')) {
        this.#failed ??= { reason: error };
      }
      throw error;
    } finally {
      this.#pending.delete(ending);
      this.#cuts.delete(cut);
      linked.unlink();
    }
  }

  async #end(call: DeviceCall, where: string, running: Promise<Outcome>): Promise<EngineEnd> {
    const outcome = await running;
    if (outcome.status === 0) return this.#contributors;
    throw await this.#errorOf(call, where, outcome);
  }

  #poisoned(where: string): EpError {
    return new EpError(
      'EP_POISONED',
      `${where}: an earlier call on the device failed, and ranks no longer agree where they are: open another group`,
      { cause: this.#failed?.reason },
    );
  }

  async #errorOf(call: DeviceCall, where: string, outcome: Outcome): Promise<EpError> {
    const code = codeOfStatus(outcome.status);
    const { sequence, kind, timeoutMs } = call;
    const context = { sequence, kind };
    // Peers hear of a failure before they hear of the death that was its reason.
    const lost = (this.#transport as Partial<KnowsLost>).lostRanks?.() ?? [];
    if (lost.length > 0 && code !== 'EP_MISMATCH' && code !== 'EP_SYSTEM') {
      return new EpError('EP_PEER_LOST', `${where}: ${formatRanks([...lost])} died or closed the transport`, {
        context: { ...context, lost: [...lost] },
      });
    }
    const ranks = Array.from({ length: this.size }, (_, rank) => rank);
    const missing = ranks.filter((rank) => ((outcome.found >> BigInt(rank)) & 1n) === 1n);
    switch (code) {
      case 'EP_TIMEOUT': {
        const awaited = missing.length > 0 ? missing : [outcome.rank];
        const arrived = ranks.filter((rank) => !awaited.includes(rank));
        return new EpError(
          code,
          `${where}: timed out after ${timeoutMs} ms; awaited ${formatRanks(awaited)}; ${formatRanks(arrived)} arrived`,
          { context: { ...context, arrived, awaited, timeoutMs } },
        );
      }
      case 'EP_PEER_LOST':
        return new EpError(code, `${where}: ${formatRanks([outcome.rank])} died or closed the transport`, {
          context: { ...context, lost: [outcome.rank] },
        });
      case 'EP_MISMATCH':
        return await this.#mismatch(call, outcome);
      case 'EP_ABORTED': {
        // Nobody but this rank: the call was queued behind one that failed here, whose own error says why.
        if (outcome.rank === this.rank) return this.#poisoned(where);
        const waited = missing.length > 0 ? `; awaited ${formatRanks(missing)}` : '';
        return new EpError(
          code,
          `${where}: ${formatRanks([outcome.rank])} gave up this call, or an earlier one${waited}`,
          { context: { ...context, ranks: [outcome.rank], awaited: missing } },
        );
      }
      default:
        return new EpError(code, `${where}: ${outcome.message ?? 'failed'}`, { context });
    }
  }

  async #mismatch(call: DeviceCall, { rank, stage, expected, found }: Outcome): Promise<EpError> {
    const { sequence, dtype } = call;
    if (stage === EP_STAGE_RANGE) {
      const given = `rank ${rank} gives ${found} bytes to rank ${this.rank}`;
      const taken = `rank ${this.rank} takes ${expected}`;
      return new EpError('EP_MISMATCH', `call ${sequence}: ${call.kind} ${dtype}: ${given}, but ${taken}`, {
        context: { ranks: [rank, this.rank].sort((a, b) => a - b), sequence, expected: given, found: taken },
      });
    }
    if (stage !== EP_STAGE_ARRIVAL) {
      return new EpError(
        'EP_MISMATCH',
        `call ${sequence}: ${formatRanks([rank])} made another call, or an earlier one, as others found`,
        {
          context: { ranks: [rank], sequence, expected: describeCall(call), found: 'another call' },
        },
      );
    }
    // What all have said of the call lies where their first messages do.
    const own = signatureOf(call);
    const texts = new Map<number, string>([[this.rank, describeSignature(own, own)]]);
    const head = new Uint8Array(groupHeadLayout.byteLength);
    for (let source = 0; source < this.size; source++) {
      if (source === this.rank) continue;
      const at = Number(found) + source * this.#slotBytes;
      await this.#memory.read(this.#memory.local(at, head.byteLength), head);
      texts.set(source, describeSignature(new DataView(head.buffer).getBigUint64(0, true), own));
    }
    const named = differentCalls(sequence, texts);
    if (named !== undefined) return named;
    return new EpError('EP_MISMATCH', `call ${sequence}: rank ${rank} made another call`, {
      context: { ranks: [rank], sequence, expected: texts.get(this.rank), found: 'another call' },
    });
  }

  protected override async release(): Promise<void> {
    await Promise.allSettled(this.#pending);
    try {
      await this.#host.close();
    } finally {
      await this.#freight.close();
      this.#native.release();
      await this.#rings.close();
      await this.#memory.close();
    }
  }
}

async function allocate(
  transport: GroupTransport,
  size: Omit<Parameters<GroupTransport['allocate']>[0], 'space'>,
): Promise<DeviceMemory> {
  const made = await transport.allocate({ ...size, space: 'device' });
  if (made instanceof DeviceMemory) return made;
  await made.close();
  throw new EpError('EP_UNSUPPORTED', `${WHERE}: the device memory of ${transport.name} is not in native hands`);
}

/**
 * Collective over the world of the transport. `EP_UNSUPPORTED` where it has no device memory, `EP_MISMATCH` naming ranks with other options, `EP_INVALID_ARGUMENT` when the
 * kernels of the ranks on this GPU could not all run at once.
 */
export async function openDeviceEngine(host: PortableEngine, init: DeviceInit): Promise<GroupEngine> {
  const { transport, store, stream, timeoutMs, signal } = init;
  let memory: DeviceMemory | undefined;
  let rings: DeviceMemory | undefined;
  let group: NativeGpuGroup | undefined;
  try {
    const lanes = checkInteger(init.lanes ?? DEFAULT_LANES, 'lanes', WHERE, 32, DEFAULT_LANES);
    const blocks = checkInteger(init.blocks ?? 0, 'blocks', WHERE, 0, EP_GROUP_MOST_BLOCKS);
    const stagingBytes = checkInteger(init.stagingBytes ?? DEFAULT_STAGING_BYTES, 'stagingBytes', WHERE, 1);
    if (!transport.capabilities.spaces?.has('device') || host.size > EP_GROUP_MOST_RANKS) {
      const why =
        host.size > EP_GROUP_MOST_RANKS
          ? `takes at most ${EP_GROUP_MOST_RANKS} ranks`
          : 'needs a transport with device memory';
      throw new EpError('EP_UNSUPPORTED', `${WHERE}: ${why}, and this is ${transport.name} of ${host.size} ranks`, {
        context: { option: 'device' },
      });
    }
    const limits = { timeoutMs, ...(signal && { signal }) };
    const signalSlots = EP_GROUP_MOST_BLOCKS * host.size;
    const ringsBytes = ringBytesOf(Math.ceil(stagingBytes / 4), host.size) * host.size;
    memory = await allocate(transport, { byteLength: stagingBytes, signalSlots, ...limits });
    rings = await allocate(transport, { byteLength: ringsBytes, signalSlots: 1, ...limits });
    let refused: unknown;
    try {
      if (stream?.device?.index !== memory.device) {
        throw new EpError(
          'EP_INVALID_ARGUMENT',
          `${WHERE}: the stream is of GPU ${stream?.device?.index}, ${transport.name} was opened for GPU ${memory.device}`,
        );
      }
      group = new (native().binding.GpuGroup)({ memory: memory.nativeMemory(WHERE), blocks, lanes });
    } catch (error) {
      refused = error;
    }
    // All hear of one that cannot: nobody waits for it.
    const own = Buffer.from(
      JSON.stringify(group === undefined ? { why: String(refused) } : { blocks: group.shape().blocks, stagingBytes }),
    );
    const meeting = { key: 'device', rank: host.rank, worldSize: host.size, bytes: new Uint8Array(own) };
    const told = (await exchange(store, meeting, limits)).map(
      (bytes) => JSON.parse(Buffer.from(bytes).toString()) as { blocks?: number; stagingBytes?: number; why?: string },
    );
    if (group === undefined) throw refused;
    const odd = told.flatMap((one, rank) => (one.stagingBytes === stagingBytes ? [] : [rank]));
    if (odd.length > 0) {
      const found = odd.map((rank) => told[rank]!.why ?? `stagingBytes ${told[rank]!.stagingBytes}`).join('; ');
      throw new EpError(
        'EP_MISMATCH',
        `${WHERE}: ${formatRanks(odd)}: ${found}; here stagingBytes is ${stagingBytes}`,
        {
          context: { ranks: odd, expected: stagingBytes, found },
        },
      );
    }
    const common = Math.min(...told.map((one) => one.blocks!));
    return new DeviceGroupEngine(host, init, { memory, group, rings, slotBytes: group.layOut(common) });
  } catch (error) {
    group?.release();
    await rings?.close();
    await memory?.close();
    await host.close();
    throw error;
  }
}
