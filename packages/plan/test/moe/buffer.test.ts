import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  alignedRowBytes,
  type BufferShape,
  balanceExperts,
  bufferSizes,
  bufferText,
  bytesText,
  generateRouting,
  largestMaxTokens,
  mapExperts,
  messageBytes,
  payloadBytes,
  planMoe,
  spreadExperts,
} from '../../src/moe/index.js';
import { expectPlanError } from '../expect-error.js';

const shape = {
  design: 'low-latency',
  experts: { experts: 256, worldSize: 8 },
  maxTokens: 128,
  topK: 8,
  hidden: 7168,
  dispatch: 'bf16',
  combine: 'bf16',
} as const satisfies BufferShape;

const shapes: fc.Arbitrary<BufferShape> = fc.record({
  design: fc.constantFrom('low-latency', 'high-throughput', 'deepep-v1', 'mooncake'),
  experts: fc
    .tuple(fc.integer({ min: 1, max: 300 }), fc.integer({ min: 0, max: 100 }), fc.integer({ min: 1, max: 64 }))
    .map(([experts, more, worldSize]) => ({ experts, replicas: experts + more, worldSize })),
  maxTokens: fc.integer({ min: 1, max: 4096 }),
  topK: fc.integer({ min: 1, max: 32 }),
  hidden: fc.integer({ min: 1, max: 8192 }),
  dispatch: fc.constantFrom('f32', 'bf16', 'f16', 'f8e4m3+f32', 'f8e4m3+ue8m0', 'logfmt10'),
  combine: fc.constantFrom('f32', 'bf16', 'logfmt10'),
  calls: fc.integer({ min: 1, max: 4 }),
  staged: fc.boolean(),
  zeroCopy: fc.boolean(),
  alignment: fc.constantFrom(1, 128),
});

describe('rows', () => {
  it.each([
    [7168, 14_352, 7408],
    [4096, 8208, 4240],
    [2048, 4112, 2128],
  ])(
    'of %d channels are %d bytes in bf16 and %d in fp8 with scales, as the original sends them',
    (hidden, bf16, fp8) => {
      expect(messageBytes('bf16', hidden)).toBe(bf16);
      expect(messageBytes('f8e4m3+f32', hidden)).toBe(fp8);
    },
  );

  it('of any size are multiples of 16', () => {
    expect(payloadBytes('f16', 100)).toBe(200);
    expect(alignedRowBytes('f16', 100)).toBe(208);
    expect(messageBytes('f16', 100)).toBe(224);
    expect(payloadBytes('f32', 3)).toBe(12);
    expect(payloadBytes('f8e4m3+ue8m0', 129)).toBe(131);
    // 1.25 H + 4 H / 128.
    expect(payloadBytes('logfmt10', 7168)).toBe(8960 + 224);
    expectPlanError(() => payloadBytes('int8' as never, 4), 'EP_INVALID_ARGUMENT', 'int8');
    expectPlanError(() => payloadBytes('bf16', 0), 'EP_INVALID_ARGUMENT', 'hidden');
  });
});

describe('bufferSizes', () => {
  it.each([
    [128, 7168, 288, 2_118_652_416],
    [128, 7168, 256, 1_883_246_592],
    [256, 2048, 288, 1_217_401_344],
    [128, 4096, 128, 538_970_112],
  ])("mooncake's buffer of %d tokens, %d channels, %d experts takes %d bytes", (maxTokens, hidden, experts, bytes) => {
    const sizes = bufferSizes({ ...shape, design: 'mooncake', maxTokens, hidden, experts: { experts, worldSize: 8 } });
    expect(sizes.totalBytes).toBe(bytes);
    expect(sizes.withoutRedundantBytes).toBe(bytes);
  });

  it('explains the 35.55 GiB of a DeepEP V1 buffer that counts redundant experts', () => {
    const sizes = bufferSizes({
      ...shape,
      design: 'deepep-v1',
      maxTokens: 2048,
      hidden: 5120,
      experts: { experts: 256, replicas: 448, worldSize: 8 },
    });
    expect(bytesText(sizes.totalBytes)).toBe('35.55 GiB');
    // 192 of 448 replicas are redundant, and every byte but the signals' is proportional to replicas.
    expect((sizes.totalBytes - sizes.withoutRedundantBytes) / sizes.totalBytes).toBeCloseTo(192 / 448, 5);
    expect(bufferText(sizes)).toContain('redundant places cost 15.23 GiB');
  });

  it.each(['low-latency', 'high-throughput'] as const)(
    'has room for results that are cast, or read where experts write them, %s: tokens have theirs only where they are cast',
    (design) => {
      const staged = (options: Partial<BufferShape>): readonly string[] =>
        bufferSizes({ ...shape, design, ...options }).components.flatMap(({ name }) =>
          name.startsWith('staged') ? [name] : [],
        );
      expect(staged({})).toEqual([]);
      expect(staged({ zeroCopy: true })).toEqual(['staged results']);
      expect(staged({ staged: true })).toEqual(['staged tokens', 'staged results']);
      expect(staged({ staged: true, zeroCopy: true })).toEqual(['staged tokens', 'staged results']);
    },
  );

  it('every component is the product of what its formula names, and they add up', () => {
    fc.assert(
      fc.property(shapes, (given) => {
        const { components, totalBytes, withoutRedundantBytes } = bufferSizes(given);
        let sum = 0;
        for (const { name, formula, factors, bytes, offset } of components) {
          expect(offset).toBe(sum);
          if (given.design === 'low-latency' || given.design === 'high-throughput')
            expect(offset % (name === 'row starts' || name === 'refusals' ? 8 : 16)).toBe(0);
          const names = Object.keys(factors);
          expect(new Function(...names, `return ${formula}`)(...Object.values(factors))).toBe(bytes);
          sum += bytes;
        }
        expect(totalBytes).toBe(sum);
        expect(withoutRedundantBytes).toBeLessThanOrEqual(totalBytes);
        const text = bufferText(bufferSizes(given));
        for (const { name } of components) expect(text).toContain(name);
        expect(text).toContain(String(totalBytes));
      }),
    );
  });

  it('the largest number of tokens fits, and one more does not', () => {
    fc.assert(
      fc.property(shapes, fc.integer({ min: 0, max: 2 ** 40 }), ({ maxTokens: _, ...given }, budget) => {
        const most = largestMaxTokens(given, budget);
        if (most > 0) expect(bufferSizes({ ...given, maxTokens: most }).totalBytes).toBeLessThanOrEqual(budget);
        if (most < 2 ** 31 - 1)
          expect(bufferSizes({ ...given, maxTokens: most + 1 }).totalBytes).toBeGreaterThan(budget);
      }),
    );
  });

  it('room for results is by choice and not by expert: a tenth of the peers at 288 experts', () => {
    const experts = { experts: 288, worldSize: 8 };
    const ours = bufferSizes({ ...shape, experts });
    const row = ours.components.find(({ name }) => name === 'returned results')!;
    expect(row.bytes).toBe(2 * 2 * 128 * 8 * 14_336);
    expect(bufferSizes({ ...shape, design: 'mooncake', experts }).totalBytes / ours.totalBytes).toBeGreaterThan(1.85);
  });

  it('takes an expert map as it is: every rank has room for the rank with most', () => {
    const map = mapExperts({
      worldSize: 2,
      experts: 3,
      rankOffsets: Int32Array.of(0, 3, 4),
      expert: Int32Array.of(0, 1, 2, 0),
    });
    const { components } = bufferSizes({ ...shape, experts: map });
    expect(components.find(({ name }) => name === 'counts')!.factors.localExperts).toBe(3);
    const spread = spreadExperts(256, 8);
    expect(bufferSizes({ ...shape, experts: spread })).toEqual(bufferSizes(shape));
  });

  it('the worst routing fits into the default rows of the high-throughput form', () => {
    for (const [experts, worldSize, topK, alignment] of [
      [4, 2, 3, 1],
      [8, 3, 2, 128],
    ] as const) {
      const routing = generateRouting({
        worldSize,
        tokens: 16,
        experts,
        topK,
        popularity: { kind: 'k-hot', hot: topK, share: 1 },
        seed: 1,
      });
      const { map } = balanceExperts(new Float64Array(experts).fill(1), { worldSize });
      const { components } = bufferSizes({
        ...shape,
        design: 'high-throughput',
        experts: map,
        maxTokens: 16,
        topK,
        alignment,
      });
      const plan = planMoe(routing, map, { mode: 'high-throughput', alignment });
      expect(Math.max(...plan.placement.recvRows)).toBeLessThanOrEqual(components[0]!.factors.recvRows!);
    }
  });

  it.each([
    [{ design: 'uccl' }, 'EP_INVALID_ARGUMENT', ['design must be one of low-latency']],
    [{ calls: 5 }, 'EP_INVALID_ARGUMENT', ['calls', '[1, 4]']],
    [{ maxTokens: 0 }, 'EP_INVALID_ARGUMENT', ['maxTokens']],
    [{ experts: { experts: 8, replicas: 7, worldSize: 2 } }, 'EP_INVALID_ARGUMENT', ['replicas', '[8,']],
    [{ experts: undefined }, 'EP_INVALID_ARGUMENT', ['experts must be an object']],
    [
      { maxTokens: 2 ** 31 - 1, experts: { experts: 65_536, worldSize: 1 } },
      'EP_CAPACITY',
      ['received tokens', '2^53'],
    ],
  ] as const)('refuses %j', (change, code, parts) => {
    expectPlanError(() => bufferSizes({ ...shape, ...change } as never), code, ...parts);
  });

  it.each([
    [0, '0 B'],
    [1023, '1023 B'],
    [1024, '1.000 KiB'],
    [2 ** 20 * 12.5, '12.50 MiB'],
    [2 ** 30 * 999, '999.0 GiB'],
    [2 ** 50, '1.000 PiB'],
  ])('%d bytes read as %s', (bytes, text) => {
    expect(bytesText(bytes)).toBe(text);
  });
});
