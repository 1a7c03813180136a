/** Operation x moment x who dies x ranks. */
import { type BackendName, MOMENTS, OPERATIONS, type Scenario } from './protocol.js';

/** In milliseconds; where in a call they fall depends on the machine, so there are many. */
const DELAYS = [0, 0.05, 0.2, 0.7, 1.5, 3, 6, 12];

interface Loss {
  readonly who: string;
  readonly victims: readonly number[];
  readonly worldSize: number;
}

const LOSSES: readonly Loss[] = [2, 3, 4, 5].flatMap((worldSize) => [
  { who: 'rank 0', victims: [0], worldSize },
  { who: 'the last rank', victims: [worldSize - 1], worldSize },
  ...(worldSize > 2 ? [{ who: 'two at once', victims: [0, worldSize - 1], worldSize }] : []),
]);

export interface NamedScenario extends Scenario {
  readonly title: string;
}

function name(backend: BackendName, operation: number, moment: number, loss: Loss, step: number): NamedScenario {
  const scenario = {
    backend,
    operation: OPERATIONS[operation]!,
    moment: MOMENTS[moment]!,
    victims: loss.victims,
    worldSize: loss.worldSize,
    delayMs: DELAYS[step % DELAYS.length]!,
  };
  const delay = ['inside', 'chunks', 'queue'].includes(scenario.moment) ? ` (${scenario.delayMs} ms)` : '';
  const title = `${scenario.operation}, ${scenario.moment}${delay}, ${loss.who} of ${loss.worldSize} dies`;
  return { ...scenario, title };
}

/** Every combination, each with one of the delays. */
export function wholeMatrix(backend: BackendName): readonly NamedScenario[] {
  let step = 0;
  return OPERATIONS.flatMap((_, operation) =>
    MOMENTS.flatMap((_, moment) => LOSSES.map((loss) => name(backend, operation, moment, loss, step++))),
  );
}

/** Every operation at every `stride`-th moment, with who dies among how many going round. The same in every run. */
export function sampleOf(backend: BackendName, stride: number): readonly NamedScenario[] {
  const pairs = OPERATIONS.flatMap((_, operation) => MOMENTS.map((_, moment) => [operation, moment] as const));
  return pairs
    .filter(([operation, moment]) => (operation + moment) % stride === 0)
    .map(([operation, moment], i) =>
      name(backend, operation, moment, LOSSES[(i * 7 + moment) % LOSSES.length]!, i * 3 + operation),
    );
}
