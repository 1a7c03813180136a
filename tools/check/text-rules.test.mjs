import { expect, test } from 'vitest';
import { findTextProblems } from './text-rules.mjs';

/** @param {string} problem */
const ruleOf = (problem) => problem.split(': ')[1];

test.each([
  ['docs/a.md', `see ${['', 'work', 'shared', 'notes.md'].join('/')}`, 'machine path'],
  ['docs/a.md', 'cd /root', 'machine path'],
  ['a.ts', "open('/tmp/ep.sock')", 'machine path'],
  ['a.json', '{"cache": "/home/ana/x"}', 'machine path'],
  ['.npmrc', `registry=https://${['registry', 'npmjs', 'org'].join('.')}/`, 'registry host'],
  ['packages/a/test/a.test.ts', "  it.only('x', () => {});", 'focused or disabled test'],
  ['packages/a/test/a.test.ts', "test.concurrent.skip('x', () => {});", 'focused or disabled test'],
  ['packages/a/test/a.test.ts', "xit('x', () => {});", 'focused or disabled test'],
  ['packages/a/src/a.ts', '// TODO: later', 'unowned to-do'],
  ['native/core/heap.cpp', '  Napi::Value value;', 'Node-API outside native/napi'],
  ['native/include/ep/abi/a.h', '#include <node_api.h>', 'Node-API outside native/napi'],
  ['native/core/heap.hpp', '#include <cuda_runtime.h>', 'CUDA runtime outside native/cuda'],
])('%s with %j is refused', (path, line, rule) => {
  expect(findTextProblems(path, `first\n${line}\n`).map(ruleOf)).toEqual([rule]);
});

test.each([
  ['docs/a.md', 'see packages/work/src and ./tmp/x and https://host/tmp/x'],
  ['a.ts', "import { homedir } from 'node:os';"],
  ['packages/a/src/a.ts', '// TODO(#12): later'],
  ['packages/a/src/a.ts', 'const list = items.only;'],
  ['packages/a/test/a.test.ts', "test.skipIf(false)('x', () => {});"],
  ['native/napi/heap.cpp', '  Napi::Value value;'],
  ['native/core/heap.cpp', '// no Napi:: here'],
  ['native/cuda/launch.cu', '#include <cuda_runtime.h>'],
])('%s with %j passes', (path, line) => {
  expect(findTextProblems(path, line)).toEqual([]);
});
