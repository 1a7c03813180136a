/**
 * Who sends what to whom in each operation. N contributors, S bytes of a rank's array (of all its arrays, where there are several), all counted without
 * what a rank gives to itself:
 *
 * | operation | written by | bytes |
 * |-----------|------------|-------|
 * | broadcast | the root | (N - 1) S |
 * | all-reduce, S <= DIRECT_BYTES | everyone, to all | (N - 1) S |
 * | all-reduce | everyone: each shard to its owner, then the owner's folded shard to all | 2 (N - 1) S / N |
 * | reduce, gather | everyone but the root, to the root | S |
 * | all-gather | everyone, to all | (N - 1) S |
 * | scatter | the root | S (N - 1) / N |
 * | reduce-scatter, all-to-all | everyone, each block to its rank | S (N - 1) / N |
 * | barrier | nobody | 0 |
 */
import type { Elements, EngineCall } from '../engine.js';
import { bytesOf, CopySink, part, type Sink, Stream } from './chunks.js';
import { Fold } from './fold.js';

/** Below this an all-reduce of one round with more bytes is faster than two rounds. */
export const DIRECT_BYTES = 2048;

export interface PlanInit {
  readonly call: EngineCall;
  readonly rank: number;
  /** Ascending; this rank is among them. */
  readonly contributors: readonly number[];
  readonly onSent: (byteLength: number) => void;
  /** More may be sent to everyone. */
  readonly onAdvance: () => void;
  /** All outputs of this rank are there. Never called from within the constructor. */
  readonly onComplete: () => void;
}

export class Plan {
  readonly #init: PlanInit;
  readonly #outgoing = new Map<number, Stream[]>();
  readonly #incoming = new Map<number, Sink[]>();
  readonly #folds: Fold[] = [];
  #pending = 0;

  constructor(init: PlanInit) {
    this.#init = init;
    for (const peer of init.contributors) {
      this.#outgoing.set(peer, []);
      this.#incoming.set(peer, []);
    }
    this.#lay();
  }

  /** Outputs that are not there yet. */
  get pending(): number {
    return this.#pending;
  }

  outgoing(peer: number): readonly Stream[] {
    return this.#outgoing.get(peer) ?? [];
  }

  sink(peer: number, stream: number): Sink | undefined {
    return this.#incoming.get(peer)?.[stream];
  }

  begin(): void {
    for (const fold of this.#folds) fold.begin();
  }

  /** Nothing more is sent, and what is held is given back. */
  cut(): void {
    for (const streams of this.#outgoing.values()) for (const stream of streams) stream.cut();
    for (const sinks of this.#incoming.values()) for (const sink of sinks) sink.drop();
  }

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
    const sent = input.slice();
    for (const peer of this.#peers) this.#send(peer, sent);
    this.#fold(input, output, () => {});
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

  #send(peer: number, elements: Elements, available: number = elements.byteLength): Stream {
    const streams = this.#outgoing.get(peer)!;
    const { call, onSent } = this.#init;
    const stream = new Stream({
      id: call.sequence,
      stream: streams.length,
      bytes: bytesOf(elements),
      available,
      onSent,
    });
    streams.push(stream);
    return stream;
  }

  #receive(peer: number, elements: Elements): void {
    this.#incoming.get(peer)!.push(new CopySink(bytesOf(elements), () => this.#done()));
    if (elements.byteLength > 0) this.#pending++;
  }

  #keep(from: Elements, to: Elements): void {
    bytesOf(to).set(bytesOf(from));
  }

  #fold(own: Elements, target: Elements, onFolded: (byteOffset: number) => void): void {
    const { call, rank, contributors } = this.#init;
    const fold = new Fold({
      dtype: call.dtype,
      op: call.reduceOp!,
      target,
      own,
      rank,
      contributors,
      onFolded: (byteOffset) => {
        onFolded(byteOffset);
        if (fold.complete) this.#done();
      },
    });
    for (const peer of this.#peers) this.#incoming.get(peer)!.push(fold.sink(peer));
    this.#folds.push(fold);
    if (target.length > 0) this.#pending++;
  }

  #done(): void {
    this.#pending--;
    if (this.#pending === 0) this.#init.onComplete();
  }
}
