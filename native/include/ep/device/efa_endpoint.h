/* Kernels that post to EFA queue pairs themselves. */
#ifndef EP_DEVICE_EFA_ENDPOINT_H
#define EP_DEVICE_EFA_ENDPOINT_H

#include "copy.h"
#include "efa_put.h"
#include "ranges.h"

EP_MACHINE_BEGIN

constexpr uint64_t efa_max_add = 64; /* each one of an addition is a WQE */

/* Peers are reached by WQEs (EP_MEMORY_EFA). Sources lie in registered memory, each in one range, and stay unchanged until `quiet` has returned true.
 * A signal is the number of writes that have arrived at the queue pair that the peer has for it, so a put and its signal are one WRITE. Writes pass each other:
 * a visible signal means that this put has landed, and says nothing of others ('bundled' order). A put that takes several WRITEs waits for all but the last
 * before it posts that one, with the signal. `add` is at most efa_max_add; adding N is N arrivals.
 * The word of a signal is brought up to date by whoever waits on the host (core/efa), for the NIC's count is not that word. The key is the block's number,
 * unless the endpoint was given another: it chooses among the queue pairs, which any of them could post to any peer with. `Way`: 0, or by_marks (posters.h). */
template <uint32_t Way> struct efa_endpoint_of {
  static constexpr uint64_t max_add = efa_max_add;
  const ep_memory_handle& memory;
  uint32_t given_key = UINT32_MAX;

  /* HAZARD: only with EP_EFA_SHARE_DEVICE may blocks meet on one key. */
  EP_HD efa_endpoint_of with_key(uint32_t key) const { return {memory, key}; }
  template <class Ctx> EP_HD uint32_t key(const Ctx& ctx) const { return given_key != UINT32_MAX ? given_key : ctx.block(); }

  EP_HD const ep_efa_memory& route() const { return *reinterpret_cast<const ep_efa_memory*>(memory.proxy); }
  EP_HD ep_efa_device& device() const { return *reinterpret_cast<ep_efa_device*>(route().device); }
  EP_HD const ep_peer_view& own() const { return reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank]; }
  EP_HD const uint64_t* local_signal(uint64_t slot) const { return reinterpret_cast<const uint64_t*>(own().signals) + slot; }

  EP_HD ep_efa_qp& qp_of(uint32_t key) const { return efa_qp_of(device(), key % device().qp_count); }
  /* Of the peer's data queue pair (0), or of that of its signal s (1 + s). */
  EP_HD const ep_efa_target& target_of(uint64_t slot, int32_t peer) const {
    return reinterpret_cast<const ep_efa_target*>(route().targets)[slot * static_cast<uint32_t>(memory.world_size) + static_cast<uint32_t>(peer)];
  }

  template <class Ctx, class Coop>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    return put_by_some(ctx, coop, peer, 0, nullptr, 0, 0, 0, slot, add, status);
  }

  /* One WRITE for rows that are contiguous, one for each row otherwise, more where a message would be too long. Rows for this rank itself are copied. */
  template <class Ctx, class Coop>
  EP_HD bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes,
                      uint64_t rows, bool non_temporal, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    if (peer == memory.rank) {
      copy_rows(coop, reinterpret_cast<uint8_t*>(own().data) + dst_offset, src, stride, row_bytes, rows, non_temporal);
      copy_rows_done(coop, non_temporal);
      return slot == EP_NO_SLOT || signal(ctx, coop, peer, slot, add, status);
    }
    return put_by_some(ctx, coop, peer, dst_offset, src, stride, row_bytes, rows, slot, add, status);
  }

  /* Until all that was posted before has completed, to whomever: queue pairs are not of one peer. All lanes of the scope call it. */
  template <class Ctx, class Coop> EP_HD bool quiet(Ctx& ctx, const Coop& coop, int32_t, ep_kernel_status* status) const {
    bool ok = true;
    for (uint32_t index = coop.lane(); index < device().qp_count && ok; index += coop.lanes()) ok = quiet_qp(ctx, qp_of(index), status);
    return coop.sync_and(ok);
  }

  /* The same for what was posted with this endpoint's key: what a kernel ends with whose sources may be overwritten by the next one. */
  template <class Ctx, class Coop> EP_HD bool quiet_key(Ctx& ctx, const Coop& coop, ep_kernel_status* status) const {
    return coop.sync_and(coop.lane() != 0 || quiet_qp(ctx, qp_of(key(ctx)), status));
  }

 private:
  struct rows_of {
    uint64_t address;
    uint64_t stride;
    uint64_t row_bytes;
    uint64_t pieces; /* of a row */
    uint64_t dst_offset;
    uint32_t lkey;
  };

  template <class Ctx> EP_HD bool quiet_qp(Ctx& ctx, ep_efa_qp& qp, ep_kernel_status* status) const {
    const bool alone = device().sharing == EP_EFA_SHARE_THREAD;
    const bool ok = alone ? efa_quiet<EP_EFA_SHARE_THREAD | Way>(ctx, qp, status) : efa_quiet<EP_EFA_SHARE_DEVICE | Way>(ctx, qp, status);
    if (!ok) efa_note_broken(ctx, device(), qp);
    return ok;
  }

  template <class Ctx, class Coop>
  EP_HD bool put_by_some(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes, uint64_t rows,
                         uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    bool ok = true;
    if constexpr (Coop::single) {
      if (coop.lane() == 0) ok = put(ctx, lone_poster<Ctx>{ctx}, peer, dst_offset, src, stride, row_bytes, rows, slot, add, status);
    } else if (coop.lane() < ctx.warp_lanes()) {
      ok = put(ctx, warp_poster<Ctx>{ctx}, peer, dst_offset, src, stride, row_bytes, rows, slot, add, status);
    }
    return coop.sync_and(ok);
  }

  template <class Ctx, class Group>
  EP_HD bool put(Ctx& ctx, const Group& group, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes, uint64_t rows,
                 uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    const ep_efa_device& d = device();
    if (d.sharing != EP_EFA_SHARE_DEVICE && given_key == UINT32_MAX && ctx.blocks() > d.qp_count) {
      if (group.lane() == 0) ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_SHARING, d.qp_count, ctx.blocks());
      return false;
    }
    if (slot != EP_NO_SLOT && add > efa_max_add) {
      if (group.lane() == 0) ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_RANGE, efa_max_add, add);
      return false;
    }
    const bool signals = slot != EP_NO_SLOT && add != 0;
    if (stride == row_bytes) {
      row_bytes *= rows;
      rows = rows != 0 ? 1 : 0;
    }
    const uint64_t pieces = (row_bytes + d.max_message - 1) / d.max_message;
    const uint64_t writes = rows * pieces;
    rows_of source{reinterpret_cast<uint64_t>(src), stride, row_bytes, pieces, dst_offset, 0};
    if (writes != 0) {
      const uint64_t span = (rows - 1) * stride + row_bytes;
      if (!range_key(ctx, &d.ranges, source.address, span, &source.lkey)) {
        if (group.lane() == 0) ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_SOURCE, source.address, span);
        return false;
      }
    }
    ep_efa_qp& qp = qp_of(key(ctx));
    const uint64_t before = signals && writes != 0 ? writes - 1 : writes;
    const auto data = [&](uint64_t i, const efa_writer<Ctx>& writer) { return write_row(writer, source, i, 0, peer); };
    if (before != 0 && !post(ctx, group, qp, before, data, peer, signals, status)) return false;
    if (!signals) return true;
    const auto last = [&](uint64_t i, const efa_writer<Ctx>& writer) {
      return i == 0 && writes != 0 ? write_row(writer, source, writes - 1, 1 + slot, peer) : write_tick(writer, 1 + slot, peer);
    };
    return post(ctx, group, qp, add, last, peer, false, status);
  }

  template <class Ctx, class Group, class Build>
  EP_HD bool post(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint64_t count, const Build& build, int32_t peer, bool awaited, ep_kernel_status* status) const {
    switch (device().sharing) {
      case EP_EFA_SHARE_THREAD: return post_as<EP_EFA_SHARE_THREAD | Way>(ctx, group, qp, count, build, peer, awaited, status);
      case EP_EFA_SHARE_BLOCK: return post_as<EP_EFA_SHARE_BLOCK | Way>(ctx, group, qp, count, build, peer, awaited, status);
      default: return post_as<EP_EFA_SHARE_DEVICE | Way>(ctx, group, qp, count, build, peer, awaited, status);
    }
  }

  template <uint32_t Sharing, class Ctx, class Group, class Build>
  EP_HD bool post_as(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint64_t count, const Build& build, int32_t peer, bool awaited,
                     ep_kernel_status* status) const {
    const uint64_t end = efa_post<Sharing>(ctx, group, qp, count, build, {peer, false}, status);
    bool ok = end != efa_refused;
    if (group.lane() == 0) {
      ok = ok && (!awaited || efa_wait_done<Sharing>(ctx, qp, end, peer, status));
      if (!ok) efa_note_broken(ctx, device(), qp);
    }
    return group.from_first(ok);
  }

  template <class Ctx>
  EP_HD ep_efa_request write_row(const efa_writer<Ctx>& writer, const rows_of& source, uint64_t i, uint64_t slot, int32_t peer) const {
    const ep_efa_remote& part = reinterpret_cast<const ep_efa_remote*>(route().remotes)[peer];
    const uint64_t longest = device().max_message;
    const uint64_t row = i / source.pieces;
    const uint64_t begin = (i % source.pieces) * longest;
    const uint64_t left = source.row_bytes - begin;
    const efa_place to{part.address + source.dst_offset + row * source.row_bytes + begin, part.rkey};
    writer.write(target_of(slot, peer), to, {source.address + row * source.stride + begin, source.lkey}, static_cast<uint32_t>(left < longest ? left : longest));
    return {to.address, peer, static_cast<uint32_t>(slot)};
  }

  template <class Ctx> EP_HD ep_efa_request write_tick(const efa_writer<Ctx>& writer, uint64_t slot, int32_t peer) const {
    const ep_efa_remote& scratch = reinterpret_cast<const ep_efa_remote*>(device().scratch_remotes)[peer];
    writer.write(target_of(slot, peer), {scratch.address, scratch.rkey}, {device().scratch, device().scratch_lkey}, 0);
    return {scratch.address, peer, static_cast<uint32_t>(slot)};
  }
};

using efa_endpoint = efa_endpoint_of<0>;

EP_MACHINE_END

#endif
