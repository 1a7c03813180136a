/** What the project promises of collectives, and of which figure. */
import type { BenchOp } from './protocol.js';

/** What a figure is: a ratio (2: twice as fast), or microseconds of a call at p50. */
export type FigureName =
  | 'group over Open MPI'
  | 'typed over Open MPI'
  | 'group over Gloo'
  | 'typed over Gloo'
  | 'group of the bound'
  | 'bf16 over f32'
  | 'native us'
  | 'exchange us'
  | 'inline us'
  | 'awaited us';

/** In words, after the figure. */
export const FIGURE_TEXT: Readonly<Record<FigureName, string>> = {
  'group over Open MPI': 'times Open MPI (group memory)',
  'typed over Open MPI': 'times Open MPI (ordinary typed arrays)',
  'group over Gloo': 'times Gloo (group memory)',
  'typed over Gloo': 'times Gloo (ordinary typed arrays)',
  'group of the bound': 'of the bound P S / C, C: what the same threads copy',
  'bf16 over f32': 'times the elements per second of f32 (bf16)',
  'native us': 'us in a native loop',
  'exchange us': 'us of a bare exchange between the same ranks, which no call can be faster than',
  'inline us': 'us as an inline call from JS',
  'awaited us': 'us awaited',
};

export interface Goal {
  readonly at: 'least' | 'most';
  readonly value: number;
}

export interface Measured {
  readonly op: BenchOp;
  readonly ranks: number;
  /** Of the larger buffer of a rank, as f32. */
  readonly bytes: number;
  readonly usableCores: number;
}

export const KIB = 2 ** 10;
export const MIB = 2 ** 20;

const least = (value: number): Goal => ({ at: 'least', value });
const most = (value: number): Goal => ({ at: 'most', value });

/** Two ranks on cores of their own. */
function pairGoal(figure: FigureName, op: BenchOp, bytes: number): Goal | undefined {
  const all = op === 'all-reduce';
  const small = op === 'barrier' || (all && bytes === 8);
  switch (figure) {
    case 'native us':
      return small ? most(0.15) : undefined;
    case 'inline us':
      return small ? most(0.5) : undefined;
    case 'awaited us':
      return small ? most(1.5) : undefined;
    case 'exchange us':
      return undefined;
    case 'group of the bound':
      return all && bytes === 64 * MIB ? least(0.8) : undefined;
    case 'bf16 over f32':
      return bytes >= 64 * MIB ? least(1.5) : undefined;
    case 'typed over Open MPI':
      return all && bytes >= MIB ? least(1.3) : undefined;
    case 'typed over Gloo':
      return all && bytes === MIB ? least(3.5) : undefined;
    case 'group over Gloo':
      if (!all) return undefined;
      return bytes === 8 ? least(50) : bytes === MIB ? least(8) : bytes === 64 * MIB ? least(5) : undefined;
    case 'group over Open MPI':
      if (all) return bytes === MIB ? least(3) : bytes === 64 * MIB ? least(5) : undefined;
      return undefined;
  }
}

/** What is promised for this figure of this case, if anything. */
export function goalOf(figure: FigureName, { op, ranks, bytes, usableCores }: Measured): Goal | undefined {
  const crowded = ranks > usableCores;
  if (figure === 'group over Open MPI') {
    // Open MPI yields then, as told by mpi_yield_when_idle.
    if (crowded) return least(1);
    if (op === 'all-to-all' && bytes >= MIB) return least(1.4);
    if (op !== 'all-reduce' && op !== 'barrier' && bytes >= MIB) return least(1.3);
  }
  return ranks === 2 && !crowded ? pairGoal(figure, op, bytes) : undefined;
}

export function isMet({ at, value }: Goal, found: number): boolean {
  return at === 'least' ? found >= value : found <= value;
}
