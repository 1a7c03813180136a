/** How memory comes to processes that take the place of others, where a transport reaches it by a NIC. */
import {
  type AllocateOptions,
  EpError,
  type Generations,
  type Rank,
  type Succession,
  type SymmetricMemory,
} from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import type { RenewableReach } from './allocate.js';
import type { Members } from './members.js';
import { RankMemory } from './memory.js';

export interface SuccessionInit {
  readonly context: NativeRankContext;
  readonly members: Members;
  /** Of the world. */
  readonly id: string;
  readonly isNew: boolean;
  readonly reach: RenewableReach;
  readonly inherit: (
    size: Pick<AllocateOptions, 'byteLength' | 'signalSlots' | 'over' | 'near'>,
  ) => Promise<RankMemory>;
  /** Called before others come in the places of these ranks. */
  readonly listeners: Set<(ranks: readonly Rank[]) => void>;
  readonly generations?: Omit<Generations, 'reconnect'>;
}

export function successionOf(init: SuccessionInit): Succession {
  const { context, members, id, isNew, reach, inherit, listeners, generations } = init;
  const native = (memory: SymmetricMemory, where: string): NativeSymmetricMemory => {
    if (memory instanceof RankMemory && memory.context === context) return memory.nativeMemory(where);
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the memory belongs to another transport`);
  };
  const replace =
    (where: string): Succession['replace'] =>
    (memory, peer, part) =>
      reach.replace(native(memory, where), peer, part);
  return {
    world: id,
    isNew,
    lifeOf: (rank) => members.lifeOf(rank),
    onReplace: (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    part: (memory) => reach.described(native(memory, 'part')),
    inherit,
    replace: replace('replace'),
    ...(generations && { generations: { ...generations, reconnect: replace('reconnect') } }),
  };
}
