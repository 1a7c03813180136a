/** What opens a portable engine. */
import type { Store, Transport } from '@ep/core';
import type { GroupEngine } from '../engine.js';
import type { Portable } from './channel.js';
import type { Placement } from './placement.js';

export interface PortableEngineOptions {
  /** The first engine on a transport must be opened by all of its ranks, later ones by their members. */
  readonly transport: Transport<Portable>;
  /** Ranks of the transport, in group order: all that the group may grow to. */
  readonly ranks: readonly number[];
  /** Ranks of the group at first, the first of `ranks`; all of them unless given. */
  readonly size?: number | undefined;
  /** Of this process in the group. */
  readonly rank: number;
  /** Keys of this group. */
  readonly store: Store;
  /** Where ranks of this transport find memory and its sections; the first engine's serves all later ones, and is closed after all of them. `store` unless given. */
  readonly arenaStore?: Store | undefined;
  readonly name: string;
  /** For opening and closing; calls bring their own. */
  readonly timeoutMs: number;
  /** Ends the opening. */
  readonly signal?: AbortSignal | undefined;
  /** Of every group, per rank. 4 MiB, or 64 KiB per rank of the world, unless given by the first engine on the transport. */
  readonly stagingBytes?: number;
  /** For each rank of the group a number that all ranks of its host have, and no other. One host unless given. */
  readonly hosts?: readonly number[] | undefined;
  /** Opens an engine of the ranks of this host, in the order of the placement. Called where a group of several hosts goes in two levels. */
  readonly openHost?: ((placement: Placement) => GroupEngine | Promise<GroupEngine>) | undefined;
  /** Who takes part at first, of the group's ranks; all of them unless given. The lowest of them is awaited by all who open the group. */
  readonly active?: readonly number[] | undefined;
  /** This rank takes no part, but asks to be taken in. */
  readonly joins?: boolean | undefined;
  /** A call whose time is up takes out members that do not answer, or have not made it, and poisons the group only if there are none. */
  readonly evicts?: boolean | undefined;
  /** How many groups can be open on the transport: 16, or as many as its signal slots allow (worldSize slots each), unless given by the first engine. */
  readonly maxGroups?: number;
}

export const WHERE = 'portable engine';
