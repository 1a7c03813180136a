// Process groups of some ranks on a device: overlapping ones, closed and opened again, with members that die or do not come.
import assert from 'node:assert/strict';
import { initProcessGroup } from '@ep/collectives';
import { readTensor, writeTensor } from '@ep/cuda-kernels';
import { codeOf } from '../code-of.mjs';
import { everyOperation } from './collectives.mjs';

const open = ({ transport, store, rank, worldSize }, stream, device = {}) =>
  initProcessGroup({
    backend: transport,
    store,
    rank,
    worldSize,
    device: { stream, stagingBytes: 2 ** 20, ...device },
  });

/** Everybody makes all of these, in this order, and gets those that it is in. */
async function makeAll(world, rank, lists) {
  const made = [];
  for (const ranks of lists) {
    const group = await world.newGroup(ranks);
    assert.equal(group !== undefined, ranks.includes(rank));
    if (group !== undefined) made.push({ ranks, group });
  }
  return made;
}

/** One i64 on the device. */
async function cell(device, value) {
  const buffer = device.allocate(16);
  const tensor = buffer.tensor('i64', [1]);
  const set = (to) => writeTensor(BigInt64Array.of(BigInt(to)), tensor);
  await set(value);
  const get = async () => Number(new BigInt64Array((await readTensor(tensor)).buffer, 0, 1)[0]);
  return { buffer, tensor, set, get };
}

async function messageRing({ group, ranks }, device) {
  const { rank, size } = group;
  const salt = ranks.reduce((sum, one) => sum + 10 ** one, 0);
  const length = 5003;
  const [source, target] = [device.allocate(4 * length), device.allocate(4 * length)];
  const pattern = (from) => new Int32Array(length).map((_, i) => from * 1000 + salt + i);
  await writeTensor(pattern(rank), source.tensor('i32', [length]));
  const sent = group.send(source.tensor('i32', [length]), (rank + 1) % size);
  const from = (rank + size - 1) % size;
  assert.equal((await group.recv(target.tensor('i32', [length]), from)).source, from);
  await sent;
  const found = new Int32Array((await readTensor(target.tensor('i32', [length]))).buffer, 0, length);
  assert.deepEqual(found, pattern(from));
  await Promise.all([source.close(), target.close()]);
}

/** Every operation and a ring of messages in each of the groups; then calls of all of them, in one order, with nobody waiting in between. */
async function deviceGroups({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const world = await open({ transport, store, rank, worldSize }, stream, { maxGroups: data.lists.length + 2 });
  const groups = await makeAll(world, rank, data.lists);
  const colored = await world.split(rank % 2, -rank);
  groups.push({ ranks: colored.ranks, group: colored });
  for (const one of groups) {
    for (const dtype of data.dtypes) await everyOperation(one.group, device, dtype, data.count);
    await messageRing(one, device);
  }
  groups.push({ ranks: world.ranks, group: world });
  const sums = await Promise.all(groups.map(() => cell(device, rank + 1)));
  const works = [];
  for (let round = 0; round < data.rounds; round++) {
    for (const [i, { group }] of groups.entries()) works.push(group.allReduce(sums[i].tensor, { op: 'max' }));
  }
  for (const [i, { group }] of groups.entries()) works.push(group.allReduce(sums[i].tensor));
  await Promise.all(works);
  for (const [i, { ranks }] of groups.entries()) {
    assert.equal(await sums[i].get(), ranks.length * (Math.max(...ranks) + 1), `[${ranks}]`);
  }
  await world.destroy();
  await Promise.all(sums.map(({ buffer }) => buffer.close()));
  await stream.close();
  return groups.length;
}

/** Sections are taken anew by other members, with other numbers of blocks in use; where there is none, all members hear of it, and the group that is closed makes room. */
async function deviceSections({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const world = await open({ transport, store, rank, worldSize }, stream, { maxGroups: 2 });
  const x = await cell(device, 0);
  const large = device.allocate(4 * 40_000);
  const many = large.tensor('i32', [40_000]);
  for (let round = 0; round < data.rounds; round++) {
    // Two pairs have the same section at one time; then three ranks have it.
    const lists =
      round % 2 === 0
        ? [
            [0, 1],
            [3, 2],
          ]
        : [[3, 0, 1]];
    for (const { ranks, group } of await makeAll(world, rank, lists)) {
      for (let call = 0; call <= round % 3; call++) {
        await x.set(rank + 1);
        await group.allReduce(x.tensor);
        assert.equal(
          await x.get(),
          ranks.reduce((sum, one) => sum + one + 1, 0),
          `round ${round}: [${ranks}]`,
        );
      }
      if (round % 4 < 2) await group.broadcast(many, { root: 0 });
      await group.destroy();
    }
  }
  const pair = await world.newGroup([0, 2]);
  const codes = [await codeOf(() => world.newGroup([2, 1]))];
  let apart;
  const makeApart = async () => {
    apart = await world.newGroup([1, 3]);
    await apart?.allReduce(x.tensor);
  };
  codes.push(await codeOf(makeApart));
  await pair?.destroy();
  await apart?.destroy();
  await world.barrier();
  const again = await world.newGroup([2, 1]);
  if (again !== undefined) codes.push(await codeOf(() => again.allReduce(x.tensor)));
  codes.push(await codeOf(() => world.allReduce(x.tensor)));
  await world.destroy();
  await Promise.all([x.buffer.close(), large.close()]);
  await stream.close();
  return codes;
}

/** One rank is killed in the middle of a call of a pair: groups without it go on, and those who are left open others. */
async function deviceGroupLost({ transport, device, store, rank, worldSize, data, ready }) {
  const stream = device.stream();
  const world = await open({ transport, store, rank, worldSize }, stream, { maxGroups: 5 });
  const { victim, pair, others } = data;
  const [dying] = await makeAll(world, rank, [pair]);
  const [living] = await makeAll(world, rank, [others]);
  const x = await cell(device, rank + 1);
  await dying?.group.allReduce(x.tensor);
  await x.set(rank + 1);
  await living?.group.allReduce(x.tensor);
  if (rank === victim) {
    await ready();
    await new Promise(() => {});
  }
  const said = { sums: [await x.get()] };
  // On the stream before the others' call: theirs runs when this one has ended.
  const failing = dying?.group.allReduce(x.tensor, { timeoutMs: 60_000 }).then(
    () => 'no error',
    ({ code, context }) => [code, context.lost],
  );
  said.lost = await failing;
  await x.set(rank + 1);
  await living.group.allReduce(x.tensor);
  said.sums.push(await x.get());
  said.poisoned = dying === undefined ? undefined : await codeOf(() => dying.group.allReduce(x.tensor));
  // In host memory the world goes on; its calls on the device do not.
  await world.barrier().catch(() => {});
  const left = await world.newGroup(others);
  await x.set(rank + 1);
  await left.allReduce(x.tensor);
  said.sums.push(await x.get());
  await world.destroy().catch(() => {});
  await x.buffer.close();
  await stream.close();
  return said;
}

/** One member does not come: who waited names it by its rank in the group, and the other group of the same ranks is as good as before. */
async function deviceGroupAbsent({ transport, device, store, rank, worldSize }) {
  const stream = device.stream();
  const world = await open({ transport, store, rank, worldSize }, stream);
  const [first] = await makeAll(world, rank, [[2, 0]]);
  const [second] = await makeAll(world, rank, [[2, 0]]);
  const x = await cell(device, rank + 1);
  const said = [];
  if (rank === 0) {
    await first.group.allReduce(x.tensor, { timeoutMs: 300 }).catch(({ code, context }) => {
      said.push([code, context.awaited, context.arrived]);
    });
    said.push(await codeOf(() => first.group.allReduce(x.tensor)));
  }
  await world.barrier();
  if (second !== undefined) {
    await x.set(rank + 1);
    await second.group.allReduce(x.tensor);
    said.push(await x.get());
    // The section of the one that failed is taken again.
    await first.group.destroy();
  }
  await world.barrier();
  for (const { group } of await makeAll(world, rank, [[0, 1, 2]])) {
    await x.set(rank + 1);
    await group.allReduce(x.tensor);
    said.push(await x.get());
  }
  await world.destroy();
  await x.buffer.close();
  await stream.close();
  return said;
}

/** Groups on streams of their own: one waits for a rank that is late, calls of another run meanwhile, whatever the order in which ranks make them. */
async function deviceGroupStreams({ transport, device, store, rank, worldSize }) {
  const [first, second, third] = [device.stream(), device.stream(), device.stream()];
  const world = await open({ transport, store, rank, worldSize }, first, { blocks: 2 });
  const pair = await world.newGroup([0, 1], { stream: second });
  const other = await world.newGroup([1, 0], { stream: second });
  const parity = await world.split(0, -rank, { stream: third });
  const [x, y, z] = [await cell(device, rank + 1), await cell(device, rank + 1), await cell(device, rank + 1)];
  const late = worldSize - 1;
  // Of the transport: calls of a group are made in one order, in host memory and on the device.
  if (rank === late) {
    await transport.barrier();
    const works = [parity.allReduce(z.tensor), world.allReduce(x.tensor)];
    await Promise.all(works);
  } else {
    const works = [world.allReduce(x.tensor), parity.allReduce(z.tensor)];
    for (let round = 0; round < 10; round++) {
      await pair.allReduce(y.tensor, { op: 'max' });
      await other.allReduce(y.tensor, { op: 'max' });
    }
    assert.deepEqual(
      works.map(({ status }) => status),
      ['pending', 'pending'],
    );
    await transport.barrier();
    await Promise.all(works);
  }
  const found = [await x.get(), await y.get(), await z.get()];
  // The share of a stream comes back with the last group on it.
  await Promise.all([pair?.destroy(), other?.destroy()]);
  await world.barrier();
  const again = await world.newGroup([2, 0, 1], { stream: second });
  await x.set(rank + 1);
  await again.allReduce(x.tensor);
  found.push(await x.get());
  const wrong = { device: { kind: 'cuda', index: 7 }, capturing: false };
  found.push(await codeOf(() => world.newGroup([0, 1], rank === 0 ? { stream: wrong } : {})));
  await world.allReduce(x.tensor);
  await world.destroy();
  await Promise.all([x, y, z].map(({ buffer }) => buffer.close()));
  await Promise.all([first.close(), second.close(), third.close()]);
  return found;
}

export const groupScenarios = {
  deviceGroups,
  deviceSections,
  deviceGroupLost,
  deviceGroupAbsent,
  deviceGroupStreams,
};
