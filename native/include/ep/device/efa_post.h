/* How WQEs are posted to an EFA queue pair.
 *
 * A post of `count` WQEs: take numbers, wait until the ring has room for them and no more than a batch would be written and not rung, write, release each
 * writer's stores, wait for the turn, ring or leave that to a later post, pass the turn on.
 * HAZARD: room is awaited for the numbers that were taken. Looked for before, it may be gone to others by then, and a WQE that the NIC has not read is
 * overwritten.
 * HAZARD: WQEs that were left unrung complete only when somebody rings. Whoever waits behind them (for room, for the batch, for their end) rings them itself
 * when it has the turn; nobody else will.
 *
 * The turn is the number in `ready`. Where the WQEs below it are all rung, whoever took that number has the turn and needs no locked operation; where they are
 * not (EP_EFA_TURN_DEFERRED), a flush may want it, too, and it is taken by compare-and-swap (EP_EFA_TURN_HELD). */
#ifndef EP_DEVICE_EFA_POST_H
#define EP_DEVICE_EFA_POST_H

#include "efa_queue.h"

EP_MACHINE_BEGIN

constexpr uint64_t efa_refused = UINT64_MAX;

EP_HD uint64_t efa_turn_number(uint64_t ready) { return ready & ~(EP_EFA_TURN_HELD | EP_EFA_TURN_DEFERRED); }

/* Takes the turn of `number` whose tail is not rung. */
template <uint32_t Sharing, class Ctx> EP_HD bool efa_turn_take(Ctx& ctx, ep_efa_qp& qp, uint64_t number) {
  using words = poster_words<Sharing>;
  uint64_t found = number | EP_EFA_TURN_DEFERRED;
  if (words::load(ctx, &qp.ready) != found) return false;
  ctx.point();
  if constexpr (words::alone) {
    words::store(ctx, &qp.ready, number | EP_EFA_TURN_HELD);
    return true;
  } else {
    return typename words::ref(qp.ready).compare_exchange_strong(found, number | EP_EFA_TURN_HELD, detail::acq_rel, detail::acquire);
  }
}

/* Whether numbers first to first + count - 1 may be written, or something can be done about it. */
struct efa_room_look {
  ep_efa_qp& qp;
  uint64_t first;
  uint32_t count;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, &qp.prefix);
    if (load_acquire(here, &qp.broken) != EP_EFA_SOUND) return true;
    const bool room = first + count <= *found + qp.depth;
    if (room && first + count <= load_acquire(here, &qp.rung) + qp.max_batch) return true;
    return (!room && efa_has_completion(qp)) || load_acquire(here, &qp.ready) == (first | EP_EFA_TURN_DEFERRED);
  }
};

/* Whether there is room as far as was seen when somebody looked last. */
template <uint32_t Sharing, class Ctx> EP_HD bool efa_has_room(Ctx& ctx, ep_efa_qp& qp, uint64_t first, uint32_t count) {
  using words = poster_words<Sharing>;
  return first + count <= words::load(ctx, &qp.prefix) + qp.depth && first + count <= words::load(ctx, &qp.rung) + qp.max_batch;
}

/* Waits for room. *held: the turn was taken on the way. */
template <uint32_t Sharing, class Ctx>
EP_HD bool efa_wait_room(Ctx& ctx, ep_efa_qp& qp, uint64_t first, uint32_t count, int32_t peer, bool* held, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  for (;;) {
    const bool room = first + count <= words::load(ctx, &qp.prefix) + qp.depth || first + count <= efa_poll<Sharing>(ctx, qp) + qp.depth;
    if (room && first + count <= words::load(ctx, &qp.rung) + qp.max_batch) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    if (!*held && efa_turn_take<Sharing>(ctx, qp, first)) {
      *held = true;
      efa_ring(ctx, qp, first);
    } else if (!ctx.wait_for(efa_room_look{qp, first, count}, first + count - qp.depth, peer, EP_STAGE_ROOM, status)) {
      efa_break(ctx, qp, EP_STATUS_CLOSED, EP_EFA_STATUS_OK, first);
      return false;
    }
  }
}

struct efa_turn_look {
  ep_efa_qp& qp;
  uint64_t first;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, &qp.ready);
    return (*found & ~EP_EFA_TURN_DEFERRED) == first || load_acquire(here, &qp.broken) != EP_EFA_SOUND;
  }
};

template <uint32_t Sharing, class Ctx> EP_HD bool efa_wait_turn(Ctx& ctx, ep_efa_qp& qp, uint64_t first, int32_t peer, ep_kernel_status* status) {
  for (;;) {
    if (poster_words<Sharing>::load(ctx, &qp.ready) == first || efa_turn_take<Sharing>(ctx, qp, first)) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    if (!ctx.wait_for(efa_turn_look{qp, first}, first, peer, EP_STAGE_TURN, status)) {
      efa_break(ctx, qp, EP_STATUS_CLOSED, EP_EFA_STATUS_OK, first);
      return false;
    }
  }
}

/* What a post is besides its WQEs. */
struct efa_post_options {
  int32_t peer;  /* who is awaited, for errors; -1: several */
  bool deferred; /* the doorbell may be left to a later post, or to a flush */
};

/* The lanes of `group` write WQEs first to first + count - 1, and release them, but for the first lane, which does so when it rings or leaves that to others. */
template <class Ctx, class Group, class Build>
EP_HD void efa_build(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint64_t first, uint32_t count, const Build& build) {
  for (uint32_t i = group.lane(); i < count; i += group.lanes()) {
    const uint64_t number = first + i;
    const uint64_t slot = number & (qp.depth - 1);
    const efa_writer<Ctx> writer{ctx, qp.sq + slot * qp.wqe_bytes, number, qp.wqe_bytes, (number & qp.depth) != 0 ? 1u : 0u,
                                 (qp.flags & EP_EFA_QP_WIDE_ID) != 0};
    ctx.point();
    reinterpret_cast<ep_efa_request*>(qp.requests)[slot] = build(i, writer);
  }
  if (group.lane() != 0 && group.lane() < count) register_fence(ctx);
  group.sync();
}

/* One batch: at most max_batch WQEs, and depth. */
template <uint32_t Sharing, class Ctx, class Group, class Build>
EP_HD uint64_t efa_post_batch(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint32_t count, const Build& build, const efa_post_options& options,
                              ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  uint64_t first = efa_refused;
  bool held = false;
  if (group.lane() == 0) {
    if (efa_state(ctx, qp) != EP_EFA_SOUND) {
      efa_report(ctx, qp, status);
    } else {
      first = words::add(ctx, &qp.taken, count);
      if (!efa_has_room<Sharing>(ctx, qp, first, count) && !efa_wait_room<Sharing>(ctx, qp, first, count, options.peer, &held, status)) first = efa_refused;
    }
  }
  first = group.from_first(first);
  if (first == efa_refused) return first;
  efa_build(ctx, group, qp, first, count, build);
  if (group.lane() == 0) {
    if (held || words::load(ctx, &qp.ready) == first || efa_wait_turn<Sharing>(ctx, qp, first, options.peer, status)) {
      const uint64_t end = first + count;
      const bool deferred = options.deferred && end - words::load(ctx, &qp.rung) < qp.max_batch;
      if (deferred) {
        register_fence(ctx);
      } else {
        efa_ring(ctx, qp, end);
      }
      words::store(ctx, &qp.ready, deferred ? end | EP_EFA_TURN_DEFERRED : end);
    } else {
      first = efa_refused;
    }
  }
  return group.from_first(first);
}

/* Posts `count` WQEs by the lanes of `group`, in batches; build(i, writer) writes WQE i and returns its ep_efa_request. Returns the number behind the last
 * one, or efa_refused, on every lane. */
template <uint32_t Sharing, class Ctx, class Group, class Build>
EP_HD uint64_t efa_post(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint64_t count, const Build& build, const efa_post_options& options,
                        ep_kernel_status* status) {
  const uint32_t most = qp.max_batch < qp.depth ? qp.max_batch : qp.depth;
  uint64_t end = efa_refused;
  for (uint64_t done = 0; done < count; done += most) {
    const auto batch = static_cast<uint32_t>(count - done < most ? count - done : most);
    const auto part = [&](uint32_t i, const efa_writer<Ctx>& writer) { return build(done + i, writer); };
    const uint64_t first = efa_post_batch<Sharing>(ctx, group, qp, batch, part, options, status);
    if (first == efa_refused) return first;
    end = first + batch;
  }
  return end;
}

struct efa_tail_look {
  ep_efa_qp& qp;
  uint64_t needed;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, &qp.rung);
    const uint64_t ready = load_acquire(here, &qp.ready);
    return *found >= needed || (ready & EP_EFA_TURN_DEFERRED) != 0 || load_acquire(here, &qp.broken) != EP_EFA_SOUND;
  }
};

/* Rings what was left, at least below `needed`, which has been published. */
template <uint32_t Sharing, class Ctx> EP_HD bool efa_ring_tail(Ctx& ctx, ep_efa_qp& qp, uint64_t needed, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  for (;;) {
    if (words::load(ctx, &qp.rung) >= needed) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    const uint64_t number = efa_turn_number(words::load(ctx, &qp.ready));
    if (efa_turn_take<Sharing>(ctx, qp, number)) {
      efa_ring(ctx, qp, number);
      words::store(ctx, &qp.ready, number);
    } else if (!ctx.wait_for(efa_tail_look{qp, needed}, needed, -1, EP_STAGE_TURN, status)) {
      return false;
    }
  }
}

/* Rings what was left of the WQEs that are published now and waits until all of them have completed. Others go on posting meanwhile. */
template <uint32_t Sharing, class Ctx> EP_HD bool efa_quiet(Ctx& ctx, ep_efa_qp& qp, ep_kernel_status* status) {
  const uint64_t posted = efa_turn_number(poster_words<Sharing>::load(ctx, &qp.ready));
  return efa_ring_tail<Sharing>(ctx, qp, posted, status) && efa_wait_done<Sharing>(ctx, qp, posted, -1, status);
}

EP_MACHINE_END

#endif
