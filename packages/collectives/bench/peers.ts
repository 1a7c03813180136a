/** Who else is on this machine: Open MPI, and Gloo in a Python with torch. Each is found, or there is a reason why not. */
import { execFile, spawn } from 'node:child_process';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { EpError } from '@ep/core';
import { Contender } from './contender.js';

export type PeerName = 'Open MPI' | 'Gloo';

export interface StartOptions {
  /** Of this start alone: socket, rendezvous file. */
  readonly folder: string;
  readonly ranks: number;
  /** Of the largest buffer of a rank. */
  readonly mostBytes: number;
  readonly usableCores: number;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

export interface Peer {
  readonly name: PeerName;
  readonly version: string;
  readonly start: (options: StartOptions) => Promise<Contender>;
}

export type Found = Peer | { readonly name: PeerName; readonly unavailable: string };

const run = promisify(execFile);

// Beside this file in the repository and in dist; see tsup.config.ts.
export const OPEN_MPI_SOURCE = fileURLToPath(new URL('./open_mpi.c', import.meta.url));
export const GLOO_SCRIPT = fileURLToPath(new URL('./gloo.py', import.meta.url));

const FOUND_NO_MPI = '(Debian: apt-get install libopenmpi-dev openmpi-bin)';

/** Compiles `source` into `folder`. */
export async function findOpenMpi(folder: string, source = OPEN_MPI_SOURCE): Promise<Found> {
  const name = 'Open MPI';
  let version: string;
  try {
    const { stdout } = await run('mpirun', ['--version']);
    version = /Open MPI\) (\d+\.\d+\.\S+)/.exec(stdout)?.[1] ?? '';
    if (version === '') return { name, unavailable: `mpirun is not Open MPI's: ${stdout.split('\n')[0]}` };
    await run('mpicc', ['--version']);
  } catch (error) {
    const { code, path } = error as NodeJS.ErrnoException;
    if (code !== 'ENOENT') throw error;
    return { name, unavailable: `${path ?? 'mpicc or mpirun'} was not found ${FOUND_NO_MPI}` };
  }
  const program = join(folder, 'open-mpi');
  await run('mpicc', ['-O3', '-o', program, source]);
  return { name, version, start: (options) => startOpenMpi(program, version, options) };
}

function startOpenMpi(program: string, version: string, options: StartOptions): Promise<Contender> {
  const { folder, ranks, mostBytes, usableCores, timeoutMs, signal } = options;
  // Shared memory has another name since version 5.
  const sharedMemory = Number.parseInt(version, 10) < 5 ? 'vader' : 'sm';
  const settings = {
    pml: 'ob1',
    btl: `self,${sharedMemory}`,
    mpi_yield_when_idle: ranks > usableCores ? '1' : '0',
  };
  // By itself it binds ranks only where each has a core.
  const placement =
    ranks > usableCores
      ? ['--map-by', 'core:OVERSUBSCRIBE', '--bind-to', 'core:overload-allowed']
      : ['--oversubscribe'];
  const mca = Object.entries(settings).flatMap(([key, value]) => ['--mca', key, value]);
  return Contender.start({
    name: 'Open MPI',
    ranks,
    timeoutMs,
    signal,
    socketPath: join(folder, 'open-mpi.sock'),
    launch: (socketPath) => [
      spawn('mpirun', ['-n', `${ranks}`, ...placement, ...mca, program, socketPath, `${mostBytes}`], {
        stdio: ['ignore', 'pipe', 'pipe'],
        env: { ...process.env, OMPI_ALLOW_RUN_AS_ROOT: '1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: '1' },
      }),
    ],
  });
}

/** `EP_TORCH_PYTHON`, or `python3`. Throws `EP_INVALID_ARGUMENT` if the former is set and has no torch: that is a mistake, not a machine without torch. */
export async function findGloo(script = GLOO_SCRIPT): Promise<Found> {
  const name = 'Gloo';
  const named = process.env.EP_TORCH_PYTHON;
  const python = named === undefined || named === '' ? 'python3' : named;
  const unavailable = (why: string): Found => {
    if (python !== named) return { name, unavailable: `${python} ${why}, and EP_TORCH_PYTHON names no other` };
    throw new EpError('EP_INVALID_ARGUMENT', `EP_TORCH_PYTHON=${python} ${why}`, { context: { python } });
  };
  const program =
    'import torch, torch.distributed as d; print(torch.__version__ if d.is_available() and d.is_gloo_available() else "")';
  let version: string;
  try {
    version = (await run(python, ['-c', program])).stdout.trim();
  } catch (error) {
    const { code, stderr } = error as NodeJS.ErrnoException & { readonly stderr?: string };
    if (code === 'ENOENT') return unavailable('was not found');
    return unavailable(`cannot import torch (${stderr?.trim().split('\n').at(-1) ?? String(error)})`);
  }
  if (version === '') return unavailable('has a torch without Gloo');
  return { name, version: `of torch ${version}`, start: (options) => startGloo(python, script, options) };
}

function startGloo(python: string, script: string, options: StartOptions): Promise<Contender> {
  const { folder, ranks, mostBytes, timeoutMs, signal } = options;
  return Contender.start({
    name: 'Gloo',
    ranks,
    timeoutMs,
    signal,
    socketPath: join(folder, 'gloo.sock'),
    launch: (socketPath) =>
      Array.from({ length: ranks }, (_, rank) =>
        spawn(python, [script, socketPath, `${rank}`, `${ranks}`, join(folder, 'gloo-rendezvous'), `${mostBytes}`], {
          stdio: ['ignore', 'pipe', 'pipe'],
        }),
      ),
  });
}
