// Copies by one lane, a warp and a block: every byte that should change does, and no other.
#include <cstring>
#include <memory>
#include <vector>

#include "../../core/device/fast.hpp"
#include "../../core/simt/simt.hpp"
#include "../check.hpp"
#include "ep/device/copy.h"

namespace {

struct copy_case {
  uint64_t dst_shift;
  uint64_t src_shift;
  uint64_t row_bytes;
  uint64_t stride;
  uint64_t rows;
  bool non_temporal;
};

constexpr uint64_t margin = 64;

// `run(dst, src)` copies; the guard bytes around the destination must stay.
template <class Run> bool copies(const copy_case& what, Run&& run) {
  const uint64_t source_bytes = what.src_shift + what.stride * what.rows + what.row_bytes;
  const uint64_t bytes = what.row_bytes * what.rows;
  std::vector<uint64_t> source_words(source_bytes / 8 + 32);
  std::vector<uint64_t> words((bytes + 2 * margin + what.dst_shift) / 8 + 32);
  const auto aligned = [](std::vector<uint64_t>& v) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(v.data()) + 63) & ~uintptr_t{63});
  };
  uint8_t* src = aligned(source_words) + what.src_shift;
  uint8_t* begin = aligned(words);
  uint8_t* dst = begin + margin + what.dst_shift;
  for (uint64_t i = 0; i < source_bytes - what.src_shift; ++i) src[i] = static_cast<uint8_t>(i * 37 + (i >> 8));
  std::memset(begin, 0xee, bytes + 2 * margin + what.dst_shift);
  run(dst, src);
  for (uint8_t* at = begin; at < dst; ++at) {
    if (*at != 0xee) return false;
  }
  for (uint64_t i = 0; i < margin; ++i) {
    if (dst[bytes + i] != 0xee) return false;
  }
  for (uint64_t row = 0; row < what.rows; ++row) {
    if (std::memcmp(dst + row * what.row_bytes, src + row * what.stride, what.row_bytes) != 0) return false;
  }
  return true;
}

template <class Visit> void each_case(Visit&& visit) {
  for (const uint64_t row_bytes : {0u, 1u, 15u, 16u, 17u, 48u, 64u, 200u, 1024u, 4099u}) {
    for (const uint64_t shift : {0u, 1u, 8u, 16u}) {
      for (const uint64_t gap : {0u, 1u, 16u}) {
        for (const uint64_t rows : {0u, 1u, 3u}) {
          for (const bool non_temporal : {false, true}) {
            visit(copy_case{shift, 0, row_bytes, row_bytes + gap, rows, non_temporal});
            visit(copy_case{0, shift, row_bytes, row_bytes + gap, rows, non_temporal});
          }
        }
      }
    }
  }
}

void one_lane() {
  uint32_t wrong = 0;
  const ep::kernel_environment environment{};
  ep::fast_context ctx{environment, 0, 1, nullptr};
  each_case([&](const copy_case& what) {
    const bool right = copies(what, [&](uint8_t* dst, const uint8_t* src) {
      const ep::block_coop<ep::fast_context> coop{ctx};
      ep::copy_rows(coop, dst, src, what.stride, what.row_bytes, what.rows, what.non_temporal);
      ep::copy_rows_done(coop, false);
    });
    if (!right) ++wrong;
  });
  EP_CHECK_EQ(wrong, 0u);
}

template <template <class> class Coop> void many_lanes(uint32_t lanes, uint32_t warp) {
  uint32_t wrong = 0;
  const ep::kernel_environment environment{};
  each_case([&](const copy_case& what) {
    if (what.non_temporal) return;
    const bool right = copies(what, [&](uint8_t* dst, const uint8_t* src) {
      ep::simt_run(ep::simt_options{1, lanes, warp, 1, 0.5}, environment, [&](ep::simt_context& ctx) {
        const Coop<ep::simt_context> coop{ctx};
        ep::copy_rows(coop, dst, src, what.stride, what.row_bytes, what.rows, false);
        ep::copy_rows_done(coop, false);
      });
    });
    if (!right) ++wrong;
  });
  EP_CHECK_EQ(wrong, 0u);
}

// Each lane does its share and no more: without the other lanes a copy is not complete.
void lanes_share() {
  const ep::kernel_environment environment{};
  const copy_case what{0, 0, 1024, 1024, 1, false};
  EP_CHECK(!copies(what, [&](uint8_t* dst, const uint8_t* src) {
    ep::simt_run(ep::simt_options{1, 4, 4, 1, 0.5}, environment, [&](ep::simt_context& ctx) {
      if (ctx.lane() == 2) return;
      ep::copy_lanes(ep::block_coop<ep::simt_context>{ctx}, dst, src, 1024);
    });
  }));
}

} // namespace

int main() {
  one_lane();
  many_lanes<ep::block_coop>(8, 4);
  many_lanes<ep::warp_coop>(4, 4);
  many_lanes<ep::thread_coop>(1, 1);
  lanes_share();
  return ep::check::finish();
}
