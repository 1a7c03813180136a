/** The comparison program, compiled by mpicc where Open MPI is installed. Arguments: bytes per pair, repeats. Prints the slowest rank's milliseconds per repeat; aborts unless every byte of the last one is right. */
export const ALLTOALLV_SOURCE = `#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Byte \`at\` of what \`from\` sends to \`to\`: another one in every place of every round.
static char mark(int from, int to, int at, int round) { return (char)(from * 16 + to + at * 7 + (at >> 8) + round * 101); }

static void fill(char* out, int rank, int size, int bytes, int round) {
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j < bytes; ++j) out[(size_t)bytes * i + j] = mark(rank, i, j, round);
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int bytes = atoi(argv[1]);
  const int repeats = atoi(argv[2]);
  int* counts = malloc(sizeof(int) * size);
  int* offsets = malloc(sizeof(int) * size);
  for (int i = 0; i < size; ++i) {
    counts[i] = bytes;
    offsets[i] = bytes * i;
  }
  char* out = malloc((size_t)bytes * size);
  char* in = malloc((size_t)bytes * size);
  fill(out, rank, size, bytes, 0);
  memset(in, 255, (size_t)bytes * size);
  for (int i = -2; i < repeats; ++i) {
    // What the others left behind in earlier repeats must not pass for the last one's bytes.
    if (i == repeats - 1) fill(out, rank, size, bytes, 1);
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Alltoallv(out, counts, offsets, MPI_BYTE, in, counts, offsets, MPI_BYTE, MPI_COMM_WORLD);
    double took = MPI_Wtime() - begin, slowest;
    MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0 && i >= 0) printf("%.6f\\n", slowest * 1e3);
  }
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j < bytes; ++j) {
      if (in[(size_t)bytes * i + j] != mark(i, rank, j, 1)) MPI_Abort(MPI_COMM_WORLD, 3);
    }
  }
  MPI_Finalize();
  return 0;
}
`;
