/**
 * Who sends what to whom in each operation that is not a small call (given.ts). N contributors, S bytes of a rank's array (of all its arrays, where there are several), all
 * counted without what a rank gives to itself:
 *
 * | operation | written by | bytes |
 * |-----------|------------|-------|
 * | broadcast | the root | (N - 1) S |
 * | all-reduce, S <= DIRECT_BYTES | everyone, to all | (N - 1) S |
 * | all-reduce of two | both, to each other | S |
 * | all-reduce | everyone: each shard to its owner, then the owner's folded shard to all | 2 (N - 1) S / N |
 * | reduce, gather | everyone but the root, to the root | S |
 * | all-gather | everyone, to all | (N - 1) S |
 * | scatter | the root | S (N - 1) / N |
 * | reduce-scatter, all-to-all | everyone, each block to its rank | S (N - 1) / N |
 * | barrier | nobody | 0 |
 */
import { createStorage } from '@ep/core';
import type { Elements, EngineCall } from '../engine.js';
import { bytesOf, CopySink, part, type Sink, Stream } from './chunks.js';
import { Fold } from './fold.js';
import type { FoldOrder } from './fold-order.js';

/** Below this an all-reduce of one round with more bytes is faster than two rounds. */
export const DIRECT_BYTES = 2048;

/** The data of one call on one rank, or of a part of it. */
export interface DataPlan {
  /** Outputs that are not there yet. */
  readonly pending: number;
  /** Peers of whose data some has not arrived. */
  readonly lacking: readonly number[];
  /** Where what this peer sends belongs, also before `begin`. */
  readonly sink: (peer: number, stream: number) => Sink | undefined;
  /** Reads inputs and sends, from now on. */
  readonly begin: () => void;
  /** Finds out at once what it would find out later, and may complete the call. */
  readonly look?: () => void;
  /** Nothing more is sent, and what is held is given back. */
  readonly cut: () => void;
  /** Once nothing is pending, all ranks have their data, and know it of each other: nobody tells it any more. */
  readonly agreed?: boolean;
  /** Resolves when nothing uses arrays of the call any more; undefined where nothing does after `cut`. */
  readonly idle?: () => Promise<unknown>;
}

export interface PlanInit {
  readonly call: EngineCall;
  readonly rank: number;
  /** Ascending; this rank is among them. */
  readonly contributors: readonly number[];
  readonly order: FoldOrder;
  /** Number of the first stream to and from each peer, where a call has several plans; 0 unless given. */
  readonly firstStream?: number;
  readonly send: (peer: number, stream: Stream) => void;
  readonly onSent: (byteLength: number) => void;
  /** More may be sent to everyone. */
  readonly onAdvance: () => void;
  /** All outputs of this rank are there. Never called from within the constructor. */
  readonly onComplete: () => void;
  /** An array of the call is no longer there. */
  readonly onFailed: (error: unknown) => void;
}

interface Outgoing {
  readonly peer: number;
  readonly stream: Stream;
}

export class Plan implements DataPlan {
  readonly #init: PlanInit;
  readonly #outgoing: Outgoing[] = [];
  readonly #incoming = new Map<number, Sink[]>();
  readonly #folds: Fold[] = [];
  /** What is copied when it begins. */
  readonly #kept: (() => void)[] = [];
  #pending = 0;

  constructor(init: PlanInit) {
    this.#init = init;
    for (const peer of init.contributors) this.#incoming.set(peer, []);
    this.#lay();
  }

  get pending(): number {
    return this.#pending;
  }

  get lacking(): readonly number[] {
    return this.#peers.filter((peer) => this.#incoming.get(peer)?.some(({ lacks }) => lacks));
  }

  /** Nothing of the inputs is read any more. */
  get sent(): boolean {
    return this.#outgoing.every(({ stream }) => stream.finished);
  }

  readonly sink = (peer: number, stream: number): Sink | undefined =>
    this.#incoming.get(peer)?.[stream - (this.#init.firstStream ?? 0)];

  /** HAZARD: the caller may transfer an array while its call is under way; what would be written there then throws, within the lane of all calls: it ends the group unless it is this call's. */
  #guarded(sink: Sink): Sink {
    return {
      get lacks() {
        return sink.lacks;
      },
      accept: (chunk, release) => {
        let held = true;
        const once = (): void => {
          if (held) release();
          held = false;
        };
        try {
          sink.accept(chunk, once);
        } catch (error) {
          once();
          this.#failLater(error);
        }
      },
      drop: sink.drop,
    };
  }

  /** Not from within a lane. */
  #failLater(error: unknown): void {
    queueMicrotask(() => this.#init.onFailed(error));
  }

  readonly begin = (): void => {
    for (const copy of this.#kept) copy();
    for (const { peer, stream } of this.#outgoing) if (!stream.finished) this.#init.send(peer, stream);
    for (const fold of this.#folds) fold.begin();
  };

  readonly cut = (): void => {
    for (const { stream } of this.#outgoing) stream.cut();
    for (const sinks of this.#incoming.values()) for (const sink of sinks) sink.drop();
  };

  get #peers(): readonly number[] {
    return this.#init.contributors.filter((peer) => peer !== this.#init.rank);
  }

  #lay(): void {
    const { call, rank, contributors } = this.#init;
    const { kind, inputs, outputs, root } = call;
    const atRoot = rank === root;
    switch (kind) {
      case 'barrier':
        return;
      case 'broadcast':
        if (atRoot) for (const peer of this.#peers) this.#send(peer, inputs[0]!);
        else this.#receive(root, outputs[0]!);
        return;
      case 'all-reduce':
        if (inputs[0]!.byteLength <= DIRECT_BYTES) this.#allReduceDirect(inputs[0]!, outputs[0]!);
        else if (contributors.length === 2) this.#allReduceOfTwo(inputs[0]!, outputs[0]!);
        else this.#allReduceByShards(inputs[0]!, outputs[0]!);
        return;
      case 'reduce':
        if (atRoot) this.#fold(inputs[0]!, outputs[0]!, () => {});
        else this.#send(root, inputs[0]!);
        return;
      case 'all-gather':
        for (const peer of this.#peers) {
          this.#send(peer, inputs[0]!);
          this.#receive(peer, outputs[peer]!);
        }
        this.#keep(inputs[0]!, outputs[rank]!);
        return;
      case 'gather':
        if (!atRoot) {
          this.#send(root, inputs[0]!);
          return;
        }
        for (const peer of this.#peers) this.#receive(peer, outputs[peer]!);
        this.#keep(inputs[0]!, outputs[rank]!);
        return;
      case 'scatter':
        if (!atRoot) {
          this.#receive(root, outputs[0]!);
          return;
        }
        for (const peer of this.#peers) this.#send(peer, inputs[peer]!);
        this.#keep(inputs[rank]!, outputs[0]!);
        return;
      case 'reduce-scatter':
        for (const peer of this.#peers) this.#send(peer, inputs[peer]!);
        this.#fold(inputs[rank]!, outputs[0]!, () => {});
        return;
      case 'all-to-all':
        for (const peer of contributors) {
          if (peer === rank) continue;
          this.#send(peer, inputs[peer]!);
          this.#receive(peer, outputs[peer]!);
        }
        this.#keep(inputs[rank]!, outputs[rank]!);
    }
  }

  #allReduceDirect(input: Elements, output: Elements): void {
    // The fold may end while a peer's slots are still full: what is sent must not be what is folded into.
    const sent = createStorage(this.#init.call.dtype, input.length);
    this.#kept.push(() => sent.set(input as never));
    for (const peer of this.#peers) this.#send(peer, sent);
    this.#fold(input, output, () => {});
  }

  /** In one round: as many bytes as by shards. Both fold all of it, in the same order. */
  #allReduceOfTwo(input: Elements, output: Elements): void {
    const isInPlace = input.buffer === output.buffer;
    const stream = this.#send(this.#peers[0]!, input, input.byteLength, () => {
      // HAZARD: not from within the lane that is sending: the end of a call may send something else.
      if (isInPlace) {
        // HAZARD: its array may be gone by then, and nobody would catch what that throws.
        queueMicrotask(() => {
          try {
            fold.advance();
          } catch (error) {
            this.#failLater(error);
          }
        });
      }
    });
    // HAZARD: in place, what has not been sent must not be what is folded into.
    const fold = this.#fold(input, output, () => {}, isInPlace ? () => stream.sentBytes : undefined);
  }

  /** In place too: a shard of another rank is overwritten only by what that rank folded, and so after it has got our part of it. */
  #allReduceByShards(input: Elements, output: Elements): void {
    const { rank, contributors } = this.#init;
    const { length } = input;
    const share = Math.ceil(length / contributors.length);
    const shard = (elements: Elements, peer: number): Elements => {
      const index = contributors.indexOf(peer);
      return part(elements, Math.min(length, index * share), Math.min(length, (index + 1) * share));
    };
    const own = shard(output, rank);
    const folded: Stream[] = [];
    for (const peer of this.#peers) this.#send(peer, shard(input, peer));
    this.#fold(shard(input, rank), own, (byteOffset) => {
      for (const stream of folded) stream.advance(byteOffset);
      this.#init.onAdvance();
    });
    for (const peer of this.#peers) {
      folded.push(this.#send(peer, own, 0));
      this.#receive(peer, shard(output, peer));
    }
  }

  #send(
    peer: number,
    elements: Elements,
    available: number = elements.byteLength,
    onOwnSent: () => void = () => {},
  ): Stream {
    const { call, firstStream = 0, onSent } = this.#init;
    const before = this.#outgoing.filter((one) => one.peer === peer).length;
    const stream = new Stream({
      id: call.sequence,
      stream: firstStream + before,
      bytes: bytesOf(elements),
      available,
      onSent: (byteLength) => {
        onSent(byteLength);
        onOwnSent();
      },
      onGone: () => this.#init.onFailed(new TypeError('an array that is sent is no longer there')),
    });
    this.#outgoing.push({ peer, stream });
    return stream;
  }

  #receive(peer: number, elements: Elements): void {
    this.#incoming.get(peer)!.push(this.#guarded(new CopySink(bytesOf(elements), () => this.#done())));
    if (elements.byteLength > 0) this.#pending++;
  }

  #keep(from: Elements, to: Elements): void {
    this.#kept.push(() => bytesOf(to).set(bytesOf(from)));
  }

  #fold(own: Elements, target: Elements, onFolded: (byteOffset: number) => void, writable?: () => number): Fold {
    const { call, rank, contributors, order } = this.#init;
    const fold = new Fold({
      dtype: call.dtype,
      op: call.reduceOp!,
      order,
      target,
      own,
      rank,
      contributors,
      onFolded: (byteOffset) => {
        onFolded(byteOffset);
        if (fold.complete) this.#done();
      },
      ...(writable && { writable }),
    });
    for (const peer of this.#peers) this.#incoming.get(peer)!.push(this.#guarded(fold.sink(peer)));
    this.#folds.push(fold);
    if (target.length > 0) this.#pending++;
    return fold;
  }

  #done(): void {
    this.#pending--;
    if (this.#pending === 0) this.#init.onComplete();
  }
}
