import { checkBoolean, checkFields, checkInteger, checkObject, maxRows, wrongKind } from '../check.js';
import { invalidArgument, PlanError, shown } from '../error.js';
import { checkMap, type ExpertMap, localExperts, maxExperts, maxWorldSize } from './experts.js';
import { alignedRowBytes, messageBytes, type Payload, scaledChannels } from './payload.js';

/** One part of a buffer. `bytes` is the product of `factors`, and `formula` names them: nothing else goes into it. */
export interface BufferComponent {
  readonly name: string;
  readonly what: string;
  readonly formula: string;
  readonly factors: Readonly<Record<string, number>>;
  readonly bytes: number;
  /** Where it begins: components lie one behind the other, those of rows (multiples of 16 bytes) first. */
  readonly offset: number;
}

/** What one rank allocates, and why. */
export interface BufferSizes {
  readonly design: BufferDesign;
  readonly components: readonly BufferComponent[];
  /** Exact. */
  readonly totalBytes: number;
  /** What `totalBytes` would be with one replica of each expert, as many on each rank as they divide: redundancy costs the difference. */
  readonly withoutRedundantBytes: number;
}

/** Whose buffer: ours in either mode, or, to compare, those of DeepEP V1 (low latency) and Mooncake EP, whose sizes do not depend on ranks. */
export type BufferDesign = 'low-latency' | 'high-throughput' | 'deepep-v1' | 'mooncake';

export interface BufferShape {
  readonly design: BufferDesign;
  /** Replicas and ranks; or their numbers, for experts that divide as evenly as they can. `replicas` is `experts` by default. */
  readonly experts: ExpertMap | { readonly experts: number; readonly replicas?: number; readonly worldSize: number };
  /** Most tokens of a rank. */
  readonly maxTokens: number;
  readonly topK: number;
  readonly hidden: number;
  /** Largest payload in each direction; the peers' designs have their own. */
  readonly dispatch: Payload;
  readonly combine: Payload;
  /** Calls that may be under way or held, 1 to 4; 2 by default. The peers have two. */
  readonly calls?: number;
  /** Room to send from, which rows need that are cast on the way. False by default. */
  readonly staged?: boolean;
  /** Room for results that are read where experts write them. False by default; `staged` has it, too. */
  readonly zeroCopy?: boolean;
  /** 'high-throughput': rows that a rank can receive. By default what the worst routing sends it. */
  readonly recvRows?: number;
  /** 'high-throughput': as in `MoeForm`; 1 by default. */
  readonly alignment?: number;
}

/** The buffer of a shape. Throws EP_CAPACITY beyond exact integers (2^53 bytes). */
export function bufferSizes(shape: BufferShape): BufferSizes {
  const checked = checkShape(shape);
  const components = componentsOf(checked);
  const spread = {
    ...checked,
    replicas: checked.experts,
    localExperts: Math.ceil(checked.experts / checked.worldSize),
  };
  return Object.freeze({
    design: checked.design,
    components: Object.freeze(components),
    totalBytes: total(components),
    withoutRedundantBytes: total(componentsOf(spread)),
  });
}

/** The largest `maxTokens` whose buffer is at most `budgetBytes`; 0 where not even one token fits, 2^31 - 1 at most. */
export function largestMaxTokens(shape: Omit<BufferShape, 'maxTokens'>, budgetBytes: number): number {
  checkInteger(budgetBytes, 'budgetBytes', 0, Number.MAX_SAFE_INTEGER);
  checkObject(shape, 'shape');
  const checked = checkShape({ ...shape, maxTokens: 1 });
  const fits = (maxTokens: number) => {
    let bytes = 0;
    for (const { factors } of designs[checked.design]({ ...checked, maxTokens })) bytes += product(factors);
    return bytes <= budgetBytes;
  };
  // Sizes grow with maxTokens: `low` fits or is 0, `high` does not fit or is the most there can be.
  let [low, high] = [0, maxRows + 1];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'] as const;

/** Bytes for people: a binary unit and four digits. */
export function bytesText(bytes: number): string {
  if (typeof bytes !== 'number') throw wrongKind('bytes', 'a number', bytes);
  let unit = 0;
  let value = bytes;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return unit === 0
    ? `${bytes} B`
    : `${value.toFixed(value < 10 ? 3 : value < 100 ? 2 : value < 1000 ? 1 : 0)} ${units[unit]}`;
}

/** The same for people: each component with its factors, and what redundant replicas cost. */
export function bufferText(sizes: BufferSizes): string {
  checkFields(sizes, 'sizes', {
    design: 'a text',
    components: 'an array of objects',
    totalBytes: 'a number',
    withoutRedundantBytes: 'a number',
  });
  const { design, components, totalBytes, withoutRedundantBytes } = sizes;
  const lines = components.map(({ name, what, factors, bytes }, i) => {
    checkObject(factors, `sizes.components[${i}].factors`);
    const values = Object.entries(factors).map(([factor, value]) => `${factor} ${value}`);
    return `  ${bytesText(bytes).padStart(10)}  ${name}: ${what}\n${' '.repeat(14)}= ${values.join(' * ')}`;
  });
  const redundant = totalBytes - withoutRedundantBytes;
  return [
    `${design} buffer: ${bytesText(totalBytes)} (${totalBytes} bytes) on each rank`,
    ...lines,
    redundant > 0
      ? `  one replica of each expert, spread evenly, would take ${bytesText(withoutRedundantBytes)}: redundant places cost ${bytesText(redundant)}`
      : '  redundant replicas cost nothing: without them no rank would need fewer places',
    '',
  ].join('\n');
}

interface CheckedShape {
  readonly design: BufferDesign;
  readonly worldSize: number;
  readonly experts: number;
  readonly replicas: number;
  /** Of the rank that has most. */
  readonly localExperts: number;
  readonly maxTokens: number;
  readonly topK: number;
  readonly hidden: number;
  readonly dispatchMessage: number;
  readonly combineRow: number;
  readonly calls: number;
  readonly staged: boolean;
  readonly zeroCopy: boolean;
  readonly recvRows: number | undefined;
  readonly alignment: number;
}

interface Part {
  readonly name: string;
  readonly what: string;
  readonly factors: Readonly<Record<string, number>>;
}

/** Words of counts and rows hold the epoch, too. */
const wordBytes = 8;

/** The formulas of every design: the one place where they are written down. */
const designs: Readonly<Record<BufferDesign, (shape: CheckedShape) => readonly Part[]>> = {
  'low-latency': (s) => [
    {
      name: 'received tokens',
      what: 'a message for every (local expert, source rank, token)',
      factors: {
        calls: s.calls,
        localExperts: s.localExperts,
        ranks: s.worldSize,
        maxTokens: s.maxTokens,
        messageBytes: s.dispatchMessage,
      },
    },
    returned(s),
    ...staged(s, s.localExperts * s.worldSize * s.maxTokens),
    counts(s),
    refusals(s),
  ],
  'high-throughput': (s) => [
    {
      name: 'received tokens',
      what: 'a message for every row of the compact receive tensor',
      factors: { calls: s.calls, recvRows: recvRowsOf(s), messageBytes: s.dispatchMessage },
    },
    returned(s),
    ...staged(s, recvRowsOf(s)),
    counts(s),
    {
      name: 'row starts',
      what: 'a word (epoch, row) for every replica: where the rows that this rank sends there begin',
      factors: { calls: s.calls, replicas: s.replicas, wordBytes },
    },
    refusals(s),
  ],
  'deepep-v1': (s) => {
    const blocks = Math.ceil(s.hidden / scaledChannels);
    const dispatch = 16 + Math.max(2 * s.hidden, s.hidden + 4 * blocks);
    const combine = 2 * s.hidden + 4 * blocks;
    return [
      {
        name: 'signals',
        what: 'a 4-byte word per expert',
        factors: { phases: 2, blockBytes: Math.ceil((4 * s.replicas) / 128) * 128 },
      },
      {
        name: 'send',
        what: 'the tokens, or a result for every (expert, token)',
        factors: { phases: 2, sendBytes: Math.max(s.maxTokens * dispatch, s.replicas * s.maxTokens * combine) },
      },
      {
        name: 'receive',
        what: 'a row for every (expert, token)',
        factors: { phases: 2, experts: s.replicas, maxTokens: s.maxTokens, rowBytes: Math.max(dispatch, combine) },
      },
    ];
  },
  mooncake: (s) => [
    {
      name: 'signals',
      what: 'a 4-byte word per expert',
      factors: { buffers: 2, directions: 2, experts: s.replicas, wordBytes: 4 },
    },
    {
      name: 'data',
      what: 'a row for every (expert, token), to send and to receive',
      factors: { buffers: 2, directions: 2, experts: s.replicas, maxTokens: s.maxTokens, rowBytes: 32 + 2 * s.hidden },
    },
  ],
};

function counts(s: CheckedShape): Part {
  return {
    name: 'counts',
    what: 'a word (epoch, count) for every (local expert, source rank)',
    factors: { calls: s.calls, localExperts: s.localExperts, ranks: s.worldSize, wordBytes },
  };
}

function refusals(s: CheckedShape): Part {
  return {
    name: 'refusals',
    what: 'a word (epoch, rank) for every rank: which call it says that a rank refuses',
    factors: { calls: s.calls, ranks: s.worldSize, wordBytes },
  };
}

function returned(s: CheckedShape): Part {
  return {
    name: 'returned results',
    what: 'a row for every (token, choice), in two banks: one may be owed late results',
    factors: { calls: s.calls, banks: 2, maxTokens: s.maxTokens, topK: s.topK, rowBytes: s.combineRow },
  };
}

function staged(s: CheckedShape, rows: number): Part[] {
  return [...(s.staged ? [stagedTokens(s)] : []), ...(s.staged || s.zeroCopy ? [stagedResults(s, rows)] : [])];
}

function stagedTokens(s: CheckedShape): Part {
  return {
    name: 'staged tokens',
    what: 'a message for every token, to send from',
    factors: { calls: s.calls, maxTokens: s.maxTokens, messageBytes: s.dispatchMessage },
  };
}

function stagedResults(s: CheckedShape, rows: number): Part {
  return {
    name: 'staged results',
    what: 'a row for every received one, to send back from',
    factors: { calls: s.calls, recvRows: rows, rowBytes: s.combineRow },
  };
}

/** Every token of every rank to as many of this rank's experts as it may choose, and each block padded at worst. */
function recvRowsOf(s: CheckedShape): number {
  if (s.recvRows !== undefined) return s.recvRows;
  return s.worldSize * s.maxTokens * Math.min(s.topK, s.localExperts) + s.localExperts * (s.alignment - 1);
}

function componentsOf(shape: CheckedShape): BufferComponent[] {
  let end = 0;
  return designs[shape.design](shape).map(({ name, what, factors }) => {
    const bytes = product(factors);
    const formula = Object.keys(factors).join(' * ');
    const offset = end;
    end += bytes;
    if (!Number.isSafeInteger(end)) {
      throw new PlanError('EP_CAPACITY', `${name} (${formula}) of the ${shape.design} buffer ends beyond 2^53 bytes`, {
        name,
        factors,
      });
    }
    return Object.freeze({ name, what, formula, factors: Object.freeze(factors), bytes, offset });
  });
}

function product(factors: Readonly<Record<string, number>>): number {
  return Object.values(factors).reduce((bytes, factor) => bytes * factor, 1);
}

function total(components: readonly BufferComponent[]): number {
  return components.reduce((sum, { bytes }) => sum + bytes, 0);
}

function checkShape(shape: BufferShape): CheckedShape {
  checkObject(shape, 'shape');
  if (!Object.hasOwn(designs, shape.design)) {
    throw invalidArgument(`design must be one of ${Object.keys(designs).join(', ')}, found ${shown(shape.design)}`, {
      name: 'design',
    });
  }
  const numbers = { calls: shape.calls ?? 2, alignment: shape.alignment ?? 1 };
  return {
    design: shape.design,
    ...checkExperts(shape.experts),
    maxTokens: checkInteger(shape.maxTokens, 'maxTokens', 1, maxRows),
    topK: checkInteger(shape.topK, 'topK', 1, maxExperts),
    hidden: shape.hidden,
    dispatchMessage: messageBytes(shape.dispatch, shape.hidden),
    combineRow: alignedRowBytes(shape.combine, shape.hidden),
    calls: checkInteger(numbers.calls, 'calls', 1, 4),
    staged: checkBoolean(shape.staged ?? false, 'staged'),
    zeroCopy: checkBoolean(shape.zeroCopy ?? false, 'zeroCopy'),
    recvRows: shape.recvRows === undefined ? undefined : checkInteger(shape.recvRows, 'recvRows', 0, maxRows),
    alignment: checkInteger(numbers.alignment, 'alignment', 1, maxRows),
  };
}

function checkExperts(of: BufferShape['experts']) {
  checkObject(of, 'experts');
  if ('rankOffsets' in of) {
    checkMap(of, 'experts');
    const { worldSize, experts } = of;
    const most = Array.from({ length: worldSize }, (_, r) => localExperts(of, r)).reduce((a, b) => Math.max(a, b), 0);
    return { worldSize, experts, replicas: of.expert.length, localExperts: most };
  }
  const worldSize = checkInteger(of.worldSize, 'worldSize', 1, maxWorldSize);
  const experts = checkInteger(of.experts, 'experts', 1, maxExperts);
  const replicas = checkInteger(of.replicas ?? experts, 'replicas', experts, maxRows);
  return { worldSize, experts, replicas, localExperts: Math.ceil(replicas / worldSize) };
}
