/* The GIN device API as the original pull request implements it, over the structs of its plugin (abi/efa_pr.h). Same calls as efa_gin, so that both run the
 * same tests. Its routes are its own: an endpoint serves signal s and counter s at once, posts from there and arrives there. */
#ifndef EP_DEVICE_EFA_PR_GIN_H
#define EP_DEVICE_EFA_PR_GIN_H

#include "coop.h"
#include "efa_count.h"
#include "efa_pr_post.h"

EP_MACHINE_BEGIN

/* What the pull request's checks refuse, as ep_kernel_status.expected at EP_STAGE_RANGE. */
#define EP_EFA_PR_NO_DESCRIPTOR 1u
#define EP_EFA_PR_VALUE_ADDS_ONE 2u

struct efa_pr_options : gin_options {
  const void* descriptor = nullptr; /* staging memory for WQEs: refused */
};

/* Which endpoint a call takes. */
struct efa_pr_route {
  int64_t signal = -1;
  int64_t counter = -1;
  uint32_t ticks = 1;
  EP_HD void act(gin_no_action) {}
  EP_HD void act(gin_signal_inc action) { signal = action.id; }
  EP_HD void act(gin_signal_add action) {
    signal = action.id;
    ticks = action.value;
  }
  EP_HD void act(gin_counter_inc action) { counter = action.id; }
  EP_HD bool any() const { return signal >= 0 || counter >= 0; }
};

template <class Rules = efa_pr_rules> struct efa_pr_gin_of {
  ep_efa_pr_device& device;

  EP_HD ep_efa_pr_counter& view(uint64_t table, int64_t id) const {
    return *reinterpret_cast<ep_efa_pr_counter*>(reinterpret_cast<const uint64_t*>(table)[id]);
  }
  EP_HD ep_efa_pr_endpoint& endpoint_of(const efa_pr_route& route) const {
    if (route.signal >= 0) return view(device.signal_handles, route.signal).base;
    if (route.counter >= 0) return view(device.counter_handles, route.counter).base;
    return device.data;
  }
  EP_HD static ep_efa_target target_of(const ep_efa_pr_endpoint& endpoint, int32_t rank) {
    return {reinterpret_cast<const uint16_t*>(endpoint.address_handles)[rank], reinterpret_cast<const uint16_t*>(endpoint.remote_qpns)[rank],
            reinterpret_cast<const uint32_t*>(endpoint.qkey)[rank]};
  }
  EP_HD static const ep_efa_pr_mr_peer& peer_of(const ep_efa_pr_mr& memory, int32_t rank) {
    return reinterpret_cast<const ep_efa_pr_mr_peer*>(&memory + 1)[rank];
  }

  template <class Ctx, class Coop, class Remote, class Local>
  EP_HD bool put(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, const ep_efa_pr_mr& to, uint64_t to_offset, const ep_efa_pr_mr& from,
                 uint64_t from_offset, uint64_t bytes, Remote remote, Local local, const efa_pr_options& options, ep_kernel_status* status) const {
    return once(coop, [&] {
      efa_pr_route route;
      route.act(remote);
      route.act(local);
      return accepts(ctx, options, status) && put_by(ctx, lone_poster<Ctx>{ctx}, rank_of(team, peer), to, to_offset, from, from_offset, bytes, route, options, status);
    });
  }

  template <class Ctx, class Coop, class Remote>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, Remote remote, const efa_pr_options& options, ep_kernel_status* status) const {
    const ep_efa_pr_mr none{};
    return put(ctx, coop, team, peer, none, 0, none, 0, 0, remote, gin_no_action{}, options, status);
  }

  template <class Ctx, class Coop, class T, class Remote>
  EP_HD bool put_value(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, const ep_efa_pr_mr& to, uint64_t to_offset, T value, Remote remote,
                       const efa_pr_options& options, ep_kernel_status* status) const {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a value has 1, 2, 4 or 8 bytes");
    return once(coop, [&] {
      efa_pr_route route;
      route.act(remote);
      if (!accepts(ctx, options, status)) return false;
      if (route.ticks > 1) {
        ctx.fail(status, EP_STATUS_INVALID, peer, EP_STAGE_RANGE, EP_EFA_PR_VALUE_ADDS_ONE, route.ticks);
        return false;
      }
      if (gin_requires_system_fence(options.given, options.required)) fence_system(ctx);
      ep_efa_pr_endpoint& endpoint = endpoint_of(route);
      const int32_t rank = rank_of(team, peer);
      const auto build = [&](uint32_t, const efa_writer<Ctx>& writer, uint64_t number) {
        const uint64_t place = endpoint.putvalue_slice_base + number % endpoint.sq_size * device.putvalue_slot_size;
        __builtin_memcpy(reinterpret_cast<void*>(place), &value, sizeof(T));
        const ep_efa_pr_mr_peer& part = peer_of(to, rank);
        writer.write(target_of(endpoint, rank), {part.remote_addr + to_offset, part.rkey}, {place, device.putvalue_lkey}, sizeof(T));
      };
      return efa_pr_post<Rules>(ctx, lone_poster<Ctx>{ctx}, endpoint, 1, build, options.aggregate, status);
    });
  }

  /* Every lane of the warp its own put; lanes of one endpoint go together. */
  template <class Ctx, class Remote, class Local>
  EP_HD bool put_lanes(Ctx& ctx, bool wanted, const gin_team& team, int32_t peer, const ep_efa_pr_mr& to, uint64_t to_offset, const ep_efa_pr_mr& from,
                       uint64_t from_offset, uint64_t bytes, Remote remote, Local local, const efa_pr_options& options, ep_kernel_status* status) const {
    efa_pr_route route;
    route.act(remote);
    route.act(local);
    wanted = wanted && (bytes != 0 || route.any()) && accepts(ctx, options, status);
    const auto own = reinterpret_cast<uint64_t>(&endpoint_of(route));
    uint32_t left = ctx.ballot(wanted);
    bool ok = true;
    while (left != 0) {
      const uint32_t first = member_poster<Ctx>::count((left & (0u - left)) - 1);
      const uint64_t chosen = ctx.shuffle(own, first);
      uint32_t members = ctx.ballot((left >> ctx.lane() % ctx.warp_lanes() & 1u) != 0 && own == chosen);
      const uint32_t most = reinterpret_cast<const ep_efa_pr_qp*>(reinterpret_cast<const ep_efa_pr_endpoint*>(chosen)->qp)->sq.wq.max_batch;
      while (member_poster<Ctx>::count(members) > most) members &= members - 1;
      left &= ~members;
      const member_poster<Ctx> group{ctx, members};
      ok = post(ctx, group, *reinterpret_cast<ep_efa_pr_endpoint*>(chosen), rank_of(team, peer), to, to_offset, from, from_offset, bytes, options, status) && ok;
    }
    return ok;
  }

  template <class Ctx, class Coop> EP_HD bool flush(Ctx& ctx, const Coop& coop, ep_kernel_status* status) const {
    return once(coop, [&] {
      bool ok = efa_pr_quiet(ctx, device.data, status);
      for (int32_t i = 0; i < device.signal_count && ok; ++i) ok = efa_pr_quiet(ctx, view(device.signal_handles, i).base, status);
      for (int32_t i = 0; i < device.counter_count && ok; ++i) ok = efa_pr_quiet(ctx, view(device.counter_handles, i).base, status);
      return ok;
    });
  }

  EP_HD uint64_t* signal_word(uint32_t id) const { return reinterpret_cast<uint64_t*>(view(device.signal_handles, id).cntr_value); }
  EP_HD uint64_t* counter_word(uint32_t id) const { return reinterpret_cast<uint64_t*>(view(device.counter_handles, id).cntr_value); }
  template <class Ctx> EP_HD uint64_t read_signal(Ctx& ctx, uint32_t id) const { return load_acquire(ctx, signal_word(id)); }
  template <class Ctx> EP_HD uint64_t read_counter(Ctx& ctx, uint32_t id) const { return load_acquire(ctx, counter_word(id)); }
  /* Stores to what the NIC owns (D4). */
  template <class Ctx, class Coop> EP_HD void reset_signal(Ctx& ctx, const Coop& coop, uint32_t id) const { reset(ctx, coop, signal_word(id)); }
  template <class Ctx, class Coop> EP_HD void reset_counter(Ctx& ctx, const Coop& coop, uint32_t id) const { reset(ctx, coop, counter_word(id)); }

  /* Compares a count of 31 bits as if it had `bits` (D5, D17). */
  template <class Ctx, class Coop>
  EP_HD bool wait_signal(Ctx& ctx, const Coop& coop, uint32_t id, uint64_t wanted, ep_kernel_status* status, uint32_t bits = 64) const {
    return wait(ctx, coop, signal_word(id), wanted, bits, EP_STAGE_ARRIVAL, status);
  }
  template <class Ctx, class Coop>
  EP_HD bool wait_counter(Ctx& ctx, const Coop& coop, uint32_t id, uint64_t wanted, ep_kernel_status* status, uint32_t bits = 56) const {
    return wait(ctx, coop, counter_word(id), wanted, bits, EP_STAGE_COMPLETION, status);
  }

 private:
  struct reached_look {
    const uint64_t* word;
    uint64_t wanted;
    uint32_t bits;
    EP_HD bool operator()(uint64_t* found) const {
      no_point here;
      *found = load_acquire(here, word);
      return efa_reached(*found, wanted, bits);
    }
  };

  template <class Coop, class Call> EP_HD bool once(const Coop& coop, const Call& call) const {
    coop.sync();
    const bool ok = coop.lane() != 0 || call();
    return coop.sync_and(ok);
  }

  EP_HD static int32_t rank_of(const gin_team& team, int32_t peer) { return team.ranks != nullptr ? team.ranks[peer] : peer; }

  template <class Ctx> EP_HD bool accepts(Ctx& ctx, const efa_pr_options& options, ep_kernel_status* status) const {
    if (options.descriptor == nullptr) return true;
    ctx.fail(status, EP_STATUS_INVALID, -1, EP_STAGE_RANGE, EP_EFA_PR_NO_DESCRIPTOR, 1);
    return false;
  }

  template <class Ctx, class Group>
  EP_HD bool put_by(Ctx& ctx, const Group& group, int32_t rank, const ep_efa_pr_mr& to, uint64_t to_offset, const ep_efa_pr_mr& from, uint64_t from_offset,
                    uint64_t bytes, const efa_pr_route& route, const efa_pr_options& options, ep_kernel_status* status) const {
    if (bytes == 0 && !route.any()) return true; /* posts nothing, so it ends no aggregated run (D8) */
    return post(ctx, group, endpoint_of(route), rank, to, to_offset, from, from_offset, bytes, options, status);
  }

  template <class Ctx, class Group>
  EP_HD bool post(Ctx& ctx, const Group& group, ep_efa_pr_endpoint& endpoint, int32_t rank, const ep_efa_pr_mr& to, uint64_t to_offset, const ep_efa_pr_mr& from,
                  uint64_t from_offset, uint64_t bytes, const efa_pr_options& options, ep_kernel_status* status) const {
    if (gin_requires_system_fence(options.given, options.required)) fence_system(ctx);
    const auto build = [&](uint32_t, const efa_writer<Ctx>& writer, uint64_t) {
      const ep_efa_target target = target_of(endpoint, rank);
      if (bytes == 0) {
        const efa_place there{reinterpret_cast<const uint64_t*>(device.scratch_remote_addrs)[rank], reinterpret_cast<const uint32_t*>(device.scratch_remote_rkeys)[rank]};
        return writer.write(target, there, {device.scratch_local_addr, device.scratch_lkey}, 0);
      }
      const ep_efa_pr_mr_peer& part = peer_of(to, rank);
      writer.write(target, {part.remote_addr + to_offset, part.rkey}, {from.local_addr + from_offset, from.lkey}, static_cast<uint32_t>(bytes));
    };
    return efa_pr_post<Rules>(ctx, group, endpoint, group.lanes(), build, options.aggregate, status);
  }

  template <class Ctx, class Coop> EP_HD void reset(Ctx& ctx, const Coop& coop, uint64_t* word) const {
    coop.sync();
    if (coop.lane() == 0) store_release(ctx, word, uint64_t{0});
    coop.sync();
  }

  template <class Ctx, class Coop>
  EP_HD bool wait(Ctx& ctx, const Coop& coop, const uint64_t* word, uint64_t wanted, uint32_t bits, uint32_t stage, ep_kernel_status* status) const {
    return once(coop, [&] { return ctx.wait_for(reached_look{word, wanted, bits}, wanted, -1, stage, status); });
  }
};

using efa_pr_gin = efa_pr_gin_of<>;

EP_MACHINE_END

#endif
