/** Starts local ranks as processes with torchrun's environment contract, watches them, and leaves none behind. */
import { type ChildProcess, type ChildProcessByStdio, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { createServer } from 'node:net';
import { constants } from 'node:os';
import { join } from 'node:path';
import type { Readable } from 'node:stream';
import { checkInteger, checkObject, checkSignal, EpError, invalid } from '@ep/core';
import { signalOf } from '../stop.js';
import type { Guardian } from './guardian.js';
import { LineSplitter } from './lines.js';
import { type Scratch, withScratch } from './scratch.js';

export type LaunchEvent =
  | { readonly event: 'start'; readonly rank: number; readonly pid: number }
  | { readonly event: 'line'; readonly rank: number; readonly stream: 'stdout' | 'stderr'; readonly text: string }
  | ({ readonly event: 'exit' } & RankExit);

export interface RankExit {
  readonly rank: number;
  /** Exit status, or null if a signal ended it. */
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
}

/** Where this host's ranks stand among those of all hosts. */
export interface LaunchPlace {
  readonly firstRank: number;
  readonly worldSize: number;
  readonly node: number;
  readonly nodes: number;
  /** Where rank 0 may serve. */
  readonly master: { readonly host: string; readonly port: number };
  /** EP_STORE, whose server the launcher holds. */
  readonly store: string;
  /** TORCHELASTIC_RUN_ID: of the job, alike on all nodes and in all attempts. */
  readonly runId: string;
  readonly attempt: number;
  readonly maxRestarts: number;
}

export interface LaunchOptions {
  readonly ranks: number;
  readonly program: string;
  readonly args: readonly string[];
  /** Absent: they are the whole job. */
  readonly place?: LaunchPlace;
  /** Added to this process's environment. */
  readonly env?: Readonly<Record<string, string>>;
  /** A rank that fails does not stop the others. */
  readonly keepGoing?: boolean;
  /** From SIGTERM, or from a signal that was passed on, to SIGKILL. Default 5000. */
  readonly graceMs?: number;
  /** Is told no more once it has thrown: all ranks are killed then, and the launch rejects with what it threw. */
  readonly onEvent: (event: LaunchEvent) => void;
  /** Stops all ranks; `reason` may be a signal name to pass on, anything else is SIGTERM. */
  readonly signal?: AbortSignal;
}

export interface LaunchResult {
  /**
   * 0 if every rank ended with 0; else that of the first failure, 128 + number for a signal that ended the rank. Where `signal` stopped the ranks before any had failed: 128 + number of the
   * signal that was passed on, whatever they answered.
   */
  readonly code: number;
  readonly failed?: RankExit;
  /** Of the ranks that were started. */
  readonly exits: readonly RankExit[];
}

/** The largest job that is started on one machine: each rank is a process. */
export const mostLocalRanks = 4096;

/** The longest that a timer of Node waits: one for longer fires at once. */
const mostGraceMs = 2 ** 31 - 1;

/** How long a rank's output may still come after its end. */
const drainMs = 1000;

export function exitCodeOf({ code, signal }: Pick<RankExit, 'code' | 'signal'>): number {
  return signal === null ? (code ?? 1) : 128 + (constants.signals[signal] ?? 0);
}

/** A port that was free a moment ago. HAZARD: somebody may take it before rank 0 listens; our own ranks meet at EP_STORE instead. */
export async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((resolve, reject) => server.once('error', reject).listen(0, '127.0.0.1', resolve));
  const address = server.address();
  await new Promise((resolve) => server.close(resolve));
  if (address === null || typeof address === 'string') {
    throw new EpError('EP_SYSTEM', `listening on 127.0.0.1 gave no port but ${String(address)}`);
  }
  return address.port;
}

/**
 * Runs `ranks` copies of a program and resolves when all have ended and their output was delivered. Each rank leads a process group: what
 * it starts and leaves behind is killed when it ends. Rejects with `EP_INVALID_ARGUMENT` before anything has started, with `EP_SYSTEM` when a
 * rank could not be started, or with what `onEvent` threw; no rank is left then.
 */
export async function launchRanks(options: LaunchOptions): Promise<LaunchResult> {
  checkLaunch(options);
  return withScratch('ep-run-', (scratch) => launchIn(scratch, options));
}

/** As `launchRanks`, with the store in a folder that the caller has. */
export async function launchIn({ folder, guardian }: Scratch, options: LaunchOptions): Promise<LaunchResult> {
  checkLaunch(options);
  const { place, ranks } = options;
  const contract =
    place === undefined
      ? { ...contractOf(ranks, ranks, '127.0.0.1', await freePort()), EP_STORE: `file:${storePath(folder)}` }
      : contractOfNode(ranks, place);
  const ours = inherited(process.env);
  return new Job(options, guardian).run((rank) => ({
    ...ours,
    ...options.env,
    ...contract,
    RANK: String(rank),
    LOCAL_RANK: String(rank - (place?.firstRank ?? 0)),
    ROLE_RANK: String(rank),
  }));
}

function checkLaunch(options: LaunchOptions): void {
  const where = 'launch';
  checkObject(options, 'options', 'an object with ranks, program, args and onEvent', where);
  const { ranks, program, args, onEvent, graceMs, env, place, signal, keepGoing } = options;
  checkInteger(ranks, 'ranks', where, 1, mostLocalRanks);
  if (!isText(program) || program === '') {
    throw invalid('program', { where, expected: 'the name or path of a program', found: program });
  }
  if (!Array.isArray(args)) throw invalid('args', { where, expected: 'a list of strings', found: args });
  for (const [index, arg] of args.entries()) {
    if (!isText(arg)) throw invalid(`args[${index}]`, { where, expected: 'a string without NUL', found: arg });
  }
  if (typeof onEvent !== 'function') throw invalid('onEvent', { where, expected: 'a function', found: onEvent });
  if (graceMs !== undefined && !(typeof graceMs === 'number' && graceMs >= 0 && graceMs <= mostGraceMs)) {
    throw invalid('graceMs', { where, expected: `a number from 0 to ${mostGraceMs}`, found: graceMs });
  }
  if (env !== undefined) checkObject(env, 'env', 'an object of strings', where);
  for (const [name, value] of Object.entries(env ?? {})) {
    if (!isText(value)) throw invalid(`env.${name}`, { where, expected: 'a string without NUL', found: value });
  }
  if (keepGoing !== undefined && typeof keepGoing !== 'boolean') {
    throw invalid('keepGoing', { where, expected: 'true or false', found: keepGoing });
  }
  if (place !== undefined) checkObject(place, 'place', 'an object', where);
  checkSignal(signal, where);
}

/** What the system takes as a word of a command line. */
const isText = (value: unknown): value is string => typeof value === 'string' && !value.includes('\0');

/** What torchrun sets for all workers alike, as of one node whose workers are one group and one role, and are not started again. */
function contractOf(worldSize: number, ranks: number, host: string, port: number): Readonly<Record<string, string>> {
  const size = String(worldSize);
  return {
    WORLD_SIZE: size,
    LOCAL_WORLD_SIZE: String(ranks),
    ROLE_WORLD_SIZE: size,
    GROUP_RANK: '0',
    GROUP_WORLD_SIZE: '1',
    ROLE_NAME: 'default',
    MASTER_ADDR: host,
    MASTER_PORT: String(port),
    TORCHELASTIC_RUN_ID: randomUUID(),
    TORCHELASTIC_RESTART_COUNT: '0',
    TORCHELASTIC_MAX_RESTARTS: '0',
    // Nobody listens at MASTER_PORT: a rank that meets there must serve the store itself.
    TORCHELASTIC_USE_AGENT_STORE: 'False',
  };
}

/** The same for one of several nodes. */
function contractOfNode(ranks: number, place: LaunchPlace): Readonly<Record<string, string>> {
  return {
    ...contractOf(place.worldSize, ranks, place.master.host, place.master.port),
    GROUP_RANK: String(place.node),
    GROUP_WORLD_SIZE: String(place.nodes),
    TORCHELASTIC_RUN_ID: place.runId,
    TORCHELASTIC_RESTART_COUNT: String(place.attempt),
    TORCHELASTIC_MAX_RESTARTS: String(place.maxRestarts),
    EP_STORE: place.store,
    EP_STORE_HELD: '1',
  };
}

/**
 * HAZARD: when this process is itself a worker of torchrun, what its agent said is of another job. With its error file, say, each of our ranks would
 * overwrite the worker's.
 */
function inherited(env: NodeJS.ProcessEnv): NodeJS.ProcessEnv {
  const foreign = (name: string): boolean => name.startsWith('TORCHELASTIC_') || name === 'EP_STORE_HELD';
  return Object.fromEntries(Object.entries(env).filter(([name]) => !foreign(name)));
}

/** Where the ranks of a job meet. */
export const storePath = (folder: string): string => join(folder, 'store');

type Child = ChildProcessByStdio<null, Readable, Readable>;

class Job {
  readonly #options: LaunchOptions;
  readonly #guardian: Guardian;
  readonly #alive = new Map<number, ChildProcess>();
  readonly #exits: RankExit[] = [];
  #failed: RankExit | undefined;
  #spawnError: EpError | undefined;
  /** What onEvent threw first. */
  #thrown: { readonly error: unknown } | undefined;
  #stoppedBy: NodeJS.Signals | undefined;
  #stopping = false;
  #timer: NodeJS.Timeout | undefined;

  constructor(options: LaunchOptions, guardian: Guardian) {
    this.#options = options;
    this.#guardian = guardian;
  }

  async run(environment: (rank: number) => NodeJS.ProcessEnv): Promise<LaunchResult> {
    const { signal, ranks } = this.#options;
    const onAbort = (): void => {
      const passedOn = signalOf(signal?.reason);
      // Ranks that had all ended were not stopped: only their output is still on its way.
      if (this.#exits.length < ranks) this.#stoppedBy = passedOn;
      this.#stop(passedOn);
    };
    // For a launcher that ends by process.exit() or an exception that nobody caught.
    const onExit = (): void => this.#signalAll('SIGKILL');
    process.on('exit', onExit);
    signal?.addEventListener('abort', onAbort);
    if (signal?.aborted) onAbort();
    try {
      const ended: Promise<void>[] = [];
      const first = this.#options.place?.firstRank ?? 0;
      for (let rank = first; rank < first + ranks && !this.#stopping; rank++)
        ended.push(this.#start(rank, environment(rank)));
      await Promise.all(ended);
    } finally {
      clearTimeout(this.#timer);
      signal?.removeEventListener('abort', onAbort);
      process.off('exit', onExit);
    }
    if (this.#thrown !== undefined) throw this.#thrown.error;
    if (this.#spawnError !== undefined) throw this.#spawnError;
    const failed = this.#failed;
    const code = exitCodeOf(failed ?? { code: 0, signal: this.#stoppedBy ?? null });
    return { code, ...(failed && { failed }), exits: this.#exits };
  }

  #start(rank: number, env: NodeJS.ProcessEnv): Promise<void> {
    const { program, args } = this.#options;
    let child: Child;
    try {
      // Detached: a group of its own, so that a terminal's Ctrl-C reaches a rank once, through us, and its children go with it.
      child = spawn(program, args, { env, detached: true, stdio: ['ignore', 'pipe', 'pipe'] });
    } catch (error) {
      this.#notStarted(rank, error as NodeJS.ErrnoException);
      return Promise.resolve();
    }
    const { pid } = child;
    return new Promise((resolve) => {
      child.on('error', (error: NodeJS.ErrnoException) => {
        if (pid !== undefined) return;
        this.#notStarted(rank, error);
        resolve();
      });
      // HAZARD: one that could not be started has no streams where descriptors ran out, whatever its type says.
      if (pid !== undefined) this.#watch(rank, child, pid, resolve);
    });
  }

  #notStarted(rank: number, error: NodeJS.ErrnoException): void {
    const { program } = this.#options;
    this.#spawnError ??= new EpError('EP_SYSTEM', `rank ${rank}: cannot start ${program}: ${reasonOf(error)}`, {
      cause: error,
      context: { rank, program, errno: error.code },
    });
    this.#stop('SIGTERM');
  }

  #watch(rank: number, child: Child, pid: number, ended: () => void): void {
    const { keepGoing } = this.#options;
    this.#guardian.add(pid);
    this.#alive.set(rank, child);
    this.#tell({ event: 'start', rank, pid });
    for (const stream of ['stdout', 'stderr'] as const) {
      const lines = new LineSplitter((text) => this.#tell({ event: 'line', rank, stream, text }));
      child[stream].on('data', (chunk: Buffer) => lines.push(chunk)).on('end', () => lines.end());
    }
    let drain: NodeJS.Timeout | undefined;
    child.on('exit', (code, signal) => {
      this.#alive.delete(rank);
      // Whatever the rank left running would hold its pipes open, and outlive the job.
      signalGroup(child, 'SIGKILL');
      this.#guardian.gone(pid);
      // A descendant in a session of its own may still hold the pipes: their end must not be waited for.
      drain = setTimeout(() => {
        child.stdout.destroy();
        child.stderr.destroy();
      }, drainMs);
      const exit = { rank, code, signal };
      this.#exits.push(exit);
      if (code !== 0 && !this.#stopping) {
        this.#failed ??= exit;
        if (keepGoing !== true) this.#stop('SIGTERM');
      }
    });
    child.on('close', (code, signal) => {
      clearTimeout(drain);
      this.#tell({ event: 'exit', rank, code, signal });
      ended();
    });
  }

  /**
   * HAZARD: most events come from streams and children, where nobody catches: what the program's function throws would end the launcher, or leave the
   * ranks behind.
   */
  #tell(event: LaunchEvent): void {
    if (this.#thrown !== undefined) return;
    try {
      this.#options.onEvent(event);
    } catch (error) {
      this.#thrown = { error };
      this.#stop('SIGKILL');
    }
  }

  #stop(signal: NodeJS.Signals): void {
    this.#stopping = true;
    this.#signalAll(signal);
    this.#timer ??= setTimeout(() => this.#signalAll('SIGKILL'), this.#options.graceMs ?? 5000);
  }

  #signalAll(signal: NodeJS.Signals): void {
    for (const child of this.#alive.values()) signalGroup(child, signal);
  }
}

function signalGroup(child: ChildProcess, signal: NodeJS.Signals): void {
  if (child.pid === undefined) return;
  try {
    process.kill(-child.pid, signal);
  } catch {
    // ESRCH: everything in the group has ended already.
  }
}

function reasonOf(error: NodeJS.ErrnoException): string {
  if (error.code === 'ENOENT') return 'no such program';
  if (error.code === 'EACCES') return 'it is not executable';
  return error.message;
}
