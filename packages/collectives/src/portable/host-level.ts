/** What the ranks of one host do among themselves for a group of several hosts: calls of an engine of their own, one after the other. */
import { type DType, EpError, elementBytes, type Storage, viewStorage } from '@ep/core';
import type { EngineCall, GroupEngine } from '../engine.js';
import type { Placement } from './placement.js';

/** Bytes of one rank's share of a piece: a call travels in such pieces, so that the host and the network work at the same time. */
export const PIECE_BYTES = 2 ** 20;
/** Pieces under way at a time. */
export const PIECES = 2;

export type HostCall = Pick<EngineCall, 'kind' | 'dtype' | 'inputs' | 'outputs' | 'signal'> &
  Partial<Pick<EngineCall, 'reduceOp' | 'root'>>;

export class HostLevel {
  readonly placement: Placement;
  #engine: GroupEngine | undefined;
  #sequence = 0;
  #staging: Uint8Array | undefined;

  constructor(placement: Placement, engine: GroupEngine) {
    this.placement = placement;
    this.#engine = engine;
  }

  /** The next call of this host's ranks, who all make the same. Ranks are places on the host. It has no limit of time: `signal` ends it. */
  async run(call: HostCall): Promise<void> {
    this.#sequence++;
    await this.#opened.run({ root: -1, ...call, sequence: this.#sequence, timeoutMs: Number.POSITIVE_INFINITY });
  }

  /** Elements in memory of the host, for what its ranks have come to in a piece: others go on using it until the piece is over. `length` of them are `PIECE_BYTES` at most. */
  staging<D extends DType>(dtype: D, piece: number, length: number): Storage[D] {
    this.#staging ??= this.#opened.allocate('u8', PIECES * PIECE_BYTES);
    const { buffer, byteOffset } = this.#staging;
    return viewStorage(dtype, buffer, byteOffset + (piece % PIECES) * PIECE_BYTES, length);
  }

  /** HAZARD: lets go of the engine, whose segments go when nobody holds it any more; plans of calls that were cut hold this. */
  async close(): Promise<void> {
    const engine = this.#engine;
    this.#engine = undefined;
    this.#staging = undefined;
    await engine?.close();
  }

  get #opened(): GroupEngine {
    if (this.#engine === undefined) throw new EpError('EP_CLOSED', 'the engine of this host is closed');
    return this.#engine;
  }
}

/** Elements of a dtype that one rank's share of a piece has. */
export const elementsOfPiece = (dtype: DType): number => PIECE_BYTES / elementBytes(dtype);
