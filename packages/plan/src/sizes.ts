import { checkFloat64Array, checkInteger, checkObject } from './check.js';
import type { DispatchPlan, PairTable } from './dispatch-plan.js';
import { invalidArgument, PlanError } from './error.js';
import { checkDispatchPlan } from './form.js';

/** How rows travel. A shard is cut into chunks of `max(1, floor(chunkBytes / rowBytes))` rows; each chunk is one put and one signal. */
export interface TransferUnit {
  readonly rowBytes: number;
  readonly chunkBytes: number;
}

/** Parallel to a pair table of the plan: element p belongs to `plan.sent.peer[p]` or `plan.received.peer[p]`. */
export interface PairSizes {
  readonly bytes: Float64Array;
  readonly chunks: Int32Array;
}

/** Exact sizes of everything a plan moves. Bytes are exact integers (Float64Array, since they pass 2^32). */
export interface PlanSizes extends TransferUnit {
  readonly chunkRows: number;
  /** Bytes of each sender's and each receiver's tensor. */
  readonly sendBytes: Float64Array;
  readonly recvBytes: Float64Array;
  readonly sent: PairSizes;
  readonly received: PairSizes;
  /** Chunks that each rank sends, and the chunks whose signals it awaits; those from itself included. */
  readonly chunksSent: Float64Array;
  readonly chunksReceived: Float64Array;
  /** All ranks together; local = between a rank and itself. */
  readonly localBytes: number;
  readonly remoteBytes: number;
  readonly localChunks: number;
  readonly remoteChunks: number;
}

/** Chunks of a shard: `ceil(length / chunkRows)`, none for length 0. */
export function chunksOf(length: number, chunkRows: number): number {
  return Math.ceil(length / chunkRows);
}

/** Bytes and chunks per pair, buffers and totals. Throws EP_CAPACITY where bytes would exceed exact integers (2^53). */
export function sizes(plan: DispatchPlan, unit: TransferUnit): PlanSizes {
  checkDispatchPlan(plan);
  checkObject(unit, 'unit');
  const rowBytes = checkInteger(unit.rowBytes, 'rowBytes', 1, Number.MAX_SAFE_INTEGER);
  const chunkBytes = checkInteger(unit.chunkBytes, 'chunkBytes', 1, Number.MAX_SAFE_INTEGER);
  const chunkRows = Math.max(1, Math.floor(chunkBytes / rowBytes));
  const { worldSize } = plan;
  const bytesOf = (rows: number, what: string, rank: number) => {
    const bytes = rows * rowBytes;
    if (!Number.isSafeInteger(bytes)) {
      throw new PlanError(
        'EP_CAPACITY',
        `${what} of rank ${rank} has ${rows} rows of ${rowBytes} bytes, more than 2^53 bytes`,
        { rank, rows, rowBytes },
      );
    }
    return bytes;
  };
  const sendBytes = Float64Array.from(plan.sendTokens, (rows, r) => bytesOf(rows, 'the send tensor', r));
  const recvBytes = Float64Array.from(plan.recvTokens, (rows, r) => bytesOf(rows, 'the receive tensor', r));

  const sent = emptySizes(plan.sent);
  const received = emptySizes(plan.received);
  const chunksSent = new Float64Array(worldSize);
  const chunksReceived = new Float64Array(worldSize);
  const chunksTo = new Int32Array(worldSize);
  const next = plan.received.offsets.slice(0, worldSize);
  let localBytes = 0;
  let remoteBytes = 0;
  let localChunks = 0;
  let remoteChunks = 0;
  for (let r = 0; r < worldSize; r++) {
    for (let e = plan.entryOffsets[r]!; e < plan.entryOffsets[r + 1]!; e++) {
      chunksTo[plan.dstRank[e]!]! += chunksOf(plan.length[e]!, chunkRows);
    }
    for (let p = plan.sent.offsets[r]!; p < plan.sent.offsets[r + 1]!; p++) {
      const peer = plan.sent.peer[p]!;
      const bytes = plan.sent.tokens[p]! * rowBytes;
      const chunks = chunksTo[peer]!;
      chunksTo[peer] = 0;
      // Senders come in ascending order, which is the order of each receiver's own list.
      const q = next[peer]!++;
      sent.bytes[p] = bytes;
      sent.chunks[p] = chunks;
      received.bytes[q] = bytes;
      received.chunks[q] = chunks;
      chunksSent[r]! += chunks;
      chunksReceived[peer]! += chunks;
      if (peer === r) {
        localBytes += bytes;
        localChunks += chunks;
      } else {
        remoteBytes += bytes;
        remoteChunks += chunks;
      }
    }
  }
  return Object.freeze({
    rowBytes,
    chunkBytes,
    chunkRows,
    sendBytes,
    recvBytes,
    sent,
    received,
    chunksSent,
    chunksReceived,
    localBytes,
    remoteBytes,
    localChunks,
    remoteChunks,
  });
}

/** What the caller has. A number holds for every rank, an array has one element per rank; what is left out is not checked. */
export interface CapacityLimits {
  readonly sendBytes?: number | ArrayLike<number>;
  readonly recvBytes?: number | ArrayLike<number>;
  /** Chunks that one rank may send in a call. */
  readonly chunksSent?: number | ArrayLike<number>;
  /** Chunks that one rank can count in a call. */
  readonly chunksReceived?: number | ArrayLike<number>;
}

/** Refuses a plan that does not fit, before anything moves: EP_CAPACITY names the first rank, what it needs and what it has. */
export function checkCapacity(plan: DispatchPlan, planned: PlanSizes, limits: CapacityLimits): void {
  checkDispatchPlan(plan);
  checkObject(planned, 'planned');
  checkObject(limits, 'limits');
  for (const name of ['sendBytes', 'recvBytes', 'chunksSent', 'chunksReceived'] as const) {
    const limit = limits[name];
    if (limit === undefined) continue;
    if (typeof limit !== 'number') checkObject(limit, name);
    const needs = checkFloat64Array(planned[name], `planned.${name}`, plan.worldSize);
    if (typeof limit !== 'number' && limit.length !== plan.worldSize) {
      throw invalidArgument(`${name} must have ${plan.worldSize} elements, one per rank, found ${limit.length}`, {
        name,
        expected: plan.worldSize,
        found: limit.length,
      });
    }
    for (let r = 0; r < plan.worldSize; r++) {
      const available = typeof limit === 'number' ? limit : limit[r]!;
      // Negated, so that NaN is refused too.
      if (!(available >= 0))
        throw invalidArgument(`the ${name} limit of rank ${r} must be at least 0, found ${available}`, {
          name,
          rank: r,
          found: available,
        });
      const needed = needs[r]!;
      if (!(needed >= 0))
        throw invalidArgument(`planned.${name}[${r}] must be at least 0, found ${needed}`, {
          name: `planned.${name}`,
          rank: r,
          found: needed,
        });
      if (needed > available) {
        throw new PlanError(
          'EP_CAPACITY',
          `rank ${r} needs ${needed} ${name} for the ${plan.kind} plan, its limit is ${available}`,
          {
            rank: r,
            name,
            kind: plan.kind,
            needed,
            available,
          },
        );
      }
    }
  }
}

function emptySizes(pairs: PairTable): PairSizes {
  return { bytes: new Float64Array(pairs.peer.length), chunks: new Int32Array(pairs.peer.length) };
}
