/* How the original pull request posts: a spin lock for each endpoint, room by the difference of two counts, and efa-dp-direct's batches. Kept beside ours
 * (efa_post.h) as the contract that ours keeps where it is sound, and as the exhibit of what is not; docs/efa-contract.md has the list (D1 to D18).
 *
 * `Rules` are the steps in which known wrong variants differ from it; tests replace them. */
#ifndef EP_DEVICE_EFA_PR_POST_H
#define EP_DEVICE_EFA_PR_POST_H

#include "efa_put.h"
#include "ep/abi/efa_pr.h"

EP_MACHINE_BEGIN

struct efa_pr_rules {
  /* Place of a call's first WQE behind the producer counter, which moves only at a doorbell.
   * HAZARD: not 0. Deferred WQEs of earlier calls would be overwritten, and only the last one would survive. */
  EP_HD static uint32_t base(const ep_efa_pr_wq& wq, uint32_t count) { return wq.wqes_pending - count; }
  /* By the lanes that wrote WQEs and do not ring. The pull request has nothing here (D11). */
  template <class Ctx> EP_HD static void release(Ctx&) {}
};

struct efa_pr_word {
#if defined(__CUDACC__)
  using ref = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;
#else
  using ref = std::atomic_ref<uint32_t>;
#endif
};

struct efa_pr_lock_look {
  uint32_t* lock;
  EP_HD bool operator()(uint64_t* found) const {
    *found = efa_pr_word::ref(*lock).load(detail::relaxed);
    return *found == 0;
  }
};

template <class Ctx> EP_HD bool efa_pr_lock(Ctx& ctx, ep_efa_pr_endpoint& endpoint, ep_kernel_status* status) {
  for (;;) {
    uint32_t free = 0;
    ctx.point();
    if (efa_pr_word::ref(endpoint.sq_lock).compare_exchange_strong(free, 1, detail::acquire, detail::relaxed)) return true;
    if (!ctx.wait_for(efa_pr_lock_look{&endpoint.sq_lock}, 0, -1, EP_STAGE_TURN, status)) return false;
  }
}

template <class Ctx> EP_HD void efa_pr_unlock(Ctx& ctx, ep_efa_pr_endpoint& endpoint) {
  ctx.point();
  efa_pr_word::ref(endpoint.sq_lock).exchange(0, detail::release);
}

/* Of the ring, under the lock. */
template <class Ctx> EP_HD void efa_pr_ring(Ctx& ctx, ep_efa_pr_wq& wq) {
  if (wq.wqes_pending == 0) return;
  wq.phase ^= static_cast<int32_t>(((wq.pc & wq.queue_mask) + wq.wqes_pending) >> wq.queue_size_shift);
  wq.pc += wq.wqes_pending;
  wq.wqes_pending = 0;
  register_fence(ctx);
  register_store(ctx, wq.db, wq.pc);
  register_fence(ctx);
}

template <class Ctx> EP_HD void efa_pr_start(Ctx& ctx, ep_efa_pr_wq& wq, uint32_t count) {
  if (wq.wqes_pending + count > wq.max_batch) efa_pr_ring(ctx, wq);
  wq.wqes_pending += count;
}

/* `id` is the request's: the pull request gives the lane's index, which is not unique (D13). */
template <class Ctx> EP_HD efa_writer<Ctx> efa_pr_writer(Ctx& ctx, const ep_efa_pr_wq& wq, uint32_t place, uint32_t id) {
  const uint32_t at = (wq.pc & wq.queue_mask) + place;
  const uint32_t phase = (static_cast<uint32_t>(wq.phase) ^ (at >> wq.queue_size_shift)) & 1u;
  return {ctx, wq.buf + static_cast<uint64_t>(at & wq.queue_mask) * EP_EFA_WQE_BYTES, id, EP_EFA_WQE_BYTES, phase, false};
}

/* Until `count` more WQEs fit: those submitted and not counted as completed are at most the ring. */
struct efa_pr_room_look {
  const ep_efa_pr_endpoint& endpoint;
  uint32_t count;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, reinterpret_cast<const uint64_t*>(endpoint.local_cntr_value));
    return endpoint.submitted_count - *found + count <= endpoint.sq_size;
  }
};

/* `count` WQEs by the lanes of `group`, at most max_batch of them; build(i, writer, number) writes WQE i, `number` being how many were submitted before it. */
template <class Rules, class Ctx, class Group, class Build>
EP_HD bool efa_pr_post(Ctx& ctx, const Group& group, ep_efa_pr_endpoint& endpoint, uint32_t count, const Build& build, bool aggregate, ep_kernel_status* status) {
  ep_efa_pr_wq& wq = reinterpret_cast<ep_efa_pr_qp*>(endpoint.qp)->sq.wq;
  bool ok = true;
  if (group.lane() == 0) {
    if (endpoint.local_cntr_value == 0) { /* the plugin leaves it out in views of counters (D1) */
      ctx.fail(status, EP_STATUS_INVALID, -1, EP_STAGE_ROOM, 1, 0);
      ok = false;
    }
    ok = ok && efa_pr_lock(ctx, endpoint, status);
    if (ok && !ctx.wait_for(efa_pr_room_look{endpoint, count}, count, -1, EP_STAGE_ROOM, status)) {
      efa_pr_unlock(ctx, endpoint);
      ok = false;
    }
    if (ok) efa_pr_start(ctx, wq, count);
  }
  if (!group.from_first(ok)) return false;
  const uint32_t base = Rules::base(wq, count);
  for (uint32_t i = group.lane(); i < count; i += group.lanes()) {
    ctx.point();
    build(i, efa_pr_writer(ctx, wq, base + i, ctx.lane()), endpoint.submitted_count + i);
  }
  if (group.lane() != 0 && group.lane() < count) Rules::release(ctx);
  group.sync();
  if (group.lane() == 0) {
    if (!aggregate) efa_pr_ring(ctx, wq);
    endpoint.submitted_count += count;
    fence_system(ctx);
    efa_pr_unlock(ctx, endpoint);
  }
  group.sync();
  return true;
}

/* Rings what is deferred and waits until the NIC has counted as many completions as were submitted.
 * HAZARD: that says which have completed only if nobody posts meanwhile (D18). */
template <class Ctx> EP_HD bool efa_pr_quiet(Ctx& ctx, ep_efa_pr_endpoint& endpoint, ep_kernel_status* status) {
  if (endpoint.local_cntr_value == 0) {
    ctx.fail(status, EP_STATUS_INVALID, -1, EP_STAGE_COMPLETION, 1, 0);
    return false;
  }
  if (!efa_pr_lock(ctx, endpoint, status)) return false;
  efa_pr_ring(ctx, reinterpret_cast<ep_efa_pr_qp*>(endpoint.qp)->sq.wq);
  const uint64_t submitted = endpoint.submitted_count;
  efa_pr_unlock(ctx, endpoint);
  return ctx.wait_for(word_look{reinterpret_cast<const uint64_t*>(endpoint.local_cntr_value), submitted}, submitted, -1, EP_STAGE_COMPLETION, status);
}

EP_MACHINE_END

#endif
