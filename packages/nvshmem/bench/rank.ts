/** One rank of the shared-memory benchmark; started by shm.ts. */
import { openFileStore } from '@ep/core';
import { allocateHost, native, nativePlaceOf } from '@ep/native';
import { type RankMemory, SHORTEST_STALL_US, stallsIn } from '@ep/native/ranks';
import { nvshmem } from '../src/index.js';
import { type RoundMarks, timedRounds } from './rounds.js';
import { type Latency, type LatencyAt, latencyOf, type RankTask, type ShmBenchResult } from './shm.js';

const task = JSON.parse(process.argv[2]!) as RankTask;
const { rank, worldSize, rounds } = task;
const TIMEOUT_MS = 60_000;
/** Series of calls before the one that counts. */
const WARM_UP = 10;

/** A result, with what the project wants of it, in microseconds. */
function resultOf(
  name: string,
  ranks: number,
  latency: Latency,
  wanted: Partial<Record<LatencyAt, number>> = {},
): ShmBenchResult {
  const goals = (Object.entries(wanted) as [LatencyAt, number][]).map(([at, microseconds]) => ({
    at,
    microseconds,
    met: latency[at] <= microseconds,
  }));
  return { name, ranks, latency, goals };
}

/** Ranks that outnumber cores wait for the scheduler, never for milliseconds. */
const BARRIER_GOALS = { p99: 100, slowest: 1000 } as const;

const store = await openFileStore(task.store);
const transport = await nvshmem.shm.open(
  { rank, worldSize, store },
  { signal: new AbortController().signal, timeoutMs: TIMEOUT_MS },
);
const memory = await transport.allocate({ byteLength: 1 << 20, signalSlots: 64 });
const { binding, operations } = native();
const stream = new binding.HostStream(0);
const samples = new Float64Array(allocateHost(rounds * 8));
const place = nativePlaceOf(samples)!;
const results: ShmBenchResult[] = [];

async function run(start: () => number): Promise<void> {
  await transport.barrier();
  const outcome = await operations.run(start);
  if (outcome.status !== 0)
    throw new Error(
      `native status ${outcome.status}: expected ${outcome.expected}, found ${outcome.found}, rank ${outcome.rank}`,
    );
}

/** Time of `calls` calls in a row, as one sample a call: a clock read per call would be most of it. */
function timed(calls: number, body: (i: number) => void): Float64Array {
  const per = 100;
  const out = new Float64Array(Math.floor(calls / per));
  for (let block = 0; block < out.length; block++) {
    const begin = process.hrtime.bigint();
    for (let i = 0; i < per; i++) body(block * per + i);
    out[block] = Number(process.hrtime.bigint() - begin) / per;
  }
  return out;
}

/** In plain words that are mapped here: what a call per peer takes would be waited for in the next barrier, and be in its time. */
async function roundMarks(): Promise<RoundMarks> {
  const marks = (await transport.allocate({ byteLength: 64, signalSlots: 1 })) as RankMemory;
  const mapped = marks.nativeMemory('the benchmark');
  const words = Array.from({ length: worldSize }, (_, peer) => new Float64Array(mapped.window(peer, 0, 8)));
  return {
    worldSize,
    enter(round) {
      words[rank]![0] = round;
    },
    entered: (peer) => words[peer]![0]!,
  };
}

/** All but the last: those who have left it sort their samples on the cores on which others have still to leave it. */
function latencyOfBarriers(series: Float64Array): Latency {
  return latencyOf(series.subarray(0, -1), 1);
}

/** Between series only, so that none is disturbed. */
const tell = (text: string): void => {
  if (rank === 0) process.send!(text);
};

if (worldSize === 2) {
  tell('stalls');
  await transport.barrier();
  const stalls = stallsIn(1000);
  const name = `stalls of ${SHORTEST_STALL_US} us and more in a second of reading the clock, on every core`;
  results.push(resultOf(name, 2, latencyOf(stalls.length > 0 ? stalls : Float64Array.of(0), 1)));
  await transport.barrier();
  const handle = transport.device(memory).bytes;
  const series = async (byteLength: number, bare: boolean): Promise<Latency> => {
    const base = memory.signals.peek(3);
    await run(() =>
      stream.pingPong({
        handle,
        peer: 1 - rank,
        first: rank === 0,
        rounds,
        byteLength,
        slot: 3,
        base,
        samples: place.operand,
        timeoutMs: TIMEOUT_MS,
        bare,
      }),
    );
    return latencyOf(samples, 0.5);
  };
  const median = (values: readonly number[]) => values.toSorted((a, b) => a - b)[values.length >> 1]!;
  const shortest = (found: readonly Latency[]) => found.reduce((best, one) => (one.p50 < best.p50 ? one : best));
  for (const byteLength of [8, 4096]) {
    tell(`native put-with-signal of ${byteLength} bytes`);
    // In turns: where the two cores share no cache, or the hypervisor moves them, both change. The first round of series warms caches and the frequency up.
    const [bare, put]: [Latency[], Latency[]] = [[], []];
    for (let turn = 0; turn < 4; turn++) {
      const of = [await series(8, true), await series(byteLength, false)] as const;
      if (turn === 0) continue;
      bare.push(of[0]);
      put.push(of[1]);
    }
    const [least, latency] = [shortest(bare), shortest(put)];
    if (byteLength === 8) {
      const name = 'native hand-over of 8 bytes by two stores and a spin, half a ping-pong';
      results.push(resultOf(name, 2, least));
    }
    const name = `native put-with-signal of ${byteLength} bytes, half a ping-pong`;
    results.push({
      ...resultOf(name, 2, latency, byteLength === 8 ? { p50: 0.15 } : {}),
      timesBare: median(put.map(({ p50 }, turn) => p50 / bare[turn]!.p50)),
    });
  }
  if (rank === 0) {
    const endpoint = await transport.connect(1);
    const from = memory.local(0, 8);
    const to = memory.remote(1, 64, 8);
    const update = { slot: 5, op: 'add', value: 1n } as const;
    const calls: [string, (i: number) => void][] = [
      ['JS signal peek', () => void memory.signals.peek(5)],
      ['JS endpoint.put of 8 bytes with signal', () => void endpoint.put(from, to, { signal: update })],
      ['JS endpoint.signal', () => void endpoint.signal(memory, update)],
    ];
    for (const [name, body] of calls) {
      tell(name);
      // V8 compiles beside the calls: 20 000 of them are over before its optimised code is there.
      for (let series = 0; series < WARM_UP; series++) timed(rounds, body);
      results.push(resultOf(name, 2, latencyOf(timed(rounds, body), 1), { p50: 0.5 }));
    }
    await endpoint.flush();
    // All of them must have arrived: a benchmark of calls that do nothing would be fast.
    await endpoint.put(from, to, {
      signal: { slot: 6, op: 'add', value: BigInt(2 * (WARM_UP + 1) * (Math.floor(rounds / 100) * 100)) },
    });
  } else {
    // Not until(): a rank that sleeps in it makes every signal of the peer pay for a wake-up, which is not what is measured.
    while (memory.signals.peek(6) === 0n) await new Promise((resolve) => setTimeout(resolve, 20));
    const [sent, arrived] = [memory.signals.peek(6), memory.signals.peek(5)];
    if (sent !== arrived) throw new Error(`${arrived} of ${sent} signals arrived`);
  }
} else {
  tell('native barrier');
  const handle = transport.device(memory).bytes;
  for (let series = 0; series < 2; series++) {
    await run(() =>
      stream.barriers({
        team: transport.world.nativeTeam,
        handle,
        first: series * rounds,
        rounds,
        samples: place.operand,
        timeoutMs: TIMEOUT_MS,
      }),
    );
  }
  results.push(resultOf('native barrier', worldSize, latencyOfBarriers(samples), BARRIER_GOALS));
  tell('JS barrier');
  const javascript = new Float64Array(Math.min(rounds, 2000));
  const marks = await roundMarks();
  for (let series = 0; series < WARM_UP + 1; series++) {
    await timedRounds(javascript, series * javascript.length, marks, () => transport.barrier());
  }
  results.push(resultOf('JS barrier', worldSize, latencyOfBarriers(javascript), BARRIER_GOALS));
}

await transport.barrier();
stream.close();
await transport.close();
await store.close();
process.send!(results, () => process.disconnect());
