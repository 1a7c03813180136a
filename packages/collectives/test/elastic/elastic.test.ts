/** Ranks that are replaced, come later, are taken out, come back. */
import { describe, expect, it } from 'vitest';
import { bundleProgram } from '../bundle.js';
import { runElastic } from './harness.js';

const program = await bundleProgram('elastic-rank');
const full = process.env.EP_TEST_FULL === '1';

describe('process groups over shared memory', () => {
  it.each(full ? [0, 1, 2, 3] : [0, 2])('replace rank %i of 4 by another process, four times', async (victim) => {
    await runElastic(program, { scenario: 'replaced', worldSize: 4, capacity: 4, victim });
  });

  it.each(full ? [0, 1, 2] : [0])('replace rank %i of 3, which has left in order', async (victim) => {
    await runElastic(program, { scenario: 'left', worldSize: 3, capacity: 3, victim });
  });

  it.each(full ? [0, 1, 2] : [2])('take rank %i of 3 out and in four times, and keep nothing', async (victim) => {
    await runElastic(program, { scenario: 'rounds', worldSize: 3, capacity: 3, victim });
  });

  it.each(full ? [0, 1, 2] : [1])('leave rank %i of 3 behind that is stopped, and take it back', async (victim) => {
    await runElastic(program, { scenario: 'stopped', worldSize: 3, capacity: 3, victim });
  });

  const stops = full ? Array.from({ length: 10 }, () => 0) : [1];
  it.each([
    ...stops.map((victim) => ['stoppedWriting', victim] as const),
    ...stops.map((victim) => ['stoppedAndDeactivated', victim] as const),
  ])('%s: keep rank %i of 3, stopped in the middle of writing, out of their memory', async (name, victim) => {
    const scenario = { scenario: name, worldSize: 3, capacity: 3, victim };
    let hits = 0;
    for (let tries = 0; tries < 5 && hits === 0; tries++) hits += (await runElastic(program, scenario)) ? 1 : 0;
    expect(hits, 'it was never stopped in the middle').toBe(1);
  });

  it.each(
    full
      ? [
          [3, 4],
          [2, 4],
          [2, 5],
          [1, 3],
        ]
      : [
          [3, 4],
          [2, 4],
          [2, 5],
        ],
  )('grow from %i to %i ranks under load', async (worldSize, capacity) => {
    await runElastic(program, { scenario: 'grown', worldSize: worldSize!, capacity: capacity!, victim: -1 });
  });

  it('begin with holes, and fill one of them', async () => {
    await runElastic(program, { scenario: 'holes', worldSize: 5, capacity: 5, victim: -1 });
  });

  it.each(full ? [0, 1, 2] : [2])('take rank %i of 3 out on purpose, and agree anew after failures', async (victim) => {
    await runElastic(program, { scenario: 'deactivated', worldSize: 3, capacity: 3, victim });
  });

  it.each(full ? [0, 1, 2] : [1])(
    'take rank %i of 3 out and in, forty times, and leave nothing behind',
    async (victim) => {
      await runElastic(program, { scenario: 'again', worldSize: 3, capacity: 3, victim });
    },
  );
});

describe.each(['hostile', 'nvshmem', 'ibgda', 'efa', 'mixed'] as const)('process groups over %s', (transport) => {
  const scenarios = [
    ['stopped', 3, [0, 1, 2]],
    ['deactivated', 3, [0, 1, 2]],
    ['rounds', 3, [0, 1, 2]],
    ['holes', 5, [-1]],
    ['again', 3, [0, 1, 2]],
    // Only where a transport has places in which nobody is yet.
    ...(transport === 'nvshmem' ? ([['grown', 2, [-1]]] as const) : []),
    // Only where a transport lets others in.
    ...(transport !== 'hostile'
      ? ([
          ['replaced', 4, [3, 2, 1, 0]],
          ['left', 3, [2, 1, 0]],
        ] as const)
      : []),
  ] as const;
  const sampled = {
    hostile: ['stopped', 'holes'],
    nvshmem: ['deactivated', 'grown', 'replaced', 'left'],
    ibgda: ['rounds', 'replaced', 'left'],
    efa: ['rounds', 'replaced', 'left'],
    mixed: ['replaced'],
  }[transport];
  const chosen = scenarios.flatMap(([scenario, worldSize, victims]) =>
    victims
      .filter((victim) => full || (sampled.includes(scenario) && victim === victims.at(-1)))
      .map((victim) => ({
        scenario,
        worldSize,
        capacity: scenario === 'grown' ? 2 * worldSize : worldSize,
        victim,
        transport,
      })),
  );
  it.each(chosen)('$scenario, rank $victim of $worldSize', async (scenario) => {
    await runElastic(program, scenario);
  });
});
