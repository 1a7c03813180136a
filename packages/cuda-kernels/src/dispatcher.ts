/** Moves the shards of plans between ranks, over any transport whose signals are bundled with their puts and can add. */
import {
  type Closeable,
  checkInteger,
  createWork,
  type DeviceHandle,
  defaultTimeoutMs,
  type Endpoint,
  EpError,
  formatRanks,
  linkSignals,
  type Rank,
  Resource,
  type SymmetricMemory,
  type Tensor,
  type Transport,
  tensor,
  type WaitOptions,
  type Work,
  WorkOwner,
} from '@ep/core';
import { codeOfStatus, type DispatchDescription, nativePlaceOf, type Outcome } from '@ep/native';
import { Agreement, agreementBytes, agreementSlots, RECORD_BYTES } from './agreement.js';
import { type BoundPart, type BoundSpec, bindSpec, type PartSpec } from './binding-spec.js';
import { HostStream } from './host-stream.js';
import { HeldLease, type Lease, LeaseSlot } from './lease.js';
import { type SourceOperand, sourceOperand } from './operand.js';

/** What a dispatcher needs of a transport. Order of puts is never assumed: completions are counted. */
export type DispatchTransport = Transport<'bundled' | 'add'>;

export interface DispatcherOptions {
  /** Bytes of received tensors that one call may have at one rank; see `leaseBytesFor`. The same on all ranks. */
  readonly leaseBytes: number;
  /** Calls whose results may be held or in flight at one time. 2 unless given. */
  readonly leases?: number;
  /** A shard travels in chunks of this many bytes, one put and one signal each. 256 KiB unless given. */
  readonly chunkBytes?: number;
  /** Thread blocks: on the `fast` executor each is one thread that copies, the stream's own among them. 1 unless given. */
  readonly blocks?: number;
  /**
   * Where the kernel runs. `fast` (default): one lane per block, bulk copies. `simt`: every lane a fiber under a seeded interleaver, for tests of the paths
   * that GPUs take.
   */
  readonly executor?: 'fast' | { readonly lanes: number; readonly warpLanes: number; readonly seed: number };
  /**
   * Bytes of a send and of a receive buffer for the staged variant (three copies of every byte): the baseline that the direct one is measured against. Needs
   * a load/store transport and `leases: 1`. 0 unless given: direct.
   */
  readonly stagingBytes?: number;
  /** Ends a call that waits for peers. EP_TIMEOUT_MS unless given. */
  readonly timeoutMs?: number;
  readonly stream?: HostStream;
  readonly signal?: AbortSignal;
}

export interface RunOptions {
  /** Ends the call: it rejects with `signal.reason`, and the dispatcher needs a `resync()`. */
  readonly signal?: AbortSignal;
  readonly timeoutMs?: number;
}

/** A dispatch that all ranks have agreed on. */
export interface BoundDispatch {
  /** Bytes that this rank sends and receives in one call, its own among them. */
  readonly bytesSent: number;
  readonly bytesReceived: number;
  readonly leaseBytes: number;
  /**
   * Collective: every rank runs the same dispatches in the same order. `sources` by part name. Resolves when everything for this rank has arrived.
   * Throws `EP_BUSY` while the lease that is due is still held here. After a timeout, an abort or a lost peer all calls reject with `EP_POISONED`
   * until `resync()`.
   */
  run(sources: Readonly<Record<string, Tensor>>, options?: RunOptions): Work<Lease>;
}

const DEFAULT_CHUNK_BYTES = 256 * 1024;
/** From this payload on, copies go past the caches. */
const NON_TEMPORAL_BYTES = 8 * 1024 * 1024;
const STAGE_NAMES = ['', 'to release its receive tensor', 'to send its chunks', 'to make room in its queue'];

interface Layout {
  readonly leases: number;
  readonly leaseBytes: number;
  readonly worldSize: number;
  /** Of each of the two staging buffers; 0: none. They lie behind everything else. */
  readonly stagingBytes: number;
}

const arrivalSlot = (layout: Layout, lease: number): number => 2 * lease * layout.worldSize;
const creditSlot = (layout: Layout, lease: number): number => (2 * lease + 1) * layout.worldSize;
const agreementPlace = (layout: Layout) => ({
  byteOffset: layout.leases * layout.leaseBytes,
  slot: 2 * layout.leases * layout.worldSize,
});

const stagingPlace = (layout: Layout): number =>
  Math.ceil((layout.leases * layout.leaseBytes + agreementBytes(layout.worldSize)) / 4096) * 4096;

/** Collective. Allocates the receive memory and meets the other ranks; `EP_MISMATCH` names ranks with other options. */
export async function openDispatcher(transport: DispatchTransport, options: DispatcherOptions): Promise<Dispatcher> {
  const where = 'openDispatcher';
  const leases = checkInteger(options.leases ?? 2, 'leases', where, 1, 1024);
  const requested = checkInteger(options.leaseBytes, 'leaseBytes', where);
  const chunkBytes = checkInteger(options.chunkBytes ?? DEFAULT_CHUNK_BYTES, 'chunkBytes', where, 1);
  const blocks = checkInteger(options.blocks ?? 1, 'blocks', where, 1, 1024);
  const leaseBytes = Math.ceil(requested / 4096) * 4096;
  const { worldSize } = transport;
  const stagingBytes = Math.ceil(checkInteger(options.stagingBytes ?? 0, 'stagingBytes', where) / 4096) * 4096;
  // One staging buffer serves all calls: the credit of the only lease is what keeps the next call out of it.
  if (stagingBytes > 0) checkInteger(leases, 'leases of a staged dispatcher', where, 1, 1);
  const layout = { leases, leaseBytes, worldSize, stagingBytes };
  const simt = options.executor === undefined || options.executor === 'fast' ? undefined : options.executor;
  const signalSlots = 2 * leases * worldSize + agreementSlots(worldSize);
  if (signalSlots > transport.capabilities.maxSignalSlots) {
    throw new EpError(
      'EP_CAPACITY',
      `${where}: ${leases} leases over ${worldSize} ranks need ${signalSlots} signal slots, ${transport.name} has ${transport.capabilities.maxSignalSlots}`,
      { context: { needed: signalSlots, available: transport.capabilities.maxSignalSlots } },
    );
  }
  const wait = {
    timeoutMs: options.timeoutMs ?? defaultTimeoutMs(),
    ...(options.signal ? { signal: options.signal } : {}),
  };
  const memory = await transport.allocate({
    byteLength: stagingPlace(layout) + 2 * stagingBytes,
    signalSlots,
    ...wait,
  });
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, memory, endpoints, agreementPlace(layout));
    const ownStream = options.stream === undefined;
    const stream = options.stream ?? new HostStream();
    const dispatcher = new Dispatcher({
      transport,
      memory,
      endpoints,
      agreement,
      stream,
      ownStream,
      handle: transport.device(memory),
      layout,
      chunkBytes,
      blocks,
      simt,
      timeoutMs: wait.timeoutMs,
    });
    try {
      await dispatcher.agree(where, `${leases} leases of ${leaseBytes} bytes, chunks of ${chunkBytes} bytes`, wait);
    } catch (error) {
      await dispatcher.close();
      throw error;
    }
    return dispatcher;
  } catch (error) {
    await memory.close();
    throw error;
  }
}

interface DispatcherInit {
  readonly transport: DispatchTransport;
  readonly memory: SymmetricMemory;
  readonly endpoints: readonly Endpoint<'bundled' | 'add'>[];
  readonly agreement: Agreement;
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
  readonly layout: Layout;
  readonly chunkBytes: number;
  readonly blocks: number;
  readonly simt: DispatchDescription['simt'];
  readonly timeoutMs: number;
}

export class Dispatcher extends Resource implements Closeable {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly #init: DispatcherInit;
  readonly #owner = new WorkOwner('dispatcher');
  readonly #slots: readonly LeaseSlot[];
  /** Per lease and rank, absolute counter values: what has been awaited from, and what must be granted by, that rank. */
  readonly #arrived: readonly BigUint64Array[];
  readonly #granted: readonly BigUint64Array[];
  #sequence = 0n;
  /** Call number of this epoch: decides which lease is due, so all ranks must agree on it. */
  #call = 0;
  #poison: { readonly reason: unknown } | undefined;
  #resyncing = false;

  constructor(init: DispatcherInit) {
    super('dispatcher');
    this.#init = init;
    this.rank = init.transport.rank;
    this.worldSize = init.transport.worldSize;
    const { leases, worldSize } = init.layout;
    this.#slots = Array.from({ length: leases }, (_, index) => new LeaseSlot(index));
    this.#arrived = this.#slots.map(() => new BigUint64Array(worldSize));
    this.#granted = this.#slots.map(() => new BigUint64Array(worldSize));
  }

  /** Raised by every `resync()`. */
  get epoch(): number {
    return this.#init.agreement.epoch;
  }

  /** True from a failed call to the next `resync()`. */
  get poisoned(): boolean {
    return this.#poison !== undefined;
  }

  /**
   * Collective, once for every set of plans: checks that all ranks hold the same plans, row sizes and dtypes (`EP_MISMATCH` names the odd ranks), and that
   * each dispatch fits a lease (`EP_CAPACITY`).
   */
  async bind<const K extends string>(
    specs: Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions = {},
  ): Promise<Record<K, BoundDispatch>> {
    return this.guard('bind', async () => {
      this.#checkUsable();
      const { layout, chunkBytes } = this.#init;
      const place = { rank: this.rank, worldSize: this.worldSize, chunkBytes, leaseBytes: layout.leaseBytes };
      let bound: [string, BoundSpec][] = [];
      let refusal: { readonly reason: unknown } | undefined;
      try {
        bound = Object.entries<readonly PartSpec[]>(specs).map(([name, parts]) => [name, bindSpec(parts, place)]);
      } catch (reason) {
        // The others must hear of it instead of waiting for this rank.
        refusal = { reason };
      }
      const identity = refusal
        ? 'a plan that this rank refused'
        : bound.map(([name, spec]) => `${name}: ${spec.identity}`).join('\n');
      try {
        await this.agree('bind', identity, options);
      } catch (error) {
        if (refusal === undefined) throw error;
      }
      if (refusal !== undefined) throw refusal.reason;
      const entries = bound.map(([name, spec]) => [name, this.#bound(name, spec)]);
      return Object.fromEntries(entries) as Record<K, BoundDispatch>;
    });
  }

  /** Collective: throws `EP_MISMATCH` naming the ranks whose text is another one. */
  async agree(where: string, text: string, options: WaitOptions): Promise<void> {
    const record = new Uint8Array(RECORD_BYTES);
    const { createHash } = await import('node:crypto');
    record.set(createHash('sha256').update(text).digest());
    new TextEncoder().encodeInto(where, record.subarray(32));
    const records = await this.#init.agreement.exchange(record, { timeoutMs: this.#init.timeoutMs, ...options });
    const odd = records.flatMap((other, rank) => (Buffer.compare(other, record) === 0 ? [] : [rank]));
    if (odd.length === 0) return;
    // The largest camp is taken to be right, so that a single odd rank is named rather than everyone else.
    const camps = new Map<string, number[]>();
    for (const [rank, other] of records.entries()) {
      const key = Buffer.from(other).toString('hex');
      camps.set(key, [...(camps.get(key) ?? []), rank]);
    }
    const shown = [...camps.values()].sort((a, b) => a.length - b.length);
    const largest = shown.at(-1)!;
    const minority = largest.length * 2 > this.worldSize ? shown.slice(0, -1).flat() : odd;
    throw new EpError(
      'EP_MISMATCH',
      `${where}: ${formatRanks(minority)} gave other plans or options than the rest; this rank: ${text.slice(0, 400)}`,
      {
        context: { ranks: minority, own: text },
      },
    );
  }

  /**
   * Collective, from whatever state each rank is in: ends what is in flight, agrees on the next epoch, forgets all counts and leases. Held leases are
   * revoked. Rejects with `EP_TIMEOUT` or `EP_PEER_LOST` naming who did not take part.
   */
  async resync(options: WaitOptions = {}): Promise<void> {
    await this.guard('resync', async () => {
      if (this.#resyncing) throw new EpError('EP_BUSY', 'resync: one is under way already');
      this.#resyncing = true;
      try {
        const reason = new EpError('EP_ABORTED', 'the dispatcher was resynchronised');
        this.#poison ??= { reason };
        this.#cancel.abort(reason);
        await this.#owner.idle();
        this.#cancel = new AbortController();
        const wait = { timeoutMs: this.#init.timeoutMs, ...options };
        // What kernels and JS have posted must have landed, or been given up, before anyone trusts a counter.
        await Promise.all(this.#init.endpoints.map((endpoint) => endpoint.flush(wait)));
        await this.#init.agreement.resync(() => this.#rebase(), wait);
        this.#poison = undefined;
      } finally {
        this.#resyncing = false;
      }
    });
  }

  /** Ends calls in flight at `resync()` and `close()`. */
  #cancel = new AbortController();

  protected override async release(): Promise<void> {
    this.#cancel.abort(new EpError('EP_ABORTED', 'the dispatcher was closed'));
    await this.#owner.idle();
    for (const slot of this.#slots) slot.held?.revoke();
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
    this.#owner.check();
  }

  #rebase(): void {
    const { memory, layout } = this.#init;
    for (const slot of this.#slots) {
      slot.held?.revoke();
      slot.held = undefined;
      slot.uses = 0;
      for (let rank = 0; rank < this.worldSize; rank++) {
        this.#arrived[slot.index]![rank] = memory.signals.peek(arrivalSlot(layout, slot.index) + rank);
        this.#granted[slot.index]![rank] = memory.signals.peek(creditSlot(layout, slot.index) + rank);
      }
    }
    this.#call = 0;
  }

  #checkUsable(): void {
    this.#owner.check();
    if (this.#poison === undefined) return;
    const { reason } = this.#poison;
    const text = reason instanceof Error ? reason.message : String(reason);
    throw new EpError('EP_POISONED', `an earlier call failed (${text}): all ranks must call resync()`, {
      cause: reason,
    });
  }

  #bound(name: string, spec: BoundSpec): BoundDispatch {
    return {
      bytesSent: spec.bytesSent,
      bytesReceived: spec.bytesReceived,
      leaseBytes: spec.leaseBytes,
      run: (sources, options) => this.#run(name, spec, sources, options ?? {}),
    };
  }

  #run(name: string, spec: BoundSpec, sources: Readonly<Record<string, Tensor>>, options: RunOptions): Work<Lease> {
    this.checkOpen(name);
    this.#checkUsable();
    options.signal?.throwIfAborted();
    const slot = this.#slots[this.#call % this.#slots.length]!;
    if (slot.held !== undefined) {
      throw new EpError(
        'EP_BUSY',
        `${name}: lease ${slot.index} of ${this.#slots.length} is still held by an earlier call: release() it, or open with more leases`,
        {
          context: { lease: slot.index, leases: this.#slots.length },
        },
      );
    }
    // Everything that can be refused is refused before the call counts: the other ranks' counters must not wait for it.
    const operands = spec.parts.map((part) => {
      const source = sources[part.spec.name];
      if (source === undefined)
        throw new EpError('EP_INVALID_ARGUMENT', `${name}: source ${part.spec.name} is missing`);
      if (source.dtype !== part.spec.dtype) {
        throw new EpError(
          'EP_INVALID_ARGUMENT',
          `${name}: source ${part.spec.name} must be ${part.spec.dtype}, found ${source.dtype}`,
        );
      }
      return sourceOperand(source, `${name} ${part.spec.name}`, part.sendRows, part.rowElements);
    });
    const description = this.#describe(spec, slot, operands, options);
    const letGo = this.hold(name);
    const control = createWork<Lease>({ op: name, sequence: this.#sequence++, owner: this.#owner });
    this.#call++;
    slot.uses++;
    const stagedBytes = operands.reduce((sum, operand) => sum + operand.stagedBytes, 0);
    const lease = new HeldLease(this.#tensors(spec, slot), stagedBytes, () => this.#give(slot));
    slot.held = lease;
    // close() cuts off what waits for peers: they may never come.
    const cuts = [this.#cancel.signal, this.closing];
    const linked = linkSignals(options.signal, ...cuts);
    this.#init.stream
      .launch((stream) => stream.dispatch(description), linked.signal)
      .then(
        (outcome) => {
          linked.unlink();
          letGo();
          if (outcome.status === 0) {
            this.#zeroGaps(spec, slot);
            control.resolve(lease);
          } else {
            const error = this.#failure(name, outcome, description);
            this.#poison ??= { reason: error };
            control.reject(error);
          }
        },
        (reason: unknown) => {
          linked.unlink();
          letGo();
          this.#poison ??= { reason };
          if (cuts.some((cut) => cut.aborted && cut.reason === reason)) control.abort(reason);
          else control.reject(reason);
        },
      );
    return control.work;
  }

  #describe(
    spec: BoundSpec,
    slot: LeaseSlot,
    operands: readonly SourceOperand[],
    options: RunOptions,
  ): DispatchDescription {
    const { layout, memory, handle, blocks, simt } = this.#init;
    const staging = this.#staging(spec);
    const base = slot.index * layout.leaseBytes;
    const arrivals = new BigUint64Array(this.worldSize);
    for (let rank = 0; rank < this.worldSize; rank++) {
      const chunks = spec.chunksFrom[rank]!;
      if (chunks === 0) continue;
      this.#arrived[slot.index]![rank]! += BigInt(chunks);
      arrivals[rank] = this.#arrived[slot.index]![rank]!;
    }
    // The n-th use of a lease needs n - 1 grants of every receiver, whoever it was that sent in those uses: a receiver may still hold another's rows.
    const credits = new BigUint64Array(this.worldSize);
    if (slot.uses > 0)
      for (let rank = 0; rank < this.worldSize; rank++)
        credits[rank] = this.#granted[slot.index]![rank]! + BigInt(slot.uses);
    const local = nativePlaceOf(memory.view('u8', base, layout.leaseBytes));
    if (local === undefined) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `the memory of ${this.#init.transport.name} is not in native hands: its views must be registered with @ep/native`,
      );
    }
    return {
      handle: handle.bytes,
      parts: spec.parts.map((part, i) => ({
        source: operands[i]!.operand,
        srcOffset: operands[i]!.byteOffset,
        strideBytes: operands[i]!.strideBytes,
        rowBytes: part.rowBytes,
        dstOffset: base + part.receiveOffset,
        dstRows: part.receiveCapacity,
        program: part.program,
        ...(staging === undefined ? {} : { staging: staging[i]! }),
      })),
      sums: spec.parts.flatMap((part) =>
        part.sum === undefined
          ? []
          : [
              {
                source: local.operand,
                srcOffset: local.byteOffset + part.receiveOffset,
                target: local.operand,
                dstOffset: local.byteOffset + part.sum.offset,
                strideBytes: part.rowBytes,
                rowElements: part.rowElements,
                dtype: part.sum.dtype,
                program: part.sum.program,
              },
            ],
      ),
      arrivalSlot: arrivalSlot(layout, slot.index),
      creditSlot: creditSlot(layout, slot.index),
      arrivals,
      credits,
      nonTemporal: spec.bytesSent >= NON_TEMPORAL_BYTES,
      blocks,
      ...(simt === undefined ? {} : { simt }),
      timeoutMs: options.timeoutMs ?? this.#init.timeoutMs,
    };
  }

  /** Send and receive buffers of the staged variant, one of each per part, back to back. */
  #staging(spec: BoundSpec): NonNullable<DispatchDescription['parts'][number]['staging']>[] | undefined {
    const { layout } = this.#init;
    if (layout.stagingBytes === 0) return undefined;
    const base = stagingPlace(layout);
    let sent = 0;
    let received = 0;
    const buffers = spec.parts.map((part) => {
      const sendRows = part.sendRows;
      const buffer = {
        sendOffset: base + sent,
        recvOffset: base + layout.stagingBytes + received,
        sendRows,
        recvRows: part.receiveRows,
      };
      sent += sendRows * part.rowBytes;
      // The largest receiver's size: offsets of later parts must be the same on all ranks.
      received += part.receiveCapacity * part.rowBytes;
      return buffer;
    });
    if (sent > layout.stagingBytes || received > layout.stagingBytes) {
      throw new EpError(
        'EP_CAPACITY',
        `staging buffers of ${layout.stagingBytes} bytes hold neither ${sent} bytes sent nor ${received} received`,
        {
          context: { needed: Math.max(sent, received), stagingBytes: layout.stagingBytes },
        },
      );
    }
    return buffers;
  }

  #tensors(spec: BoundSpec, slot: LeaseSlot): Readonly<Record<string, Tensor>> {
    const base = slot.index * this.#init.layout.leaseBytes;
    return Object.fromEntries(spec.parts.map((part) => [part.spec.name, this.#tensorOf(part, base)]));
  }

  #tensorOf(part: BoundPart, base: number): Tensor {
    const { dtype, rowShape } = part.spec;
    const rows = part.sum?.rows ?? part.receiveRows;
    const offset = base + (part.sum?.offset ?? part.receiveOffset);
    return tensor(dtype, [rows, ...rowShape], this.#init.memory.view(dtype, offset, rows * part.rowElements));
  }

  #zeroGaps(spec: BoundSpec, slot: LeaseSlot): void {
    for (const part of spec.parts) {
      if (part.gaps.length === 0 || part.sum !== undefined) continue;
      const offset = slot.index * this.#init.layout.leaseBytes + part.receiveOffset;
      const bytes = this.#init.memory.view('u8', offset, part.receiveRows * part.rowBytes);
      for (const [row, rows] of part.gaps) bytes.fill(0, row * part.rowBytes, (row + rows) * part.rowBytes);
    }
  }

  #give(slot: LeaseSlot): void {
    slot.held = undefined;
    if (this.closed) return;
    const { memory, layout, endpoints } = this.#init;
    const update = { slot: creditSlot(layout, slot.index) + this.rank, op: 'add' as const, value: 1n };
    for (const endpoint of endpoints) endpoint.signal(memory, update);
  }

  #failure(name: string, outcome: Outcome, description: DispatchDescription): EpError {
    const code = codeOfStatus(outcome.status);
    const { memory } = this.#init;
    const late = [...description.arrivals].flatMap((expected, rank) =>
      expected !== 0n && memory.signals.peek(description.arrivalSlot + rank) < expected ? [rank] : [],
    );
    const who = outcome.rank >= 0 ? `rank ${outcome.rank} ${STAGE_NAMES[outcome.stage] ?? ''}` : 'its peers';
    const verb =
      code === 'EP_PEER_LOST' ? 'lost' : code === 'EP_TIMEOUT' ? 'timed out waiting for' : 'ended while waiting for';
    const missing = late.length > 0 ? `; nothing complete from ${formatRanks(late)}` : '';
    return new EpError(
      code,
      `${name}: ${verb} ${who}: expected count ${outcome.expected}, found ${outcome.found}${missing}`,
      {
        context: {
          rank: outcome.rank,
          stage: outcome.stage,
          expected: outcome.expected,
          found: outcome.found,
          awaited: late,
        },
      },
    );
  }
}
