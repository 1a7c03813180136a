/** What a MoE buffer can be opened with, and what a call can be given. */
import { checkInteger, checkTimeout, defaultTimeoutMs, invalid, type Tensor } from '@ep/core';
import type { DispatchDescription } from '@ep/native';
import {
  alignedRowBytes,
  type BufferShape,
  type BufferSizes,
  bufferSizes,
  type ExpertMap,
  type MoeForm,
  mapExperts,
  type Payload,
  type RankMask,
  type ReplicaPolicy,
  spreadExperts,
} from '@ep/plan/moe';
import { checkObject } from '../check-spec.js';
import type { HostStream } from '../host-stream.js';
import { checkExecutor } from '../options.js';

/** Element types of tokens and results. */
export type MoeDType = 'f32' | 'bf16' | 'f16';

export interface MoeBufferOptions {
  readonly mode: MoeForm['mode'];
  /** How many experts, spread evenly over the ranks, or a map with replicas (`balanceExperts`). */
  readonly experts: number | ExpertMap;
  /** Most tokens of a rank in one call. */
  readonly maxTokens: number;
  readonly topK: number;
  readonly hidden: number;
  /** Of tokens and results. bf16 unless given. */
  readonly dtype?: MoeDType;
  /** How tokens travel to experts: `dtype` unless given, or cast to e4m3 with a scale for each 128 channels. */
  readonly payload?: Exclude<Payload, 'logfmt10'>;
  /** How results travel back: `dtype` unless given. */
  readonly combinePayload?: MoeDType | 'logfmt10';
  /**
   * Where all ranks share memory: experts may write their results into `received.combineBuffer`, where their sources read them, instead of having them copied. Alike on all ranks;
   * takes room for as many rows as can be received. `EP_UNSUPPORTED` over other transports, `EP_INVALID_ARGUMENT` where `combinePayload` is not `dtype`. False unless given.
   */
  readonly zeroCopyCombine?: boolean;
  /** Makes e4m3 scales powers of two, whatever holds them. UE8M0 scales always are. */
  readonly roundScales?: boolean;
  /** Calls that may be under way or held, 1 to 4; 2 unless given. */
  readonly calls?: number;
  /** 'high-throughput': rows of each expert's block are padded with zero rows to a multiple of this. 1 unless given. */
  readonly alignment?: number;
  /** 'high-throughput': rows that a rank can receive in one call; what the worst routing sends it unless given. `EP_INVALID_ARGUMENT` in low latency, which has room for that always. */
  readonly recvRows?: number;
  /** Which replica serves a choice; see `ReplicaPolicy`. */
  readonly policy?: ReplicaPolicy;
  /** Rank r is on node floor(r / ranksPerNode), for `policy: 'nearest'`. All ranks on one unless given. */
  readonly ranksPerNode?: number;
  /** Thread blocks: on the `fast` executor each is one thread that copies. 1 unless given. */
  readonly blocks?: number;
  /** As in `DispatcherOptions`. */
  readonly executor?: 'fast' | { readonly lanes: number; readonly warpLanes: number; readonly seed: number };
  /**
   * How long a dispatch waits for ranks before it goes on without them, in milliseconds; a combine, twice as long; the opening, before it fails. 0 looks once; Infinity: no limit. EP_TIMEOUT_MS (of which 0 is
   * no limit) unless given.
   */
  readonly timeoutMs?: number;
  /** One of the caller's, which then outlives the buffer; one of its own unless given. */
  readonly stream?: HostStream;
  readonly signal?: AbortSignal;
}

export interface MoeCallOptions {
  /** How long this half waits for ranks before it goes on without them, in milliseconds: 0 looks once, Infinity is no limit. That of the buffer unless given. */
  readonly timeoutMs?: number;
  /** Ends the call: it rejects with `signal.reason`. The buffer must then be closed: other ranks' calls and this rank's no longer pair up. */
  readonly signal?: AbortSignal;
}

export interface MoeDispatchOptions extends MoeCallOptions {
  /**
   * Ranks to be left out from the start, besides those of `activeRanks` of the buffer: 0 or false. Alike on all ranks that take part. HAZARD: one that is left out and is to be in a later call makes this call, too, with
   * the same mask; otherwise it is a call behind, and the others give it up.
   */
  readonly activeRanks?: RankMask;
  /** 'high-throughput': also hand out a `layout` for later dispatches of the same choices. `EP_INVALID_ARGUMENT` in low latency, which takes none. */
  readonly keepLayout?: boolean;
}

export interface MoeCombineOptions extends MoeCallOptions {
  /** Of each choice, token-major: tokens * topK. Without them rows are summed as they are: the backward pass of dispatch. */
  readonly weights?: Float32Array;
  /** At most two tensors like the result, added to it. */
  readonly bias?: readonly Tensor<MoeDType>[];
  /** Where some of a token's experts are gone, scale what is left so that its weights keep their sum. */
  readonly renormalise?: boolean;
  /** Where the result goes, packed: in native memory (`allocateHost`) without a copy. New memory unless given. */
  readonly out?: Tensor<MoeDType>;
}

export interface ResolvedMoe {
  readonly mode: MoeForm['mode'];
  readonly map: ExpertMap;
  readonly worldSize: number;
  readonly maxTokens: number;
  readonly topK: number;
  readonly hidden: number;
  readonly dtype: MoeDType;
  readonly payload: Exclude<Payload, 'logfmt10'>;
  readonly combinePayload: MoeDType | 'logfmt10';
  readonly roundScales: boolean;
  readonly calls: number;
  readonly alignment: number;
  /** Of the receive tensor of the rank that has most room. */
  readonly recvRows: number;
  /** Bytes of a row to experts, headers left out, and of a row back. */
  readonly rowBytes: number;
  readonly resultRowBytes: number;
  /** Rows are cast before they travel, into parts of the buffer. */
  readonly staged: boolean;
  readonly zeroCopyCombine: boolean;
  readonly policy: ReplicaPolicy;
  readonly ranksPerNode: number;
  readonly sizes: BufferSizes;
  readonly blocks: number;
  readonly simt: DispatchDescription['simt'];
  readonly timeoutMs: number;
}

export const MOE_DTYPES: readonly MoeDType[] = ['f32', 'bf16', 'f16'];

function checkOne<T extends string>(value: T, name: string, where: string, of: readonly T[]): T {
  if (of.includes(value)) return value;
  throw invalid(name, { where, expected: `one of ${of.join(', ')}`, found: value });
}

/** Throws `EP_INVALID_ARGUMENT`, or `EP_CAPACITY` for a buffer beyond 2^53 bytes. */
export function resolveMoe(options: MoeBufferOptions, worldSize: number, where: string): ResolvedMoe {
  checkObject(options, 'options', 'an object with mode, experts, maxTokens, topK and hidden', where);
  const mode = checkOne(options.mode, 'mode', where, ['low-latency', 'high-throughput']);
  const map =
    typeof options.experts === 'number' ? spreadExperts(options.experts, worldSize) : mapExperts(options.experts);
  if (map.worldSize !== worldSize) {
    throw invalid('experts', { where, expected: `a map of ${worldSize} ranks`, found: `one of ${map.worldSize}` });
  }
  const dtype = checkOne(options.dtype ?? 'bf16', 'dtype', where, MOE_DTYPES);
  const payload = checkOne(options.payload ?? dtype, 'payload', where, [dtype, 'f8e4m3+f32', 'f8e4m3+ue8m0']);
  const combinePayload = checkOne(options.combinePayload ?? dtype, 'combinePayload', where, [dtype, 'logfmt10']);
  const staged = payload !== dtype || combinePayload !== dtype;
  const zeroCopyCombine = options.zeroCopyCombine ?? false;
  if (typeof zeroCopyCombine !== 'boolean' || (zeroCopyCombine && combinePayload !== dtype)) {
    const expected = zeroCopyCombine === true ? `false where results travel as ${combinePayload}` : 'a boolean';
    throw invalid('zeroCopyCombine', { where, expected, found: zeroCopyCombine });
  }
  const shape: BufferShape = {
    design: mode,
    experts: map,
    maxTokens: options.maxTokens,
    topK: checkInteger(options.topK, 'topK', where, 1, map.experts),
    hidden: options.hidden,
    dispatch: payload,
    combine: combinePayload,
    calls: options.calls ?? 2,
    staged,
    zeroCopy: zeroCopyCombine,
    alignment: options.alignment ?? 1,
    ...(options.recvRows === undefined ? {} : { recvRows: options.recvRows }),
  };
  if (mode === 'low-latency' && (options.alignment ?? 1) !== 1) {
    throw invalid('alignment', { where, expected: '1 in low-latency mode', found: options.alignment });
  }
  if (mode === 'low-latency' && options.recvRows !== undefined) {
    const expected = 'absent in low-latency mode, which has room for all rows';
    throw invalid('recvRows', { where, expected, found: options.recvRows });
  }
  const sizes = bufferSizes(shape);
  return {
    mode,
    map,
    worldSize,
    maxTokens: shape.maxTokens,
    topK: shape.topK,
    hidden: shape.hidden,
    dtype,
    payload,
    combinePayload,
    roundScales: options.roundScales ?? payload === 'f8e4m3+ue8m0',
    calls: shape.calls!,
    alignment: shape.alignment!,
    recvRows: recvRowsOf(sizes, mode, map, shape.maxTokens),
    rowBytes: alignedRowBytes(payload, shape.hidden),
    resultRowBytes: alignedRowBytes(combinePayload, shape.hidden),
    staged,
    zeroCopyCombine,
    policy: checkOne(options.policy ?? 'spread', 'policy', where, ['spread', 'nearest']),
    ranksPerNode: checkInteger(options.ranksPerNode ?? worldSize, 'ranksPerNode', where, 1),
    sizes,
    blocks: checkInteger(options.blocks ?? 1, 'blocks', where, 1, 1024),
    simt: checkExecutor(options.executor, where),
    timeoutMs: checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), where),
  };
}

/** In high-throughput form a factor of the component; in low-latency form what a rank of the most experts may receive. */
function recvRowsOf(sizes: BufferSizes, mode: MoeForm['mode'], map: ExpertMap, maxTokens: number): number {
  if (mode === 'low-latency') return map.maxLocalExperts * map.worldSize * maxTokens;
  return sizes.components.find(({ name }) => name === 'received tokens')!.factors.recvRows!;
}

/** What all ranks must have chosen alike, in words. */
export function moeLines(resolved: ResolvedMoe): readonly string[] {
  const { map, sizes } = resolved;
  const same = ['mode', 'maxTokens', 'topK', 'hidden', 'dtype', 'payload', 'combinePayload', 'roundScales'] as const;
  const more = ['calls', 'alignment', 'recvRows', 'policy', 'ranksPerNode', 'zeroCopyCombine'] as const;
  return [
    ...[...same, ...more].map((name) => `${name} is ${resolved[name]}`),
    `replicas by rank are ${[...map.rankOffsets].join(' ')}`,
    `their experts are ${[...map.expert].join(' ')}`,
    `bytes are ${sizes.totalBytes}`,
  ];
}
