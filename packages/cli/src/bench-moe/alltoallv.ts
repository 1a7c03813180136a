/**
 * The comparison program, compiled by mpicc where Open MPI is installed: packs rows by destination, exchanges counts and rows, orders them by expert; then back,
 * with the weighted sum. Arguments: file of choices (int32, rank by rank), tokens, hidden, experts, topK, repeats. Prints the slowest rank's milliseconds of both
 * directions per repeat, and aborts if a token does not come back as it went; repeats take two sets of tokens in turn.
 */
export const MPI_MOE_SOURCE = `#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int first_of(int rank, int experts, int size) {
  const int least = experts / size, more = experts % size;
  return rank * least + (rank < more ? rank : more);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int tokens = atoi(argv[2]), hidden = atoi(argv[3]), experts = atoi(argv[4]), top_k = atoi(argv[5]), repeats = atoi(argv[6]);
  const int choices = tokens * top_k;
  int32_t* topk = malloc(sizeof(int32_t) * choices);
  FILE* file = fopen(argv[1], "rb");
  if (file == NULL || fseek(file, (long)rank * choices * 4, SEEK_SET) != 0 || fread(topk, 4, choices, file) != (size_t)choices) MPI_Abort(MPI_COMM_WORLD, 2);
  fclose(file);
  const size_t row = (size_t)hidden * 2;
  const int mine = first_of(rank + 1, experts, size) - first_of(rank, experts, size);
  uint16_t* both = malloc(2 * row * tokens);
  for (int turn = 0; turn < 2; ++turn) {
    for (int t = 0; t < tokens; ++t) for (int h = 0; h < hidden; ++h) both[((size_t)turn * tokens + t) * hidden + h] = 0x3f80 + (rank * 31 + t * 7 + turn * 51 + h) % 100;
  }
  uint16_t* out = malloc(row * tokens);
  int* count = calloc(experts, sizeof(int));
  int* next = calloc(experts, sizeof(int));
  int* place = malloc(sizeof(int) * choices);
  int* theirs = malloc(sizeof(int) * size * (mine > 0 ? mine : 1));
  int *send_counts = malloc(4 * size), *send_at = malloc(4 * size), *recv_counts = malloc(4 * size), *recv_at = malloc(4 * size);
  int *n_send = malloc(4 * size), *n_send_at = malloc(4 * size), *n_recv = malloc(4 * size), *n_recv_at = malloc(4 * size);
  MPI_Datatype row_type;
  MPI_Type_contiguous((int)row, MPI_BYTE, &row_type);
  MPI_Type_commit(&row_type);
  uint16_t* packed = malloc(row * choices);
  uint16_t *received = NULL, *ordered = NULL;
  size_t room = 0;
  float* sum = malloc(sizeof(float) * hidden);
  for (int i = -2; i < repeats; ++i) {
    const uint16_t* x = both + (size_t)(i & 1) * tokens * hidden;
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime();
    memset(count, 0, sizeof(int) * experts);
    for (int c = 0; c < choices; ++c) ++count[topk[c]];
    for (int e = 0, at = 0; e < experts; at += count[e++]) next[e] = at;
    for (int c = 0; c < choices; ++c) {
      place[c] = next[topk[c]]++;
      memcpy(packed + (size_t)place[c] * hidden, x + (size_t)(c / top_k) * hidden, row);
    }
    for (int r = 0, at = 0; r < size; ++r) {
      const int from = first_of(r, experts, size), to = first_of(r + 1, experts, size);
      n_send[r] = to - from;
      n_send_at[r] = from;
      n_recv[r] = mine;
      n_recv_at[r] = r * mine;
      send_counts[r] = 0;
      for (int e = from; e < to; ++e) send_counts[r] += count[e];
      send_at[r] = at;
      at += send_counts[r];
    }
    MPI_Alltoallv(count, n_send, n_send_at, MPI_INT, theirs, n_recv, n_recv_at, MPI_INT, MPI_COMM_WORLD);
    size_t rows = 0;
    for (int r = 0; r < size; ++r) {
      recv_counts[r] = 0;
      for (int e = 0; e < mine; ++e) recv_counts[r] += theirs[r * mine + e];
      recv_at[r] = (int)rows;
      rows += recv_counts[r];
    }
    if (rows > room) {
      room = rows;
      received = realloc(received, row * room);
      ordered = realloc(ordered, row * room);
    }
    MPI_Alltoallv(packed, send_counts, send_at, row_type, received, recv_counts, recv_at, row_type, MPI_COMM_WORLD);
    size_t to = 0;
    for (int e = 0; e < mine; ++e) {
      for (int r = 0; r < size; ++r) {
        size_t from = recv_at[r];
        for (int before = 0; before < e; ++before) from += theirs[r * mine + before];
        memcpy(ordered + to * hidden, received + from * hidden, row * theirs[r * mine + e]);
        to += theirs[r * mine + e];
      }
    }
    double there = MPI_Wtime() - begin;
    MPI_Barrier(MPI_COMM_WORLD);
    begin = MPI_Wtime();
    to = 0;
    for (int e = 0; e < mine; ++e) {
      for (int r = 0; r < size; ++r) {
        size_t from = recv_at[r];
        for (int before = 0; before < e; ++before) from += theirs[r * mine + before];
        memcpy(received + from * hidden, ordered + to * hidden, row * theirs[r * mine + e]);
        to += theirs[r * mine + e];
      }
    }
    MPI_Alltoallv(received, recv_counts, recv_at, row_type, packed, send_counts, send_at, row_type, MPI_COMM_WORLD);
    const float weight = 1.0f / (float)top_k;
    for (int t = 0; t < tokens; ++t) {
      memset(sum, 0, sizeof(float) * hidden);
      for (int k = 0; k < top_k; ++k) {
        const uint16_t* from = packed + (size_t)place[t * top_k + k] * hidden;
        for (int h = 0; h < hidden; ++h) {
          const uint32_t bits = (uint32_t)from[h] << 16;
          float value;
          memcpy(&value, &bits, 4);
          sum[h] += weight * value;
        }
      }
      for (int h = 0; h < hidden; ++h) {
        uint32_t bits;
        memcpy(&bits, &sum[h], 4);
        out[(size_t)t * hidden + h] = (uint16_t)((bits + 0x8000u) >> 16);
      }
    }
    double back = MPI_Wtime() - begin, both[2] = {there, back}, slowest[2];
    MPI_Reduce(both, slowest, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (memcmp(out, x, row * tokens) != 0) MPI_Abort(MPI_COMM_WORLD, 3);
    if (rank == 0 && i >= 0) printf("%.6f %.6f\\n", slowest[0] * 1e3, slowest[1] * 1e3);
  }
  MPI_Finalize();
  return 0;
}
`;
