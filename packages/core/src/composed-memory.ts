/** The memories of a composed transport: one memory for its users, one part of each member underneath. */
import type { DType, Storage } from './dtype.js';
import { checkInteger, EpError, isEpError } from './errors.js';
import { CloseScope, Resource } from './scope.js';
import type {
  AdoptedMemory,
  PartAddresses,
  Rank,
  Region,
  RemoteRegion,
  SignalPad,
  SlotId,
  SymmetricMemory,
  WaitOptions,
} from './transport.js';
import { linkSignals, onAbortOf } from './waiting.js';

async function closeAll(parts: readonly AsyncDisposable[]): Promise<void> {
  const scope = new CloseScope();
  for (const part of parts) scope.add(part);
  await scope.close();
}

/** Whether a transport's failure says nothing about these peers: it lost others. */
const isOfOthers = (reason: unknown, peers: readonly Rank[] | undefined): boolean =>
  peers !== undefined &&
  isEpError(reason) &&
  reason.code === 'EP_PEER_LOST' &&
  Array.isArray(reason.context.lost) &&
  !reason.context.lost.some((rank) => peers.includes(rank));

/** Fires, with its reason, when one of `failed` does that concerns `peers`, all ranks unless given. */
function failureOf(peers: readonly Rank[] | undefined, failed: readonly AbortSignal[]) {
  const controller = new AbortController();
  const hear = (signal: AbortSignal): void => {
    if (!isOfOthers(signal.reason, peers)) controller.abort(signal.reason);
  };
  const onAbort = (event: Event): void => hear(event.target as AbortSignal);
  for (const signal of failed) {
    if (signal.aborted) hear(signal);
    else onAbortOf(signal, onAbort);
  }
  const unlink = (): void => {
    for (const signal of failed) signal.removeEventListener('abort', onAbort);
  };
  return { signal: controller.signal, unlink };
}

/** The pad of the first member; a wait on it also ends when another member fails, whose signals would never come. */
function sharedPad(pad: SignalPad, failed: () => readonly AbortSignal[]): SignalPad {
  return {
    slots: pad.slots,
    ...(pad.hold && { hold: pad.hold }),
    peek: (slot) => pad.peek(slot),
    async until(slot, test, options: WaitOptions = {}) {
      const failure = failureOf(options.peers ?? undefined, failed());
      const { signal, unlink } = linkSignals(options.signal, failure.signal);
      try {
        return await pad.until(slot, test, { ...options, signal });
      } finally {
        unlink();
        failure.unlink();
      }
    },
  };
}

/** Throws on every use: split memory has a pad for each member. */
function noPad(slots: number, refuse: (what: string) => never): SignalPad {
  return {
    slots,
    peek: (_slot: SlotId) => refuse('signals.peek'),
    until: async () => refuse('signals.until'),
  };
}

export class ComposedMemory extends Resource implements SymmetricMemory {
  readonly byteLength: number;
  readonly space: 'host' | 'device';
  readonly signals: SignalPad;
  readonly addresses?: PartAddresses;
  /** True if every transport allocated bytes of its own. */
  readonly split: boolean;
  readonly #parts: readonly SymmetricMemory[];
  readonly #routes: readonly number[];
  readonly #routed = new WeakMap<RemoteRegion, RemoteRegion>();

  /** Made by a composed transport. `failed`: those of its transports as they are now; they are others once ranks have come back. */
  constructor(
    parts: readonly SymmetricMemory[],
    routes: readonly number[],
    split: boolean,
    failed: () => readonly AbortSignal[],
  ) {
    super('composed memory');
    const first = parts[0]!;
    this.byteLength = first.byteLength;
    this.space = first.space;
    this.split = split;
    this.#parts = parts;
    this.#routes = routes;
    this.signals = split ? noPad(first.signals.slots, (what) => this.#refuse(what)) : sharedPad(first.signals, failed);
    if (!split && first.addresses) this.addresses = first.addresses;
  }

  /** The memory of the transport that reaches `peer`: where what it sends lands. The same for all peers unless split. */
  part(peer: Rank): SymmetricMemory {
    checkInteger(peer, 'peer', 'composed memory', 0, this.#routes.length - 1);
    return this.split ? this.member(this.#routes[peer]!) : this.member(0);
  }

  /** The memory of one transport, by its place in the composition. */
  member(index: number): SymmetricMemory {
    this.checkOpen('member');
    return this.#parts[index]!;
  }

  local(byteOffset: number, byteLength: number): Region {
    const { memory: _, ...range } = this.#whole('local').local(byteOffset, byteLength);
    return { ...range, memory: this };
  }

  remote(peer: Rank, byteOffset: number, byteLength: number): RemoteRegion {
    checkInteger(peer, 'peer', 'composed memory', 0, this.#routes.length - 1);
    const inner = this.member(this.#routes[peer]!).remote(peer, byteOffset, byteLength);
    const region: RemoteRegion = { memory: this, peer, byteOffset, byteLength };
    this.#routed.set(region, inner);
    return region;
  }

  /** The region in the words of the transport that reaches its peer. One that `remote` did not make is checked here. */
  routed(region: RemoteRegion): RemoteRegion {
    this.checkOpen('put');
    const { peer, byteOffset, byteLength } = region;
    return this.#routed.get(region) ?? this.member(this.#routes[peer]!).remote(peer, byteOffset, byteLength);
  }

  view<D extends DType>(dtype: D, byteOffset: number, length: number): Storage[D] {
    return this.#whole('view').view(dtype, byteOffset, length);
  }

  read(from: Region, into: Uint8Array): Promise<void> {
    return this.guard('read', () => this.#whole('read').read(this.#inFirst(from), into));
  }

  write(from: Uint8Array, into: Region): Promise<void> {
    return this.guard('write', () => this.#whole('write').write(from, this.#inFirst(into)));
  }

  protected override release(): Promise<void> {
    return closeAll(this.#parts);
  }

  #inFirst(region: Region): Region {
    return region.memory === this ? this.member(0).local(region.byteOffset, region.byteLength) : region;
  }

  #whole(what: string): SymmetricMemory {
    return this.split ? this.#refuse(what) : this.member(0);
  }

  #refuse(what: string): never {
    throw new EpError(
      'EP_UNSUPPORTED',
      `composed memory: ${what}: it is split over ${this.#parts.length} transports and has no one place: use part(peer)`,
      { context: { parts: this.#parts.length } },
    );
  }
}

/** Memory of the caller, registered with every member. */
export class ComposedAdoption extends Resource implements AdoptedMemory {
  readonly address: bigint;
  readonly byteLength: number;
  readonly #parts: readonly AdoptedMemory[];

  /** Made by `adopt` of a composed transport. */
  constructor(parts: readonly AdoptedMemory[], address: bigint, byteLength: number) {
    super('adopted memory');
    this.address = address;
    this.byteLength = byteLength;
    this.#parts = parts;
  }

  member(index: number): AdoptedMemory {
    this.checkOpen('member');
    return this.#parts[index]!;
  }

  protected override release(): Promise<void> {
    return closeAll(this.#parts);
  }
}
