/** The suite of GIN contexts. */
import { ginCases } from '../gin/index.js';
import { mandatoryGinCases } from '../mandatory.js';
import { describeRanks, type RankMatrix } from './describe-ranks.js';

/** Declares the tests. `title` names the transport, for example `efa-gda (soft)`; its `openGin` makes the contexts. */
export function describeGin(title: string, options: RankMatrix): void {
  const found = { module: '@ep/conformance/gin', name: 'ginCases' };
  describeRanks(title, { suite: 'gin', cases: ginCases, found, mandatory: mandatoryGinCases }, options);
}
