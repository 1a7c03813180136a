/**
 * The cases of process groups over calls on a device: whatever a call or message is given in host memory is copied to the GPU, the call is made there, and results are copied
 * back. Calls of all groups that come from one are made one behind the other, on a stream beside that of the one.
 */
import { type DType, Resource } from '@ep/core';
import {
  GpuCopier,
  type GpuQueue,
  type NativeGpuMemory,
  type NativeGpuStream,
  native,
  type OperationId,
  type Outcome,
  openGpus,
} from '@ep/native';
import { type EngineFactory, engineFactory, type GroupTransport } from '../../src/backends.js';
import { DeviceElements } from '../../src/device/elements.js';
import type {
  DeviceCall,
  Elements,
  EngineCall,
  EngineEnd,
  GroupEngine,
  RecvCall,
  RecvEnd,
  SendCall,
} from '../../src/engine.js';

/** Of the array types that carry elements: one of each. */
const DTYPES: Readonly<Record<string, DType>> = {
  Float64Array: 'f64',
  Float32Array: 'f32',
  BigInt64Array: 'i64',
  BigUint64Array: 'u64',
  Int32Array: 'i32',
  Uint32Array: 'u32',
  Int16Array: 'i16',
  Uint16Array: 'u16',
  Int8Array: 'i8',
  Uint8Array: 'u8',
};

const ARENA_BYTES = 2 ** 22;

/** As a `CudaStream` is one: @ep/cuda-kernels is above this package. */
export class Queue extends Resource implements GpuQueue {
  readonly device = { kind: 'cuda' as const, index: 0 };
  readonly capturing = false;
  readonly #stream: NativeGpuStream = new (native().binding.GpuStream)(openGpus().library, 0, false);

  constructor() {
    super('queue of a GPU');
  }

  follow(start: (stream: NativeGpuStream) => OperationId, signal?: AbortSignal): Promise<Outcome> {
    return native().operations.run(() => start(this.#stream), signal);
  }

  nativeStream(): NativeGpuStream {
    return this.#stream;
  }

  join(): void {}

  protected override release(): void {
    this.#stream.close();
  }
}

/** What the calls of some groups go on. HAZARD: made where groups open, not at the first call of each: page-locked memory is not had before kernels that run have ended, and one may wait for this very call. */
class Shared {
  readonly queue = new Queue();
  readonly copier = GpuCopier.open(openGpus().library, 0);
  /** The last call. HAZARD: each awaits copies of the host before it comes to the stream, where ranks must have the calls of all groups in one order. */
  tail: Promise<unknown> = Promise.resolve();
  /** Where the arrays of the call under way lie on the device. */
  memory = new (native().binding.GpuMemory)(openGpus().library, 0, ARENA_BYTES);
  #bytes = ARENA_BYTES;

  reserve(bytes: number): NativeGpuMemory {
    if (bytes > this.#bytes) {
      this.memory.release();
      this.memory = new (native().binding.GpuMemory)(openGpus().library, 0, bytes);
      this.#bytes = bytes;
    }
    return this.memory;
  }

  async close(): Promise<void> {
    await this.queue.close();
    await this.copier.close();
    this.memory.release();
  }
}

class StagedEngine extends Resource implements GroupEngine {
  readonly name: string;
  readonly rank: number;
  readonly size: number;
  readonly view: GroupEngine['view'];
  readonly allocate: GroupEngine['allocate'];
  readonly trace: GroupEngine['trace'];
  readonly connections: GroupEngine['connections'];
  readonly #inner: GroupEngine;
  readonly #shared: Shared;
  readonly #onRelease: () => Promise<void>;

  constructor(inner: GroupEngine, shared: Shared, onRelease: () => Promise<void>) {
    super('staged engine');
    this.#inner = inner;
    this.#shared = shared;
    this.#onRelease = onRelease;
    this.name = inner.name;
    this.rank = inner.rank;
    this.size = inner.size;
    this.view = inner.view;
    this.allocate = inner.allocate;
    this.trace = inner.trace;
    this.connections = inner.connections;
  }

  readonly run = (call: EngineCall): Promise<EngineEnd> => {
    const end = this.#shared.tail.then(() => this.#staged(call));
    this.#shared.tail = end.catch(() => {});
    return end;
  };

  /** HAZARD: posted before anything is awaited, since messages match in that order. What is sent is still on its way on the stream then. */
  readonly send = async (call: SendCall): Promise<void> => {
    const { data } = call;
    const { block, elements } = this.#blockFor(data);
    const pinned = new (native().binding.GpuPinned)(openGpus().library, 0, elements.byteLength + 1);
    new Uint8Array(pinned.window()).set(bytesOf(data));
    const copied = this.#shared.queue.follow((stream) => {
      stream.copy(block, elements.place.byteOffset, pinned, 0, elements.byteLength);
      return stream.follow(-1);
    });
    try {
      await this.#inner.device!.send({ ...call, data: elements });
    } finally {
      await copied;
      block.release();
    }
  };

  readonly recv = async (call: RecvCall): Promise<RecvEnd> => {
    const { block, elements } = this.#blockFor(call.data);
    try {
      const end = await this.#inner.device!.recv({ ...call, data: elements });
      await this.#shared.copier.read(block, elements.place.byteOffset, bytesOf(call.data).subarray(0, end.byteLength));
      return end;
    } finally {
      block.release();
    }
  };

  /** Device memory of a message, now and then at an odd multiple of its elements. */
  #blockFor(of: Elements): {
    readonly block: NativeGpuMemory;
    readonly elements: DeviceElements;
  } {
    const { length, byteLength, BYTES_PER_ELEMENT } = of;
    const byteOffset = length % 3 === 0 ? BYTES_PER_ELEMENT : 0;
    const block = new (native().binding.GpuMemory)(openGpus().library, 0, byteOffset + byteLength + 1);
    const dtype = DTYPES[of.constructor.name]!;
    const address = block.address() + BigInt(byteOffset);
    return { block, elements: new DeviceElements(dtype, 0, address, length, { operand: block, byteOffset }) };
  }

  async #staged(call: EngineCall): Promise<EngineEnd> {
    const placed = this.#place(call);
    for (const input of call.inputs) {
      const at = placed.get(input)!;
      await this.#shared.copier.write(bytesOf(input), this.#shared.memory, at.place.byteOffset);
    }
    const onDevice = (list: readonly Elements[]): DeviceElements[] => list.map((one) => placed.get(one)!);
    const staged: DeviceCall = { ...call, inputs: onDevice(call.inputs), outputs: onDevice(call.outputs) };
    const end = await this.#inner.device!.run(staged);
    for (const output of call.outputs) {
      await this.#shared.copier.read(this.#shared.memory, placed.get(output)!.place.byteOffset, bytesOf(output));
    }
    return end;
  }

  /** Arrays one behind the other, at odd multiples of their elements: what is not aligned must work, too. An array that is both input and output lies in one place. */
  #place({ dtype, inputs, outputs }: EngineCall): Map<Elements, DeviceElements> {
    const offsets = new Map<Elements, number>();
    let at = 0;
    for (const one of [...inputs, ...outputs]) {
      if (offsets.has(one)) continue;
      offsets.set(one, at);
      at += Math.ceil(one.byteLength / 16) * 16 + (one.length % 3 === 0 ? one.BYTES_PER_ELEMENT : 0);
      at = Math.ceil(at / one.BYTES_PER_ELEMENT) * one.BYTES_PER_ELEMENT;
    }
    const operand = this.#shared.reserve(at);
    const base = operand.address();
    return new Map(
      [...offsets].map(([one, byteOffset]) => [
        one,
        new DeviceElements(dtype, 0, base + BigInt(byteOffset), one.length, { operand, byteOffset }),
      ]),
    );
  }

  protected override async release(): Promise<void> {
    await this.#inner.close();
    await this.#onRelease();
  }
}

const bytesOf = ({ buffer, byteOffset, byteLength }: Elements): Uint8Array =>
  new Uint8Array(buffer, byteOffset, byteLength);

/** Of one opening. Two blocks for each of two streams: the cases open many worlds, and blocks of all have to fit at once. More groups at a time than any case has. */
export const stagedOnDevice = (transport: GroupTransport): EngineFactory => {
  const made: Shared[] = [];
  let factory: EngineFactory | undefined;
  const closeQueues = async (): Promise<void> => {
    for (const shared of made.splice(0)) await shared.close();
  };
  return async (init) => {
    const isFirst = factory === undefined;
    const at = isFirst ? 0 : 1;
    made[at] ??= new Shared();
    const shared = made[at];
    const { queue: stream } = shared;
    factory ??= engineFactory(transport, { stream, stagingBytes: 2 ** 20, blocks: 2, maxGroups: 12 });
    try {
      const onRelease = isFirst ? closeQueues : () => Promise.resolve();
      return new StagedEngine(await factory({ ...init, stream }), shared, onRelease);
    } catch (error) {
      if (isFirst) await closeQueues();
      throw error;
    }
  };
};
