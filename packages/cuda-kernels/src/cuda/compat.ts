/** The per-token dispatch of `../compat.ts` on GPUs: the same kernel, the same defects and refusals, tensors that lie on the device. */
import { type DeviceTensor, EpError } from '@ep/core';
import {
  type NativeGpuCompat,
  type NativeGpuCompatDispatch,
  type NativeGpuMemory,
  type NativeGpuOperand,
  type NativeGpuStream,
  native,
} from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { checkTransport } from '../check-spec.js';
import {
  byRole,
  CompatBase,
  type CompatInit,
  type CompatPart,
  type CompatSizes,
  type CompatSpec,
  checkPacked,
  resolveCompat,
} from '../compat-base.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import type { RunOptions } from '../options.js';
import { deviceTensor } from './buffer.js';
import { openOnDevice } from './open-memory.js';
import { type DeviceSource, type DeviceSourceSpec, deviceSource, packedSource } from './operand.js';
import { checkBlocks, checkStream, type DeviceDispatcherOptions } from './options.js';
import type { CudaStream } from './stream.js';

export interface DeviceCompatOptions
  extends CompatSizes,
    Pick<DeviceDispatcherOptions, 'stream' | 'timeoutMs' | 'signal'> {
  /** Thread blocks of 320 threads, at most one for each row that a rank sends; the original has 20. As of `DeviceDispatcherOptions`. */
  readonly blocks?: number;
}

export interface DeviceCompatRunOptions extends RunOptions {
  /** Packed tensors to copy results to, by part name; rows of replicas that do not exist stay as they are. New, zeroed memory for parts without. */
  readonly into?: Readonly<Record<string, DeviceTensor>>;
}

export interface DeviceCompatResult {
  /** By part name: copies, [rows, ...row shape], or the tensors of `into`. A gradient has its replicas one behind the other. */
  readonly tensors: Readonly<Record<string, DeviceTensor>>;
  /** Frees the tensors that were made for this call, once nothing on the device uses them. Those of `into` stay. */
  release(): void;
}

export interface BoundDeviceCompat {
  /**
   * Collective, one call at a time (`EP_BUSY`). The kernel is put on the stream when all ranks have come, behind whatever lies there by then; resolves when this rank has all of its rows. Not while the stream is
   * being captured (`EP_INVALID_ARGUMENT`): no graph holds the barrier. After a call that failed (`EP_TIMEOUT` and `EP_PEER_LOST` name the rank, and the rows expected and found) all others reject with
   * `EP_POISONED`: close, and open another one. HAZARD: without `into` it allocates, which may wait for kernels of this process that wait for peers.
   */
  run(sources: Readonly<Record<string, DeviceTensor>>, options?: DeviceCompatRunOptions): Promise<DeviceCompatResult>;
}

interface DeviceCompatInit extends CompatInit {
  readonly memory: DeviceMemory;
  readonly stream: CudaStream;
  readonly made: NativeGpuCompat;
  readonly closeControl: () => Promise<void>;
}

export class DeviceCompatDispatcher extends CompatBase<BoundDeviceCompat> {
  readonly #init: DeviceCompatInit;

  constructor(init: DeviceCompatInit) {
    super(init, 'compat dispatcher of a GPU');
    this.#init = init;
  }

  /** Thread blocks of a call, at most, and threads of each; how many such blocks the GPU runs at once. */
  get shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number } {
    this.checkOpen('shape');
    return this.#init.made.shape();
  }

  protected override async release(): Promise<void> {
    this.#init.made.release();
    await this.#init.memory.close();
    await this.#init.closeControl();
  }

  protected override bound(name: string, { parts, shards }: CompatSpec): BoundDeviceCompat {
    const routes = byRole(parts.map(({ route }) => route));
    const dispatch = new (native().binding.GpuCompatDispatch)({ compat: this.#init.made, ...shards, ...routes });
    return { run: (sources, options = {}) => this.#run(name, parts, dispatch, sources, options) };
  }

  async #run(
    name: string,
    parts: readonly CompatPart[],
    dispatch: NativeGpuCompatDispatch,
    sources: Readonly<Record<string, DeviceTensor>>,
    options: DeviceCompatRunOptions,
  ): Promise<DeviceCompatResult> {
    const { stream } = this.#init;
    const own: NativeGpuMemory[] = [];
    const release = () => {
      for (const memory of own.splice(0)) memory.release();
    };
    try {
      return await this.call(name, options, () => {
        const on = this.#checkRuns(name);
        const read = parts.map((part) => this.#sourceOf(part, sources?.[part.spec.name], name));
        const written = parts.map((part) => this.#targetOf(part, options.into?.[part.spec.name], name, own));
        const operands = read.flatMap((source, i): (NativeGpuOperand | number)[] => {
          const target = written[i]!.place;
          return [source.operand, source.byteOffset, target.operand, target.byteOffset];
        });
        // The rest of what can be refused: behind the barrier the others count on this rank.
        on.compatCheck(dispatch, ...operands);
        return {
          launch: (timeoutMs, signal) =>
            stream.follow(() => on.compatDispatch(dispatch, timeoutMs, ...operands), signal),
          result: {
            tensors: Object.freeze(Object.fromEntries(parts.map(({ spec }, i) => [spec.name, written[i]!.tensor]))),
            release,
          },
        };
      });
    } catch (error) {
      release();
      throw error;
    }
  }

  #checkRuns(name: string): NativeGpuStream {
    const { stream, memory } = this.#init;
    memory.nativeMemory(name);
    if (!stream.capturing) return stream.nativeStream(name);
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `${name}: the stream is being captured, and no graph holds the barrier of all ranks that each compat call begins with; enqueue() of openDeviceDispatcher puts a call into a graph`,
    );
  }

  #wanted({ spec: { name: part, dtype, rowShape } }: CompatPart, where: string, rows: number): DeviceSourceSpec {
    return { where: `${where} ${part}`, dtype, rows, rowShape, device: this.#init.memory.device };
  }

  #sourceOf(part: CompatPart, source: DeviceTensor | undefined, name: string): DeviceSource {
    const found = deviceSource(source, this.#wanted(part, `${name}, source`, part.sendRows));
    checkPacked(part, found.strideBytes);
    return found;
  }

  /** Memory that is made here is one of `own`. */
  #targetOf(
    part: CompatPart,
    given: DeviceTensor | undefined,
    name: string,
    own: NativeGpuMemory[],
  ): { readonly tensor: DeviceTensor; readonly place: Pick<DeviceSource, 'operand' | 'byteOffset'> } {
    const { spec, receiveRows, route } = part;
    if (given !== undefined) {
      return { tensor: given, place: packedSource(given, this.#wanted(part, `${name}, into`, receiveRows)) };
    }
    const { library, device, copier } = this.#init.memory;
    const operand = new (native().binding.GpuMemory)(library, device, receiveRows * route.rowBytes);
    own.push(operand);
    const place = { operand, byteOffset: 0, copier };
    const at = { device: this.#init.stream.device, address: operand.address(), place };
    return { tensor: deviceTensor(spec.dtype, [receiveRows, ...spec.rowShape], at), place };
  }
}

/**
 * Collective, over a transport whose device memory all ranks' kernels reach by loads and stores (`nvshmem.cuda`). `EP_MISMATCH` names ranks with other sizes, or ranks that could not open it and why;
 * `EP_INVALID_ARGUMENT` says when the kernels of the ranks on this GPU could not all run at once.
 */
export async function openDeviceCompatDispatcher(
  transport: DispatchTransport,
  options: DeviceCompatOptions,
): Promise<DeviceCompatDispatcher> {
  const where = 'openDeviceCompatDispatcher';
  checkTransport(transport, where);
  const resolved = resolveCompat(options, transport.worldSize, where);
  const stream = checkStream(options.stream, where);
  const blocks = checkBlocks(options.blocks, where);
  const { byteLength, signalSlots, identity, timeoutMs } = resolved;
  const opened = await openOnDevice(transport, where, {
    ...{ stream, identity, byteLength, signalSlots },
    make: (memory) => new (native().binding.GpuCompat)({ memory: memory.nativeMemory(where), blocks }),
    wait: { timeoutMs, ...(options.signal ? { signal: options.signal } : {}) },
  });
  return new DeviceCompatDispatcher({ ...opened, transport, resolved, stream });
}
