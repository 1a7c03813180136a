/** The comparison program, compiled by mpicc where Open MPI is installed. Arguments: bytes per pair, repeats. Prints the slowest rank's milliseconds per repeat. */
export const ALLTOALLV_SOURCE = `#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
  for (int i = 0; i < size; ++i) memset(out + (size_t)bytes * i, rank * 16 + i, bytes);
  memset(in, 255, (size_t)bytes * size);
  for (int i = -2; i < repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Alltoallv(out, counts, offsets, MPI_BYTE, in, counts, offsets, MPI_BYTE, MPI_COMM_WORLD);
    double took = MPI_Wtime() - begin, slowest;
    MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0 && i >= 0) printf("%.6f\\n", slowest * 1e3);
  }
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j < bytes; ++j) {
      if (in[(size_t)bytes * i + j] != (char)(i * 16 + rank)) MPI_Abort(MPI_COMM_WORLD, 3);
    }
  }
  MPI_Finalize();
  return 0;
}
`;
