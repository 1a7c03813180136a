/** The same calls by Open MPI on the same hosts: over TCP between all ranks, as the goals have it, and with shared memory on each host. */
import { execFile } from 'node:child_process';
import { chmod, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { GROUP_RANKS, type GroupTask, type GroupTimes } from './groups-task.js';
import { type Host, hostsSubnet } from './hosts.js';

const run = promisify(execFile);

/** Arguments: turns, calls and milliseconds of the warm-up (as ours), then operation (0: all-reduce, 1: all-to-all), bytes and calls of each. Prints the slowest rank's microseconds of a call, a line each turn; aborts where a result is wrong. */
const SOURCE = `#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, size;
static void call(int op, float* in, float* out, int count) {
  if (op == 0) MPI_Allreduce(MPI_IN_PLACE, in, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else MPI_Alltoall(in, count / size, MPI_FLOAT, out, count / size, MPI_FLOAT, MPI_COMM_WORLD);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int turns = atoi(argv[1]);
  const int most = atoi(argv[2]);
  const double warm_begin = MPI_Wtime(), warm_s = atof(argv[3]) / 1000;
  float over[2] = {0, 0};
  for (int i = 0; i < most && over[0] == 0; ++i) {
    over[0] = over[1] = MPI_Wtime() - warm_begin > warm_s ? 1 : 0;
    call(0, over, over, 2);
  }
  for (int at = 4; at + 2 < argc; at += 3) {
    const int op = atoi(argv[at]), count = atoi(argv[at + 1]) / 4, calls = atoi(argv[at + 2]);
    float* in = calloc(count, sizeof(float));
    float* out = calloc(count, sizeof(float));
    for (int turn = 0; turn <= turns; ++turn) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = MPI_Wtime();
      for (int i = 0; i < calls; ++i) call(op, in, out, count);
      double us = (MPI_Wtime() - begin) * 1e6 / calls, slowest;
      MPI_Reduce(&us, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
      for (int i = 0; i < count; ++i) in[i] = (float)(i % 1009) * (float)(rank + 1);
      call(op, in, out, count);
      const int block = count / size;
      for (int i = 0; i < count; ++i) {
        const float expected = op == 0 ? (float)(i % 1009) * (float)(size * (size + 1) / 2) : (float)((rank * block + i % block) % 1009) * (float)(i / block + 1);
        if ((op == 0 ? in : out)[i] != expected) MPI_Abort(MPI_COMM_WORLD, 2);
      }
      for (int i = 0; i < count; ++i) in[i] = 0;
      if (rank == 0 && turn > 0) printf("%.3f\\n", slowest);
    }
    free(in);
    free(out);
  }
  MPI_Finalize();
  return 0;
}
`;

export interface MpiGroups {
  /** Over TCP between all ranks. */
  readonly tcp: GroupTimes;
  /** With shared memory on each host, as it runs where nobody says otherwise. */
  readonly shared: GroupTimes;
}

const quoted = (word: string): string => `'${word.replaceAll("'", "'\\''")}'`;

/** What starts its daemon on the other host in the place of ssh: a host's address, then words for its shell. */
function agentOf(hosts: readonly Host[]): string {
  const cases = hosts.map(({ address, enter }) => `${address}) exec ${enter.map(quoted).join(' ')} sh -c "$*" ;;`);
  return `#!/bin/sh\nhost=$1\nshift\ncase $host in\n${cases.join('\n')}\nesac\necho "no host $host" >&2\nexit 1\n`;
}

/** Half of the ranks on each host. Or why it was not measured. */
export async function runMpiGroups(
  { warmUp, turns, calls }: Pick<GroupTask, 'warmUp' | 'turns' | 'calls'>,
  hosts: readonly Host[],
  folder: string,
): Promise<MpiGroups | string> {
  try {
    await run('mpicc', ['--version']);
  } catch {
    return 'groups of Open MPI: mpicc was not found (Debian: apt-get install libopenmpi-dev openmpi-bin)';
  }
  const [source, binary, agent] = ['groups.c', 'groups', 'agent.sh'].map((name) => join(folder, name)) as [
    string,
    string,
    string,
  ];
  await writeFile(source, SOURCE);
  await run('mpicc', ['-O3', '-o', binary, source]);
  await writeFile(agent, agentOf(hosts));
  await chmod(agent, 0o700);
  const major = Number(/ (\d+)\./.exec((await run('mpirun', ['--version'])).stdout)?.[1]);
  const sharedMemory = major < 5 ? 'vader' : 'sm';
  const wanted = calls.flatMap(({ op, bytes, calls: count }) => [op === 'all-reduce' ? 0 : 1, bytes, count]);
  const perHost = GROUP_RANKS / hosts.length;
  const timed = async (btl: string): Promise<GroupTimes> => {
    const settings = Object.entries({
      plm_rsh_agent: agent,
      pml: 'ob1',
      btl,
      btl_tcp_if_include: hostsSubnet,
      oob_tcp_if_include: hostsSubnet,
      mpi_yield_when_idle: '1',
    }).flatMap(([name, value]) => ['--mca', name, value]);
    const places = hosts.map(({ address }) => `${address}:${perHost}`).join(',');
    const program = [binary, turns, warmUp.calls, warmUp.ms, ...wanted].map(String);
    const [command, ...args] = [...hosts[0]!.enter, 'mpirun', '-n', `${GROUP_RANKS}`, '--host', places];
    const { stdout } = await run(command!, [...args, ...settings, ...program], {
      env: { ...process.env, OMPI_ALLOW_RUN_AS_ROOT: '1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: '1' },
    });
    const lines = stdout.trim().split('\n').map(Number);
    if (lines.length !== turns * calls.length || lines.some((us) => !(us > 0))) {
      throw new Error(`Open MPI printed ${JSON.stringify(stdout.slice(0, 200))}`);
    }
    return calls.map((_, at) => lines.slice(at * turns, (at + 1) * turns));
  };
  return { tcp: await timed('self,tcp'), shared: await timed(`self,${sharedMemory},tcp`) };
}
