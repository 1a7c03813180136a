/**
 * The per-token dispatch that `openDispatcher` replaces: the baseline for speed, and the exhibit of its defects. Kept as they are, none of them fixed:
 *   - every row is a put and a signal of its own, for each destination, to the own rank as well; it is copied three times
 *   - a call waits until counters EQUAL the plan's: each begins with a barrier of all ranks and counters of zero, and none overlaps another
 *   - a failed call cannot be taken up again: there is no resync
 *   - results are copied out; there are no leases, so no rank runs ahead of another
 * What would hang or crash it is refused with `EP_UNSUPPORTED`, alike on all ranks: a rank without rows to send, more than 9 replicas, rows that are no
 * whole 16-byte vectors, an empty first home shard of a gradient. It does not sum replicas.
 */
import {
  checkAttached,
  checkInteger,
  checkTimeout,
  type DeviceHandle,
  defaultTimeoutMs,
  EpError,
  elementCount,
  invalid,
  isEpError,
  linkSignals,
  type Rank,
  Resource,
  type SymmetricMemory,
  type Tensor,
  tensor,
  viewStorage,
  type WaitOptions,
} from '@ep/core';
import { allocateHost, type CompatDescription, type CompatTensor, codeOfStatus, nativePlaceOf } from '@ep/native';
import { digest } from '@ep/plan';
import { Agreement, agreementBytes, agreementSlots } from './agreement.js';
import { type PartSpec, rowBytesOf } from './binding-spec.js';
import { checkObject, checkParts, checkSizedParts, checkTransport } from './check-spec.js';
import {
  checkCompatParts,
  gradientMetadata,
  type SendMetadata,
  sendMetadata,
  sendReplicas,
} from './compat-metadata.js';
import { refusal } from './difference.js';
import type { DispatchTransport } from './dispatcher-base.js';
import { HostStream } from './host-stream.js';
import { roundToPage } from './layout.js';
import { sourceOperand, sourceSpec } from './operand.js';
import { checkExecutor, checkRunOptions, type DispatcherOptions, type RunOptions } from './options.js';

export interface CompatOptions extends Pick<DispatcherOptions, 'executor' | 'timeoutMs' | 'stream' | 'signal'> {
  /** Bytes of the send and of the receive buffer of queries, outputs and gradients: `compatBytesFor`. The same on all ranks. */
  readonly queryBytes: number;
  /** The same for key-value rows. 0 unless given: calls without them. */
  readonly keyValueBytes?: number;
  /** Thread blocks, at most one for each row that a rank sends. 1 unless given. */
  readonly blocks?: number;
}

export interface CompatRunOptions extends RunOptions {
  /** Native memory to copy results to, by part name; its rows of replicas that do not exist stay as they are. New, zeroed memory for parts without. */
  readonly into?: Readonly<Record<string, Tensor>>;
}

export interface CompatResult {
  /** By part name: copies, which belong to the caller. A gradient has its replicas one behind the other. */
  readonly tensors: Readonly<Record<string, Tensor>>;
  readonly stagedBytes: number;
}

export interface BoundCompat {
  /** Collective, one call at a time (`EP_BUSY`). After a call that failed all others reject with `EP_POISONED`: close, and open another one. */
  run(sources: Readonly<Record<string, Tensor>>, options?: CompatRunOptions): Promise<CompatResult>;
}

interface CompatPlace {
  readonly queryBytes: number;
  readonly keyValueBytes: number;
}

interface CompatInit {
  readonly transport: DispatchTransport;
  readonly memory: SymmetricMemory;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
  readonly agreement: Agreement;
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly place: CompatPlace;
  readonly blocks: number;
  readonly simt: CompatDescription['simt'];
  readonly timeoutMs: number;
}

interface BoundPart {
  readonly spec: PartSpec;
  readonly rowBytes: number;
  readonly sendRows: number;
  readonly receiveRows: number;
  readonly metadata: SendMetadata;
}

const mostOf = (rows: Int32Array): number => rows.reduce((most, count) => Math.max(most, count), 0);
const bufferBytesOf = (spec: PartSpec): number =>
  Math.max(mostOf(spec.plan.sendTokens), mostOf(spec.plan.recvTokens)) * rowBytesOf(spec);

/** Bytes that calls of these parts need of `queryBytes` and `keyValueBytes`. */
export function compatBytesFor(parts: readonly PartSpec[]): {
  readonly queryBytes: number;
  readonly keyValueBytes: number;
} {
  checkSizedParts(parts, ['sendTokens', 'recvTokens'], 'compatBytesFor');
  const [query, keyValue] = parts;
  return {
    queryBytes: query === undefined ? 0 : bufferBytesOf(query),
    keyValueBytes: keyValue === undefined ? 0 : bufferBytesOf(keyValue),
  };
}

export class CompatDispatcher extends Resource {
  readonly #init: CompatInit;
  #busy = false;
  #poison: { readonly reason: unknown } | undefined;

  constructor(init: CompatInit) {
    super('compat dispatcher');
    this.#init = init;
  }

  /** Collective, as `Dispatcher.bind`: a dispatch is a query part, or a query and a key-value part, or a gradient. */
  async bind<const K extends string>(
    specs: Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions = {},
  ): Promise<Record<K, BoundCompat>> {
    return this.guard('bind', async () => {
      checkRunOptions(options, 'bind');
      this.#checkUsable();
      let bound: (readonly [string, readonly BoundPart[]])[] = [];
      let refused: { readonly reason: unknown } | undefined;
      try {
        checkObject(specs, 'specs', 'an object with a list of parts for each dispatch', 'bind');
        bound = Object.entries<readonly PartSpec[]>(specs).map(([name, parts]) => [name, this.#bindParts(name, parts)]);
      } catch (reason) {
        refused = { reason };
      }
      const lines = refused ? refusal(refused.reason) : bound.flatMap(([name, parts]) => identityOf(name, parts));
      try {
        await this.#agree('bind', lines, options);
      } catch (error) {
        if (refused === undefined) throw error;
      }
      // Where all ranks refuse alike there is no mismatch.
      if (refused !== undefined) throw refused.reason;
      const entries = bound.map(([name, parts]) => [name, this.#bound(name, parts)]);
      return Object.fromEntries(entries) as Record<K, BoundCompat>;
    });
  }

  /** The barrier that each call needs, too: nobody passes it before all ranks are here. */
  async #agree(where: string, lines: readonly string[], options: WaitOptions): Promise<void> {
    const linked = linkSignals(options.signal, this.closing);
    try {
      const wait = { timeoutMs: this.#init.timeoutMs, ...options, signal: linked.signal };
      await this.#init.agreement.same(`compat ${where}`, lines, wait);
    } catch (reason) {
      if (!isEpError(reason) || reason.code !== 'EP_MISMATCH') this.#poison ??= { reason };
      throw reason;
    } finally {
      linked.unlink();
    }
  }

  protected override async release(): Promise<void> {
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
  }

  #checkUsable(): void {
    if (this.#poison === undefined) return;
    const { reason } = this.#poison;
    const text = reason instanceof Error ? reason.message : String(reason);
    throw new EpError(
      'EP_POISONED',
      `an earlier compat call failed (${text}): it cannot resync, close it and open another on all ranks`,
      { cause: reason },
    );
  }

  #bindParts(name: string, parts: readonly PartSpec[]): readonly BoundPart[] {
    const { transport, place } = this.#init;
    checkParts(parts, transport.worldSize, `bind ${name}`);
    checkCompatParts(parts);
    return parts.map((spec, i) => {
      const needed = bufferBytesOf(spec);
      const [knob, available] = i === 0 ? ['queryBytes', place.queryBytes] : ['keyValueBytes', place.keyValueBytes];
      if (needed > available) {
        throw new EpError(
          'EP_CAPACITY',
          `bind ${name}: ${spec.name} needs buffers of ${needed} bytes, this compat dispatcher has ${available} (${knob})`,
          { context: { needed, available } },
        );
      }
      const { rank } = transport;
      return {
        spec,
        rowBytes: rowBytesOf(spec),
        sendRows: spec.plan.sendTokens[rank]!,
        receiveRows: spec.plan.recvTokens[rank]!,
        metadata: sendMetadata(spec.plan, rank),
      };
    });
  }

  #bound(name: string, parts: readonly BoundPart[]): BoundCompat {
    const { transport, place } = this.#init;
    const first = parts[0]!.spec.plan;
    const gradient =
      first.kind === 'rev-kv'
        ? { gradient: { ...gradientMetadata(first, transport.rank), replicas: first.replicas } }
        : {};
    const bases = [0, 2 * place.queryBytes];
    const sizes = [place.queryBytes, place.keyValueBytes];
    return {
      run: async (sources, options = {}) => {
        const letGo = this.hold(name);
        try {
          this.#checkUsable();
          if (this.#busy) throw new EpError('EP_BUSY', `${name}: a compat dispatcher runs one call at a time`);
          checkRunOptions(options, name);
          options.signal?.throwIfAborted();
          const timeoutMs = options.timeoutMs ?? this.#init.timeoutMs;
          let stagedBytes = 0;
          const results = parts.map((part) => targetOf(part, options.into?.[part.spec.name], name));
          const tensors = parts.map((part, i): CompatTensor => {
            const source = sourceOf(part, sources?.[part.spec.name], name);
            stagedBytes += source.stagedBytes;
            const target = nativePlaceOf(results[i]!.data)!;
            return {
              source: source.operand,
              srcOffset: source.byteOffset,
              target: target.operand,
              dstOffset: target.byteOffset,
              rowBytes: part.rowBytes,
              sendOffset: bases[i]!,
              recvOffset: bases[i]! + sizes[i]!,
              recvRows: Math.floor(sizes[i]! / part.rowBytes),
              signalSlot: i * transport.worldSize,
              replicas: sendReplicas(part.spec.plan),
              dstRank: part.metadata.dstRank,
              dstRow: part.metadata.dstRow,
              counts: part.metadata.counts,
            };
          });
          this.#busy = true;
          await this.#call(name, options.signal, timeoutMs, {
            seqLen: parts[0]!.metadata.seqLen,
            query: tensors[0]!,
            ...(tensors[1] === undefined ? {} : { keyValue: tensors[1] }),
            ...gradient,
          });
          return { tensors: Object.fromEntries(parts.map(({ spec }, i) => [spec.name, results[i]!])), stagedBytes };
        } finally {
          letGo();
        }
      },
    };
  }

  async #call(
    name: string,
    signal: AbortSignal | undefined,
    timeoutMs: number,
    tensors: Pick<CompatDescription, 'seqLen' | 'query' | 'keyValue' | 'gradient'>,
  ): Promise<void> {
    const { stream, handle, blocks, simt } = this.#init;
    const linked = linkSignals(signal, this.closing);
    try {
      await this.#agree(name, [], { timeoutMs, ...(signal ? { signal } : {}) });
      const description = {
        ...tensors,
        handle: handle.bytes,
        blocks,
        timeoutMs: Number.isFinite(timeoutMs) ? timeoutMs : -1,
        ...(simt === undefined ? {} : { simt }),
      };
      const outcome = await stream.launch((native) => native.compatDispatch(description), linked.signal);
      if (outcome.status === 0) return;
      const { rank, expected, found, message } = outcome;
      throw new EpError(
        codeOfStatus(outcome.status),
        `${name}: ${message ?? `compat waited for rank ${rank}: expected exactly ${expected} rows, found ${found}`}`,
        { context: { rank, expected, found } },
      );
    } catch (reason) {
      this.#poison ??= { reason };
      throw reason;
    } finally {
      linked.unlink();
      this.#busy = false;
    }
  }
}

function identityOf(name: string, parts: readonly BoundPart[]): string[] {
  return parts.map(
    ({ spec }) =>
      `${name}: ${spec.name} is ${spec.dtype} [${spec.rowShape.join(', ')}] by ${spec.plan.kind} ${digest(spec.plan)}`,
  );
}

function sourceOf(part: BoundPart, source: Tensor | undefined, name: string) {
  const what = `source ${part.spec.name}`;
  const { dtype, rowShape } = part.spec;
  const operand = sourceOperand(source, sourceSpec(`${name}, ${what}`, dtype, part.sendRows, rowShape));
  if (part.sendRows > 1 && operand.strideBytes !== part.rowBytes) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `compat: ${what}: expected packed rows of ${part.rowBytes} bytes, found rows ${operand.strideBytes} bytes apart; openDispatcher reads them in place`,
    );
  }
  return operand;
}

function targetOf(part: BoundPart, given: Tensor | undefined, name: string): Tensor {
  const { dtype, rowShape } = part.spec;
  const shape = [part.receiveRows, ...rowShape];
  const elements = elementCount(shape);
  if (given === undefined) {
    return tensor(dtype, shape, viewStorage(dtype, allocateHost(part.receiveRows * part.rowBytes), 0, elements));
  }
  checkObject(given, `into ${part.spec.name}`, 'a tensor', name);
  checkAttached(given.data, `${name}, into ${part.spec.name}`);
  if (given.dtype !== dtype || given.data.length !== elements || nativePlaceOf(given.data) === undefined) {
    throw invalid(`into ${part.spec.name}`, {
      where: name,
      expected: `${elements} elements of ${dtype} in native memory (allocateHost)`,
      found: given.shape,
    });
  }
  return tensor(dtype, shape, given.data);
}

/** Collective. `EP_CAPACITY` says when the transport has too few signal slots. */
export async function openCompatDispatcher(
  transport: DispatchTransport,
  options: CompatOptions,
): Promise<CompatDispatcher> {
  const where = 'openCompatDispatcher';
  checkTransport(transport, where);
  checkObject(options, 'options', 'an object with queryBytes', where);
  const { worldSize, capabilities } = transport;
  const queryBytes = roundToPage(checkInteger(options.queryBytes, 'queryBytes', where));
  const keyValueBytes = roundToPage(checkInteger(options.keyValueBytes ?? 0, 'keyValueBytes', where));
  const agreementAt = 2 * (queryBytes + keyValueBytes);
  const byteLength = agreementAt + agreementBytes(worldSize);
  const blocks = checkInteger(options.blocks ?? 1, 'blocks', where, 1, 1024);
  const simt = checkExecutor(options.executor, where);
  const timeoutMs = checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), where);
  const signalSlots = 2 * worldSize + agreementSlots(worldSize);
  if (signalSlots > capabilities.maxSignalSlots) {
    throw new EpError(
      'EP_CAPACITY',
      `${where}: ${worldSize} ranks need ${signalSlots} signal slots, ${transport.name} has ${capabilities.maxSignalSlots}`,
      { context: { needed: signalSlots, available: capabilities.maxSignalSlots } },
    );
  }
  const wait = { timeoutMs, ...(options.signal ? { signal: options.signal } : {}) };
  const memory = await transport.allocate({ byteLength, signalSlots, ...wait });
  const ownStream = options.stream === undefined;
  let stream: HostStream | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, memory, endpoints, { byteOffset: agreementAt, slot: 2 * worldSize });
    const open = (): DeviceHandle<'bundled' | 'add'> => {
      const made = transport.device(memory);
      stream = options.stream ?? new HostStream();
      return made;
    };
    const lines = [`queryBytes is ${queryBytes}`, `keyValueBytes is ${keyValueBytes}`];
    const handle = await agreement.concludeWith(where, open, lines, wait);
    const place = { queryBytes, keyValueBytes };
    return new CompatDispatcher({
      transport,
      memory,
      handle,
      agreement,
      stream: stream!,
      ownStream,
      place,
      blocks,
      simt,
      timeoutMs,
    });
  } catch (error) {
    if (ownStream) await stream?.close();
    await memory.close();
    throw error;
  }
}
