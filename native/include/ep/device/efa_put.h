/* One put, value or get of the GIN facade (efa_gin.h): its arguments, checked, and the WQEs that it comes to. */
#ifndef EP_DEVICE_EFA_PUT_H
#define EP_DEVICE_EFA_PUT_H

#include "efa_post.h"
#include "efa_scope.h"

EP_MACHINE_BEGIN

/* Ranks that calls name their peers by. */
struct gin_team {
  const int32_t* ranks; /* null: team ranks are ranks */
  int32_t size;
};

/* Remote actions. HAZARD: adding N is N arrivals, of which the last but one may be seen before the put's bytes: only N says that they have landed. Who looks
 * in between may see a part of it, and adders that meet on one signal are told apart by nobody. */
struct gin_no_action {};
struct gin_signal_inc {
  uint32_t id;
};
struct gin_signal_add {
  uint32_t id;
  uint32_t value;
};
/* A local action: the counter ticks once when the put's source may be reused. */
struct gin_counter_inc {
  uint32_t id;
};

struct gin_options {
  gin_scope given = gin_scope::thread;
  gin_scope required = gin_scope::device;
  bool aggregate = false; /* the doorbell may be left to a later call of this context, or to a flush */
};

/* Of the targets, or of the queue pairs: 0 is the data queue pair, 1 + id that of a signal or a counter. No id becomes 0. */
EP_HD uint32_t efa_slot_of(uint32_t id) { return id != UINT32_MAX ? 1 + id : UINT32_MAX; }

/* A put whose arguments have been checked (`at` or `to`), and what its actions come to. */
struct efa_put {
  efa_place remote{};
  efa_place local{};
  uint64_t bytes = 0;
  int32_t rank = -1;
  uint32_t slot = 0;  /* of the targets: 0, or 1 + signal */
  uint32_t ticks = 1; /* arrivals there */
  uint32_t qp = 0;    /* that posts: 0, or 1 + counter */

  EP_HD void act(gin_no_action) {}
  EP_HD void act(gin_signal_inc action) { slot = efa_slot_of(action.id); }
  EP_HD void act(gin_signal_add action) {
    slot = action.value != 0 ? efa_slot_of(action.id) : 0;
    ticks = action.value != 0 ? action.value : 1;
  }
  EP_HD void act(gin_counter_inc action) { qp = efa_slot_of(action.id); }

  template <class Ctx> EP_HD static bool in_range(Ctx& ctx, uint64_t found, uint64_t limit, int32_t peer, ep_kernel_status* status) {
    if (found <= limit) return true;
    ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_RANGE, limit, found);
    return false;
  }

  EP_HD static bool within(const ep_efa_memory& memory, uint64_t offset, uint64_t length) {
    return length <= memory.byte_length && offset <= memory.byte_length - length; /* in this order, so that no sum wraps */
  }

  /* Whom it is for, and by which queue pairs. */
  EP_HD_SMALL bool names(const ep_efa_device& device, const gin_team& team, int32_t peer) {
    if (static_cast<uint32_t>(peer) >= static_cast<uint32_t>(team.size) || team.size < 0) return false;
    rank = team.ranks != nullptr ? team.ranks[peer] : peer;
    return static_cast<uint32_t>(rank) < static_cast<uint32_t>(device.world_size) && slot <= device.signal_count && qp <= device.counter_count;
  }

  /* Says which argument is out of range, for which there is one. Always false. `length` 0: of memories none was looked at. */
  template <class Ctx>
  EP_HD_SELDOM static bool refuse(Ctx& ctx, const efa_put& put, const ep_efa_device& device, const gin_team& team, int32_t peer, const ep_efa_memory* there,
                                  uint64_t there_offset, const ep_efa_memory* here, uint64_t here_offset, uint64_t length, ep_kernel_status* status) {
    if (peer < 0 || peer >= team.size) {
      ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_RANGE, team.size > 0 ? static_cast<uint32_t>(team.size) - 1 : 0, static_cast<uint32_t>(peer));
      return false;
    }
    const int32_t rank = put.rank;
    return in_range(ctx, static_cast<uint32_t>(rank), static_cast<uint32_t>(device.world_size) - 1, peer, status) &&
           in_range(ctx, put.slot, device.signal_count, rank, status) && in_range(ctx, put.qp, device.counter_count, rank, status) && length != 0 &&
           in_range(ctx, length, there->byte_length, rank, status) && in_range(ctx, there_offset, there->byte_length - length, rank, status) &&
           in_range(ctx, length, here->byte_length, rank, status) && in_range(ctx, here_offset, here->byte_length - length, rank, status) && false;
  }

  /* Of no bytes: something at either end has to be named all the same. */
  template <class Ctx>
  EP_HD bool to(Ctx& ctx, const ep_efa_device& device, const gin_team& team, int32_t peer, ep_kernel_status* status) {
    if (!names(device, team, peer)) [[unlikely]] {
      refuse(ctx, efa_put{*this}, device, team, peer, nullptr, 0, nullptr, 0, 0, status);
      return false;
    }
    const ep_efa_remote& scratch = reinterpret_cast<const ep_efa_remote*>(device.scratch_remotes)[rank];
    remote = {scratch.address, scratch.rkey};
    local = {device.scratch, device.scratch_lkey};
    return true;
  }

  template <class Ctx>
  EP_HD_SMALL bool at(Ctx& ctx, const ep_efa_device& device, const gin_team& team, int32_t peer, const ep_efa_memory& there, uint64_t there_offset,
                const ep_efa_memory& here, uint64_t here_offset, uint64_t length, ep_kernel_status* status) {
    if (length == 0) return to(ctx, device, team, peer, status);
    if (!names(device, team, peer) || !within(there, there_offset, length) || !within(here, here_offset, length)) [[unlikely]] {
      refuse(ctx, efa_put{*this}, device, team, peer, &there, there_offset, &here, here_offset, length, status);
      return false;
    }
    const ep_efa_remote& part = reinterpret_cast<const ep_efa_remote*>(there.remotes)[rank];
    bytes = length;
    remote = {part.address + there_offset, part.rkey};
    local = {here.address + here_offset, here.lkey};
    return true;
  }
};

EP_HD ep_efa_qp& efa_qp_of(const ep_efa_device& device, uint32_t index) { return reinterpret_cast<ep_efa_qp*>(device.qps)[index]; }
EP_HD const ep_efa_target& efa_target_of(const ep_efa_device& device, const ep_efa_qp& qp, uint32_t slot, int32_t rank) {
  return reinterpret_cast<const ep_efa_target*>(qp.targets)[static_cast<uint64_t>(slot) * static_cast<uint32_t>(device.world_size) + static_cast<uint32_t>(rank)];
}

/* After a call on the queue pair that failed; always false. HAZARD: one that was only given up is sound, and has no record that waits could report: they would look for it for ever. */
template <class Ctx> EP_HD_SELDOM bool efa_note_broken(Ctx& ctx, ep_efa_device& device, ep_efa_qp& qp) {
  if (efa_state(ctx, qp) == EP_EFA_SOUND) return false;
  poster_words<EP_EFA_SHARE_DEVICE>::first(ctx, &device.broken, 1 + static_cast<uint64_t>(qp.index));
  return false;
}

/* Writes `length` bytes of a put from byte `begin` on; of none, the first word of the scratch is named. */
template <class Ctx>
EP_HD_SMALL ep_efa_request efa_write_piece(const ep_efa_device& device, const ep_efa_qp& qp, const efa_writer<Ctx>& writer, const efa_put& put, uint32_t slot,
                                           uint64_t begin, uint32_t length) {
  const efa_place to{put.remote.address + begin, put.remote.key};
  writer.write(efa_target_of(device, qp, slot, put.rank), to, {put.local.address + begin, put.local.key}, length);
  return {to.address, put.rank, slot};
}

template <uint32_t Sharing, class Ctx, class Build>
EP_HD uint64_t efa_post_alone(Ctx& ctx, ep_efa_device& device, ep_efa_qp& qp, uint64_t count, const Build& build, int32_t rank, bool deferred,
                              ep_kernel_status* status) {
  const uint64_t end = efa_post<Sharing>(ctx, lone_poster<Ctx>{ctx}, qp, count, build, {rank, deferred}, status);
  if (end == efa_refused) efa_note_broken(ctx, device, qp);
  return end;
}

template <uint32_t Sharing, class Ctx, class Build>
EP_HD_SMALL bool efa_post_one_alone(Ctx& ctx, ep_efa_device& device, ep_efa_qp& qp, const Build& build, int32_t rank, bool deferred, ep_kernel_status* status) {
  if (efa_post_one<Sharing>(ctx, qp, build, {rank, deferred}, status)) [[likely]] return true;
  efa_note_broken(ctx, device, qp);
  return false;
}

/* Arrivals without bytes, by the data queue pair, so that no counter sees them. */
template <uint32_t Sharing, class Ctx>
EP_HD_SELDOM bool efa_post_ticks(Ctx& ctx, ep_efa_device& device, const efa_put& put, uint32_t count, bool deferred, ep_kernel_status* status) {
  ep_efa_qp& data = efa_qp_of(device, 0);
  efa_put empty = put;
  empty.remote = {reinterpret_cast<const ep_efa_remote*>(device.scratch_remotes)[put.rank].address,
                  reinterpret_cast<const ep_efa_remote*>(device.scratch_remotes)[put.rank].rkey};
  empty.local = {device.scratch, device.scratch_lkey};
  const auto build = [&](uint64_t, const efa_writer<Ctx>& writer) { return efa_write_piece(device, data, writer, empty, put.slot, 0, 0); };
  return efa_post_alone<Sharing>(ctx, device, data, count, build, put.rank, deferred, status) != efa_refused;
}

/* One WRITE, and the arrivals of an addition besides. */
template <uint32_t Sharing, class Ctx>
EP_HD_SMALL bool efa_put_short(Ctx& ctx, ep_efa_device& device, const efa_put& put, bool deferred, ep_kernel_status* status) {
  ep_efa_qp& qp = efa_qp_of(device, put.qp);
  const auto build = [&](const efa_writer<Ctx>& writer) EP_SMALL_LAMBDA { return efa_write_piece(device, qp, writer, put, put.slot, 0, static_cast<uint32_t>(put.bytes)); };
  return efa_post_one_alone<Sharing>(ctx, device, qp, build, put.rank, deferred, status) &&
         (put.ticks == 1 || efa_post_ticks<Sharing>(ctx, device, efa_put{put}, put.ticks - 1, deferred, status));
}

/* HAZARD: writes pass each other. The last piece carries the signal or the counter, so the others complete before it is posted. */
template <uint32_t Sharing, class Ctx>
EP_HD_SELDOM bool efa_put_long(Ctx& ctx, ep_efa_device& device, const efa_put& put, bool deferred, ep_kernel_status* status) {
  const uint64_t longest = device.max_message;
  const uint64_t before = (put.bytes - 1) / longest;
  ep_efa_qp& data = efa_qp_of(device, 0);
  const auto build = [&](uint64_t i, const efa_writer<Ctx>& writer) {
    return efa_write_piece(device, data, writer, put, 0, i * longest, static_cast<uint32_t>(longest));
  };
  const bool waits = put.slot != 0 || put.qp != 0;
  const uint64_t end = efa_post_alone<Sharing>(ctx, device, data, before, build, put.rank, !waits && deferred, status);
  if (end == efa_refused) return false;
  if (waits && !efa_wait_done<Sharing>(ctx, data, end, put.rank, status)) return efa_note_broken(ctx, device, data);
  efa_put last = put;
  last.remote.address += before * longest;
  last.local.address += before * longest;
  last.bytes -= before * longest;
  return efa_put_short<Sharing>(ctx, device, last, deferred, status);
}

/* By one lane. A put always posts a WQE, whatever it carries: it is what ends a run of aggregated ones. */
template <uint32_t Sharing, class Ctx>
EP_HD_SMALL bool efa_put_one(Ctx& ctx, ep_efa_device& device, const efa_put& put, const gin_options& options, ep_kernel_status* status) {
  if (gin_requires_system_fence(options.given, options.required)) fence_system(ctx);
  if (put.bytes > device.max_message) [[unlikely]] return efa_put_long<Sharing>(ctx, device, efa_put{put}, options.aggregate, status);
  return efa_put_short<Sharing>(ctx, device, put, options.aggregate, status);
}

/* A value travels within its WQE, or waits in the place of its WQE's slot until the NIC has read it: that place is free when the slot is. */
template <class Ctx>
EP_HD_SMALL ep_efa_request efa_write_value(const ep_efa_device& device, const ep_efa_qp& qp, const efa_writer<Ctx>& writer, const efa_put& put, uint64_t value) {
  const ep_efa_target& target = efa_target_of(device, qp, put.slot, put.rank);
  const auto bytes = static_cast<uint32_t>(put.bytes);
  if (qp.values == 0) {
    writer.write_value(target, put.remote, value, bytes);
  } else {
    auto* place = reinterpret_cast<uint64_t*>(qp.values) + (writer.number & (qp.depth - 1));
    *place = value;
    writer.write(target, put.remote, {reinterpret_cast<uint64_t>(place), qp.values_lkey}, bytes);
  }
  return {put.remote.address, put.rank, put.slot};
}

template <uint32_t Sharing, class Ctx>
EP_HD bool efa_put_value_one(Ctx& ctx, ep_efa_device& device, const efa_put& put, uint64_t value, const gin_options& options, ep_kernel_status* status) {
  if (gin_requires_system_fence(options.given, options.required)) fence_system(ctx);
  ep_efa_qp& data = efa_qp_of(device, 0);
  const auto build = [&](const efa_writer<Ctx>& writer) EP_SMALL_LAMBDA { return efa_write_value(device, data, writer, put, value); };
  return efa_post_one_alone<Sharing>(ctx, device, data, build, put.rank, options.aggregate, status) &&
         (put.ticks == 1 || efa_post_ticks<Sharing>(ctx, device, efa_put{put}, put.ticks - 1, options.aggregate, status));
}

template <uint32_t Sharing, class Ctx>
EP_HD bool efa_get_one(Ctx& ctx, ep_efa_device& device, const efa_put& get, const gin_options& options, ep_kernel_status* status) {
  const uint64_t longest = device.max_message;
  const uint64_t pieces = get.bytes != 0 ? (get.bytes + longest - 1) / longest : 1;
  ep_efa_qp& data = efa_qp_of(device, 0);
  const auto build = [&](uint64_t i, const efa_writer<Ctx>& writer) {
    const uint64_t begin = i * longest;
    const uint64_t left = get.bytes - begin;
    const efa_place from{get.remote.address + begin, get.remote.key};
    writer.read(efa_target_of(device, data, 0, get.rank), from, {get.local.address + begin, get.local.key},
                static_cast<uint32_t>(left < longest ? left : longest));
    return ep_efa_request{from.address, get.rank, 0};
  };
  return efa_post_alone<Sharing>(ctx, device, data, pieces, build, get.rank, options.aggregate, status) != efa_refused;
}

/* Some lanes of a warp that post together; the others call along. */
template <class Ctx> struct member_poster {
  Ctx& ctx;
  uint32_t members;
  EP_HD static uint32_t count(uint32_t bits) {
#if defined(__CUDACC__)
    return static_cast<uint32_t>(__popc(bits));
#else
    return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
  }
  EP_HD uint32_t own() const { return ctx.lane() % ctx.warp_lanes(); }
  EP_HD uint32_t lane() const {
    return (members >> own() & 1u) != 0 ? count(members & ((1u << own()) - 1)) : UINT32_MAX;
  }
  EP_HD uint32_t lanes() const { return count(members); }
  template <class T> EP_HD T from_first(T value) const { return ctx.shuffle(value, count((members & (0u - members)) - 1)); }
  EP_HD void sync() const { ctx.sync_warp(); }
};

/* By all lanes of a warp, each with its own put; `wanted` says whether it has one.
 * HAZARD: queue pairs take turns. A warp that held numbers of two at a time could wait for another that holds them crosswise. */
template <uint32_t Sharing, class Ctx>
EP_HD bool efa_put_lanes(Ctx& ctx, ep_efa_device& device, bool wanted, const efa_put& put, const gin_options& options, ep_kernel_status* status) {
  if (wanted && gin_requires_system_fence(options.given, options.required)) fence_system(ctx);
  const uint32_t own = ctx.lane() % ctx.warp_lanes();
  const bool plain = put.bytes <= device.max_message && put.ticks == 1;
  bool ok = true;
  uint32_t left = ctx.ballot(wanted && plain);
  while (left != 0) {
    const uint32_t first = member_poster<Ctx>::count((left & (0u - left)) - 1);
    const uint32_t index = ctx.shuffle(put.qp, first);
    ep_efa_qp& qp = efa_qp_of(device, index);
    uint32_t members = ctx.ballot((left >> own & 1u) != 0 && put.qp == index);
    const uint32_t most = qp.max_batch < qp.depth ? qp.max_batch : qp.depth;
    while (member_poster<Ctx>::count(members) > most) members &= members - 1;
    left &= ~members;
    const auto build = [&](uint64_t, const efa_writer<Ctx>& writer) {
      return efa_write_piece(device, qp, writer, put, put.slot, 0, static_cast<uint32_t>(put.bytes));
    };
    const member_poster<Ctx> group{ctx, members};
    const uint64_t end = efa_post<Sharing>(ctx, group, qp, group.lanes(), build, {put.rank, options.aggregate}, status);
    if (end == efa_refused && (members >> own & 1u) != 0) {
      efa_note_broken(ctx, device, qp);
      ok = false;
    }
  }
  if (wanted && !plain) ok = efa_put_one<Sharing>(ctx, device, put, options, status);
  return ok;
}

EP_MACHINE_END

#endif
