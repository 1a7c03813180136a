// One rank on one host: joins the others through the network, runs a scenario, reports its value or error.
import { initProcessGroup } from '@ep/collectives';
import { compose, formatRoutes, openFileStore, openTcpStore, prefixStore } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';
import { scenarios as attention } from '../attention/scenarios.mjs';
import { endure } from './endure.mjs';
import { experts } from './experts.mjs';

const start = JSON.parse(process.argv[2]);
const post = (message) => new Promise((resolve) => process.send(message, resolve));
const { rank, worldSize, first, perHost, address } = start;
const here = (other) => other < first === rank < first;
const ranks = Array.from({ length: worldSize }, (_, other) => other);

/** Waits for what the other host never sends; says who was lost, and whether the ranks of this host still reach each other. */
async function silence({ transport }) {
  const memory = await transport.allocate({ byteLength: 8192, signalSlots: 2 });
  const endpoints = await Promise.all(ranks.map((peer) => transport.connect(peer)));
  // Everybody has a connection to everybody.
  for (const endpoint of endpoints) {
    await endpoint.put(memory.local(0, 1024), memory.remote(endpoint.peer, 2048, 1024), {
      signal: { slot: 0, op: 'inc' },
    });
  }
  await memory.signals.until(0, { cmp: 'ge', value: BigInt(worldSize) });
  const began = performance.now();
  await post('ready');
  const ends = await Promise.allSettled(
    ranks
      .filter((peer) => !here(peer))
      .flatMap((peer) => [
        memory.signals.until(0, { cmp: 'ge', value: 1000n }, { peers: [peer], timeoutMs: 30_000 }),
        // Requests under way end as well: these are made until one fails.
        (async () => {
          for (;;) {
            await endpoints[peer].put(memory.local(0, 1024), memory.remote(peer, 2048, 1024));
            await new Promise((resolve) => setTimeout(resolve, 20));
          }
        })(),
      ]),
  );
  const ms = performance.now() - began;
  for (const peer of ranks.filter(here)) {
    await endpoints[peer].put(memory.local(0, 1024), memory.remote(peer, 4096, 1024), {
      signal: { slot: 1, op: 'inc' },
    });
  }
  await memory.signals.until(
    1,
    { cmp: 'ge', value: BigInt(perHost) },
    { peers: ranks.filter(here), timeoutMs: 10_000 },
  );
  return {
    codes: ends.map(({ reason }) => reason?.code),
    lost: ends.map(({ reason }) => reason?.context.lost[0]),
    ms,
    failed: transport.failed.aborted,
  };
}

/** Waits for a rank that is killed, by itself and in a group; says when what ended, in milliseconds since the epoch, and by how many lines it would hear of other hosts. */
async function killed({ transport, store, data }) {
  const group = await initProcessGroup({ backend: transport, store: prefixStore(store, 'group') });
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
  await group.barrier();
  const far = ranks.filter((peer) => !here(peer)).length;
  const until = performance.now() + 20_000;
  while (transport.counts().lines < far && performance.now() < until) {
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  const { lines } = transport.counts();
  await transport.barrier();
  await post('ready');
  if (rank === data.victim) await new Promise(() => setInterval(() => {}, 1000));
  const endOf = async (work) => {
    const code = await Promise.resolve(work).then(
      () => 'none',
      (error) => error.code,
    );
    return { code, at: Date.now() };
  };
  const waits = { peers: [data.victim], timeoutMs: 30_000 };
  const ends = await Promise.all([
    endOf(memory.signals.until(0, { cmp: 'ge', value: 1n }, waits)),
    endOf(group.barrier()),
  ]);
  // Those who are left go on, and leave in order: that is no death to anybody.
  const again = Float32Array.of(rank);
  await group.allReduce(again);
  await group.destroy();
  return { ends, lines, sum: again[0], lost: transport.lostRanks() };
}

/** Rounds of a ring, long enough for a link to be cut meanwhile; says how long the longest took. */
async function rounds({ transport, data }) {
  const bytes = 20_000;
  const memory = await transport.allocate({ byteLength: 2 * bytes, signalSlots: 1 });
  const [next, previous] = [(rank + 1) % worldSize, (rank + worldSize - 1) % worldSize];
  const endpoint = await transport.connect(next);
  const [own, received] = [memory.view('u8', 0, bytes), memory.view('u8', bytes, bytes)];
  await transport.barrier();
  await post('ready');
  let longest = 0;
  for (let round = 1; round <= data.rounds; round++) {
    const began = performance.now();
    own.fill(round + rank);
    await endpoint.put(memory.local(0, bytes), memory.remote(next, bytes, bytes), { signal: { slot: 0, op: 'inc' } });
    await memory.signals.until(0, { cmp: 'ge', value: BigInt(round) }, { peers: [previous] });
    if (received.some((byte) => byte !== ((round + previous) & 255))) throw new Error(`round ${round}: wrong bytes`);
    // Nobody writes again before all have looked.
    await transport.barrier();
    longest = Math.max(longest, performance.now() - began);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  return longest;
}

/** Whoever carries the bytes between the hosts: libfabric, or software NICs. */
const providers = { fabric: nvshmem.fabric, ibgda: ibgda.soft, efa: efaGda.soft };

/** Reduces in a group of all ranks, and says what every rank has come to. */
async function reduce({ transport, store, data }) {
  const group = await initProcessGroup({ backend: transport, store: prefixStore(store, 'group') });
  await group.barrier();
  await post('ready');
  const values = Float32Array.from({ length: data.length }, (_, i) => (i % 1009) * (rank + 1));
  await group.allReduce(values, { op: 'sum' });
  const factor = (worldSize * (worldSize + 1)) / 2;
  const wrong = values.findIndex((value, i) => value !== (i % 1009) * factor);
  await group.destroy();
  return { wrong, hosts: transport.hosts };
}

/** Reductions for all and for each root, and what one has of all and back again. */
async function rooted({ transport, store, data: { length, turns } }) {
  const group = await initProcessGroup({ backend: transport, store: prefixStore(store, 'group') });
  // By then all know how calls go.
  for (let turn = 0; turn < 5; turn++) {
    await group.barrier();
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  await post('ready');
  const given = (of, i) => (i % 1009) * (of + 1);
  const sum = (i) => (given(0, i) * worldSize * (worldSize + 1)) / 2;
  const filled = (of) => Float32Array.from({ length }, (_, i) => given(of, i));
  const check = (what, values, expected) => {
    const wrong = values.findIndex((value, i) => value !== expected(i));
    if (wrong >= 0) throw new Error(`${what}: element ${wrong} is ${values[wrong]}, not ${expected(wrong)}`);
  };
  for (let turn = 0; turn < turns; turn++) {
    const all = filled(rank);
    await group.allReduce(all, { op: 'sum' });
    check('all-reduce', all, sum);
    const root = turn % worldSize;
    const own = filled(rank);
    await group.reduce(own, { root, op: 'sum' });
    if (rank === root) check('reduce', own, sum);
    const back = new Float32Array(1000);
    const parts = ranks.map(() => new Float32Array(1000));
    await group.gather(filled(rank).subarray(0, 1000), { root, ...(rank === root && { outputs: parts }) });
    if (rank === root) for (const [of, part] of parts.entries()) check(`gather of ${of}`, part, (i) => given(of, i));
    await group.scatter(back, { root, ...(rank === root && { inputs: parts }) });
    check('scatter', back, (i) => given(rank, i));
  }
  await group.destroy();
  return { hosts: transport.hosts };
}

/** What the test says by `Job.enough`. */
const told = new Promise((resolve) => process.once('message', resolve));

/** How this rank reaches the others, as a table; and by which handle kernels do. */
async function routes({ transport }) {
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
  await transport.barrier();
  return { table: formatRoutes(transport.routes()), kind: transport.device(memory).kind };
}

const scenarios = { ...attention, silence, killed, rounds, reduce, rooted, endure, experts, routes };

/** With `data.shared` ranks of one host share memory, and what joins the hosts is for the rest. */
async function open(store) {
  const over = start.data.over ?? 'fabric';
  const network = { address, ...start.data.config };
  const { signal } = new AbortController();
  const far = await providers[over].open(
    { rank, worldSize, store },
    {
      signal,
      config: { ranksOnHost: perHost, timeoutMs: 60_000, ...(over === 'fabric' ? network : { network }) },
    },
  );
  if (!start.data.shared) return far;
  try {
    const member = { rank, worldSize, store: prefixStore(store, 'shm') };
    const near = await nvshmem.shm.open(member, { signal, config: { hosts: 'found', timeoutMs: 60_000 } });
    return Object.assign(compose([near, far]), { barrier: (options) => far.barrier(options) });
  } catch (error) {
    await far.close();
    throw error;
  }
}

try {
  const store =
    start.data.file === undefined
      ? await openTcpStore({
          ...start.store,
          isServer: rank === 0,
          ...(rank === 0 ? { bind: address } : {}),
          worldSize,
        })
      : await openFileStore(start.data.file);
  const transport = await open(store);
  let value;
  try {
    value = await scenarios[start.scenario]({ ...start, store, transport, ready: () => post('ready'), told });
  } finally {
    await transport.close().finally(() => store.close());
  }
  await post({ rank, value });
} catch (error) {
  await post({ rank, error: { code: error?.code, message: error?.stack ?? String(error) } });
}
process.disconnect();
