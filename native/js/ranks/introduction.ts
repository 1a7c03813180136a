/** How ranks tell each other what they must know before they can reach each other: through a store, or by whatever way a transport offers instead. */
import { EpError, exchange, type Facts, type Member, type PeerFacts, rendezvous, type WaitOptions } from '@ep/core';

/** What a rank tells in a step, by name; of the same names and lengths on all ranks. */
export type Told<Name extends string> = { readonly [N in Name]: Uint8Array };

/** Collective: all ranks take the same steps in one order, each once. */
export interface Introduction {
  /** The first step. Resolves with what every rank published, by rank; rejects with `EP_RENDEZVOUS` naming the odd ranks. */
  readonly compare: (facts: Facts, limits: WaitOptions) => Promise<readonly PeerFacts[]>;
  /** Resolves with what every rank told, by rank. Rejects with `EP_RENDEZVOUS` naming a rank that told something else. */
  readonly tell: <Name extends string>(
    step: string,
    told: Told<Name>,
    limits: WaitOptions,
  ) => Promise<readonly Told<Name>[]>;
}

/** Through the member's store, which serves one introduction of one transport. Rejects with `EP_TIMEOUT`, besides, where a rank does not come to a later step. */
export function throughStore({ rank, worldSize, store }: Member, transport: string): Introduction {
  const member = { rank, worldSize };
  return {
    compare: (facts, limits) => rendezvous(store, { ...member, facts, key: `${transport}/rendezvous` }, limits),
    tell: async <Name extends string>(step: string, told: Told<Name>, limits: WaitOptions) => {
      const bytes = Buffer.concat(Object.values<Uint8Array>(told));
      const all = await exchange(store, { ...member, key: `${transport}/${step}`, bytes }, limits);
      return all.map((theirs, peer) => {
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
