// What the attention test runs: shapes, their tensors, and the instruction sets of this CPU.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "core_attention_reference.hpp"

namespace ep::attention::test {

struct scenario {
  const char* name;
  int64_t q_rows, kv_rows;
  int32_t q_heads, kv_heads, dim;
  std::vector<query_shard> shards;
  std::vector<piece> pieces;
  int64_t spare = 0;  // elements between rows
  float scale = 0.125f;

  problem what(dtype type) const {
    return {type, q_rows, kv_rows, q_heads, kv_heads, dim, scale, shards.data(), static_cast<int64_t>(shards.size()), pieces.data(),
            static_cast<int64_t>(pieces.size())};
  }
};

struct tensors {
  matrix q, k, v, d_o, o, d_q, d_k, d_v, lse, delta;

  tensors(const scenario& s, dtype type)
      : q(type, s.q_rows, s.q_heads * s.dim, s.spare),
        k(type, s.kv_rows, s.kv_heads * s.dim, s.spare),
        v(k),
        d_o(q),
        o(q),
        d_q(q),
        d_k(k),
        d_v(k),
        lse(dtype::f32, s.q_rows, s.q_heads, s.spare),
        delta(lse) {
    std::mt19937 random(7);
    q.fill(random);
    k.fill(random);
    v.fill(random);
    d_o.fill(random);
  }

  forward_args forward_of(const problem& w) { return {w, q.in(), k.in(), v.in(), o.out(), lse.out()}; }

  backward_args backward_of(const problem& w, bool with_delta = false) {
    return {w,        d_o.in(), q.in(), k.in(), v.in(), lse.in(), with_delta ? input_rows{nullptr, 0} : o.in(),
            with_delta ? delta.in() : input_rows{nullptr, 0}, d_q.out(), d_k.out(), d_v.out()};
  }
};

inline std::vector<isa> paths() {
  std::vector<isa> found;
  for (const isa path : {isa::portable, isa::avx2, isa::avx512}) {
    if (isa_available(path)) found.push_back(path);
  }
  return found;
}

inline query_shard whole(int64_t rows) { return {0, rows, 0, 1}; }

/// A context scattered in pieces of 1 to 9 rows over twice as many key-value rows, not in row order.
inline std::vector<piece> scattered(int64_t keys) {
  std::vector<piece> pieces;
  for (int64_t at = 0, i = 0; at < keys; ++i) {
    const int64_t length = std::min<int64_t>(1 + i * 5 % 9, keys - at);
    pieces.push_back({2 * at, length});
    at += length;
  }
  std::mt19937 random(3);
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

inline std::vector<scenario> scenarios() {
  const std::vector<piece> parts = scattered(257);
  return {
      {"one document, odd length", 131, 131, 8, 2, 64, {whole(131)}, {{0, 131}}},
      {"many pieces", 100, 600, 4, 2, 64, {{0, 100, 0, static_cast<int64_t>(parts.size())}}, parts, 5},
      {"one-token shards", 6, 300, 8, 2, 64, {{0, 1, 0, 1}, {1, 1, 1, 1}, {2, 1, 2, 1}, {3, 1, 3, 1}, {5, 1, 0, 4}},
       {{0, 1}, {1, 64}, {70, 65}, {140, 160}}},
      {"empty shards and pieces, queries that see nothing", 60, 50, 4, 1, 64,
       {{0, 0, 0, 0}, {10, 7, 0, 0}, {20, 20, 0, 3}, {0, 5, 1, 1}, {60, 0, 3, 0}, {45, 4, 2, 1}}, {{3, 0}, {5, 9}, {50, 0}}},
      {"shards that share keys", 210, 260, 4, 2, 64,
       {{0, 40, 0, 1}, {150, 60, 0, 2}, {40, 70, 2, 1}, {110, 40, 3, 2}, {0, 0, 0, 5}}, {{0, 40}, {40, 60}, {30, 100}, {200, 60}, {180, 25}}},
      {"a key twice in one context", 30, 40, 2, 1, 64, {{0, 30, 0, 2}}, {{0, 40}, {10, 20}}},
      {"group of three, dim 20", 70, 70, 6, 2, 20, {whole(70)}, {{0, 70}}, 3},
      {"one head, dim 1", 40, 90, 1, 1, 1, {{0, 40, 0, 1}}, {{0, 90}}, 1, 0.7f},
      {"no groups, dim 7", 33, 65, 3, 3, 7, {{0, 33, 0, 1}}, {{0, 65}}},
      {"dim 80", 50, 129, 4, 1, 80, {{0, 50, 0, 1}}, {{0, 129}}},
      {"dim 128, two row blocks", 200, 200, 2, 1, 128, {whole(200)}, {{0, 200}}, 8},
      {"dim 256", 20, 70, 2, 2, 256, {{0, 20, 0, 1}}, {{0, 70}}, 0, 0.0625f},
      {"group larger than a block", 5, 9, 200, 1, 16, {{0, 5, 0, 1}}, {{0, 9}}},
      {"negative scale", 50, 50, 2, 1, 64, {whole(50)}, {{0, 50}}, 0, -0.125f},
      {"peaked scores", 80, 80, 2, 1, 64, {whole(80)}, {{0, 80}}, 0, 1.0f},
      {"no rows", 0, 0, 2, 1, 64, {}, {}},
      {"no queries", 0, 5, 2, 1, 64, {}, {{0, 5}}},
  };
}

}  // namespace ep::attention::test
