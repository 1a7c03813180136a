// The core attention kernels of GPUs on the host's executors, against attention in fp64: the scenarios of core_attention_test.cpp, contexts of several pieces put together.
#include "../core_attention_cases.hpp"

#include "../check.hpp"
#include "core/launch.hpp"
#include "core/simt/simt.hpp"
#include "ep/device/core_attention.h"

namespace {

using namespace ep::attention;
using namespace ep::attention::test;

// The kernels take one run of keys for each shard: the first piece of each.
scenario one_run(scenario s) {
  std::vector<piece> pieces;
  for (query_shard& shard : s.shards) {
    pieces.push_back(shard.piece_count == 0 ? piece{0, 0} : s.pieces[static_cast<size_t>(shard.first_piece)]);
    shard.first_piece = static_cast<int64_t>(pieces.size()) - 1;
    shard.piece_count = 1;
  }
  s.pieces = pieces;
  return s;
}

std::vector<ep_attention_shard> shards_of(const scenario& s, uint32_t& tiles) {
  std::vector<ep_attention_shard> made;
  uint64_t tile = 0;
  for (size_t i = 0; i < s.shards.size(); ++i) {
    const query_shard& shard = s.shards[i];
    made.push_back({static_cast<uint64_t>(shard.q_row), static_cast<uint64_t>(shard.q_length), static_cast<uint64_t>(s.pieces[i].row), static_cast<uint64_t>(s.pieces[i].length), tile});
    tile += (static_cast<uint64_t>(shard.q_length) + EP_ATTENTION_TILE - 1) / EP_ATTENTION_TILE;
  }
  tiles = static_cast<uint32_t>(tile);
  return made;
}

ep_attention_rows rows_of(const output_rows& of) { return {reinterpret_cast<uint64_t>(of.data), static_cast<uint64_t>(of.stride)}; }

ep_attention_args args_of(const scenario& s, dtype type, tensors& t, const std::vector<ep_attention_shard>& shards, uint32_t tiles) {
  ep_attention_args args{};
  args.shards = reinterpret_cast<uint64_t>(shards.data());
  args.shard_count = static_cast<uint32_t>(shards.size());
  args.kv_rows = static_cast<uint64_t>(s.kv_rows);
  args.dtype = type == dtype::f32 ? EP_DTYPE_F32 : EP_DTYPE_BF16;
  args.tiles = tiles;
  args.q_heads = static_cast<uint32_t>(s.q_heads);
  args.kv_heads = static_cast<uint32_t>(s.kv_heads);
  args.head_dim = static_cast<uint32_t>(s.dim);
  std::memcpy(&args.scale_bits, &s.scale, sizeof args.scale_bits);
  args.q = rows_of(t.q.out());
  args.k = rows_of(t.k.out());
  args.v = rows_of(t.v.out());
  args.o = rows_of(t.o.out());
  args.lse = rows_of(t.lse.out());
  args.d_o = rows_of(t.d_o.out());
  args.d_q = rows_of(t.d_q.out());
  args.d_k = rows_of(t.d_k.out());
  args.d_v = rows_of(t.d_v.out());
  return args;
}

void expect_close(const char* name, const char* which, const matrix& got, const std::vector<double>& want, const std::vector<bool>* rows, double limit) {
  const double error = relative_error(got, want, rows);
  if (!(error <= limit)) std::fprintf(stderr, "%s, %s: error %g\n", name, which, error);
  EP_CHECK(error <= limit);
  EP_CHECK(got.gaps_marked());
}

void check(const scenario& s, dtype type, const tensors& t) {
  const reference want = compute_reference(s.what(type), t.q, t.k, t.v, t.d_o);
  const double bound = type == dtype::f32 ? 1e-5 : 1e-2;
  expect_close(s.name, "o", t.o, want.o, &want.owned, bound);
  expect_close(s.name, "lse", t.lse, want.lse, &want.owned, 1e-5);
  expect_close(s.name, "d_q", t.d_q, want.d_q, &want.owned, bound);
  expect_close(s.name, "d_k", t.d_k, want.d_k, nullptr, bound);
  expect_close(s.name, "d_v", t.d_v, want.d_v, nullptr, bound);
  for (int64_t row = 0; row < s.q_rows; ++row) {
    if (!want.owned[static_cast<size_t>(row)]) EP_CHECK(t.o.row_marked(row) && t.lse.row_marked(row) && t.d_q.row_marked(row));
  }
}

bool same(const tensors& a, const tensors& b) {
  return a.o.bytes() == b.o.bytes() && a.lse.bytes() == b.lse.bytes() && a.d_q.bytes() == b.d_q.bytes() && a.d_k.bytes() == b.d_k.bytes() && a.d_v.bytes() == b.d_v.bytes();
}

void on_fast(const scenario& s, dtype type, tensors& t, uint32_t blocks) {
  uint32_t tiles = 0;
  const auto shards = shards_of(s, tiles);
  const ep_attention_args args = args_of(s, type, t, shards, tiles);
  const ep::kernel_environment environment;
  for (const bool forward : {true, false}) {
    EP_CHECK(ep::fast_run(blocks, environment, [&](ep::fast_context& ctx) {
               std::vector<float> scratch(forward ? EP_ATTENTION_FORWARD_FLOATS(args.head_dim) : EP_ATTENTION_BACKWARD_FLOATS(args.head_dim));
               if (forward) ep::core_attention_forward(ctx, args, scratch.data());
               else ep::core_attention_backward(ctx, args, scratch.data());
             }).ok());
  }
}

// Many lanes: every barrier that is missing shows as values that are not there yet.
void on_simt(const scenario& s, dtype type, tensors& t, uint64_t seed) {
  uint32_t tiles = 0;
  const auto shards = shards_of(s, tiles);
  const ep_attention_args args = args_of(s, type, t, shards, tiles);
  const ep::kernel_environment environment;
  ep::simt_options options;
  options.blocks = 2;
  options.lanes = 8;
  options.warp_lanes = 4;
  options.seed = seed;
  for (const bool forward : {true, false}) {
    std::vector<std::vector<float>> scratch(options.blocks);
    for (auto& own : scratch) own.resize(forward ? EP_ATTENTION_FORWARD_FLOATS(args.head_dim) : EP_ATTENTION_BACKWARD_FLOATS(args.head_dim));
    const auto ran = ep::simt_run(options, environment, [&](ep::simt_context& ctx) {
      if (forward) ep::core_attention_forward(ctx, args, scratch[ctx.block()].data());
      else ep::core_attention_backward(ctx, args, scratch[ctx.block()].data());
    });
    EP_CHECK(ran.ok);
  }
}

} // namespace

int main() {
  for (const scenario& given : scenarios()) {
    const scenario s = one_run(given);
    for (const dtype type : {dtype::f32, dtype::bf16}) {
      tensors one(s, type);
      on_fast(s, type, one, 1);
      check(s, type, one);
      tensors three(s, type);
      on_fast(s, type, three, 3);
      EP_CHECK(same(one, three));
      if (s.q_rows > 80) continue;
      tensors lanes(s, type);
      on_simt(s, type, lanes, static_cast<uint64_t>(s.q_rows));
      check(s, type, lanes);
    }
  }
  return ep::check::finish();
}
