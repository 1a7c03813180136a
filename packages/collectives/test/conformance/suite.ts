/** Declares the tests of process groups over an engine. */

import type { Named } from '@ep/conformance';
import { describeRanks, type RankMatrix } from '@ep/conformance';
import { processGroupCases } from './cases/index.js';
import { mandatoryGroupCases } from './mandatory.js';

/** `module`: the bundle of programs/conformance.ts. */
export function describeGroups(
  title: string,
  module: string,
  matrix: Omit<RankMatrix, 'provider'> & { readonly provider?: Named },
): void {
  describeRanks(
    title,
    {
      suite: 'group',
      cases: processGroupCases.map((one) => ({ ...one, ranks: one.ranks ?? 1 })),
      found: { module, name: 'cases' },
      mandatory: mandatoryGroupCases,
      keepSentences: true,
    },
    { provider: { module, name: 'shm' }, ...matrix },
  );
}
