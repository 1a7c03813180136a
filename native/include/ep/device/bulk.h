/* Rows by the machine's copy engine, through some of a block's own memory: no register holds a byte that is under way, so that many may be.
 *
 * A context that has such an engine offers it to each of its warps (`bulk_bytes`, of a stage): bulk_load(stage, src, bytes), bulk_load_once of what nobody reads again soon, and bulk_store(dst, stage, bytes) begin a copy; bulk_landed(stage, turn)
 * awaits a load, of which each stage has one in each turn, and bulk_data(stage) is where it lies for lanes that have awaited it; bulk_left(1) awaits that all stores but the last one have read their stages, bulk_end() that all have written; bulk_begin() comes before
 * loads of what others have written. By lane 0 of the warp, but for bulk_landed and bulk_data; addresses and bytes are multiples of 16. `bulk_count` is the warp's own and counts its loads. */
#ifndef EP_DEVICE_BULK_H
#define EP_DEVICE_BULK_H

#include "moe_rows.h"

EP_MACHINE_BEGIN

namespace detail {

template <class Ctx> constexpr bool moe_has_bulk = requires { Ctx::bulk_bytes; };

constexpr uint32_t bulk_stages = 3;

/* Rows of one warp, one after the other; without such an engine by its lanes. Two loads and a store are under way. All lanes call it: `begin` behind what says that rows may be read, `end` before a barrier that says that rows are there. A row to
 * null is read and goes nowhere. */
template <class Ctx> class bulk_rows {
 public:
  EP_HD explicit bulk_rows(Ctx& context) : ctx(context) {}
  EP_HD void begin() {
    if constexpr (moe_has_bulk<Ctx>) {
      if (leads()) ctx.bulk_begin();
    }
  }
  EP_HD void copy(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
    if constexpr (moe_has_bulk<Ctx>) {
      if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src) | bytes) & 15u) == 0) {
        if (leads()) in_parts(dst, src, static_cast<uint32_t>(bytes));
        return;
      }
    }
    if (dst != nullptr) moe_copy_row(warp_coop<Ctx>{ctx}, dst, src, bytes);
  }
  EP_HD void end() {
    if constexpr (moe_has_bulk<Ctx>) {
      if (!leads()) return;
      if (loading > 1) forward(older, 2);
      if (loading > 0) forward(newer, 1);
      loading = 0;
      ctx.bulk_end();
    }
  }

 private:
  struct part {
    uint8_t* dst;
    uint32_t bytes;
  };
  Ctx& ctx;
  part older{}, newer{};
  uint32_t loading = 0;

  EP_HD bool leads() const { return ctx.lane() % ctx.warp_lanes() == 0; }
  EP_HD void in_parts(uint8_t* dst, const uint8_t* src, uint32_t bytes) {
    const uint32_t parts = (bytes + Ctx::bulk_bytes - 1) / Ctx::bulk_bytes;
    const uint32_t each = parts == 0 ? 0 : (bytes / 16 + parts - 1) / parts * 16;
    for (uint32_t at = 0; at < bytes; at += each) load(dst == nullptr ? nullptr : dst + at, src + at, bytes - at < each ? bytes - at : each);
  }
  /* HAZARD: a stage is loaded anew only when the store before the last one has read it. */
  EP_HD void load(uint8_t* dst, const uint8_t* src, uint32_t bytes) {
    if (loading == 2) forward(older, 2);
    else ++loading;
    ctx.bulk_left(1);
    ctx.bulk_load(ctx.bulk_count % bulk_stages, src, bytes);
    ++ctx.bulk_count;
    older = newer;
    newer = {dst, bytes};
  }
  /* The load that was begun `ago` loads ago. */
  EP_HD void forward(const part& of, uint32_t ago) {
    const uint32_t number = ctx.bulk_count - ago;
    ctx.bulk_landed(number % bulk_stages, number / bulk_stages);
    if (of.dst != nullptr) ctx.bulk_store(of.dst, number % bulk_stages, of.bytes);
  }
};

} // namespace detail

EP_MACHINE_END

#endif
