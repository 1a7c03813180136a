// What a rank does with the per-token kernel. Each function runs on every rank and returns what the test compares.
import { tensor } from '@ep/core';
import { compatBytesFor, openCompatDispatcher } from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { movePlan } from '@ep/plan/reference';
import { codeOf } from '../code-of.mjs';
import { fillRows, fullPlan, randomPlan, storageOf } from './plans.mjs';

const ROW_BYTES = { q: 32, kv: 16 }; // whole vectors
const ROWS = { q: 8, kv: 4 }; // of f32

function specsOf(plan, dtype = 'f32') {
  const part = (name, of, bytes) => ({ name, plan: of, dtype, rowShape: [bytes / storageOf(dtype, [0]).byteLength] });
  return {
    forward: [part('q', plan.fwdQ, ROW_BYTES.q), part('kv', plan.fwdKv, ROW_BYTES.kv)],
    output: [part('o', plan.revQ, ROW_BYTES.q)],
    gradient: [part('dKv', plan.revKv, ROW_BYTES.kv)],
  };
}

function bytesFor(specs) {
  const sizes = Object.values(specs).map(compatBytesFor);
  return {
    queryBytes: Math.max(...sizes.map(({ queryBytes }) => queryBytes)),
    keyValueBytes: Math.max(...sizes.map(({ keyValueBytes }) => keyValueBytes)),
  };
}

/** All ranks' rows, so that the oracle needs no communication. */
const allRows = (rowsOfRank, width, salt, dtype = 'f32') =>
  Array.from(rowsOfRank, (rows, rank) => storageOf(dtype, fillRows(new Float32Array(rows * width), rank, width, salt)));

const bytesOf = (storage) => Buffer.from(storage.buffer, storage.byteOffset, storage.byteLength);

/** Every dispatch of the plans that the kernel accepts, several times over, against the plain oracle. */
async function compat({ transport, rank, worldSize, data }) {
  const { dtype } = data;
  const counts = { compared: 0, refused: 0, bytes: 0 };
  const plans = [
    fullPlan(worldSize, 5),
    ...data.seeds.map((seed) => randomPlan(seed, worldSize, { maxShards: 6, documents: 4 * worldSize })),
  ];
  for (const [salt, plan] of plans.entries()) {
    const specs = specsOf(plan, dtype);
    const dispatcher = await openCompatDispatcher(transport, { ...bytesFor(specs), ...data.options });
    for (const [name, parts] of Object.entries(specs)) {
      let bound;
      try {
        bound = await dispatcher.bind({ [name]: parts });
      } catch (error) {
        if (error.code !== 'EP_UNSUPPORTED') throw error;
        counts.refused++;
        continue;
      }
      for (let call = 0; call < 3; call++) {
        const all = parts.map((part) => allRows(part.plan.sendTokens, part.rowShape[0], salt + call, dtype));
        const sources = Object.fromEntries(
          parts.map((part, i) => [
            part.name,
            tensor(dtype, [part.plan.sendTokens[rank], part.rowShape[0]], all[i][rank]),
          ]),
        );
        const { tensors } = await bound[name].run(sources);
        for (const [i, part] of parts.entries()) {
          const expected = movePlan(part.plan, all[i], part.rowShape[0])[rank];
          const { dtype: made, data: found } = tensors[part.name];
          if (made !== dtype || Buffer.compare(bytesOf(expected), bytesOf(found)) !== 0)
            throw new Error(`plan ${salt}, ${name} ${part.name}, call ${call}: the rows differ from the oracle's`);
          counts.bytes += found.byteLength;
        }
        counts.compared++;
      }
    }
    await dispatcher.close();
  }
  return counts;
}

/** Documents of shards with these lengths; shard i of document d is at home on rank (d + i) % worldSize and served by rank d % worldSize. */
function planOf(worldSize, documents, sharing = 'each-server') {
  const lengths = documents.flat();
  const offsets = [0];
  for (const document of documents) offsets.push(offsets.at(-1) + document.length);
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(lengths),
    homeRank: Int32Array.from(documents.flatMap((document, d) => document.map((_, i) => (d + i) % worldSize))),
    documentOffsets: Int32Array.from(offsets),
  });
  return planAttention(
    shards,
    Int32Array.from(shards.lengths, (_, g) => g % worldSize),
    { sharing },
  );
}

/** What the kernel cannot do is refused on every rank, and nothing hangs. Two ranks. */
async function compatRefusals({ transport, rank, worldSize }) {
  const good = fullPlan(worldSize, 5);
  const specs = specsOf(good);
  const dispatcher = await openCompatDispatcher(transport, { ...bytesFor(specs), timeoutMs: 20_000 });
  const bindCode = (parts) => codeOf(() => dispatcher.bind({ call: parts }));
  const [q, kv] = specs.forward;
  const found = {
    width: await bindCode([{ ...q, rowShape: [5] }]),
    kinds: await bindCode([kv]),
    compact: await bindCode([{ ...specs.gradient[0], plan: good.revKvCompact }]),
    reduce: await bindCode([{ ...specs.gradient[0], reduce: good.reduction }]),
    dtypes: await bindCode([q, { ...kv, dtype: 'i32' }]),
    idleRank: await bindCode([{ ...q, plan: planOf(worldSize, [[3], [0]]).fwdQ }]),
    replicas: await bindCode(specsOf(planOf(worldSize, [Array(12).fill(2)], 'each-query')).forward),
    emptyFirstShard: await bindCode(
      specsOf(
        planOf(worldSize, [
          [0, 2],
          [3, 2],
          [4, 4],
        ]),
      ).gradient,
    ),
    capacity: await bindCode([{ ...q, rowShape: [1 << 12] }]),
    mismatch: await bindCode([{ ...q, rowShape: [rank === 0 ? 4 : 8] }]),
  };
  const { call } = await dispatcher.bind({ call: [q] });
  const rows = good.fwdQ.sendTokens[rank];
  const wide = new Float32Array(allocateHost(rows * ROWS.q * 8));
  const strided = { dtype: 'f32', shape: [rows, ROWS.q], strides: [ROWS.q * 2, 1], data: wide };
  found.strided = await codeOf(() => call.run({ q: strided }));
  found.into = await codeOf(() =>
    call.run({ q: tensor('f32', [rows, ROWS.q]) }, { into: { q: tensor('f32', [1, 8]) } }),
  );
  const first = call.run({ q: tensor('f32', [rows, ROWS.q]) });
  found.busy = await codeOf(() => call.run({ q: tensor('f32', [rows, ROWS.q]) }));
  await first;
  // Rank 1 does not make the next call: there is no way back from that.
  if (rank === 0) {
    found.absent = await codeOf(() => call.run({ q: tensor('f32', [rows, ROWS.q]) }, { timeoutMs: 200 }));
    found.poisoned = await codeOf(() => call.run({ q: tensor('f32', [rows, ROWS.q]) }));
  } else {
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  await dispatcher.close();
  found.closed = await codeOf(() => call.run({ q: tensor('f32', [rows, ROWS.q]) }));
  return found;
}

/** Results go where the caller says; a gradient's rows without a replica keep what was there. */
async function compatInto({ transport, rank, worldSize }) {
  const plan = planOf(worldSize, [
    [3, 2, 2],
    [4, 1],
    [2, 5],
  ]);
  const [part] = specsOf(plan).gradient;
  const dispatcher = await openCompatDispatcher(transport, compatBytesFor([part]));
  const { back } = await dispatcher.bind({ back: [part] });
  const all = allRows(plan.revKv.sendTokens, ROWS.kv, 3);
  const target = new Float32Array(allocateHost(plan.revKv.recvTokens[rank] * ROWS.kv * 4)).fill(-7);
  const shape = [plan.revKv.recvTokens[rank], ROWS.kv];
  const { tensors } = await back.run(
    { dKv: tensor('f32', [plan.revKv.sendTokens[rank], ROWS.kv], all[rank]) },
    { into: { dKv: tensor('f32', shape, target) } },
  );
  const marked = movePlan(
    plan.revKv,
    all.map((rows) => rows.map((value) => value + 1)),
    ROWS.kv,
  )[rank];
  const expected = Array.from(marked, (value) => (value === 0 ? -7 : value - 1));
  await dispatcher.close();
  if (tensors.dKv.data !== target) throw new Error('the result is not in the memory that was given');
  for (const [i, value] of expected.entries())
    if (target[i] !== value) throw new Error(`element ${i}: found ${target[i]}, expected ${value}`);
  return expected.filter((value) => value === -7).length;
}

/** By name, as the tests call them. */
export const compatScenarios = { compat, compatRefusals, compatInto };
