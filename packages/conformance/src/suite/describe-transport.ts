/** The suite of every transport. */
import { inapplicableBecause } from '../cases/case.js';
import { transportCases } from '../cases/index.js';
import { mandatoryCases } from '../mandatory.js';
import { describeRanks, type RankMatrix } from './describe-ranks.js';

export type TransportConformance = RankMatrix & Required<Pick<RankMatrix, 'otherConfig'>>;

/** Declares the tests. `title` names the transport, for example `nvshmem (shm)`. */
export function describeTransport(title: string, options: TransportConformance): void {
  describeRanks(
    title,
    {
      suite: 'transport',
      cases: transportCases,
      found: { module: '@ep/conformance/cases', name: 'transportCases' },
      mandatory: mandatoryCases,
      inapplicable: inapplicableBecause,
    },
    options,
  );
}
