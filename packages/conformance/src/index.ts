/** @ep/conformance: one body per behaviour, run for every transport and store; outcomes are committed. For tests: needs vitest. */
export { mandatoryCases, mandatoryGinCases, mandatoryStoreCases } from './mandatory.js';
export { storeCases } from './stores/cases.js';
export type { StorePlace } from './stores/protocol.js';
export { StorePrograms } from './stores/store-programs.js';
export { describeGin } from './suite/describe-gin.js';
export {
  describePlaces,
  type PlacedProvider,
  type PlacedTransport,
  type PlacesConfig,
} from './suite/describe-places.js';
export {
  type DeclaredCase,
  describeRanks,
  isRequired,
  type RankMatrix,
  type RankSuite,
  resolveModule,
} from './suite/describe-ranks.js';
export { describeStore, type StoreSetUp } from './suite/describe-store.js';
export { describeTransport, type TransportConformance } from './suite/describe-transport.js';
export { compareOutcome, type ExpectedFile, type Outcome, readExpected } from './suite/expected.js';
export { Outcomes } from './suite/outcomes.js';
export type { CaseOrder, Named } from './world/protocol.js';
export { World, Worlds } from './world/world.js';
