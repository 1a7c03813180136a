/** The smallest transport that really moves bytes: all ranks in one thread, everything lands at once. For tests of what is built on transports. */
import {
  type AdoptedMemory,
  type AllocateOptions,
  type Capabilities,
  createWork,
  type DeviceHandle,
  type DType,
  type Endpoint,
  EpError,
  type Need,
  type PartAddresses,
  type Rank,
  type Region,
  type RemoteRegion,
  Resource,
  type SignalUpdate,
  type SymmetricMemory,
  type Transport,
  viewStorage,
  WorkOwner,
} from '../src/index.js';

interface Part {
  readonly bytes: Uint8Array;
  readonly slots: BigUint64Array;
}

/** Address -> part, as if all ranks' memory were mapped here. */
const mapped = new Map<bigint, Part>();
let nextAddress = 0x10000n;

/** What the ranks of one transport share: every allocation, in order. */
export interface FakeWorld {
  readonly allocations: Part[][];
}
export const fakeWorld = (): FakeWorld => ({ allocations: [] });

export interface FakeOptions {
  readonly name: string;
  readonly needs: readonly Need[];
  readonly maxMessageBytes?: number;
  /** Whether memory of others can be registered. */
  readonly registers?: boolean;
  /** As `Transport.hosts`. */
  readonly hosts?: readonly Rank[];
}

class FakeMemory extends Resource implements SymmetricMemory {
  readonly byteLength: number;
  readonly space = 'host';
  readonly signals;
  readonly addresses?: PartAddresses;
  readonly parts: readonly Part[];
  /** Of `allocate`. */
  readonly near: readonly Rank[] | undefined;
  readonly #mine: Part;

  constructor(
    parts: readonly Part[],
    rank: Rank,
    addresses: PartAddresses | undefined,
    near: readonly Rank[] | undefined,
  ) {
    super('fake memory');
    const mine = parts[rank]!;
    this.#mine = mine;
    this.near = near;
    this.parts = parts;
    this.byteLength = mine.bytes.byteLength;
    if (addresses) this.addresses = addresses;
    this.signals = {
      slots: mine.slots.length,
      peek: (slot: number) => mine.slots[slot]!,
      until: (_slot: number, _test: unknown, options: { signal?: AbortSignal } = {}) =>
        new Promise<bigint>((_resolve, reject) => {
          options.signal?.throwIfAborted();
          options.signal?.addEventListener('abort', () => reject(options.signal?.reason));
        }),
    };
  }
  local(byteOffset: number, byteLength: number): Region {
    this.#check(byteOffset, byteLength);
    return { memory: this, byteOffset, byteLength };
  }
  remote(peer: Rank, byteOffset: number, byteLength: number): RemoteRegion {
    this.#check(byteOffset, byteLength);
    return { memory: this, peer, byteOffset, byteLength };
  }
  view<D extends DType>(dtype: D, byteOffset: number, length: number) {
    return viewStorage(dtype, this.#mine.bytes.buffer, byteOffset, length);
  }
  async read(from: Region, into: Uint8Array): Promise<void> {
    into.set(bytesOf(from).subarray(0, into.byteLength));
  }
  async write(from: Uint8Array, into: Region): Promise<void> {
    bytesOf(into).set(from);
  }
  mine(): Part {
    return this.#mine;
  }
  protected release(): void {}
  #check(byteOffset: number, byteLength: number): void {
    this.checkOpen('region');
    if (byteOffset + byteLength > this.byteLength)
      throw new EpError('EP_INVALID_ARGUMENT', 'fake memory: out of bounds');
  }
}

class FakeAdoption extends Resource implements AdoptedMemory {
  readonly address: bigint;
  readonly byteLength: number;
  constructor(
    readonly part: Part,
    address: bigint,
    byteLength: number,
  ) {
    super('fake adoption');
    this.address = address;
    this.byteLength = byteLength;
  }
  protected release(): void {}
}

function bytesOf({ memory, byteOffset, byteLength }: Region): Uint8Array {
  if (memory instanceof FakeMemory) return memory.mine().bytes.subarray(byteOffset, byteOffset + byteLength);
  if (memory instanceof FakeAdoption) return memory.part.bytes.subarray(byteOffset, byteOffset + byteLength);
  throw new EpError('EP_INVALID_ARGUMENT', 'fake transport: memory of another transport');
}

function partOf(memory: SymmetricMemory, peer: Rank): Part {
  if (memory instanceof FakeMemory) return memory.parts[peer]!;
  throw new EpError('EP_INVALID_ARGUMENT', 'fake transport: memory of another transport');
}

class FakeTransport<C extends Need> extends Resource implements Transport<C> {
  readonly name: string;
  readonly capabilities: Capabilities;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly hosts?: readonly Rank[];
  readonly breakdown: AbortController = new AbortController();
  readonly failed: AbortSignal = this.breakdown.signal;
  readonly log: string[] = [];
  readonly #world: FakeWorld;
  readonly #options: FakeOptions;
  readonly #works = new WorkOwner('fake');
  #allocated = 0;

  constructor(world: FakeWorld, rank: Rank, worldSize: number, options: FakeOptions) {
    super(options.name);
    this.name = options.name;
    this.rank = rank;
    this.worldSize = worldSize;
    if (options.hosts) this.hosts = options.hosts;
    this.#world = world;
    this.#options = options;
    this.capabilities = {
      needs: new Set(options.needs),
      maxMessageBytes: options.maxMessageBytes ?? 1000,
      maxSignalSlots: 64,
      initiators: new Set(['host'] as const),
    };
  }

  readonly allocate = async ({ byteLength, signalSlots, over, near }: AllocateOptions): Promise<SymmetricMemory> => {
    this.checkOpen('allocate');
    if (over && !this.#options.registers)
      throw new EpError('EP_UNSUPPORTED', `${this.name}: cannot register memory of others`);
    const address = over?.addresses?.bytes ?? nextAddress++;
    const part = mapped.get(address) ?? { bytes: new Uint8Array(byteLength), slots: new BigUint64Array(signalSlots) };
    mapped.set(address, part);
    const parts = this.#world.allocations[this.#allocated] ?? [];
    this.#world.allocations[this.#allocated++] = parts;
    parts[this.rank] = part;
    return this.children.add(new FakeMemory(parts, this.rank, { bytes: address, signals: address }, near));
  };

  readonly adopt = async ({ address, byteLength }: { address: bigint; byteLength: number }): Promise<AdoptedMemory> => {
    const part = mapped.get(address);
    if (!part || !this.#options.registers) throw new EpError('EP_UNSUPPORTED', `${this.name}: cannot adopt`);
    return this.children.add(new FakeAdoption(part, address, byteLength));
  };

  readonly connect = async (peer: Rank): Promise<Endpoint<C>> => {
    const done = <T>(op: string, move: () => T) => {
      const control = createWork<T>({ op, sequence: this.log.push(`${op} ${peer}`), owner: this.#works });
      control.resolve(move());
      return control.work;
    };
    const raise = (memory: SymmetricMemory, update: SignalUpdate<C> | undefined) => {
      if (update) partOf(memory, peer).slots[update.slot]! += update.value ?? 1n;
    };
    const target = (to: RemoteRegion) =>
      partOf(to.memory, to.peer).bytes.subarray(to.byteOffset, to.byteOffset + to.byteLength);
    const changeByte = (to: RemoteRegion, change: (old: bigint) => bigint): bigint => {
      const [old] = target(to);
      target(to)[0] = Number(change(BigInt(old!)));
      return BigInt(old!);
    };
    const endpoint: Omit<Endpoint<C>, keyof Resource> = {
      peer,
      put: (from, to, options) =>
        done('put', () => {
          target(to).set(bytesOf(from));
          raise(to.memory, options?.signal);
        }),
      putValue: (to, value, options) =>
        done('put-value', () => {
          target(to)[0] = Number(value);
          raise(to.memory, options?.signal);
        }),
      signal: (memory, update) => done('signal', () => raise(memory, update)),
      get: (from, to) => done('get', () => bytesOf(to).set(target(from))),
      fetchAdd: (to, add) => done('fetch-add', () => changeByte(to, (old) => old + add)),
      compareSwap: (to, compare, swap) => done('swap', () => changeByte(to, (old) => (old === compare ? swap : old))),
      submit: (batch) =>
        batch.map((request) => {
          if (request.kind === 'put')
            return endpoint.put(request.from, request.to, request.signal && { signal: request.signal });
          if (request.kind === 'put-value')
            return endpoint.putValue(request.to, request.value, request.signal && { signal: request.signal });
          return endpoint.signal(request.memory, request.signal);
        }),
      flush: async () => {},
    };
    const log = this.log;
    class FakeEndpoint extends Resource {
      constructor() {
        super('fake endpoint');
      }
      protected release(): void {
        log.push(`close endpoint ${peer}`);
      }
    }
    return this.children.add(Object.assign(new FakeEndpoint(), endpoint) as unknown as Endpoint<C>);
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<C> => ({
    kind: memory instanceof FakeMemory && memory.near ? `${this.name} over ${memory.near}` : this.name,
    abi: '1',
    bytes: partOf(memory, this.rank).bytes.subarray(0, 0),
  });

  protected release(): void {
    this.log.push('close');
  }
}

export function fakeTransport<C extends Need>(
  world: FakeWorld,
  rank: Rank,
  worldSize: number,
  options: FakeOptions & { readonly needs: readonly C[] },
): FakeTransport<C> {
  return new FakeTransport<C>(world, rank, worldSize, options);
}
