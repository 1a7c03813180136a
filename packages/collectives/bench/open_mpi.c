/*
 * Open MPI's side of `ep bench collectives`: one rank of the comparison, compiled with mpicc and started by mpirun. It takes one command a line from the
 * benchmark's socket and answers it in one line; what the commands mean, and which values move, is told in protocol.ts and pattern.ts.
 *
 * Arguments: path of the socket, bytes of the largest buffer.
 */
#include <mpi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PERIOD = 4093, RANK_STEP = 1009, SAMPLES = 1024, GROWTH_BITS = 112 };
static const float POISON = -1.0f;

enum op { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER, OPS };
static const char* const op_names[OPS] = {"all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "barrier"};

static int rank, size;
static FILE* link_in;
static FILE* link_out;
static float* input;
static float* output;
/* Sum over the ranks of the values at an index, by index modulo the period. */
static float sums[PERIOD];

/* The case whose values lie in the buffers; an all-reduce in place multiplies them by `size` with every call. */
static enum op filled_op = OPS;
static size_t filled_count;
static int calls_made, calls_most;

static int is(const char* a, const char* b) { return strcmp(a, b) == 0; }

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void fail(const char* what, const char* detail) {
  fprintf(link_out, "failed rank %d: %s %s\n", rank, what, detail);
  fflush(link_out);
  MPI_Abort(MPI_COMM_WORLD, 3);
}

static float value_of(size_t i, size_t source) { return (float)((i + source * RANK_STEP) % PERIOD); }

static void fill_values(float* data, size_t count, size_t offset) {
  const size_t first = count < PERIOD ? count : PERIOD;
  for (size_t i = 0; i < first; ++i) data[i] = value_of(offset + i, (size_t)rank);
  for (size_t done = first; done < count;) {
    const size_t part = done < count - done ? done : count - done;
    memcpy(data + done, data, part * sizeof(float));
    done += part;
  }
}

static size_t result_count(enum op op, size_t count) {
  return op == BARRIER ? 0 : op == REDUCE_SCATTER ? count / (size_t)size : count;
}

static float* result_of(enum op op) { return op == ALL_REDUCE || op == BROADCAST ? input : output; }

/* What element `i` of the result is after one call. */
static float expected(enum op op, size_t block, size_t i) {
  switch (op) {
    case BROADCAST: return value_of(i, 0);
    case ALL_GATHER: return value_of(i, i / block);
    case ALL_TO_ALL: return value_of((size_t)rank * block + i % block, i / block);
    case REDUCE_SCATTER: return sums[((size_t)rank * block + i) % PERIOD];
    default: return sums[i % PERIOD];
  }
}

static void check(enum op op, size_t count, size_t step) {
  const float* result = result_of(op);
  const size_t length = result_count(op, count), block = count / (size_t)size;
  float scale = 1;
  if (op == ALL_REDUCE)
    for (int call = 1; call < calls_made; ++call) scale *= (float)size;
  for (size_t i = 0; i < length; i += step) {
    const float wanted = expected(op, block, i) * scale;
    if (result[i] == wanted) continue;
    char text[160];
    snprintf(text, sizeof text, "element %zu of %zu: found %.9g, expected %.9g", i, length, (double)result[i], (double)wanted);
    fail(op_names[op], text);
  }
}

static size_t sample_step(enum op op, size_t count) {
  const size_t length = result_count(op, count);
  return length <= SAMPLES ? 1 : (length / SAMPLES) | 1;
}

/* Values to start from, and elements of the result that only a call can make right. */
static void prepare(enum op op, size_t count, int calls, size_t poison_step) {
  if (op != filled_op || count != filled_count || (op == ALL_REDUCE && calls_made + calls > calls_most)) {
    const size_t block = count / (size_t)size;
    if (op == ALL_GATHER) fill_values(input, block, (size_t)rank * block);
    else fill_values(input, count, 0);
    filled_op = op;
    filled_count = count;
    calls_made = 0;
  }
  calls_made += calls;
  if (op == ALL_REDUCE || (op == BROADCAST && rank == 0)) return;
  float* result = result_of(op);
  for (size_t i = 0; i < result_count(op, count); i += poison_step) result[i] = POISON;
}

static void call(enum op op, size_t count) {
  const int n = (int)count, block = n / size;
  const MPI_Comm world = MPI_COMM_WORLD;
  int status = MPI_SUCCESS;
  switch (op) {
    case ALL_REDUCE: status = MPI_Allreduce(MPI_IN_PLACE, input, n, MPI_FLOAT, MPI_SUM, world); break;
    case BROADCAST: status = MPI_Bcast(input, n, MPI_FLOAT, 0, world); break;
    case ALL_GATHER: status = MPI_Allgather(input, block, MPI_FLOAT, output, block, MPI_FLOAT, world); break;
    case REDUCE_SCATTER: status = MPI_Reduce_scatter_block(input, output, block, MPI_FLOAT, MPI_SUM, world); break;
    case ALL_TO_ALL: status = MPI_Alltoall(input, block, MPI_FLOAT, output, block, MPI_FLOAT, world); break;
    default: status = MPI_Barrier(world);
  }
  if (status != MPI_SUCCESS) fail(op_names[op], "did not succeed");
}

/* Answers only when all went well: a line that begins with `ok` is whole. */
static void answer(const int64_t* numbers, int count) {
  fprintf(link_out, "ok");
  for (int i = 0; i < count; ++i) fprintf(link_out, " %lld", (long long)numbers[i]);
  fprintf(link_out, "\n");
}

static int64_t* numbers_of(int count) {
  int64_t* numbers = malloc((size_t)count * sizeof *numbers);
  if (numbers == NULL) fail("no memory for", "its samples");
  return numbers;
}

static void run(enum op op, size_t count, int calls, int warm, int batches) {
  int64_t* took = numbers_of(warm + batches);
  const size_t step = sample_step(op, count);
  for (int batch = 0; batch < warm + batches; ++batch) {
    prepare(op, count, calls, step);
    MPI_Barrier(MPI_COMM_WORLD);
    const int64_t begin = now_ns();
    for (int i = 0; i < calls; ++i) call(op, count);
    took[batch] = now_ns() - begin;
    MPI_Barrier(MPI_COMM_WORLD); /* as ours: nobody compares while another's row goes on */
    check(op, count, step);
  }
  answer(took + warm, batches);
  free(took);
}

/* Every element of the last timed call, then of one more call whose result was poisoned throughout. */
static void verify(enum op op, size_t count) {
  check(op, count, 1);
  filled_op = OPS;
  prepare(op, count, 1, 1);
  MPI_Barrier(MPI_COMM_WORLD);
  call(op, count);
  check(op, count, 1);
  answer(NULL, 0);
}

/* When this rank came to each barrier and when it left, by the clock that all processes of a machine share. */
static void verify_barrier(int rounds) {
  int64_t* times = numbers_of(2 * rounds);
  for (int round = 0; round < rounds; ++round) {
    const int64_t late = now_ns() + 100000 * (int64_t)((rank + round) % size);
    while (now_ns() < late) continue;
    times[2 * round] = now_ns();
    MPI_Barrier(MPI_COMM_WORLD);
    times[2 * round + 1] = now_ns();
  }
  answer(times, 2 * rounds);
  free(times);
}

static void connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const int link = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (link < 0 || strlen(path) >= sizeof address.sun_path) exit(2);
  strcpy(address.sun_path, path);
  if (connect(link, (struct sockaddr*)&address, sizeof address) != 0) exit(2);
  link_in = fdopen(link, "r");
  link_out = fdopen(dup(link), "w");
  if (link_in == NULL || link_out == NULL) exit(2);
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  /* mpirun gives its ranks process groups of their own: whoever kills the benchmark's group does not reach them. */
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int bits = 0;
  while ((1 << bits) < size) ++bits;
  calls_most = bits == 0 ? GROWTH_BITS : GROWTH_BITS / bits;
  for (size_t i = 0; i < PERIOD; ++i)
    for (int source = 0; source < size; ++source) sums[i] += value_of(i, (size_t)source);
  connect_to(argv[1]);
  const size_t bytes = strtoull(argv[2], NULL, 10);
  if (posix_memalign((void**)&input, 1 << 21, bytes) != 0 || posix_memalign((void**)&output, 1 << 21, bytes) != 0)
    fail("no memory for", "its buffers");
  fprintf(link_out, "rank %d\n", rank);
  fflush(link_out);

  char line[256], verb[16], variant[32], name[32], dtype[16];
  size_t count;
  int calls, warm, batches;
  while (fgets(line, sizeof line, link_in) != NULL) {
    if (is(line, "end\n")) {
      MPI_Finalize();
      return 0;
    }
    const int words = sscanf(line, "%15s %31s %31s %15s %zu %d %d %d", verb, variant, name, dtype, &count, &calls, &warm, &batches);
    enum op op = ALL_REDUCE;
    while (words >= 3 && op < OPS && !is(name, op_names[op])) ++op;
    if (words < 5 || op == OPS) fail("does not understand", line);
    if (words == 8 && is(verb, "run")) run(op, count, calls, warm, batches);
    else if (words == 5 && is(verb, "check") && op == BARRIER) verify_barrier((int)count);
    else if (words == 5 && is(verb, "check")) verify(op, count);
    else fail("does not understand", line);
    fflush(link_out);
  }
  /* The benchmark is gone. */
  _exit(1);
}
