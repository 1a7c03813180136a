/** The environment: our switches, and the contract with whoever launched this rank. */
import { isIPv6 } from 'node:net';
import { checkObject, EpError, invalid } from './errors.js';
import { MOST_WORLD_SIZE } from './ranks.js';
import { firstHostOf, portOfStep } from './slurm.js';
import type { Rank } from './transport.js';

/** Every switch: what it does and its value when unset. docs/environment.md is generated from this table. */
export const SWITCHES = {
  EP_NATIVE_PATH: {
    default: 'unset',
    meaning: 'path of the native addon to load; nothing else is tried when it is set',
  },
  EP_CUDA_PATH: {
    default: 'unset',
    meaning: 'path of the library of kernels for GPUs (`libep_cuda.so`) to load; nothing else is tried when it is set',
  },
  EP_NCCL_PATH: {
    default: 'unset',
    meaning:
      "path of NVIDIA's NCCL (`libnccl.so.2`) for groups over it; nothing else is tried when it is set; unset: by its name, where the loader searches",
  },
  EP_NVSHMEM_PATH: {
    default: 'unset',
    meaning:
      "path of the host library of NVIDIA's NVSHMEM (`libnvshmem_host.so.3`) for `nvshmem.nvshmem`; nothing else is tried when it is set; unset: by its name, where the loader searches",
  },
  EP_CUDA_ARCHITECTURES: {
    default: 'unset',
    meaning:
      'comma-separated compute capabilities, for example `90`, that `build:cuda` and the tests of kernels on GPUs compile for; unset: all that are supported',
  },
  EP_DEBUG: {
    default: 'unset',
    meaning:
      'comma-separated topics to report on; `leaks` warns of objects that were garbage collected without close(), with the place where they were made',
  },
  EP_REQUIRE: {
    default: 'unset',
    meaning:
      'comma-separated `transport:backing` names (for example `ibgda:hardware`) that tests must find: unavailable becomes a failure',
  },
  EP_TEST_FULL: {
    default: 'unset',
    meaning: '`1`: conformance tests run their whole matrix of worlds and modes instead of a sample',
  },
  EP_TEST_SEEDS: {
    default: 'unset',
    meaning: 'how many seeds each C++ test of device code tries instead of its own number',
  },
  EP_FUZZ_RUNS: {
    default: 'unset',
    meaning: "how many inputs the C++ fuzzers make instead of some seconds' worth",
  },
  EP_FUZZ_SEED: {
    default: 'unset',
    meaning: 'where the C++ fuzzers begin; a finding prints the one that repeats it',
  },
  EP_SOAK_MINUTES: {
    default: 'unset',
    meaning: 'how long the soak of several hosts strikes, instead of some seconds, or half an hour with `EP_TEST_FULL`',
  },
  EP_SOAK_SEED: {
    default: 'unset',
    meaning: 'which faults that soak makes: it prints the one that repeats them',
  },
  EP_HOSTS: {
    default: 'unset',
    meaning:
      'two hosts and how many ranks each may have, `a:2,b:2`, for the suites of several hosts; unset: those of the allocation of Slurm, if this is one, or network namespaces',
  },
  EP_HOSTS_LAUNCHER: {
    default: 'ssh -o BatchMode=yes',
    meaning:
      'the command by which these suites reach a host of EP_HOSTS: it is given the name of the host and one line for its shell',
  },
  EP_STORE: {
    default: 'unset',
    meaning:
      '`file:<path>` or `tcp://<host>:<port>` of the store through which the ranks meet; wins over MASTER_ADDR and MASTER_PORT',
  },
  EP_STORE_HELD: {
    default: 'unset',
    meaning:
      '`1`: the launcher holds the server of the store that EP_STORE names, and no rank does; `ep run` sets it on several hosts',
  },
  EP_STORE_BIND: {
    default: 'unset',
    meaning:
      'the address at which the rank that holds a TCP store listens, for example `0.0.0.0` for every interface; unset: loopback, and nothing else',
  },
  EP_JOB_SECRET: {
    default: 'unset',
    meaning:
      'what the ranks of one job share and nobody else knows, at least 16 bytes: TCP stores and `nvshmem.fabric` ask for it; `none`: off, for a trusted network; unset: refused where other hosts could take part',
  },
  EP_JOB_SECRET_FILE: {
    default: 'unset',
    meaning: 'path of a file that holds the job secret; read where EP_JOB_SECRET is not set',
  },
  EP_TORCH_PYTHON: {
    default: 'unset',
    meaning:
      'a python that can import torch, for tests and benchmarks against PyTorch; unset: `python3`, and where that has no torch they are recorded as unavailable',
  },
  EP_TRACE_DIR: {
    default: 'unset',
    meaning:
      'folder into which each rank of a process group dumps its last calls when one times out or fails, and on SIGUSR2; `ep trace merge` reads it; unset: nothing is written, and SIGUSR2 keeps its meaning',
  },
  EP_TIMEOUT_MS: {
    default: '300000',
    meaning:
      'how long set-up, collective calls, waits and dispatches wait for other ranks where the call gives no timeoutMs, in milliseconds; `0` means without a limit',
  },
} as const satisfies Record<string, { readonly default: string; readonly meaning: string }>;

export type Switch = keyof typeof SWITCHES;
export type Environment = Readonly<Record<string, string | undefined>>;

function checkEnvironment(env: Environment, where: string): void {
  checkObject(env, 'env', 'an object of variables, as process.env', where);
}

/** True if the comma-separated EP_DEBUG names the topic. */
export function debugs(topic: string, env: Environment = process.env): boolean {
  checkEnvironment(env, 'debugs');
  const topics = env.EP_DEBUG;
  return topics?.split(',').some((name) => name.trim() === topic) ?? false;
}

function parseInteger(name: string, text: string, min: number, max: number): number {
  const value = /^\d{1,16}$/.test(text) ? Number(text) : Number.NaN;
  if (value >= min && value <= max) return value;
  throw invalid(name, { where: 'environment', expected: `a decimal integer from ${min} to ${max}`, found: text });
}

/** EP_TIMEOUT_MS, or its default; `Infinity` for 0. */
export function defaultTimeoutMs(env: Environment = process.env): number {
  checkEnvironment(env, 'defaultTimeoutMs');
  const text = env.EP_TIMEOUT_MS ?? '';
  const value = parseInteger(
    'EP_TIMEOUT_MS',
    text === '' ? SWITCHES.EP_TIMEOUT_MS.default : text,
    0,
    Number.MAX_SAFE_INTEGER,
  );
  return value === 0 ? Number.POSITIVE_INFINITY : value;
}

export type StoreAddress =
  | { readonly kind: 'file'; readonly path: string }
  | { readonly kind: 'tcp'; readonly host: string; readonly port: number };

/** One rank's place in a launched job. */
export interface LaunchEnv {
  readonly rank: Rank;
  readonly worldSize: number;
  /** Place among the ranks of this host; absent if the launcher did not say. */
  readonly localRank?: number;
  readonly localWorldSize?: number;
  readonly store: StoreAddress;
  /** Who holds the server of the TCP store, if it is not rank 0: torchrun's agent, whose store knows no job secret, or `ep run`. */
  readonly storeOfLauncher?: 'torchrun' | 'ep';
  /** How often the launcher has started the ranks again. Its store keeps the keys of earlier attempts. */
  readonly restarts?: number;
}

/** The variables of one launcher; `either`: one of the first two alone is an error, not another launcher's business. */
interface LauncherNames {
  readonly rank: string;
  readonly worldSize: string;
  readonly localRank: string;
  readonly localWorldSize?: string;
  readonly either?: true;
  /** The first of its variables is not ours to interpret unless the second is there as well. */
  readonly both?: true;
}

const TORCHRUN: LauncherNames = {
  rank: 'RANK',
  worldSize: 'WORLD_SIZE',
  localRank: 'LOCAL_RANK',
  localWorldSize: 'LOCAL_WORLD_SIZE',
  either: true,
};

/** In the order in which they are looked for: mpirun within a Slurm allocation sets its own beside Slurm's. */
const LAUNCHERS: readonly LauncherNames[] = [
  // An indexed job of Kubernetes says which of its pods this is, its manifest how many there are.
  { rank: 'JOB_COMPLETION_INDEX', worldSize: 'WORLD_SIZE', localRank: 'LOCAL_RANK', both: true },
  TORCHRUN,
  {
    rank: 'OMPI_COMM_WORLD_RANK',
    worldSize: 'OMPI_COMM_WORLD_SIZE',
    localRank: 'OMPI_COMM_WORLD_LOCAL_RANK',
    localWorldSize: 'OMPI_COMM_WORLD_LOCAL_SIZE',
  },
  { rank: 'SLURM_PROCID', worldSize: 'SLURM_NTASKS', localRank: 'SLURM_LOCALID' },
  // mpirun of MPICH and of Intel MPI; behind Slurm, whose own srun sets two of these as well.
  {
    rank: 'PMI_RANK',
    worldSize: 'PMI_SIZE',
    localRank: 'MPI_LOCALRANKID',
    localWorldSize: 'MPI_LOCALNRANKS',
    both: true,
  },
];

type Value = (name: string) => string | undefined;

/** Undefined: started by hand, or not at all. */
function launcherOf(value: Value): LauncherNames | undefined {
  const has = (name: string): boolean => value(name) !== undefined;
  return LAUNCHERS.find((names) => {
    // What somebody sets by hand wins over a pod's index.
    if (names.both === true) return has(names.rank) && has(names.worldSize) && !has('RANK');
    return has(names.rank) || (names.either === true && has(names.worldSize));
  });
}

/** Only where Slurm says who this is: mpirun within an allocation may put rank 0 elsewhere. */
const launchedBySlurm = (value: Value): boolean => launcherOf(value)?.rank === 'SLURM_PROCID';

function hostOfSlurm(value: Value): string | undefined {
  if (!launchedBySlurm(value)) return undefined;
  const variable = ['SLURM_STEP_NODELIST', 'SLURM_JOB_NODELIST', 'SLURM_NODELIST'].find(
    (name) => value(name) !== undefined,
  );
  return variable === undefined ? undefined : firstHostOf(value(variable)!, variable);
}

function portOfSlurm(value: Value): string | undefined {
  const job = launchedBySlurm(value) ? value('SLURM_JOB_ID') : undefined;
  if (job === undefined) return undefined;
  const number = (name: string, text: string) => parseInteger(name, text, 0, 2 ** 32 - 1);
  return String(portOfStep(number('SLURM_JOB_ID', job), number('SLURM_STEP_ID', value('SLURM_STEP_ID') ?? '0')));
}

function parseStoreAddress(env: Environment, value: Value): StoreAddress {
  const named = value('EP_STORE');
  if (named !== undefined) {
    const path = named.startsWith('file:') ? named.slice('file:'.length) : '';
    if (path !== '' && !path.includes('\0')) return { kind: 'file', path };
    const [, address, port] = /^tcp:\/\/(\[[\da-fA-F:.]+\]|[^\s\0/:[\]]+):(\d{1,5})$/.exec(named) ?? [];
    if (address !== undefined && port !== undefined)
      return {
        kind: 'tcp',
        host: address.replace(/[[\]]/g, ''),
        port: parseInteger('the port of EP_STORE', port, 1, 65535),
      };
    const expected = '`file:<path>` or `tcp://<host>:<port>`';
    throw invalid('EP_STORE', { where: 'environment', expected, found: env.EP_STORE });
  }
  const host = value('MASTER_ADDR') ?? hostOfSlurm(value);
  const port = value('MASTER_PORT') ?? portOfSlurm(value);
  if (host === undefined || port === undefined) {
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `environment: no store to meet at: set EP_STORE=file:<path> or tcp://<host>:<port>, or both MASTER_ADDR and MASTER_PORT (${host === undefined ? 'MASTER_ADDR' : 'MASTER_PORT'} is not set)`,
      { context: { MASTER_ADDR: host, MASTER_PORT: port } },
    );
  }
  // Brackets belong to an address with its port: taken for a name, they would wait for a name server.
  const bare = /^\[([\da-fA-F:.]+)\]$/.exec(host)?.[1] ?? host;
  if (/[\s\0/[\]]/.test(bare) || (bare.includes(':') && !isIPv6(bare))) {
    const expected = 'a host name or address, without a port, which is MASTER_PORT';
    throw invalid('MASTER_ADDR', { where: 'environment', expected, found: host });
  }
  return { kind: 'tcp', host: bare, port: parseInteger('MASTER_PORT', port, 1, 65535) };
}

function holderOf(value: Value, store: StoreAddress): LaunchEnv['storeOfLauncher'] {
  // The agent's server is the one at MASTER_ADDR; a store that EP_STORE names is ours.
  if (value('EP_STORE') === undefined) return value('TORCHELASTIC_USE_AGENT_STORE') === 'True' ? 'torchrun' : undefined;
  const held = value('EP_STORE_HELD');
  if (held !== undefined && held !== '1')
    throw invalid('EP_STORE_HELD', { where: 'environment', expected: '"1" or not set', found: held });
  return held === '1' && store.kind === 'tcp' ? 'ep' : undefined;
}

/**
 * Reads torchrun's contract (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and our EP_STORE; where RANK and WORLD_SIZE
 * are not set, the variables of Open MPI, MPICH and Intel MPI, or Slurm say who this is, and where only WORLD_SIZE is, the index of a Kubernetes job. Under srun, what is missing of MASTER_ADDR and MASTER_PORT is the first host of the step and a port made
 * of the numbers of job and step. An empty variable counts as unset. Throws `EP_INVALID_ARGUMENT` naming the variable, what it should be and what it is.
 */
export function readLaunchEnv(env: Environment = process.env): LaunchEnv {
  checkEnvironment(env, 'readLaunchEnv');
  const value = (name: string): string | undefined =>
    env[name] === undefined || env[name] === '' ? undefined : env[name];
  const names = launcherOf(value) ?? TORCHRUN;
  const rankText = value(names.rank);
  const sizeText = value(names.worldSize);
  if (rankText === undefined || sizeText === undefined) {
    const missing = [names.rank, names.worldSize].filter((name) => value(name) === undefined);
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `environment: ${missing.join(' and ')} not set: start this program with \`ep run -n N -- program\`, torchrun, mpirun or srun, or set RANK and WORLD_SIZE`,
      { context: { missing } },
    );
  }
  const worldSize = parseInteger(names.worldSize, sizeText, 1, MOST_WORLD_SIZE);
  const rank = parseInteger(names.rank, rankText, 0, worldSize - 1);
  const optional = (name: string | undefined, min: number, max: number): number | undefined => {
    const text = name === undefined ? undefined : value(name);
    return name === undefined || text === undefined ? undefined : parseInteger(name, text, min, max);
  };
  const localWorldSize = optional(names.localWorldSize, 1, worldSize);
  const localRank = optional(names.localRank, 0, (localWorldSize ?? worldSize) - 1);
  const restarts = optional('TORCHELASTIC_RESTART_COUNT', 0, Number.MAX_SAFE_INTEGER);
  const store = parseStoreAddress(env, value);
  const storeOfLauncher = holderOf(value, store);
  return {
    rank,
    worldSize,
    ...(localRank === undefined ? {} : { localRank }),
    ...(localWorldSize === undefined ? {} : { localWorldSize }),
    store,
    ...(storeOfLauncher === undefined ? {} : { storeOfLauncher }),
    ...(restarts === undefined ? {} : { restarts }),
  };
}
