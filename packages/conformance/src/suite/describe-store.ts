/** The vitest side for stores: they need no ranks, a second handle is another rank's view. */
import { CloseScope, type Store } from '@ep/core';
import { describe, it } from 'vitest';
import { storeCases } from '../stores/cases.js';

/** Gives a function that opens handles on one set of keys; `scope` closes everything. */
export type StoreSetUp = (scope: CloseScope) => () => Promise<Store>;

export function describeStore(title: string, setUp: StoreSetUp): void {
  describe(`${title} store`, () => {
    it.each(storeCases.map((one) => [one.id, one.sentence, one.body] as const))(
      '%s: %s',
      async (_id, _sentence, body) => {
        await using scope = new CloseScope();
        await body(setUp(scope));
      },
    );
  });
}
