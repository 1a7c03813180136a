import { describe, expect, it } from 'vitest';
import { checkApart } from '../../src/checks.js';

const room = new Float32Array(256);
const view = (begin: number, length = 2) => room.subarray(begin, begin + length);
const apart = (count: number) => Array.from({ length: count }, (_, i) => view(4 * i));

// Few arrays are compared in pairs, many are sorted.
describe.each([4, 40])('%i arrays of a call', (count) => {
  const inputs = apart(count);

  it('may lie beside each other, and be empty anywhere', () => {
    const outputs = inputs.map((_, i) => view(4 * i + 2));
    checkApart('call', { what: 'inputs', arrays: inputs }, { what: 'outputs', arrays: outputs });
    checkApart('call', { what: 'inputs', arrays: inputs }, { what: 'output', arrays: [view(1, 0)] });
    checkApart('call', { what: 'inputs', arrays: inputs }, { what: 'output', arrays: [new Float32Array(256)] });
  });

  it.each([
    ['an output that begins in an input', view(5), 'inputs[1] and output overlap in memory'],
    ['an output that ends in an input', view(7), 'output and inputs[2] overlap in memory'],
    ['an output that holds all inputs', view(0, 200), 'inputs[0] and output overlap in memory'],
    ['an output that is an input', view(8), 'inputs[2] and output overlap in memory'],
  ])('are refused with %s', (_, output, text) => {
    expect(() =>
      checkApart('call', { what: 'inputs', arrays: inputs }, { what: 'output', arrays: [output] }),
    ).toThrowError(`call: ${text}`);
  });

  it('are refused where two of one list overlap', () => {
    expect(() => checkApart('call', { what: 'tensors', arrays: [...inputs, view(4 * count - 3)] })).toThrowError(
      `call: tensors[${count - 1}] and tensors[${count}] overlap in memory`,
    );
  });
});
