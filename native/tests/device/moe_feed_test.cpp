// Tokens on their way to be cast: every block of channels of every token is fed to one warp, once, and cast to the same bits as row by row; from where it lies, and through stages of a copy engine that is as late as it may be.
#include <cstring>
#include <memory>

#include "../../core/moe/cast.hpp"
#include "../check.hpp"
#include "ep/device/moe_feed.h"
#include "world.hpp"

using namespace ep::test;

namespace {

// Copies land when they are awaited, not before, and what lay in their stage is gone as soon as they are begun.
struct copy_engine {
  static constexpr uint32_t bytes = 4096;
  struct stage {
    std::vector<uint8_t> memory = std::vector<uint8_t>(bytes + 16);
    const void* src = nullptr;
    uint32_t length = 0;
    uint32_t loads = 0;
    uint8_t* data() { return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 15u); }
  };
  stage stages[ep::detail::bulk_stages];
  uint32_t wrong = 0;
};

struct engine_context {
  static constexpr bool single_lane = false;
  static constexpr uint32_t bulk_bytes = copy_engine::bytes;
  ep::simt_context& in;
  copy_engine& engine; // of this lane's warp
  uint32_t bulk_count = 0;

  uint32_t block() const { return in.block(); }
  uint32_t blocks() const { return in.blocks(); }
  uint32_t lane() const { return in.lane(); }
  uint32_t lanes() const { return in.lanes(); }
  uint32_t warp_lanes() const { return in.warp_lanes(); }
  void sync_warp() { in.sync_warp(); }
  template <class T> T shuffle(T value, uint32_t from) { return in.shuffle(value, from); }

  void bulk_load_once(uint32_t stage, const void* src, uint32_t length) {
    copy_engine::stage& of = engine.stages[stage];
    if (length > bulk_bytes || of.src != nullptr) ++engine.wrong;
    std::memset(of.data(), 0xee, bulk_bytes);
    of.src = src;
    of.length = length;
    ++of.loads;
  }
  void bulk_landed(uint32_t stage, uint32_t turn) {
    copy_engine::stage& of = engine.stages[stage];
    do in.point();
    while (of.loads <= turn);
    if (of.loads != turn + 1) ++engine.wrong;
    if (of.src != nullptr) std::memcpy(of.data(), of.src, of.length);
    of.src = nullptr;
  }
  const uint8_t* bulk_data(uint32_t stage) { return engine.stages[stage].data(); }
};

struct feed_shape {
  uint64_t hidden;
  uint32_t tokens;
  uint32_t blocks;
  uint32_t lanes;
  uint32_t warp;
  uint32_t dtype;
  uint32_t payload;
};

uint64_t blocks_of(const feed_shape& of) { return of.hidden / EP_MOE_SCALED_CHANNELS; }

template <class Ctx> void cast_all(Ctx& ctx, const feed_shape& of, const ep::moe_view& at, const ep_moe_dispatch_args& args, uint8_t* rows, std::vector<uint32_t>& fed) {
  ep::detail::moe_feed<Ctx> feed(ctx, at, args);
  EP_CHECK(feed.has_tokens());
  feed.begin();
  feed.each([&](const ep::detail::moe_feed_part& part, const uint8_t* channels) {
    if (ctx.lane() % ctx.warp_lanes() == 0) {
      for (uint32_t i = 0; i < part.count; ++i) ++fed[part.token * blocks_of(of) + part.first + i];
    }
    uint8_t* row = rows + part.token * at.buffer.row_bytes;
    if (of.dtype == EP_MOE_F16) ep::detail::moe_cast_fed<ep::number_f16>(ctx, part, channels, of.hidden, of.payload, row);
    else ep::detail::moe_cast_fed<ep::number_bf16>(ctx, part, channels, of.hidden, of.payload, row);
  });
}

void feeds(const feed_shape& of, bool by_engine, uint64_t seed) {
  random_source random(seed);
  ep_moe_buffer buffer{};
  buffer.hidden = static_cast<uint32_t>(of.hidden);
  buffer.payload = of.payload;
  buffer.row_bytes = ep::aligned_row_bytes(of.payload, of.hidden);
  const uint64_t stride = 2 * of.hidden + 32;
  std::vector<uint8_t> x(of.tokens * stride + 16), rows(of.tokens * buffer.row_bytes + 16, 0xaa), wanted(buffer.row_bytes + 16);
  const auto aligned = [](std::vector<uint8_t>& in) { return in.data() + (-reinterpret_cast<uintptr_t>(in.data()) & 15u); };
  for (uint8_t& byte : x) byte = static_cast<uint8_t>(random());
  ep_moe_dispatch_args args{};
  args.x = reinterpret_cast<uint64_t>(aligned(x));
  args.x_stride_bytes = stride;
  args.dtype = of.dtype;
  args.call.routing.tokens = of.tokens;
  const ep::moe_view at{buffer, args.call};

  std::vector<uint32_t> fed(of.tokens * blocks_of(of));
  const uint32_t warps = of.lanes / of.warp;
  const auto engines = std::make_unique<copy_engine[]>(of.blocks * warps);
  ep::kernel_environment environment;
  const auto result = ep::simt_run({of.blocks, of.lanes, of.warp, seed, 0.5}, environment, [&](ep::simt_context& ctx) {
    if (!by_engine) return cast_all(ctx, of, at, args, aligned(rows), fed);
    engine_context own{ctx, engines[ctx.block() * warps + ctx.lane() / of.warp]};
    cast_all(own, of, at, args, aligned(rows), fed);
  });
  EP_CHECK_EQ(result.report, "");
  uint32_t wrong = 0;
  for (const uint32_t times : fed) wrong += times == 1 ? 0 : 1;
  for (uint32_t i = 0; i < of.blocks * warps; ++i) {
    wrong += engines[i].wrong;
    for (const copy_engine::stage& stage : engines[i].stages) wrong += stage.src == nullptr ? 0 : 1; // all that was begun is taken
  }
  for (uint32_t token = 0; token < of.tokens; ++token) {
    ep_moe_cast_row(of.dtype, aligned(x) + token * stride, of.hidden, of.payload, wanted.data());
    wrong += std::memcmp(aligned(rows) + token * buffer.row_bytes, wanted.data(), ep::payload_bytes(of.payload, of.hidden)) == 0 ? 0 : 1;
  }
  EP_CHECK_EQ(wrong, 0u);
}

} // namespace

int main() {
  uint64_t seed = 0;
  for (const uint64_t hidden : {128u, 384u, 896u, 2048u, 7168u}) {
    for (const uint32_t tokens : {0u, 1u, 3u, 9u}) {
      for (const feed_shape& shape : {feed_shape{0, 0, 1, 8, 8, 0, 0}, feed_shape{0, 0, 3, 32, 8, 0, 0}, feed_shape{0, 0, 2, 64, 32, 0, 0}, feed_shape{0, 0, 5, 64, 16, 0, 0}}) {
        feed_shape of = shape;
        of.hidden = hidden;
        of.tokens = tokens;
        of.dtype = seed % 2 == 0 ? EP_MOE_BF16 : EP_MOE_F16;
        of.payload = seed % 3 == 0 ? EP_MOE_F8_F32 : seed % 3 == 1 ? EP_MOE_F8_F32_POW2 : EP_MOE_F8_UE8M0;
        for (const bool by_engine : {false, true}) feeds(of, by_engine, ++seed);
      }
    }
  }
  return ep::check::finish();
}
