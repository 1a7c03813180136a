import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { parseRoutingTrace, type RoutingTrace, routingOfRanks, routingTraceText } from '../../src/moe/index.js';
import { expectPlanError } from '../expect-error.js';
import { routings } from './arbitraries.js';

const head = '{"format":"@ep/routing-trace","version":1,"worldSize":2,"experts":4,"topK":2,"steps":2}';

const one = head.replace('"steps":2', '"steps":1');

const traces: fc.Arbitrary<RoutingTrace> = fc
  .record({ worldSize: fc.integer({ min: 1, max: 4 }), experts: fc.integer({ min: 1, max: 9 }) })
  .chain(({ worldSize, experts }) => fc.array(routings(worldSize, experts, 3), { minLength: 1, maxLength: 4 }))
  .map((steps) => {
    const { worldSize, experts, topK } = steps[0]!;
    return { worldSize, experts, topK, steps: steps.filter((step) => step.topK === topK) };
  });

describe('routing traces', () => {
  it('survive writing and reading', () => {
    fc.assert(
      fc.property(traces, (trace) => {
        expect(parseRoutingTrace(routingTraceText(trace))).toEqual(trace);
      }),
    );
  });

  it('read as documented: lines, a rank without tokens has none', () => {
    const text = `${head}\n{"step":0,"rank":1,"topkIdx":[0,3,1,-1]}\n{"step":1,"rank":0,"topkIdx":[2,1]}\n`;
    const { steps, worldSize, experts, topK } = parseRoutingTrace(text);
    expect([worldSize, experts, topK]).toEqual([2, 4, 2]);
    expect(steps).toEqual([
      routingOfRanks(4, 2, [Int32Array.of(), Int32Array.of(0, 3, 1, -1)]),
      routingOfRanks(4, 2, [Int32Array.of(2, 1), Int32Array.of()]),
    ]);
    expect(routingTraceText({ worldSize, experts, topK, steps })).toBe(text);
    expect(parseRoutingTrace(text.trimEnd()).steps).toHaveLength(2);
  });

  it.each([
    ['', ['line 1', 'JSON object']],
    ['[]', ['line 1', 'JSON object', 'an array of 0']],
    ['{}', ['line 1', "format must be '@ep/routing-trace'", 'undefined']],
    [head.replace('"worldSize":2', '"worldSize":65537'), ['worldSize must be an integer in [1, 65536]']],
    [head.replace('"experts":4', '"experts":1e9'), ['experts']],
    [head.replace('"topK":2', '"topK":5'), ['topK must be an integer in [1, 4]']],
    [head.replace('"steps":2', '"steps":"2"'), ['steps', 'string 2']],
    [`${one}\n\n`, ['line 2', 'JSON object']],
    [`${one}\n{"step":1,"rank":0,"topkIdx":[]}`, ['line 2', 'step must be an integer in [0, 0]']],
    [`${one}\n{"step":0,"rank":2,"topkIdx":[]}`, ['line 2', 'rank must be an integer in [0, 1]']],
    [`${one}\n{"step":0,"rank":0,"topkIdx":[1]}`, ['line 2', 'multiple of topK = 2', 'an array of 1']],
    [`${one}\n{"step":0,"rank":0,"topkIdx":"12"}`, ['line 2', 'topkIdx']],
    [`${one}\n{"step":0,"rank":0,"topkIdx":[1,0.5]}`, ['line 2', 'topkIdx[1] must be an int32']],
    [`${one}\n{"step":0,"rank":0,"topkIdx":[1,4]}`, ['step 0', 'topkIdx[1] must be in [-1, 3], found 4']],
    [`${one}\n{"step":0,"rank":0,"topkIdx":[1,1]}`, ['step 0', 'repeats expert 1']],
    [
      `${head}\n{"step":1,"rank":0,"topkIdx":[]}\n{"step":0,"rank":1,"topkIdx":[]}`,
      ['line 2', 'of step 0', 'step 1, rank 0'],
    ],
    [`${head}\n{"step":0,"rank":1,"topkIdx":[]}\n{"step":0,"rank":1,"topkIdx":[]}`, ['line 3', 'after step 0, rank 1']],
    [`${head}\n{"step":0,"rank":1,"topkIdx":[]}\n{"step":0,"rank":0,"topkIdx":[]}`, ['line 3', 'found step 0, rank 0']],
    [head, ['line 1', 'steps must be at most 0, the number of lines that follow, found 2']],
    [
      `${head}\n{"step":0,"rank":0,"topkIdx":[]}\n{"step":0,"rank":1,"topkIdx":[]}`,
      ['line 3', 'steps must be 2, as the first line says', 'found 1'],
    ],
  ])('refuses %j', (text, parts) => {
    expectPlanError(() => parseRoutingTrace(text), 'EP_INVALID_PLAN', ...parts);
  });

  it('refuses another version, and more empty steps than a short file may ask memory for', () => {
    expectPlanError(() => parseRoutingTrace(head.replace('"version":1', '"version":2')), 'EP_PLAN_VERSION', '2', '1');
    const many = head.replace('"steps":2', '"steps":2147483647');
    expectPlanError(() => parseRoutingTrace(many), 'EP_CAPACITY', '2147483647 steps of worldSize 2', 'at most 2097152');
    const wide = head.replace('"experts":4', '"experts":65536').replace('"steps":2', '"steps":5000');
    expectPlanError(() => parseRoutingTrace(wide), 'EP_CAPACITY', '5000 steps of experts 65536', 'at most 4096');
    const short = head.replace('"steps":2', '"steps":2000000');
    expectPlanError(() => parseRoutingTrace(short), 'EP_INVALID_PLAN', 'line 1', 'steps must be at most 0', '2000000');
    expectPlanError(() => parseRoutingTrace(7 as never), 'EP_INVALID_PLAN', 'text');
  });

  it('refuses to write steps of different shapes', () => {
    const step = routingOfRanks(4, 2, [Int32Array.of(0, 1)]);
    expectPlanError(
      () => routingTraceText({ worldSize: 1, experts: 5, topK: 2, steps: [step] }),
      'EP_INVALID_ARGUMENT',
      'steps[0].experts must be 5',
      'found 4',
    );
  });
});
