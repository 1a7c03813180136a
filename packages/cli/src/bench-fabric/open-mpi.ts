/** The same ping-pong and the same messages by Open MPI over TCP, on the loopback interface. */
import { execFile } from 'node:child_process';
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';
import type { FabricTask } from './task.js';

const run = promisify(execFile);

/** Arguments: rounds, messages, bytes, window, turns. Prints half a round in us (the median) and the seconds of all messages for each turn; aborts where bytes are wrong. */
const SOURCE = `#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int by_size(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}
static uint32_t word_of(int turn, size_t at) { return (uint32_t)at * 2654435761u + (uint32_t)turn * 40503u; }

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const int rounds = atoi(argv[1]), messages = atoi(argv[2]), bytes = atoi(argv[3]), window = atoi(argv[4]), turns = atoi(argv[5]);
  double* samples = malloc(sizeof(double) * rounds);
  uint32_t* data = malloc((size_t)bytes * window);
  const size_t words = (size_t)bytes / 4 * window;
  MPI_Request* requests = malloc(sizeof(MPI_Request) * window);
  for (int turn = 0; turn <= turns; ++turn) {
    MPI_Barrier(MPI_COMM_WORLD);
    for (int64_t i = 0; i < rounds; ++i) {
      int64_t found = i;
      const double begin = MPI_Wtime();
      if (rank == 0) MPI_Send(&i, 8, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
      MPI_Recv(&found, 8, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      if (rank == 1) MPI_Send(&found, 8, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
      samples[i] = (MPI_Wtime() - begin) * 5e5;
      if (found != i) MPI_Abort(MPI_COMM_WORLD, 2);
    }
    for (size_t i = 0; i < words; ++i) data[i] = rank == 0 ? word_of(turn, i) : 0;
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    for (int i = 0; i < messages; ++i) {
      MPI_Request* at = requests + i % window;
      char* bytes_of = (char*)data + (size_t)(i % window) * bytes;
      if (i >= window) MPI_Wait(at, MPI_STATUS_IGNORE);
      if (rank == 0) MPI_Isend(bytes_of, bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD, at);
      else MPI_Irecv(bytes_of, bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, at);
    }
    MPI_Waitall(messages < window ? messages : window, requests, MPI_STATUSES_IGNORE);
    MPI_Barrier(MPI_COMM_WORLD);
    const double seconds = MPI_Wtime() - begin;
    const size_t arrived = (size_t)(messages < window ? messages : window) * bytes / 4;
    for (size_t i = 0; i < arrived; ++i) if (data[i] != word_of(turn, i)) MPI_Abort(MPI_COMM_WORLD, 3);
    qsort(samples, rounds, sizeof(double), by_size);
    if (rank == 0 && turn > 0) printf("%.4f %.9f\\n", samples[rounds / 2], seconds);
  }
  MPI_Finalize();
  return 0;
}
`;

export interface OpenMpiTimes {
  readonly latency: readonly number[];
  readonly seconds: readonly number[];
}

/** Or why it was not measured. */
export async function runOpenMpi(
  {
    rounds,
    messages,
    messageBytes,
    window,
    turns,
  }: Pick<FabricTask, 'rounds' | 'messages' | 'messageBytes' | 'window' | 'turns'>,
  folder: string,
): Promise<OpenMpiTimes | string> {
  try {
    await run('mpicc', ['--version']);
  } catch {
    return 'Open MPI over TCP: mpicc was not found (Debian: apt-get install libopenmpi-dev openmpi-bin)';
  }
  const [source, binary] = [join(folder, 'tcp.c'), join(folder, 'tcp')];
  await writeFile(source, SOURCE);
  await run('mpicc', ['-O3', '-o', binary, source]);
  const over = ['--mca', 'pml', 'ob1', '--mca', 'btl', 'self,tcp', '--mca', 'btl_tcp_if_include', 'lo'];
  const numbers = [rounds, messages, messageBytes, window, turns].map(String);
  const { stdout } = await run('mpirun', ['-n', '2', '--oversubscribe', ...over, binary, ...numbers], {
    env: { ...process.env, OMPI_ALLOW_RUN_AS_ROOT: '1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: '1' },
  });
  const lines = stdout
    .trim()
    .split('\n')
    .map((line) => line.split(' ').map(Number));
  if (lines.length !== turns || lines.some(([a, b]) => !(a! > 0 && b! > 0))) {
    throw new Error(`Open MPI printed ${JSON.stringify(stdout.slice(0, 200))}`);
  }
  return { latency: lines.map(([us]) => us!), seconds: lines.map(([, seconds]) => seconds!) };
}
