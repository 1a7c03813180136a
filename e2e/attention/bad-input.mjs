// Wrong calls of one rank, each of which must be refused and leave the dispatcher as good as it was.
import { tensor } from '@ep/core';
import { openDispatcher } from '@ep/cuda-kernels';
import { codeOf } from '../code-of.mjs';
import { randomPlan } from './plans.mjs';

/** The code of each, by the name of what is wrong. */
export async function badInput({ transport, worldSize }) {
  const plan = randomPlan(2, worldSize).fwdQ;
  const dispatcher = await openDispatcher(transport, { leaseBytes: 65536 });
  const { forward } = await dispatcher.bind({ forward: [{ name: 'q', plan, dtype: 'f32', rowShape: [4] }] });
  const rows = plan.sendTokens[0];
  const codes = {};
  const attempt = (name, body) => {
    try {
      body();
      codes[name] = 'no error';
    } catch (error) {
      codes[name] = error.code ?? String(error);
    }
  };
  attempt('missing', () => forward.run({}));
  attempt('dtype', () => forward.run({ q: tensor('f64', [rows, 4]) }));
  attempt('rows', () => forward.run({ q: tensor('f32', [rows + 1, 4]) }));
  attempt('width', () => forward.run({ q: tensor('f32', [rows, 5]) }));
  attempt('shape', () => forward.run({ q: tensor('f32', [rows, 2, 2]) }));
  attempt('noTensor', () => forward.run({ q: new Float32Array(rows * 4) }));
  attempt('nothing', () => forward.run());
  const shape = [rows, 4];
  attempt('shapeNoList', () => forward.run({ q: { dtype: 'f32', shape: 4, data: new Float32Array(rows * 4) } }));
  attempt('dataNoArray', () => forward.run({ q: { dtype: 'f32', shape, data: null } }));
  attempt('dataOfAnotherType', () => forward.run({ q: { dtype: 'f32', shape, data: new Int32Array(rows * 4) } }));
  attempt('dataTooShort', () => forward.run({ q: { dtype: 'f32', shape, data: new Float32Array(rows * 4 - 1) } }));
  const buffer = new ArrayBuffer(rows * 16);
  const detached = tensor('f32', [rows, 4], new Float32Array(buffer));
  structuredClone(buffer, { transfer: [buffer] });
  attempt('detached', () => forward.run({ q: detached }));
  const resizable = tensor(
    'f32',
    [rows, 4],
    new Float32Array(new ArrayBuffer(rows * 16, { maxByteLength: rows * 32 })),
  );
  attempt('resizable', () => forward.run({ q: resizable }));
  codes.capacity = await codeOf(() =>
    dispatcher.bind({ big: [{ name: 'q', plan, dtype: 'f64', rowShape: [100_000] }] }),
  );
  codes.world = await codeOf(() =>
    dispatcher.bind({ other: [{ name: 'q', plan: randomPlan(2, worldSize + 1).fwdQ, dtype: 'f32', rowShape: [4] }] }),
  );
  codes.reduceDtype = await codeOf(() =>
    dispatcher.bind({
      sum: [
        {
          name: 'd',
          plan: randomPlan(2, worldSize).revKvCompact,
          dtype: 'i32',
          rowShape: [4],
          reduce: randomPlan(2, worldSize).reduction,
        },
      ],
    }),
  );
  // Each is wrong in one thing only, which no check of forms can see.
  const wrongPlans = {
    planVersion: { version: plan.version + 1 },
    planKind: { kind: 'nonsense' },
    planOverlap: { dstOffset: plan.dstOffset.map(() => 0) },
    planLength: { length: plan.length.map((length, i) => (i === 0 ? length + 1 : length)) },
    planSums: { recvTokens: plan.recvTokens.map((tokens) => tokens + 1) },
    planPairs: { received: { ...plan.received, tokens: plan.received.tokens.map((tokens) => tokens + 1) } },
    planOffsets: { entryOffsets: plan.entryOffsets.subarray(0, worldSize) },
  };
  for (const [name, wrong] of Object.entries(wrongPlans)) {
    const bad = { ...plan, ...wrong };
    codes[name] = await codeOf(() => dispatcher.bind({ bad: [{ name: 'q', plan: bad, dtype: 'f32', rowShape: [4] }] }));
  }
  attempt('timeout', () => forward.run({ q: tensor('f32', [rows, 4]) }, { timeoutMs: Number.NaN }));
  codes.noOptions = await codeOf(() => openDispatcher(transport));
  codes.executor = await codeOf(() =>
    openDispatcher(transport, { leaseBytes: 64, executor: { lanes: 6, warpLanes: 4, seed: 1 } }),
  );
  const good = await forward.run({ q: tensor('f32', [rows, 4]) });
  good.release();
  await dispatcher.close();
  attempt('closed', () => forward.run({ q: tensor('f32', [rows, 4]) }));
  return codes;
}
