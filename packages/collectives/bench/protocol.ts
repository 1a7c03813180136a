/**
 * How the benchmark talks to a contender's ranks, ours and others': each rank connects to a socket, says `rank <n>`, and from then on answers every line with
 * one line. Between commands a rank sleeps in a read, so that contenders can take turns on the same cores.
 *
 * | command | does | answer |
 * |---------|------|--------|
 * | `run <variant> <op> <dtype> <elements> <calls> <warm> <batches>` | a barrier, then `calls` calls in a row, timed together; `warm + batches` times | `ok`, nanoseconds of each batch but the warm ones |
 * | `check <variant> <op> <dtype> <elements>` | compares every element of the last result, and of one more call whose result was overwritten before | `ok` |
 * | `check <variant> barrier <dtype> <rounds>` | barriers to which the ranks come at different times | `ok`, for each: when this rank came and when it left |
 * | `bitwise <variant> all-reduce <dtype> <elements>` | sums numbers whose sum depends on the order | `ok <digest of the result>`; only ours |
 * | `end` | leaves | |
 *
 * Instead of `ok`: `failed <text>`, after which the contender is of no more use, or `unsupported <text>`. `elements` are those of the larger buffer of a rank: the
 * result of an all-gather, the input of a reduce-scatter, all blocks of an all-to-all.
 */

/** In the order in which they are measured. */
export const BENCH_OPS = ['all-reduce', 'broadcast', 'all-gather', 'reduce-scatter', 'all-to-all', 'barrier'] as const;
export type BenchOp = (typeof BENCH_OPS)[number];

export type BenchDType = 'f32' | 'bf16';

export const BYTES_OF: Readonly<Record<BenchDType, number>> = { f32: 4, bf16: 2 };

/**
 * How a rank of ours makes its calls; contenders that have one way only ignore it.
 *
 * - `group`: on memory of the group, awaiting only what has not ended when its call returns. `typed`: the same on ordinary typed arrays.
 * - `awaited`: on memory of the group, awaiting every call.
 * - `native`: all-reduces of one element, or barriers, in a native loop.
 * - `exchange`: likewise, but no calls: every rank stores a number and waits for those of the others.
 * - `copy`, `copy-non-temporal`: no collective, but a copy of as many bytes by one thread of each rank.
 */
export type Variant = 'group' | 'typed' | 'awaited' | 'native' | 'exchange' | 'copy' | 'copy-non-temporal';

/** What is called, on what. */
export interface Target {
  readonly variant: Variant;
  readonly op: BenchOp;
  readonly dtype: BenchDType;
  readonly elements: number;
}

export interface Run extends Target {
  readonly calls: number;
  readonly warm: number;
  readonly batches: number;
}

export type Command = ({ readonly verb: 'run' } & Run) | ({ readonly verb: 'check' | 'bitwise' } & Target);

export function formatCommand(command: Command): string {
  const { verb, variant, op, dtype, elements } = command;
  const counts = verb === 'run' ? [command.calls, command.warm, command.batches] : [];
  return [verb, variant, op, dtype, elements, ...counts].join(' ');
}

/** For our own ranks, which trust who started them. */
export function parseCommand(line: string): Command {
  const [verb, variant, op, dtype, ...numbers] = line.split(' ');
  const [elements, calls, warm, batches] = numbers.map(Number);
  const target = { variant, op, dtype, elements } as Target;
  if (verb === 'run') return { verb, ...target, calls: calls!, warm: warm!, batches: batches! };
  if (verb === 'check' || verb === 'bitwise') return { verb, ...target };
  throw new Error(`a rank of the benchmark was told ${JSON.stringify(line)}`);
}

export type Answer =
  | { readonly kind: 'ok'; readonly words: readonly string[] }
  | { readonly kind: 'failed' | 'unsupported'; readonly text: string };

export function parseAnswer(line: string): Answer {
  const [kind, ...words] = line.trim().split(' ');
  if (kind === 'ok') return { kind, words };
  if (kind === 'failed' || kind === 'unsupported') return { kind, text: words.join(' ') };
  return { kind: 'failed', text: `answered ${JSON.stringify(line.slice(0, 200))}` };
}
