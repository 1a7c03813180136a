/** The vitest side for stores: they need no ranks, a second handle is another rank's view. */
import { CloseScope, type Store } from '@ep/core';
import { afterAll, describe, it } from 'vitest';
import { mandatoryStoreCases } from '../mandatory.js';
import { storeCases } from '../stores/cases.js';
import { Outcomes } from './outcomes.js';

/** Gives a function that opens handles on one set of keys; `scope` closes everything. */
export type StoreSetUp = (scope: CloseScope) => () => Promise<Store>;

/** Declares the tests of a kind of store. */
export function describeStore(
  name: string,
  { setUp, expected }: { readonly setUp: StoreSetUp; readonly expected: URL },
): void {
  describe(`${name} store`, () => {
    const outcomes = new Outcomes(
      expected,
      storeCases.map((one) => one.id),
      mandatoryStoreCases,
    );
    afterAll(() => outcomes.save({ suite: 'store', name }));

    it('has the committed outcomes of all cases, no other, and the mandatory ones among them', () => {
      outcomes.checkComplete({ suite: 'store', name });
    });

    for (const { id, sentence, body } of storeCases) {
      it(`${id}: ${sentence}`, async () => {
        let failure: unknown;
        try {
          await using scope = new CloseScope();
          await body(setUp(scope));
        } catch (error) {
          failure = error;
        }
        outcomes.note(id, failure === undefined ? 'pass' : 'fail', failure);
      });
    }
  });
}
