/* Kernels that post to mlx5 queue pairs themselves. */
#ifndef EP_DEVICE_IBGDA_ENDPOINT_H
#define EP_DEVICE_IBGDA_ENDPOINT_H

#include "copy.h"
#include "mlx5_post.h"
#include "ranges.h"

EP_MACHINE_BEGIN

/* Peers are reached by WQEs (EP_MEMORY_IBGDA). Sources lie in registered memory, each in one range, and stay unchanged until `quiet` has returned true.
 * Puts and signals with one key take one queue pair to each peer, number `key` modulo those in use, which executes in order: so a visible signal means that
 * all that was put to that peer with this key before has landed ('prior' order). Across keys there is no order. The key is the block's number, unless the
 * endpoint was given another (`with_key`): an expert's, say, so that a peer's traffic is spread over its queue pairs.
 * `Post` is a way to post (mlx5_post.h). */
template <class Post> struct ibgda_endpoint_of {
  const ep_memory_handle& memory;
  uint32_t given_key = UINT32_MAX;

  /* HAZARD: only with EP_IBGDA_SHARE_DEVICE may blocks meet on one key. */
  EP_HD ibgda_endpoint_of with_key(uint32_t key) const { return {memory, key}; }
  template <class Ctx> EP_HD uint32_t key(const Ctx& ctx) const { return given_key != UINT32_MAX ? given_key : ctx.block(); }

  EP_HD const ep_ibgda_memory& route() const { return *reinterpret_cast<const ep_ibgda_memory*>(memory.proxy); }
  EP_HD ep_ibgda_device& device() const { return *reinterpret_cast<ep_ibgda_device*>(route().device); }
  EP_HD const ep_ibgda_remote& remote(int32_t rank) const { return reinterpret_cast<const ep_ibgda_remote*>(route().remotes)[rank]; }
  EP_HD const ep_peer_view& own() const { return reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank]; }
  EP_HD const uint64_t* local_signal(uint64_t slot) const { return reinterpret_cast<const uint64_t*>(own().signals) + slot; }

  EP_HD mlx5_place remote_data(int32_t peer, uint64_t offset) const { return {remote(peer).data + offset, remote(peer).data_rkey}; }
  EP_HD mlx5_place remote_signal(int32_t peer, uint64_t slot) const { return {remote(peer).signals + slot * 8, remote(peer).signals_rkey}; }

  EP_HD ep_ibgda_qp& qp_of(int32_t peer, uint32_t key) const {
    const ep_ibgda_device& d = device();
    return reinterpret_cast<ep_ibgda_qp*>(d.qps)[static_cast<uint64_t>(peer) * d.qps_per_peer + key % d.active_qps];
  }

  /* The registered range that holds all of these bytes; *lkey is its key. */
  template <class Ctx> EP_HD bool local_key(Ctx& ctx, uint64_t address, uint64_t bytes, uint32_t* lkey) const {
    return range_key(ctx, &device().ranges, address, bytes, lkey);
  }

  /* Posts `count` WQEs to one queue pair by the lanes of `group`; build(i, writer) writes WQE i. */
  template <class Ctx, class Group, class Build>
  EP_HD bool post(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, uint64_t count, const Build& build, ep_kernel_status* status) const {
    if (device().sharing != EP_IBGDA_SHARE_DEVICE && given_key == UINT32_MAX && ctx.blocks() > device().active_qps) {
      if (group.lane() == 0) ctx.fail(status, EP_STATUS_INVALID, qp.peer, EP_STAGE_SHARING, device().active_qps, ctx.blocks());
      return false;
    }
    const uint64_t most = most_at_once(qp);
    for (uint64_t done = 0; done < count; done += most) {
      const auto batch = static_cast<uint32_t>(count - done < most ? count - done : most);
      const auto part = [&](uint32_t i, const mlx5_writer& writer) { build(done + i, writer); };
      if (post_batch(ctx, group, qp, batch, part, status)) continue;
      if (group.lane() == 0) note_broken(ctx, qp);
      return false;
    }
    return true;
  }

  /* WQEBBs with one doorbell. Not the whole ring: the NIC reads one half while the other is written. */
  EP_HD static uint64_t most_at_once(const ep_ibgda_qp& qp) { return qp.depth > 1 ? qp.depth / 2 : 1; }

  /* Whether a WQE of so many WQEBBs, and the one that ends its post, can be posted. */
  EP_HD static bool holds(const ep_ibgda_qp& qp, uint32_t blocks) { return Post::whole && blocks + 1 <= most_at_once(qp); }

  /* Masked compare-and-swap of a word of 8 bytes at a multiple of 8, awaited, by one lane of any scope; *old is what was there. Where the ring holds() no such WQE,
   * EP_STATUS_INVALID. */
  template <class Ctx>
  EP_HD bool masked_swap(Ctx& ctx, ep_ibgda_qp& qp, const mlx5_place& word, uint64_t compare, uint64_t compare_mask, uint64_t swap, uint64_t swap_mask,
                         const mlx5_place& old, ep_kernel_status* status) const {
    if (!holds(qp, mlx5_masked_swap_blocks)) {
      ctx.fail(status, EP_STATUS_INVALID, qp.peer, EP_STAGE_ROOM, 2 * (mlx5_masked_swap_blocks + 1), qp.depth);
      return false;
    }
    const auto build = [&](uint64_t i, const mlx5_writer& writer) {
      if (i == mlx5_masked_swap_blocks) return writer.nop();
      writer.masked_swap8(static_cast<uint32_t>(i), word, compare, compare_mask, swap, swap_mask, old);
    };
    return post(ctx, lone_poster<Ctx>{ctx}, qp, mlx5_masked_swap_blocks + 1, build, status) && quiet_qp(ctx, qp, status);
  }

  /* By lane 0. */
  template <class Ctx, class Coop>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    bool ok = true;
    if (coop.lane() == 0) {
      ep_ibgda_qp& qp = qp_of(peer, key(ctx));
      const auto build = [&](uint64_t, const mlx5_writer& writer) { write_signal(writer, qp, peer, slot, add); };
      ok = post(ctx, lone_poster<Ctx>{ctx}, qp, 1, build, status);
    }
    return coop.sync_and(ok);
  }

  /* One WRITE for rows that are contiguous, one for each row otherwise, more where a message would be too long; then the signal, all with one doorbell where they
   * fit the ring. Rows for this rank itself are copied, and signalled through the NIC (see ep_ibgda_device). */
  template <class Ctx, class Coop>
  EP_HD bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes,
                      uint64_t rows, bool non_temporal, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    if (peer == memory.rank) {
      copy_rows(coop, reinterpret_cast<uint8_t*>(own().data) + dst_offset, src, stride, row_bytes, rows, non_temporal);
      copy_rows_done(coop, non_temporal);
      return slot == EP_NO_SLOT || signal(ctx, coop, peer, slot, add, status);
    }
    bool ok = true;
    if constexpr (Coop::single) {
      if (coop.lane() == 0) ok = put(ctx, lone_poster<Ctx>{ctx}, peer, dst_offset, src, stride, row_bytes, rows, slot, add, status);
    } else if (coop.lane() < ctx.warp_lanes()) {
      ok = put(ctx, warp_poster<Ctx>{ctx}, peer, dst_offset, src, stride, row_bytes, rows, slot, add, status);
    }
    return coop.sync_and(ok);
  }

  /* Until all that was posted to `peer` before has completed: sources may be reused, and it has landed. All lanes of the scope call it. */
  template <class Ctx, class Coop> EP_HD bool quiet(Ctx& ctx, const Coop& coop, int32_t peer, ep_kernel_status* status) const {
    bool ok = true;
    for (uint32_t key = coop.lane(); key < device().active_qps && ok; key += coop.lanes()) ok = quiet_qp(ctx, qp_of(peer, key), status);
    return coop.sync_and(ok);
  }

  /* The same for all that was posted with this endpoint's key, to whomever: what a kernel ends with whose sources may be overwritten by the next one. */
  template <class Ctx, class Coop> EP_HD bool quiet_key(Ctx& ctx, const Coop& coop, ep_kernel_status* status) const {
    bool ok = true;
    for (uint32_t peer = coop.lane(); peer < static_cast<uint32_t>(memory.world_size) && ok; peer += coop.lanes()) {
      ok = quiet_qp(ctx, qp_of(static_cast<int32_t>(peer), key(ctx)), status);
    }
    return coop.sync_and(ok);
  }

  /* Waits until everything that is posted now has completed. */
  template <class Ctx> EP_HD bool quiet_qp(Ctx& ctx, ep_ibgda_qp& qp, ep_kernel_status* status) const {
    const uint64_t posted = Post::posted(ctx, qp);
    const bool alone = device().sharing == EP_IBGDA_SHARE_THREAD;
    const bool ok = alone ? mlx5_wait_done<EP_IBGDA_SHARE_THREAD>(ctx, qp, posted, EP_STAGE_COMPLETION, status)
                          : mlx5_wait_done<EP_IBGDA_SHARE_DEVICE>(ctx, qp, posted, EP_STAGE_COMPLETION, status);
    if (!ok) note_broken(ctx, qp);
    return ok;
  }

  /* One request whose answer is awaited, by one lane of any scope: build(0, writer). */
  template <class Ctx, class Build> EP_HD bool round_trip(Ctx& ctx, ep_ibgda_qp& qp, const Build& build, ep_kernel_status* status) const {
    return post(ctx, lone_poster<Ctx>{ctx}, qp, 1, build, status) && quiet_qp(ctx, qp, status);
  }

 private:
  template <class Ctx> EP_HD void note_broken(Ctx& ctx, ep_ibgda_qp& qp) const {
    if (mlx5_state(ctx, qp) == EP_IBGDA_SOUND) return;
    poster_words<EP_IBGDA_SHARE_DEVICE>::first(ctx, &device().broken, 1 + static_cast<uint64_t>(qp.index));
  }

  EP_HD void write_signal(const mlx5_writer& writer, const ep_ibgda_qp& qp, int32_t peer, uint64_t slot, uint64_t add) const {
    writer.fetch_add8(remote_signal(peer, slot), add, {qp.response, qp.response_lkey});
  }

  template <class Ctx, class Group, class Build>
  EP_HD bool post_batch(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, uint32_t count, const Build& build, ep_kernel_status* status) const {
    switch (device().sharing) {
      case EP_IBGDA_SHARE_THREAD: return Post::template post<EP_IBGDA_SHARE_THREAD>(ctx, group, qp, count, build, status) != mlx5_refused;
      case EP_IBGDA_SHARE_BLOCK: return Post::template post<EP_IBGDA_SHARE_BLOCK>(ctx, group, qp, count, build, status) != mlx5_refused;
      default: return Post::template post<EP_IBGDA_SHARE_DEVICE>(ctx, group, qp, count, build, status) != mlx5_refused;
    }
  }

  /* Of a source that the NIC does not know: the bytes travel within the WQE. */
  template <class Ctx, class Group>
  EP_HD_SELDOM bool put_long_inline(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, const mlx5_place& to, const void* src, uint32_t bytes, int32_t peer, uint64_t slot,
                                    uint64_t add, ep_kernel_status* status) const {
    const uint32_t blocks = mlx5_inline_blocks(bytes);
    const auto build = [&](uint64_t i, const mlx5_writer& writer) {
      if (i < blocks) return writer.write_long_inline(static_cast<uint32_t>(i), to, src, bytes);
      if (slot == EP_NO_SLOT) return writer.nop();
      write_signal(writer, qp, peer, slot, add);
    };
    return post(ctx, group, qp, blocks + 1, build, status);
  }

  template <class Ctx, class Group>
  EP_HD bool put(Ctx& ctx, const Group& group, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes,
                 uint64_t rows, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    const uint64_t address = reinterpret_cast<uint64_t>(src);
    if (stride == row_bytes) {
      row_bytes *= rows;
      rows = rows != 0 ? 1 : 0;
    }
    const uint64_t longest = device().max_message;
    const uint64_t pieces = (row_bytes + longest - 1) / longest;
    const uint64_t writes = rows * pieces;
    const bool is_inline = row_bytes <= EP_IBGDA_MAX_INLINE;
    ep_ibgda_qp& qp = qp_of(peer, key(ctx));
    uint32_t lkey = 0;
    if (writes != 0 && !is_inline) {
      const uint64_t span = (rows - 1) * stride + row_bytes;
      if (!local_key(ctx, address, span, &lkey)) {
        if (rows == 1 && row_bytes <= EP_IBGDA_MAX_LONG_INLINE && holds(qp, mlx5_inline_blocks(static_cast<uint32_t>(row_bytes)))) {
          return put_long_inline(ctx, group, qp, remote_data(peer, dst_offset), src, static_cast<uint32_t>(row_bytes), peer, slot, add, status);
        }
        if (group.lane() == 0) ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_SOURCE, address, span);
        return false;
      }
    }
    const auto build = [&](uint64_t i, const mlx5_writer& writer) {
      if (i == writes) return write_signal(writer, qp, peer, slot, add);
      const uint64_t row = i / pieces;
      const uint64_t begin = (i % pieces) * longest;
      const uint64_t left = row_bytes - begin;
      const auto bytes = static_cast<uint32_t>(left < longest ? left : longest);
      const mlx5_place to = remote_data(peer, dst_offset + row * row_bytes + begin);
      const uint64_t from = address + row * stride + begin;
      if (is_inline) return writer.write_inline(to, reinterpret_cast<const void*>(from), bytes);
      writer.write(to, {from, lkey}, bytes);
    };
    return post(ctx, group, qp, writes + (slot != EP_NO_SLOT ? 1 : 0), build, status);
  }
};

/* On a GPU many blocks share a queue pair, and a turn is passed on in 2 us; on the host few threads do, and a locked operation counts. */
#if defined(__CUDACC__)
using ibgda_endpoint = ibgda_endpoint_of<post_by_ringer>;
#else
using ibgda_endpoint = ibgda_endpoint_of<post_in_turn>;
#endif

EP_MACHINE_END

#endif
