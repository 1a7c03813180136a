// Core attention of a context-parallel attention server, on the host: what a rank computes between receiving Q, K, V and
// returning O (forward), and between receiving dO and returning dQ, dK, dV (backward).
//
// A query shard is `q_length` rows of Q and the `context` rows of K and V named by its pieces, in document order. The shard is the
// end of its context: its query t sees the keys 0 .. context - q_length + t. A query that sees no key (q_length > context) gets
// O = 0, LSE = -inf and no gradient; O and LSE are the same for a query whose every score is -inf.
//
//   S = scale Q K^T    P = softmax(S)    O = P V    LSE = log sum exp S
//   delta = rowsum(dO O)    dS = P (dO V^T - delta)    dQ = scale dS K    dK = scale dS^T Q    dV = P^T dO
//
// Method: blocked with a running maximum (Dao et al., FlashAttention-2); no matrix of q_rows x kv_rows exists. Sums are fp32, results are
// rounded once. Results are the same bit for bit for every number of threads; they differ in the last bits between instruction sets.
// A NaN or an infinity in K or V row j can reach, as NaN, earlier queries that share a key block with j: 0 times inf is NaN.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace ep::attention {

enum class dtype : uint32_t { f32, bf16 };

/// `best` takes the widest instruction set of this CPU; the others force one, for tests and comparisons.
enum class isa : uint32_t { best, portable, avx2, avx512 };

enum class status : uint32_t {
  ok,
  bad_argument,     // a shape, a pointer, a stride or a number of threads
  bad_shard,        // a query shard leaves the query rows or the list of pieces
  bad_piece,        // a piece leaves the key-value rows
  shards_overlap,   // two shards own the same query row
  unsupported_isa,  // the forced instruction set is not on this CPU
  out_of_memory,
  no_threads,       // the system refused to start a thread
  cancelled,        // outputs are partly written
};

inline constexpr int32_t max_head_dim = 256;
inline constexpr int32_t max_heads = 4096;
inline constexpr int32_t max_threads = 1024;

/// `length` rows of K and V from `row` on.
struct piece {
  int64_t row;
  int64_t length;
};

struct query_shard {
  int64_t q_row;
  int64_t q_length;
  int64_t first_piece;
  int64_t piece_count;
};

/// Row i starts at data + i * stride (bytes). Address and stride are multiples of the element's size. `data` may be null without rows.
struct input_rows {
  const void* data;
  int64_t stride;
};

struct output_rows {
  void* data;
  int64_t stride;
};

struct problem {
  dtype type;  // of Q, K, V, O and their gradients; LSE and delta are always f32
  int64_t q_rows;
  int64_t kv_rows;
  int32_t q_heads;  // a multiple of kv_heads; query head h reads key-value head h / (q_heads / kv_heads)
  int32_t kv_heads;
  int32_t head_dim;
  float scale;
  const query_shard* shards;
  int64_t shard_count;
  const piece* pieces;
  int64_t piece_count;
  int32_t threads = 1;  // the caller's thread is one of them
  isa path = isa::best;
  const std::atomic<uint32_t>* cancel = nullptr;  // polled once per block of keys; non-zero ends the call with `cancelled`
};

struct forward_args {
  problem what;
  input_rows q;     // [q_rows, q_heads * head_dim]
  input_rows k;     // [kv_rows, kv_heads * head_dim]
  input_rows v;     // [kv_rows, kv_heads * head_dim]
  output_rows o;    // as q
  output_rows lse;  // f32 [q_rows, q_heads], natural logarithm
};

struct backward_args {
  problem what;
  input_rows d_o;
  input_rows q;
  input_rows k;
  input_rows v;
  input_rows lse;    // of the forward
  input_rows o;      // either the output of the forward, or
  input_rows delta;  // f32 [q_rows, q_heads]; the one that is not given has data == nullptr
  output_rows d_q;
  output_rows d_k;
  output_rows d_v;
};

/// Writes the O and LSE rows of every shard and no other. Inputs and outputs must not share bytes.
/// Arguments are checked, and memory and threads obtained, before the first byte is written; after a refusal `why` (may be null) says
/// which argument, shard or piece it was.
status forward(const forward_args& args, std::string* why);

/// Writes the dQ rows of every shard, and all rows of dK and dV: the sum over the shards that read the row, in the order of the list,
/// zero for a row that none reads. Otherwise as `forward`.
status backward(const backward_args& args, std::string* why);

/// Whether this build and this CPU have the instruction set (`best`: always).
bool isa_available(isa path);

/// What `best` stands for on this CPU.
isa isa_best();

const char* isa_name(isa path);
const char* status_name(status value);

}  // namespace ep::attention
