/** The suite of every transport. No test framework is imported here: ranks load it in threads and processes of their own. */
import { atomicCases } from './atomics.js';
import type { TransportCase } from './case.js';
import { deviceCases } from './device.js';
import { failureCases } from './failure.js';
import { isolationCases } from './isolation.js';
import { lifecycleCases } from './lifecycle.js';
import { memoryCases } from './memory.js';
import { putCases } from './put.js';
import { requestCases } from './requests.js';
import { roundCases } from './rounds.js';
import { setUpCases } from './setup.js';
import { signalCases } from './signals.js';
import { stressCases } from './stress.js';
import { waitCases } from './waits.js';

export { type CaseRank, inapplicableBecause, type Mode, type Resources, type TransportCase } from './case.js';

/** Those that end with a dead rank come last: the ranks are started anew after each. */
export const transportCases: readonly TransportCase[] = [
  ...setUpCases,
  ...lifecycleCases,
  ...memoryCases,
  ...putCases,
  ...signalCases,
  ...requestCases,
  ...atomicCases,
  ...waitCases,
  ...isolationCases,
  ...roundCases,
  ...deviceCases,
  ...stressCases,
  ...failureCases,
];
