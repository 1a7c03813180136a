/**
 * `ep bench fabric`: puts, and an attention dispatch, of the backing `fabric` against libfabric alone between the same two processes, and against Open MPI over TCP; on the loopback
 * interface, and between two network namespaces where these can be made; there also all-reduces and all-to-alls of four ranks, against Open MPI's. Results verified.
 */
import { execFile } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { nvshmem } from '@ep/nvshmem';
import type { Bench, BenchCase, BenchOptions, BenchRatio, BenchResult } from '../bench/bench.js';
import { type MpiGroups, runMpiGroups } from './groups-mpi.js';
import { GROUP_RANKS, type GroupCall, type GroupTask, type GroupTimes, type WarmUp } from './groups-task.js';
import { type Host, makeHosts } from './hosts.js';
import { type OpenMpiTimes, runOpenMpi } from './open-mpi.js';
import type { FabricTask, FabricTimes } from './task.js';

/** Built beside the entry point; see tsup.config.ts. */
const rankProgram = new URL('./bench-fabric-rank.js', import.meta.url);
const groupsProgram = new URL('./bench-fabric-groups-rank.js', import.meta.url);

const run = promisify(execFile);

/** Of all connections, those of namespaces too: between them, one that paces (bbr) may take four times as long as one that does not. */
const congestionControl = async (): Promise<string> =>
  (await readFile('/proc/sys/net/ipv4/tcp_congestion_control', 'utf8').catch(() => 'unknown')).trim();

/** Latency of a put as a multiple of a raw write's; bandwidths as a part of the raw one; groups as times Open MPI's speed. */
const goals = { latency: 1.3, put: 0.9, dispatch: 0.85, group: 1, largeGroup: 1.2 } as const;

type Shape = Omit<FabricTask, 'store' | 'rank' | 'address' | 'ranksOnHost'>;

function shapeOf({ quick, repeats }: BenchOptions): Shape {
  const size = quick
    ? { rounds: 200, messageBytes: 64 << 10, messages: 8, turns: 2 }
    : { rounds: 5000, messageBytes: 1 << 20, messages: 64, turns: 7 };
  return { ...size, turns: repeats ?? size.turns, window: 8, rowBytes: 4096 };
}

const medianOf = (values: readonly number[]): number =>
  values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)]!;

const spreadOf = (values: readonly number[]): number => (Math.max(...values) - Math.min(...values)) / medianOf(values);

/** Of what took turns: the median of the ratios. */
const timesOf = (of: readonly number[], other: readonly number[]): number =>
  medianOf(of.map((value, turn) => value / other[turn]!));

/** A turn takes long beside what a compiler, which comes again for what was called meanwhile, holds a core for (20 ms). */
function groupCallsOf({ quick }: BenchOptions): readonly GroupCall[] {
  const [medium, large] = quick ? [64 << 10, 256 << 10] : [1 << 20, 64 << 20];
  return [
    { op: 'all-reduce', bytes: 8, calls: quick ? 5 : 2000 },
    { op: 'all-reduce', bytes: medium, calls: quick ? 2 : 100 },
    { op: 'all-reduce', bytes: large, calls: 1 },
    { op: 'all-to-all', bytes: medium, calls: quick ? 2 : 100 },
  ];
}

/** Thousands: until compilers have seen the code of calls often enough, these take several times as long. */
const warmUpOf = ({ quick }: BenchOptions): WarmUp =>
  quick ? { calls: 50, ms: 5000, longer: 5, turns: 1 } : { calls: 30_000, ms: 20_000, longer: 4000, turns: 8 };

/** Half of the ranks on each host. */
async function runGroups(
  { warmUp, turns, calls }: Pick<GroupTask, 'warmUp' | 'turns' | 'calls'>,
  hosts: readonly Host[],
  folder: string,
): Promise<GroupTimes> {
  const perHost = GROUP_RANKS / hosts.length;
  const shared = {
    store: join(folder, 'groups of ours'),
    worldSize: GROUP_RANKS,
    ranksOnHost: GROUP_RANKS,
    hosts: Array.from({ length: GROUP_RANKS }, (_, rank) => rank - (rank % perHost)),
    warmUp,
    turns,
    calls,
  };
  const perRank = await startRanks<GroupTimes>(
    groupsProgram,
    Array.from({ length: GROUP_RANKS }, (_, rank) => {
      const { address, enter } = hosts[Math.floor(rank / perHost)]!;
      return { enter, task: { ...shared, rank, address } satisfies GroupTask };
    }),
  );
  return calls.map((_, at) =>
    Array.from({ length: turns }, (__, turn) => Math.max(...perRank.map((times) => times[at]![turn]!))),
  );
}

/** For tests, too. Open MPI's turns were not ours: medians are compared. */
export function groupCases(calls: readonly GroupCall[], ours: GroupTimes, mpi?: MpiGroups): BenchCase[] {
  return calls.map(({ op, bytes, calls: count }, at): BenchCase => {
    const times = (theirs: GroupTimes): number => medianOf(theirs[at]!) / medianOf(ours[at]!);
    const least = op === 'all-reduce' && bytes >= 1 << 20 ? goals.largeGroup : goals.group;
    return {
      name: `two hosts of two ranks: ${op} of ${bytes} bytes, f32`,
      unit: 'us',
      median: medianOf(ours[at]!),
      spread: spreadOf(ours[at]!),
      samples: ours[at]!.length,
      ratios:
        mpi === undefined
          ? []
          : [
              {
                name: 'times as fast as Open MPI over TCP',
                value: times(mpi.tcp),
                goal: { at: 'least', value: least },
              },
              { name: 'times as fast as Open MPI with shared memory on each host', value: times(mpi.shared) },
            ],
      detail: { 'calls timed together': count },
    };
  });
}

interface Start {
  readonly enter: readonly string[];
  readonly task: object;
}

/** The first failure ends the other ranks, too. */
async function startRanks<T>(program: URL, starts: readonly Start[]): Promise<T[]> {
  const stop = new AbortController();
  const env = { ...process.env, EP_JOB_SECRET: randomBytes(32).toString('hex') };
  const options = { signal: stop.signal, killSignal: 'SIGKILL', maxBuffer: 2 ** 24, env } as const;
  return Promise.all(
    starts.map(async ({ enter, task }) => {
      const [command, ...args] = [...enter, process.execPath, fileURLToPath(program), JSON.stringify(task)];
      try {
        return JSON.parse((await run(command!, args, options)).stdout) as T;
      } catch (error) {
        stop.abort(error);
        throw stop.signal.reason;
      }
    }),
  );
}

function runRanks(shape: Shape, hosts: readonly Host[], folder: string, where: string): Promise<FabricTimes[]> {
  const starts = [0, 1].map((rank) => {
    const { address, enter } = hosts[rank % hosts.length]!;
    const ranksOnHost = 2; // namespaces share the cores
    const task: FabricTask = { ...shape, rank, store: join(folder, where), address, ranksOnHost };
    return { enter, task };
  });
  return startRanks<FabricTimes>(rankProgram, starts);
}

/** For tests, too: from what both ranks told to cases. `mpi` moved what `messages` and `messageBytes` say, in one direction. */
export function fabricCases(
  where: string,
  { messages, messageBytes }: Pick<Shape, 'messages' | 'messageBytes'>,
  perRank: readonly FabricTimes[],
  mpi?: OpenMpiTimes,
): BenchCase[] {
  const { latency } = perRank[0]!;
  const p50sOf = (all: readonly (readonly [number, number])[]): number[] => all.map(([p50]) => p50);
  const [rawLatency, putLatency, awaited] = [p50sOf(latency.raw), p50sOf(latency.put), p50sOf(latency.awaited)];
  const rawRounds = rawLatency.map((half) => 2 * half);
  const slowest = (name: keyof FabricTimes['seconds']): number[] =>
    perRank[0]!.seconds[name].map((_, turn) => Math.max(...perRank.map(({ seconds }) => seconds[name][turn]!)));
  const p99Of = (all: readonly (readonly [number, number])[]): number => medianOf(all.map(([, p99]) => p99));
  const latencyCase = (name: string, values: readonly number[], p99: number, ratios: BenchRatio[]): BenchCase => ({
    name: `${where}: ${name}`,
    unit: 'us',
    median: medianOf(values),
    spread: spreadOf(values),
    samples: values.length,
    ratios,
    detail: { 'p99 us': p99 },
  });
  const bandwidthCase = (name: string, seconds: readonly number[], moved: number, ratios: BenchRatio[]): BenchCase => {
    const gigabytes = seconds.map((one) => moved / one / 1e9);
    return {
      name: `${where}: ${name}`,
      unit: 'GB/s',
      median: medianOf(gigabytes),
      spread: spreadOf(gigabytes),
      samples: gigabytes.length,
      ratios,
      detail: { bytes: moved },
    };
  };
  const bytes = messages * messageBytes;
  const [raw, put, byJs] = [slowest('raw'), slowest('put'), slowest('awaited')];
  const [both, dispatch] = [slowest('raw both ways'), slowest('dispatch')];
  const size = `${messageBytes} bytes`;
  const mpiLatency = mpi && {
    name: 'times Open MPI over TCP (send and receive)',
    value: medianOf(putLatency) / medianOf(mpi.latency),
  };
  const mpiBandwidth = mpi && { name: 'times Open MPI over TCP', value: medianOf(mpi.seconds) / medianOf(put) };
  return [
    latencyCase('raw write of 8 bytes with data, half a ping-pong', rawLatency, p99Of(latency.raw), []),
    latencyCase('put of 8 bytes with signal, half a ping-pong', putLatency, p99Of(latency.put), [
      { name: 'times a raw write', value: timesOf(putLatency, rawLatency), goal: { at: 'most', value: goals.latency } },
      ...(mpiLatency === undefined ? [] : [mpiLatency]),
    ]),
    latencyCase('put of 8 bytes with signal that JS awaits', awaited, p99Of(latency.awaited), [
      { name: 'times a round of raw writes', value: timesOf(awaited, rawRounds) },
    ]),
    bandwidthCase(`raw writes of ${size}`, raw, bytes, []),
    bandwidthCase(`puts of ${size} with signal`, put, bytes, [
      { name: 'of raw writes', value: timesOf(raw, put), goal: { at: 'least', value: goals.put } },
      ...(mpiBandwidth === undefined ? [] : [mpiBandwidth]),
    ]),
    bandwidthCase(`puts of ${size} with signal that JS awaits`, byJs, bytes, [
      { name: 'of raw writes', value: timesOf(raw, byJs) },
    ]),
    bandwidthCase(`raw writes of ${size}, both ways at once`, both, 2 * bytes, []),
    bandwidthCase('attention dispatch, both ways at once', dispatch, 2 * bytes, [
      { name: 'of raw writes', value: timesOf(both, dispatch), goal: { at: 'least', value: goals.dispatch } },
    ]),
  ];
}

/** Why there is nothing to measure; undefined: there is. */
export async function fabricMissing(): Promise<string | undefined> {
  const probe = await nvshmem.fabric.probe({ address: '127.0.0.1' });
  return probe.available ? undefined : `${probe.reason}; ${probe.remedy}`;
}

export const fabricBench: Bench = {
  name: 'fabric',
  run: async (options: BenchOptions, tell): Promise<BenchResult> => {
    const shape = shapeOf(options);
    const folder = await mkdtemp(join(tmpdir(), 'ep-bench-fabric-'));
    const skipped: string[] = [];
    const cases: BenchCase[] = [];
    let library = '';
    try {
      tell('Open MPI over TCP');
      const mpi = await runOpenMpi(shape, folder);
      if (typeof mpi === 'string') skipped.push(mpi);
      tell('loopback');
      const here = await runRanks(shape, [{ address: '127.0.0.1', enter: [] }], folder, 'loopback');
      library = `libfabric ${here[0]!.version}, provider ${here[0]!.provider}`;
      cases.push(...fabricCases('loopback', shape, here, typeof mpi === 'string' ? undefined : mpi));
      const hosts = await makeHosts();
      if (typeof hosts === 'string') skipped.push(`between two hosts: ${hosts}`);
      else {
        try {
          tell('two namespaces');
          const across = await runRanks(shape, hosts.hosts, folder, 'namespaces');
          cases.push(...fabricCases('two namespaces', shape, across));
          tell('process groups');
          const groups = { warmUp: warmUpOf(options), turns: shape.turns, calls: groupCallsOf(options) };
          const mpiGroups = await runMpiGroups(groups, hosts.hosts, folder);
          if (typeof mpiGroups === 'string') skipped.push(mpiGroups);
          const ours = await runGroups(groups, hosts.hosts, folder);
          cases.push(...groupCases(groups.calls, ours, typeof mpiGroups === 'string' ? undefined : mpiGroups));
        } finally {
          hosts.close();
        }
      }
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
    return {
      name: 'fabric',
      cases,
      notes: [
        `${library}, congestion control ${await congestionControl()}; the two ranks took turns of libfabric alone and of puts and dispatches, whose every byte was compared`,
        'a raw write is posted and polled for by one thread of a rank; so is a put, while that thread looks: the transport has another for when it sleeps',
        "Open MPI's messages ran on the loopback interface before",
        'of the groups, the two ranks of a namespace shared memory (compose), and all ranks the cores; those of Open MPI ran in the same namespaces before',
      ],
      skipped,
    };
  },
};
