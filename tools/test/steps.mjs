// The table of test steps: what runs in which lane, how long it may take, and where its totals are.
// A step is here when what it needs exists. Packages with a `test` script are added by themselves; a script without
// tests fails, it is not skipped.
import { join } from 'node:path';
import { listPackages, resultsDir, root } from '../workspace.mjs';

/** @typedef {'default' | 'ci' | 'full'} Lane */
/**
 * @typedef {{ name: string, lanes: readonly Lane[], minutes: number, usual?: number, command: readonly string[], cwd?: string,
 *   env?: Record<string, string>, report?: { format: 'vitest' | 'junit' | 'plain', files: readonly string[] },
 *   counts?: boolean, needs?: string, beside?: boolean }} Step
 * minutes: its limit; usual: what it takes on two cores without a compiler cache, 1 unless given (--until);
 * counts: false when the step only prepares others and is no test of its own; needs: a step that must have passed;
 * beside: it runs beside the others, on what they leave of the cores
 */

/** @type {readonly Lane[]} */
export const lanes = ['default', 'ci', 'full'];

/**
 * A step that compiles, or counts what no load changes. Suites leave half of two cores idle, since their ranks wait for each other.
 * @param {Step} step
 * @returns {Step}
 */
const beside = (step) => ({ ...step, minutes: step.minutes * 3, beside: true });

/** Relative to each package, so that one command line fits all of them (turbo hands the same arguments to each). */
const vitestFile = join('.cache', 'vitest.json');
const vitestArguments = [
  '--reporter=default',
  '--reporter=json',
  `--outputFile.json=${vitestFile}`,
  // CI's machine is shared, and one of some thousand tests of ranks that wait for each other may meet a pause that it did
  // not allow for. It is tried once more, and named (failures.mjs). A developer's run fails at once, and so do sanitizers:
  // what those report is a defect however seldom it is met.
  ...(process.env.CI === 'true' ? ['--retry=1'] : []),
];

/** @param {string} script */
const packagesWith = (script) => listPackages().filter((entry) => entry.manifest.scripts?.[script] !== undefined);

/** Of `test:ci`. @type {Record<string, number>} */
const usualMinutes = { '@ep/cli': 4, '@ep/collectives': 9, '@ep/cuda-kernels': 5 };

/**
 * @param {string} script one that ends in `vitest run`: it is given vitest's arguments
 * @param {readonly Lane[]} stepLanes
 * @param {number} minutes
 * @returns {Step[]} one step per package with that script, one after the other: suites wait on their own ranks
 */
const suites = (script, stepLanes, minutes) =>
  packagesWith(script).map((entry) => ({
    name: `${script} ${entry.name}`,
    lanes: stepLanes,
    minutes,
    ...(script === 'test:ci' ? { usual: usualMinutes[entry.name] ?? 2 } : {}),
    command: ['pnpm', 'run', script, ...vitestArguments],
    cwd: join(root, entry.dir),
    report: { format: 'vitest', files: [join(root, entry.dir, vitestFile)] },
  }));

/**
 * @param {number} minutes
 * @returns {Step[]} one step, and one test, per package with a fuzzer
 */
const fuzzers = (minutes) =>
  packagesWith('fuzz').map((entry) => ({
    name: `fuzz ${entry.name}`,
    lanes: ['full'],
    minutes,
    command: ['pnpm', 'run', 'fuzz'],
    cwd: join(root, entry.dir),
  }));

/**
 * Configure, build and run the C++ tests of one CMake preset (native/CMakePresets.json).
 * @param {string} preset
 * @param {readonly Lane[]} stepLanes
 * @param {number} minutes
 * @param {{ build: number, tests: number }} usual
 * @param {boolean} [sampled] those of EP_SAMPLED_TESTS (native/cmake/EpSources.cmake)
 * @returns {Step[]}
 */
const ctestPreset = (preset, stepLanes, minutes, usual, sampled = false) => {
  const cwd = join(root, 'native');
  const report = join(resultsDir, `ctest-${preset}.xml`);
  const prepare = { lanes: stepLanes, minutes, cwd, counts: false };
  return [
    beside({ ...prepare, name: `configure ${preset}`, command: ['cmake', '--preset', preset], needs: 'build' }),
    beside({
      ...prepare,
      name: `build ${preset}`,
      usual: usual.build,
      command: ['cmake', '--build', '--preset', preset, ...(sampled ? ['--target', 'sampled_tests'] : [])],
      needs: `configure ${preset}`,
    }),
    {
      name: `ctest ${preset}`,
      lanes: stepLanes,
      minutes,
      usual: usual.tests,
      cwd,
      command: [
        ...['ctest', '--preset', preset, '--no-tests=error', '--output-on-failure', '--output-junit', report],
        ...(sampled ? ['-L', 'sampled'] : []),
        ...(preset === 'release' && process.env.CI === 'true' ? ['--repeat', 'until-pass:2'] : []),
      ],
      report: { format: 'junit', files: [report] },
      needs: `build ${preset}`,
    },
  ];
};

/**
 * Some C++ tests of the release preset, told by a variable to do more than they do elsewhere.
 * @param {string} name
 * @param {string} variable `NAME=value`
 * @param {string} tests a regular expression of ctest
 * @param {number} minutes
 * @returns {Step}
 */
const longer = (name, variable, tests, minutes) => {
  const report = join(resultsDir, `ctest-${name.replaceAll(/\W+/g, '-')}.xml`);
  const run = ['ctest', '--preset', 'release', '-R', tests, '--no-tests=error', '--output-on-failure'];
  return {
    name,
    lanes: ['full'],
    minutes,
    cwd: join(root, 'native'),
    command: ['cmake', '-E', 'env', variable, ...run, '--output-junit', report],
    report: { format: 'junit', files: [report] },
    needs: 'build release',
  };
};

/**
 * The C++ tests of a preset that needs a tool which a machine may lack: see optional-preset.mjs.
 * @param {string} preset
 * @param {readonly Lane[]} stepLanes
 * @param {number} minutes
 * @returns {Step}
 */
const optionalPreset = (preset, stepLanes, minutes) => {
  const totals = join(resultsDir, `${preset}-totals.json`);
  return {
    name: `ctest ${preset}`,
    lanes: stepLanes,
    minutes,
    command: ['node', 'tools/test/optional-preset.mjs', preset, '--totals', totals],
    report: { format: 'plain', files: [totals] },
  };
};

/**
 * @param {readonly Lane[]} stepLanes
 * @param {readonly string[]} options
 * @returns {Step}
 */
const kernelsLinked = (stepLanes, options) => {
  const totals = join(resultsDir, 'kernel-totals.json');
  return beside({
    name: 'kernels linked',
    lanes: stepLanes,
    minutes: 15,
    usual: 3,
    command: ['node', 'native/tests/compile/run.mjs', '--totals', totals, ...options],
    report: { format: 'plain', files: [totals] },
  });
};

/** @returns {readonly Step[]} */
export function stepTable() {
  const ciLanes = /** @type {const} */ (['ci', 'full']);
  const checkTotals = join(resultsDir, 'check-totals.json');
  const headerTotals = join(resultsDir, 'header-totals.json');
  const aloneTotals = join(resultsDir, 'header-alone-totals.json');
  const instructionTotals = join(resultsDir, 'instruction-totals.json');
  return [
    {
      name: 'build',
      lanes,
      minutes: 20,
      command: ['turbo', 'run', 'build', 'build:native', '--output-logs=errors-only'],
      counts: false,
    },
    {
      name: 'check',
      lanes: ['default'],
      minutes: 6,
      command: ['node', 'tools/check/main.mjs', '--totals', checkTotals],
      report: { format: 'plain', files: [checkTotals] },
    },
    {
      name: 'test tools',
      lanes: ['default'],
      minutes: 3,
      command: ['vitest', 'run', '--root', 'tools', ...vitestArguments],
      report: { format: 'vitest', files: [join(root, 'tools', vitestFile)] },
    },
    ...suites('test', ['default'], 10),
    // Their tests have limits of their own. This one is for what hangs: a machine whose host is busy has taken three times as long as usual, and what would not end in CI's time is left out (--until).
    ...suites('test:ci', ['ci'], 30),
    ...ctestPreset('release', ciLanes, 15, { build: 6, tests: 4 }),
    // The device code over the software EFA, under ten times and more the seeds that it has elsewhere.
    longer(
      'efa for 1000 seeds',
      'EP_TEST_SEEDS=1000',
      '^efa_(gin|gin_failures|post|endpoint|pr|naive)(_unordered)?_test$',
      20,
    ),
    // What software NICs are told by posters, by commands and by their peers on a network: as much as ends within a test's 300 s on a busy machine, too.
    longer('fuzz of C++', 'EP_FUZZ_RUNS=500000', '^(nic_fuzz|net_talk|net_wire|net_efa)_test$', 20),
    beside({
      name: 'headers',
      lanes: ['default'],
      minutes: 10,
      command: ['node', 'tools/headers/main.mjs', '--totals', headerTotals],
      report: { format: 'plain', files: [headerTotals] },
    }),
    beside({
      name: 'headers alone',
      lanes: ciLanes,
      minutes: 10,
      usual: 3,
      command: ['node', 'tools/headers/main.mjs', '--alone', '--totals', aloneTotals],
      report: { format: 'plain', files: [aloneTotals] },
    }),
    // `headers` has compiled all of them for the others; linking is alike.
    kernelsLinked(['ci'], ['--architectures', '90', '--whole']),
    kernelsLinked(['full'], []),
    beside({
      name: 'instructions of a post',
      lanes: ciLanes,
      minutes: 5,
      command: ['node', 'native/tests/device/post_instructions.mjs', '--totals', instructionTotals],
      report: { format: 'plain', files: [instructionTotals] },
    }),
    optionalPreset('litmus', ciLanes, 15),
    { name: 'prebuild', lanes: ciLanes, minutes: 10, command: ['node', 'tools/prebuild/main.mjs'], counts: false },
    {
      name: 'publish dry run',
      lanes: ciLanes,
      minutes: 5,
      command: ['node', 'tools/pack/publish-dry-run.mjs'],
      needs: 'prebuild',
    },
    {
      name: 'e2e',
      lanes: ciLanes,
      minutes: 30,
      usual: 13,
      command: [
        'turbo',
        'run',
        'e2e',
        '--concurrency=1',
        '--continue',
        '--output-logs=new-only',
        '--',
        ...vitestArguments,
      ],
      report: { format: 'vitest', files: packagesWith('e2e').map((entry) => join(root, entry.dir, vitestFile)) },
    },
    // Last, for on a slow machine the last of `ci` is left out (--until).
    ...ctestPreset('asan', ['ci'], 20, { build: 4, tests: 2 }, true),
    ...ctestPreset('tsan', ['ci'], 20, { build: 4, tests: 3 }, true),
    ...ctestPreset('asan', ['full'], 20, { build: 7, tests: 6 }),
    ...ctestPreset('tsan', ['full'], 20, { build: 6, tests: 8 }),
    optionalPreset('clang', ['full'], 20),
    optionalPreset('clang-asan', ['full'], 30),
    // That of groups takes 65 to 75 minutes on two cores.
    ...suites('test:full', ['full'], 120),
    ...fuzzers(60),
  ];
}

/**
 * @param {Lane} lane
 * @param {readonly Step[]} [table]
 */
export const stepsOf = (lane, table = stepTable()) => table.filter((step) => step.lanes.includes(lane));
