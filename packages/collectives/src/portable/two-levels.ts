/**
 * The data of a call in two levels: the ranks of each host through the memory that they share, and each of them with its counterparts on the other hosts, those of its
 * place there, through the transport. H hosts of m ranks, S bytes of a rank's array (of all its arrays, where there are several):
 *
 * | operation | on the host | between hosts | bytes that leave a host |
 * |-----------|-------------|---------------|-------------------------|
 * | all-reduce | reduce-scatter, then all-gather | all-reduce of each rank's share, as plan.ts has it | 2 (H - 1) S / H |
 * | reduce | reduce-scatter, then gather on the root's | reduce of each share to the root's host | S |
 * | reduce-scatter | one reduce-scatter for each host | each share to the rank that it is for | S (H - 1) / H |
 * | all-gather | one all-gather for each host | each rank's array to its counterparts | m (H - 1) S |
 * | broadcast | broadcast by the root, or its counterpart | the root to its counterparts | (H - 1) S, of the root's |
 * | gather, scatter | the same, on the root's | all others with the root | as in one level |
 * | all-to-all | the same | all pairs of different hosts | as in one level |
 *
 * Sums and products of f16 and bf16 are of single precision from the reduce-scatter to the end of the exchange: twice as many bytes leave a host.
 *
 * Calls are carried out in pieces: one is on the host while the one before is between hosts. All ranks of a host make the same calls of its engine in the same order,
 * which follows from the call and the placement alone.
 *
 * HAZARD: what fails on the host because of another rank is not told from here. That rank is found to be gone, or says why it gave up, to all ranks of the group at once:
 * so all end alike.
 */
import { createStorage, type DType, isEpError } from '@ep/core';
import type { Elements, EngineCall } from '../engine.js';
import { part, type Sink } from './chunks.js';
import type { PlannedCall } from './collectives-init.js';
import { levelsOf, ofHosts, partialDType, rounded, widened } from './fold-order.js';
import { elementsOfPiece, type HostCall, type HostLevel, PIECES } from './host-level.js';
import { type DataPlan, Plan, type PlanInit } from './plan.js';

/** Of an array. Smaller ones are there sooner by one step than by three. */
export const TWO_LEVELS_BYTES = 2 ** 15;

const NONE: readonly Elements[] = [];
/** Streams that an exchange has between two ranks, at most. */
const STREAMS = 2;

/** Whether a call goes in two levels: the same on all of its ranks. */
export function goesInTwoLevels({ call, contributors }: PlannedCall, { placement }: HostLevel): boolean {
  const { kind, inputs, outputs } = call;
  if (kind === 'barrier' || !placement.even) return false;
  if (contributors.length < placement.hosts.length * placement.mates.length) return false;
  // Nobody knows the lengths of all.
  if (kind === 'all-to-all') return true;
  return (inputs[0] ?? outputs[0])!.byteLength >= TWO_LEVELS_BYTES;
}

/** One plan of some ranks of different hosts, for one piece. */
class Exchange {
  readonly plan: Plan;
  readonly received: Promise<void>;
  /** Its inputs may change. */
  readonly sent: Promise<void>;
  #onReceived!: () => void;
  #onSent!: () => void;

  constructor(init: PlanInit) {
    this.received = new Promise((resolve) => {
      this.#onReceived = resolve;
    });
    this.sent = new Promise((resolve) => {
      this.#onSent = resolve;
    });
    this.plan = new Plan({
      ...init,
      onSent: (byteLength) => {
        init.onSent(byteLength);
        if (this.plan.sent) this.#onSent();
      },
      onComplete: () => this.#onReceived(),
    });
  }

  begin(): void {
    this.plan.begin();
    if (this.plan.pending === 0) this.#onReceived();
    if (this.plan.sent) this.#onSent();
  }
}

interface Piece {
  /** What the host does before the exchange. */
  readonly up?: () => Promise<void>;
  readonly exchange?: Exchange;
  /** What it does after. */
  readonly down?: () => Promise<void>;
}

type ExchangeCall = Pick<EngineCall, 'kind' | 'inputs' | 'outputs'> &
  Partial<Pick<EngineCall, 'root' | 'reduceOp' | 'dtype'>>;

export class TwoLevelPlan implements DataPlan {
  readonly #data: PlannedCall;
  readonly #host: HostLevel;
  readonly #pieces: readonly Piece[];
  readonly #cut = new AbortController();
  readonly #underWay = new Set<Promise<unknown>>();
  #done = false;

  constructor(data: PlannedCall, host: HostLevel) {
    this.#data = data;
    this.#host = host;
    this.#pieces = this.#lay();
  }

  get pending(): number {
    return this.#done ? 0 : 1;
  }

  /** On other hosts. */
  get lacking(): readonly number[] {
    return [...new Set(this.#pieces.flatMap(({ exchange }) => exchange?.plan.lacking ?? []))];
  }

  readonly sink = (peer: number, stream: number): Sink | undefined =>
    this.#pieces[Math.floor(stream / STREAMS)]?.exchange?.plan.sink(peer, stream);

  readonly begin = (): void => {
    this.#drive().then(
      () => {
        if (this.#cut.signal.aborted) return;
        this.#done = true;
        this.#data.onComplete();
      },
      (error: unknown) => {
        if (!this.#cut.signal.aborted && !isAnothers(error)) this.#data.onFailed(error);
      },
    );
  };

  readonly cut = (): void => {
    for (const { exchange } of this.#pieces) exchange?.plan.cut();
    this.#cut.abort();
  };

  readonly idle = (): Promise<unknown> => Promise.allSettled(this.#underWay);

  async #drive(): Promise<void> {
    const ups: Promise<void>[] = [];
    for (let at = 0; at < this.#pieces.length + PIECES - 1; at++) {
      const next = this.#pieces[at];
      if (next !== undefined) {
        const up = this.#raise(next, ups.at(-1));
        // It is awaited below, which may be after it has failed.
        up.catch(() => {});
        ups.push(up);
      }
      const last = at - PIECES + 1;
      if (last < 0) continue;
      await ups[last];
      const { exchange, down } = this.#pieces[last]!;
      await exchange?.received;
      await down?.();
      // The staging memory of this piece is that of a later one.
      if (at + 1 < this.#pieces.length) await exchange?.sent;
    }
  }

  /** HAZARD: the ends of calls on the host are not told in their order, and exchanges that begin in another order than on the counterparts wait for each other for ever. */
  async #raise({ up, exchange }: Piece, before: Promise<void> | undefined): Promise<void> {
    await up?.();
    await before;
    exchange?.begin();
  }

  /** Ends with an exception once the call is over for another reason. */
  async #onHost(call: Omit<HostCall, 'dtype' | 'signal'> & { readonly dtype?: DType }): Promise<void> {
    const { signal } = this.#cut;
    signal.throwIfAborted();
    const run = this.#host.run({ dtype: this.#data.call.dtype, ...call, signal });
    this.#underWay.add(run);
    try {
      await run;
    } finally {
      this.#underWay.delete(run);
    }
    signal.throwIfAborted();
  }

  #exchange(piece: number, contributors: readonly number[], call: ExchangeCall): Exchange {
    const { placement } = this.#host;
    const size = placement.hosts.length * placement.mates.length;
    const ofHost = placement.hosts.map((members) => contributors.findIndex((rank) => members.includes(rank)));
    return new Exchange({
      ...this.#data,
      call: { ...this.#data.call, ...call },
      contributors,
      order: ofHosts(size, ofHost),
      firstStream: STREAMS * piece,
    });
  }

  /** This rank and its counterparts. */
  get #column(): readonly number[] {
    const { placement } = this.#host;
    return placement.column(placement.local);
  }

  /** One array for each rank of the group, of which only those of some ranks are used. */
  #sparse(arrays: ReadonlyMap<number, Elements>, dtype: DType = this.#data.call.dtype): readonly Elements[] {
    const { hosts, mates } = this.#host.placement;
    const none = createStorage(dtype, 0);
    return Array.from({ length: hosts.length * mates.length }, (_, rank) => arrays.get(rank) ?? none);
  }

  #lay(): readonly Piece[] {
    switch (this.#data.call.kind) {
      case 'all-reduce':
      case 'reduce':
        return this.#layReduction();
      case 'reduce-scatter':
        return this.#layReduceScatter();
      case 'all-gather':
        return this.#layAllGather();
      case 'broadcast':
        return this.#layBroadcast();
      case 'gather':
      case 'scatter':
      case 'all-to-all':
        return [this.#layApart()];
      case 'barrier':
        return [];
    }
  }

  /** Cuts n elements; `share`: of a piece, what one rank has in staging memory. */
  #cutUp(elements: number, share: number, lay: (piece: number, begin: number, end: number) => Piece): readonly Piece[] {
    const length = Math.max(1, share);
    return Array.from({ length: Math.ceil(elements / length) }, (_, piece) =>
      lay(piece, piece * length, Math.min(elements, (piece + 1) * length)),
    );
  }

  #layReduction(): readonly Piece[] {
    const { call, rank } = this.#data;
    const { mates, hosts, local } = this.#host.placement;
    const { within, across } = levelsOf(call.reduceOp!);
    const [input, output] = [call.inputs[0]!, call.outputs[0]];
    const rootHost = hosts.find((members) => members.includes(call.root));
    const m = mates.length;
    const { dtype } = call;
    const wide = partialDType(dtype, call.reduceOp!);
    return this.#cutUp(input.length, m * elementsOfPiece(wide), (piece, begin, end) => {
      const share = Math.ceil((end - begin) / m);
      const own = this.#host.staging(wide, piece, share);
      // What the host's ranks share equally may be longer than the piece.
      const isWhole = m * share === end - begin;
      const parts = (whole: Elements): readonly Elements[] =>
        mates.map((_, i) => part(whole, i * share, (i + 1) * share));
      const up = (): Promise<void> => {
        const given = widened(dtype, wide, part(input, begin, end));
        const whole = isWhole ? given : createStorage(wide, m * share);
        if (!isWhole) whole.set(given as never);
        return this.#onHost({
          kind: 'reduce-scatter',
          dtype: wide,
          reduceOp: within,
          inputs: parts(whole),
          outputs: [own],
        });
      };
      /** Collects all shares, where this rank is to have them. */
      const collect = async (kind: 'all-gather' | 'gather', root: number, isTarget: boolean): Promise<void> => {
        const inputs = [rounded(dtype, wide, own)];
        if (!isTarget) return this.#onHost({ kind, root, inputs, outputs: NONE });
        const target = part(output!, begin, end);
        const whole = isWhole ? target : createStorage(dtype, m * share);
        await this.#onHost({ kind, root, inputs, outputs: parts(whole) });
        if (!isWhole) target.set(part(whole, 0, end - begin) as never);
      };
      const folded = { dtype: wide, reduceOp: across, inputs: [own] };
      if (rootHost === undefined) {
        const exchange = this.#exchange(piece, this.#column, { ...folded, kind: 'all-reduce', outputs: [own] });
        return { up, exchange, down: () => collect('all-gather', -1, true) };
      }
      const exchange = this.#exchange(piece, this.#column, {
        ...folded,
        kind: 'reduce',
        root: rootHost[local]!,
        outputs: rootHost === mates ? [own] : NONE,
      });
      if (rootHost !== mates) return { up, exchange };
      return { up, exchange, down: () => collect('gather', mates.indexOf(call.root), rank === call.root) };
    });
  }

  #layReduceScatter(): readonly Piece[] {
    const { call } = this.#data;
    const { hosts, local } = this.#host.placement;
    const { within, across } = levelsOf(call.reduceOp!);
    const output = call.outputs[0]!;
    const { dtype } = call;
    const wide = partialDType(dtype, call.reduceOp!);
    const share = Math.floor(elementsOfPiece(wide) / hosts.length);
    return this.#cutUp(output.length, share, (piece, begin, end) => {
      const staging = this.#host.staging(wide, piece, hosts.length * (end - begin));
      const folded = hosts.map((_, h) => part(staging, h * (end - begin), (h + 1) * (end - begin)));
      const up = async (): Promise<void> => {
        const ends = hosts.map((members, h) =>
          this.#onHost({
            kind: 'reduce-scatter',
            dtype: wide,
            reduceOp: within,
            inputs: members.map((rank) => widened(dtype, wide, part(call.inputs[rank]!, begin, end))),
            outputs: [folded[h]!],
          }),
        );
        await Promise.all(ends);
      };
      const target = part(output, begin, end);
      const result = wide === dtype ? target : createStorage(wide, end - begin);
      const exchange = this.#exchange(piece, this.#column, {
        kind: 'reduce-scatter',
        dtype: wide,
        reduceOp: across,
        inputs: this.#sparse(new Map(hosts.map((members, h) => [members[local]!, folded[h]!])), wide),
        outputs: [result],
      });
      if (wide === dtype) return { up, exchange };
      const down = async (): Promise<void> => target.set(rounded(dtype, wide, result) as never);
      return { up, exchange, down };
    });
  }

  #layAllGather(): readonly Piece[] {
    const { call } = this.#data;
    const { hosts, local } = this.#host.placement;
    const input = call.inputs[0]!;
    return this.#cutUp(input.length, elementsOfPiece(call.dtype), (piece, begin, end) => {
      const outputOf = (member: number): Elements => part(call.outputs[member]!, begin, end);
      const exchange = this.#exchange(piece, this.#column, {
        kind: 'all-gather',
        inputs: [part(input, begin, end)],
        outputs: this.#sparse(new Map(this.#column.map((peer) => [peer, outputOf(peer)]))),
      });
      const down = async (): Promise<void> => {
        const ends = hosts.map((members) => {
          const own = outputOf(members[local]!);
          // Not where it lies already: the arrays of a call do not overlap.
          const outputs = members.map((member, i) =>
            i === local ? createStorage(call.dtype, own.length) : outputOf(member),
          );
          return this.#onHost({ kind: 'all-gather', inputs: [own], outputs });
        });
        await Promise.all(ends);
      };
      return { exchange, down };
    });
  }

  #layBroadcast(): readonly Piece[] {
    const { call, rank } = this.#data;
    const { placement } = this.#host;
    const { hosts, local } = placement;
    const rootHost = hosts.find((members) => members.includes(call.root))!;
    const relay = rootHost.indexOf(call.root);
    const array = (call.inputs[0] ?? call.outputs[0])!;
    return this.#cutUp(array.length, elementsOfPiece(call.dtype), (piece, begin, end) => {
      const piecePart = [part(array, begin, end)];
      const atRoot = rank === call.root;
      const down = (): Promise<void> =>
        this.#onHost({
          kind: 'broadcast',
          root: relay,
          inputs: local === relay ? piecePart : NONE,
          outputs: local === relay ? NONE : piecePart,
        });
      if (local !== relay) return { down };
      const exchange = this.#exchange(piece, placement.column(relay), {
        kind: 'broadcast',
        inputs: atRoot ? piecePart : NONE,
        outputs: atRoot ? NONE : piecePart,
      });
      return { exchange, down };
    });
  }

  /** What goes between ranks of a host goes there, at the same time as all else. */
  #layApart(): Piece {
    const { call, rank, contributors } = this.#data;
    const { hosts, mates } = this.#host.placement;
    const { kind, root, inputs, outputs } = call;
    // Of an all-to-all each rank's own, of the others the root's: its own part is the root's to keep, and in an all-to-all the host's.
    const home = root < 0 ? mates : hosts.find((members) => members.includes(root))!;
    const centre = root < 0 ? rank : root;
    const members = contributors.filter((peer) => peer === centre || !home.includes(peer));
    const reached = root < 0 ? members.filter((peer) => peer !== rank) : members;
    const pick = (arrays: readonly Elements[], ranks: readonly number[]): readonly Elements[] =>
      arrays.length < contributors.length ? arrays : ranks.map((one) => arrays[one]!);
    const only = (arrays: readonly Elements[]): readonly Elements[] =>
      arrays.length < contributors.length ? arrays : this.#sparse(new Map(reached.map((one) => [one, arrays[one]!])));
    const exchange =
      members.includes(rank) && this.#exchange(0, members, { kind, inputs: only(inputs), outputs: only(outputs) });
    let onHost: Promise<void> | undefined;
    const up = async (): Promise<void> => {
      if (home !== mates) return;
      const local = { kind, root: mates.indexOf(root), inputs: pick(inputs, mates), outputs: pick(outputs, mates) };
      onHost = this.#onHost(local);
      // It is awaited below.
      onHost.catch(() => {});
    };
    const down = async (): Promise<void> => onHost;
    return { up, down, ...(exchange && { exchange }) };
  }
}

/** Of another rank's doing: it is told by that rank, or of it. */
function isAnothers(error: unknown): boolean {
  return isEpError(error) && ['EP_PEER_LOST', 'EP_ABORTED', 'EP_POISONED', 'EP_CLOSED'].includes(error.code);
}
