// The layer rule (ARCHITECTURE.md): who may import whom. `pnpm check --only layers` applies it.

// Top to bottom. What a layer's product code may import of ours, and nothing else.
const layers = {
  'packages/plan': [],
  'packages/core': [],
  native: ['packages/core'],
  'packages/nvshmem': ['packages/core', 'native'],
  'packages/ibgda': ['packages/core', 'native'],
  'packages/efa-gda': ['packages/core', 'native'],
  'packages/cuda-kernels': ['packages/core', 'native', 'packages/plan'],
  'packages/collectives': ['packages/core', 'native'],
  'packages/cli': ['packages/[^/]+', 'native'],
  'packages/conformance': ['packages/core', 'native'],
  'packages/fuzz': [],
};
/** Private: for tests, benchmarks and fuzzers only. */
const harnesses = ['packages/conformance', 'packages/fuzz'];
const transports = ['packages/nvshmem', 'packages/ibgda', 'packages/efa-gda'];

const ours = '^(packages/[^/]+|native)/';
const names = Object.keys(layers);
/** @param {readonly string[]} allowed */
const anyOf = (allowed) => `^(${allowed.join('|')})/`;

const productRules = Object.entries(layers).map(([layer, allowed]) => ({
  name: `layer ${layer}`,
  severity: 'error',
  comment: `${layer} may import of ours only: ${allowed.join(', ') || 'nothing'}`,
  from: { path: `^${layer}/(src|js|bin)/` },
  to: { path: ours, pathNot: anyOf([layer, ...allowed]) },
}));

// Tests, benchmarks and fuzzers may also use what stands above them in the list (kernels need a transport to run over) and the
// harnesses; another transport never.
const testRules = names.map((layer, index) => {
  const above = names.slice(0, index).filter((name) => !(transports.includes(layer) && transports.includes(name)));
  return {
    name: `layer of tests ${layer}`,
    severity: 'error',
    comment: `tests of ${layer} may import of ours only: ${[...above, ...harnesses].join(', ')}`,
    from: { path: `^${layer}/(test|tests|bench|fuzz)/` },
    to: { path: ours, pathNot: anyOf([layer, ...above, ...layers[layer], ...harnesses]) },
  };
});

/** @type {import('dependency-cruiser').IConfiguration} */
module.exports = {
  forbidden: [
    ...productRules,
    ...testRules,
    {
      name: 'nothing imports e2e or tools',
      severity: 'error',
      comment: 'but the scripts that build and run the C++ tests, which share compilers and processes with tools',
      from: { path: ours, pathNot: '^native/tests/[^/]+/[^/]+\\.mjs$' },
      to: { path: '^(e2e|tools)/' },
    },
    {
      name: 'scripts of C++ tests import no e2e',
      severity: 'error',
      from: { path: '^native/tests/' },
      to: { path: '^e2e/' },
    },
    {
      name: 'plan depends on nothing',
      severity: 'error',
      comment: '@ep/plan is pure TypeScript: no package, no Node built-in, so that it also runs in a browser',
      from: { path: '^packages/plan/src/' },
      to: { pathNot: '^packages/plan/' },
    },
    {
      name: 'product code does not import tests',
      severity: 'error',
      from: { path: '^(packages/[^/]+|native)/(src|js|bin)/' },
      to: { path: '^(packages/[^/]+|native)/(test|tests|bench)/|\\.test\\.' },
    },
    {
      name: 'no cycles',
      severity: 'error',
      from: {},
      to: { circular: true, viaOnly: { dependencyTypesNot: ['type-only'] } },
    },
    {
      name: 'every import resolves',
      severity: 'error',
      comment: 'is the package listed in package.json, installed and built?',
      from: {},
      to: { couldNotResolve: true },
    },
  ],
  options: {
    doNotFollow: { path: ['node_modules', '/dist/'] },
    exclude: { path: ['/\\.cache/', '/native/build/'] },
    tsPreCompilationDeps: true,
    tsConfig: { fileName: 'tsconfig.base.json' },
    enhancedResolveOptions: { exportsFields: ['exports'], conditionNames: ['import', 'types', 'default'] },
  },
};
