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
  type DeviceHandle,
  EpError,
  elementCount,
  invalid,
  type Rank,
  type SymmetricMemory,
  type Tensor,
  tensor,
  viewStorage,
} from '@ep/core';
import { allocateHost, type CompatDescription, type CompatTensor, nativePlaceOf } from '@ep/native';
import { Agreement, agreementBytes, agreementSlots } from './agreement.js';
import { checkObject, checkTransport } from './check-spec.js';
import {
  byRole,
  CompatBase,
  type CompatInit,
  type CompatPart,
  type CompatSizes,
  type CompatSpec,
  checkPacked,
  resolveCompat,
} from './compat-base.js';
import type { DispatchTransport } from './dispatcher-base.js';
import { HostStream } from './host-stream.js';
import { sourceOperand, sourceSpec } from './operand.js';
import { checkExecutor, type DispatcherOptions, type RunOptions } from './options.js';

export interface CompatOptions
  extends CompatSizes,
    Pick<DispatcherOptions, 'executor' | 'timeoutMs' | 'stream' | 'signal'> {
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

interface HostCompatInit extends CompatInit {
  readonly memory: SymmetricMemory;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly blocks: number;
  readonly simt: CompatDescription['simt'];
}

export class CompatDispatcher extends CompatBase<BoundCompat> {
  readonly #init: HostCompatInit;

  constructor(init: HostCompatInit) {
    super(init, 'compat dispatcher');
    this.#init = init;
  }

  protected override async release(): Promise<void> {
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
  }

  protected override bound(name: string, { parts, shards }: CompatSpec): BoundCompat {
    const { stream, handle, blocks, simt } = this.#init;
    return {
      run: (sources, options = {}) =>
        this.call(name, options, () => {
          let stagedBytes = 0;
          const results = parts.map((part) => targetOf(part, options.into?.[part.spec.name], name));
          const tensors = parts.map((part, i): CompatTensor => {
            const source = sourceOf(part, sources?.[part.spec.name], name);
            stagedBytes += source.stagedBytes;
            const target = nativePlaceOf(results[i]!.data)!;
            return {
              ...part.route,
              source: source.operand,
              srcOffset: source.byteOffset,
              target: target.operand,
              dstOffset: target.byteOffset,
            };
          });
          const description = { ...shards, ...byRole(tensors), handle: handle.bytes, blocks, ...(simt && { simt }) };
          return {
            launch: (timeoutMs, signal) =>
              stream.launch((native) => native.compatDispatch({ ...description, timeoutMs }), signal),
            result: {
              tensors: Object.fromEntries(parts.map(({ spec }, i) => [spec.name, results[i]!])),
              stagedBytes,
            },
          };
        }),
    };
  }
}

function sourceOf(part: CompatPart, source: Tensor | undefined, name: string) {
  const { dtype, rowShape, name: partName } = part.spec;
  const operand = sourceOperand(source, sourceSpec(`${name}, source ${partName}`, dtype, part.sendRows, rowShape));
  checkPacked(part, operand.strideBytes);
  return operand;
}

function targetOf({ spec, receiveRows, route }: CompatPart, given: Tensor | undefined, name: string): Tensor {
  const { dtype, rowShape } = spec;
  const shape = [receiveRows, ...rowShape];
  const elements = elementCount(shape);
  if (given === undefined) {
    return tensor(dtype, shape, viewStorage(dtype, allocateHost(receiveRows * route.rowBytes), 0, elements));
  }
  checkObject(given, `into ${spec.name}`, 'a tensor', name);
  checkAttached(given.data, `${name}, into ${spec.name}`);
  if (given.dtype !== dtype || given.data.length !== elements || nativePlaceOf(given.data) === undefined) {
    throw invalid(`into ${spec.name}`, {
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
  const { worldSize, capabilities } = transport;
  const resolved = resolveCompat(options, worldSize, where);
  const blocks = checkInteger(options.blocks ?? 1, 'blocks', where, 1, 1024);
  const simt = checkExecutor(options.executor, where);
  const agreementPlace = { byteOffset: resolved.byteLength, slot: resolved.signalSlots };
  const byteLength = resolved.byteLength + agreementBytes(worldSize);
  const signalSlots = resolved.signalSlots + agreementSlots(worldSize);
  if (signalSlots > capabilities.maxSignalSlots) {
    throw new EpError(
      'EP_CAPACITY',
      `${where}: ${worldSize} ranks need ${signalSlots} signal slots, ${transport.name} has ${capabilities.maxSignalSlots}`,
      { context: { needed: signalSlots, available: capabilities.maxSignalSlots } },
    );
  }
  const wait = { timeoutMs: resolved.timeoutMs, ...(options.signal ? { signal: options.signal } : {}) };
  const memory = await transport.allocate({ byteLength, signalSlots, ...wait });
  const ownStream = options.stream === undefined;
  let stream: HostStream | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, memory, endpoints, agreementPlace);
    const open = (): DeviceHandle<'bundled' | 'add'> => {
      const made = transport.device(memory);
      stream = options.stream ?? new HostStream();
      return made;
    };
    const handle = await agreement.concludeWith(where, open, resolved.identity, wait);
    const init = { transport, agreement, resolved, memory, handle, blocks, simt };
    return new CompatDispatcher({ ...init, stream: stream!, ownStream });
  } catch (error) {
    if (ownStream) await stream?.close();
    await memory.close();
    throw error;
  }
}
