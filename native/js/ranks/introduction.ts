/** How ranks tell each other what they must know before they can reach each other: through a store, or by whatever way a transport offers instead. */
import {
  EpError,
  exchange,
  type Facts,
  type Member,
  type PeerFacts,
  type Rank,
  rendezvous,
  type WaitOptions,
} from '@ep/core';

/** What a rank tells in a step, by name; of the same names and lengths on all ranks. */
export type Told<Name extends string> = { readonly [N in Name]: Uint8Array };

/** Collective: all ranks that are here take the same steps in one order, each once. */
export interface Introduction {
  /** The first step. Resolves with what every rank published, in their order; rejects with `EP_RENDEZVOUS` naming the odd ranks. */
  readonly compare: (facts: Facts, limits: WaitOptions) => Promise<readonly PeerFacts[]>;
  /** Resolves with what every rank told, in their order. Rejects with `EP_RENDEZVOUS` naming a rank that told something else. */
  readonly tell: <Name extends string>(
    step: string,
    told: Told<Name>,
    limits: WaitOptions,
  ) => Promise<readonly Told<Name>[]>;
}

/** `activeRanks`: who comes, ascending; all ranks unless given. */
export interface Introduced extends Member {
  readonly activeRanks?: readonly Rank[] | undefined;
}

/** Through the member's store, which serves one introduction of one transport. Rejects with `EP_TIMEOUT`, besides, where a rank does not come to a later step. */
export function throughStore({ rank, worldSize, store, activeRanks }: Introduced, transport: string): Introduction {
  const member = { rank, worldSize, ...(activeRanks && { ranks: activeRanks }) };
  return {
    compare: (facts, limits) => rendezvous(store, { ...member, facts, key: `${transport}/rendezvous` }, limits),
    tell: async <Name extends string>(step: string, told: Told<Name>, limits: WaitOptions) => {
      const bytes = Buffer.concat(Object.values<Uint8Array>(told));
      const all = await exchange(store, { ...member, key: `${transport}/${step}`, bytes }, limits);
      return all.map((theirs, at) => {
        const peer = activeRanks?.[at] ?? at;
        if (theirs.byteLength === bytes.byteLength) return split(told, theirs);
        const found = `${theirs.byteLength} bytes of ${step}, expected ${bytes.byteLength}`;
        throw new EpError('EP_RENDEZVOUS', `${transport}: rank ${peer} published ${found}`, {
          context: { ranks: [peer], step },
        });
      });
    },
  };
}

/** The parts that stand in `bytes` one behind the other, as long as those of `like`. */
function split<Name extends string>(like: Told<Name>, bytes: Uint8Array): Told<Name> {
  let at = 0;
  const parts = Object.entries<Uint8Array>(like).map(([name, { byteLength }]) => {
    at += byteLength;
    return [name, bytes.subarray(at - byteLength, at)] as const;
  });
  return Object.fromEntries(parts) as Told<Name>;
}
