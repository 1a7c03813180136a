/** Runs one failure scenario: real processes, real signals; and judges what the survivors tell. */
import assert from 'node:assert/strict';
import { type ChildProcess, fork } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Readable } from 'node:stream';
import { fileURLToPath } from 'node:url';
import type { CallEnd, FromRank, RankArguments, Scenario } from './protocol.js';

/** From the start of the processes to the end of the last survivor: more is a hang. */
const HUNG_MS = 40_000;
/** From a death to the end of the operation that it ends. Far more than it takes on a machine that has nothing else to do. */
export const BOUND_MS = 5_000;

export interface ScenarioEnd {
  /** From the last death to the end of the operation that ended with it, on each survivor. In milliseconds. */
  readonly latencies: readonly number[];
  readonly calls: readonly CallEnd[];
}

interface RankWatch {
  readonly child: ChildProcess;
  readonly gone: Promise<void>;
  exit: string | undefined;
  calls: readonly CallEnd[] | undefined;
  why: string | undefined;
  diedAt: bigint | undefined;
}

/** Elements of a call: one chunk, or many. */
const lengthOf = ({ moment, operation }: Scenario): number => {
  if (moment !== 'chunks') return 64;
  // Those that have a part for each rank.
  return operation === 'all-reduce' || operation === 'broadcast' || operation === 'reduce' ? 2 ** 21 : 2 ** 19;
};

function start(program: string, args: RankArguments): RankWatch {
  const child = fork(fileURLToPath(program), [JSON.stringify(args)], {
    execArgv: [],
    stdio: ['ignore', 'inherit', 'inherit', 'pipe', 'ipc'],
  });
  const watch: RankWatch = {
    child,
    gone: new Promise((resolve) => child.once('close', () => resolve())),
    exit: undefined,
    calls: undefined,
    why: undefined,
    diedAt: undefined,
  };
  child.on('exit', (code, signal) => {
    watch.exit = signal ?? `exit code ${code}`;
  });
  (child.stdio[3] as Readable).on('data', (bytes: Buffer) => {
    watch.diedAt = BigInt(bytes.toString());
  });
  child.on('message', (message: FromRank) => {
    if (message.kind === 'ended') watch.calls = message.calls;
    else if (message.kind === 'failed') watch.why = message.why;
  });
  return watch;
}

/** What decides whether survivors agree: when it ended does not. */
const outcomeOf = (call: CallEnd): unknown =>
  call.end === 'done' ? { done: call.contributors } : { lost: [...call.lost].sort() };

/** `program`: the bundle of programs/failure-rank.ts. Throws where the survivors hang, fail, or do not agree. */
export async function runScenario(program: string, scenario: Scenario): Promise<ScenarioEnd> {
  const { worldSize, victims } = scenario;
  const directory = mkdtempSync(join(tmpdir(), 'ep-failure-'));
  const watches = Array.from({ length: worldSize }, (_, rank) =>
    start(program, { rank, storePath: join(directory, 'store'), scenario, length: lengthOf(scenario) }),
  );
  let hung = false;
  const timer = setTimeout(() => {
    hung = true;
    for (const { child, exit } of watches) if (exit === undefined) child.kill('SIGKILL');
  }, HUNG_MS);
  await Promise.all(watches.map((watch) => watch.gone));
  clearTimeout(timer);
  rmSync(directory, { recursive: true });

  const survivors = watches.flatMap((watch, rank) => (victims.includes(rank) ? [] : [{ rank, ...watch }]));
  for (const rank of victims) {
    const { exit, why } = watches[rank]!;
    assert.equal(exit, 'SIGKILL', `victim ${rank}: ${why ?? exit}`);
  }
  const wrong = survivors.filter(({ calls }) => calls === undefined);
  const told = wrong.map(({ rank, why, exit }) => `rank ${rank}: ${why ?? (hung ? 'hangs' : exit)}`);
  assert.equal(wrong.length, 0, told.join('\n'));
  return judge(
    scenario,
    survivors.map(({ rank, calls }) => ({ rank, calls: calls! })),
    watches.map(({ diedAt }) => diedAt),
  );
}

function judge(
  { victims, worldSize }: Scenario,
  survivors: readonly { readonly rank: number; readonly calls: readonly CallEnd[] }[],
  deaths: readonly (bigint | undefined)[],
): ScenarioEnd {
  const first = survivors[0]!;
  for (const { rank, calls } of survivors) {
    for (let call = 0; call < Math.max(calls.length, first.calls.length); call++) {
      const [mine, theirs] = [calls[call], first.calls[call]].map((end) => end && outcomeOf(end));
      assert.deepEqual(mine, theirs, `call ${call} of rank ${rank} and of rank ${first.rank} ended differently`);
    }
  }
  const lost = new Set<number>();
  for (const call of first.calls) if (call.end === 'lost') for (const rank of call.lost) lost.add(rank);
  for (const rank of lost) assert.ok(victims.includes(rank), `rank ${rank} is alive, but was called lost`);
  const last = first.calls.at(-1)!;
  const expected = Array.from({ length: worldSize }, (_, rank) => rank).filter((rank) => !victims.includes(rank));
  assert.deepEqual(outcomeOf(last), { done: expected }, `the last of ${first.calls.length} calls`);

  const died = deaths.reduce<bigint>((latest, at) => (at !== undefined && at > latest ? at : latest), 0n);
  const latencies = survivors.flatMap(({ calls }) => {
    const end = calls.findLast((call) => call.end === 'lost');
    return end === undefined ? [] : [Number(BigInt(end.at) - died) / 1e6];
  });
  for (const latency of latencies) assert.ok(latency < BOUND_MS, `${latency} ms from the death to the end`);
  return { latencies, calls: first.calls };
}
