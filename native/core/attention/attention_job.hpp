// What the planner of a call (attention_plan.cpp) hands to the block kernels: a checked, private copy of the caller's lists, so that
// nothing the caller changes during the call can move an access out of bounds.
#pragma once

#include <cstdint>
#include <vector>

#include "core_attention.hpp"

namespace ep::attention {

// One step of a kernel is block_rows rows of Q (tokens x heads of a group) against block_keys keys. 192 is divisible by the usual group
// sizes and by the 6 rows of a register tile; 64 keys of K^T at head dimension 64 fill half of a 32 KiB L1.
inline constexpr int64_t block_keys = 64;
inline constexpr int64_t block_rows = 192;

struct planned_piece {
  int64_t row;
  int64_t length;
  int64_t sum_row;  // where the piece begins in the gradient sums of its part
};

struct planned_shard {
  int64_t q_row;
  int64_t q_length;
  int64_t context;  // keys, over all pieces
  int64_t first_piece;
  int64_t piece_count;
};

/// Shards linked by key-value rows that they share. Two parts have no row in common, so they may run at the same time.
struct plan_part {
  std::vector<int64_t> shards;  // ascending
  std::vector<piece> intervals;  // the rows they read, each once
  int64_t sum_rows = 0;         // rows of the gradient sums
  double cost = 0;              // attended pairs
};

struct plan {
  std::vector<planned_shard> shards;
  std::vector<planned_piece> pieces;
  std::vector<plan_part> parts;    // backward only; descending cost
  std::vector<piece> unread;       // key-value rows that no shard reads; backward only
};

struct forward_job {
  const forward_args& args;
  const plan& todo;
};

struct backward_job {
  const backward_args& args;
  const plan& todo;
};

struct forward_item {
  int64_t shard;
  int64_t kv_head;
  int64_t first_token;
};

struct backward_item {
  int64_t part;
  int64_t kv_head;
};

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/// Head dimension in scratch: 16 floats are one vector of the widest path and a whole register tile of the narrowest.
inline int64_t padded_dim(const problem& what) { return round_up(what.head_dim, 16); }

inline int64_t group_size(const problem& what) { return what.q_heads / what.kv_heads; }

inline int64_t tokens_per_block(const problem& what) {
  const int64_t tokens = block_rows / group_size(what);
  return tokens > 0 ? tokens : 1;
}

/// Rows of a block: block_rows, or one token if its group is larger.
inline int64_t rows_per_block(const problem& what) { return tokens_per_block(what) * group_size(what); }

/// Floats that one worker needs; the kernels carve them up in this order.
inline int64_t forward_scratch(const problem& what) {
  const int64_t rows = round_up(rows_per_block(what), 16);
  const int64_t dim = padded_dim(what);
  return rows * (2 * dim + block_keys + 2 + 16) + block_keys * 2 * dim;
}

inline int64_t backward_scratch(const problem& what, int64_t sum_rows) {
  const int64_t rows = round_up(rows_per_block(what), 16);
  const int64_t dim = padded_dim(what);
  return rows * (3 * dim + 2 * block_keys + 2) + block_keys * 6 * dim + 2 * sum_rows * dim;
}

/// One instruction set. `scratch` is 64-byte aligned. Returns false if the call was cancelled on the way.
struct kernels {
  bool (*forward)(const forward_job&, const forward_item&, float* scratch);
  bool (*backward)(const backward_job&, const backward_item&, float* scratch);
  void (*exp2)(const float* from, float* to);  // 16 values; the tests measure its error
};

const kernels& portable_kernels();
#if defined(__x86_64__)
const kernels& avx2_kernels();
const kernels& avx512_kernels();
#endif

/// Checks everything about a problem except its tensors, and copies its lists. `parts` are made for the backward.
status make_plan(const problem& what, bool for_backward, plan& out, std::string& why);

}  // namespace ep::attention
