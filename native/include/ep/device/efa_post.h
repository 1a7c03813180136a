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
 * not (EP_EFA_TURN_DEFERRED), a flush may want it, too: by compare-and-swap it is taken (EP_EFA_TURN_HELD), or passed on by whoever rings nothing. */
#ifndef EP_DEVICE_EFA_POST_H
#define EP_DEVICE_EFA_POST_H

#include "efa_queue.h"

EP_MACHINE_BEGIN

constexpr uint64_t efa_refused = UINT64_MAX;

EP_HD uint64_t efa_turn_number(uint64_t ready) { return ready & ~(EP_EFA_TURN_HELD | EP_EFA_TURN_DEFERRED); }

/* Takes the turn of `number` whose tail is not rung. */
template <uint32_t Sharing, class Ctx> EP_HD_SMALL bool efa_turn_take(Ctx& ctx, ep_efa_qp& qp, uint64_t number) {
  using words = poster_words<Sharing>;
  const uint64_t turn = number | EP_EFA_TURN_DEFERRED;
  return words::load(ctx, &qp.ready) == turn && words::swap(ctx, &qp.ready, turn, number | EP_EFA_TURN_HELD);
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

/* Waits for room. *held: whether the turn is the caller's already; it may be taken on the way. */
template <uint32_t Sharing, class Ctx>
EP_HD_SELDOM bool efa_wait_room(Ctx& ctx, ep_efa_qp& qp, uint64_t first, uint32_t count, int32_t peer, bool* held, ep_kernel_status* status) {
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

template <uint32_t Sharing, class Ctx> EP_HD_SELDOM bool efa_wait_turn(Ctx& ctx, ep_efa_qp& qp, uint64_t first, int32_t peer, ep_kernel_status* status) {
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

/* Numbers that were taken. */
struct efa_taken {
  uint64_t first;
  uint64_t end;
  uint64_t rung; /* as it was when they were taken: it has not become less */
  bool held;     /* their turn has come already; `rung` is `first` then */
};

/* Takes `count` numbers and waits until their WQEs may be written. */
template <uint32_t Sharing, class Ctx>
EP_HD_SMALL bool efa_take(Ctx& ctx, ep_efa_qp& qp, uint32_t count, int32_t peer, efa_taken* taken, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  if (efa_state(ctx, qp) != EP_EFA_SOUND) [[unlikely]] {
    efa_report(ctx, qp, status);
    return false;
  }
  const uint64_t first = words::add(ctx, &qp.taken, count);
  const uint64_t end = first + count;
  const bool next = words::load(ctx, &qp.ready) == first; /* then all below is rung, and a batch has room */
  const uint64_t rung = next ? first : words::load(ctx, &qp.rung);
  if (end - words::load(ctx, &qp.prefix) <= qp.depth && (next || end - rung <= qp.max_batch)) [[likely]] {
    *taken = {first, end, rung, next};
    return true;
  }
  bool held = next;
  if (!efa_wait_room<Sharing>(ctx, qp, first, count, peer, &held, status)) return false;
  *taken = {first, end, held ? first : rung, held};
  return true;
}

/* Writes WQE `number` by build(writer). */
template <class Ctx, class Build> EP_HD_SMALL void efa_write(Ctx& ctx, ep_efa_qp& qp, uint64_t number, const Build& build) {
  const uint64_t slot = number & (qp.depth - 1);
  const efa_writer<Ctx> writer{ctx, qp.sq + slot * qp.wqe_bytes, number, qp.wqe_bytes, (number & qp.depth) != 0 ? 1u : 0u,
                               (qp.flags & EP_EFA_QP_WIDE_ID) != 0};
  ctx.point();
  reinterpret_cast<ep_efa_request*>(qp.requests)[slot] = build(writer);
}

/* Waits for the turn of what was taken and written, rings or leaves that to others, and passes the turn on. */
template <uint32_t Sharing, class Ctx>
EP_HD_SMALL bool efa_publish(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken, const efa_post_options& options, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  uint64_t rung = taken.rung;
  if (!taken.held) {
    /* Who rings nothing has no use for the turn: it is passed on as it is. */
    const uint64_t turn = taken.first | EP_EFA_TURN_DEFERRED;
    if (options.deferred && taken.end - rung < qp.max_batch && words::load(ctx, &qp.ready) == turn) {
      register_fence(ctx);
      if (words::swap(ctx, &qp.ready, turn, taken.end | EP_EFA_TURN_DEFERRED)) [[likely]] return true;
    }
    if (!efa_turn_take<Sharing>(ctx, qp, taken.first) && !efa_wait_turn<Sharing>(ctx, qp, taken.first, options.peer, status)) return false;
    rung = words::load(ctx, &qp.rung);
  }
  const bool deferred = options.deferred && taken.end - rung < qp.max_batch;
  if (deferred) {
    register_fence(ctx);
  } else {
    efa_ring(ctx, qp, taken.end);
  }
  words::store(ctx, &qp.ready, deferred ? taken.end | EP_EFA_TURN_DEFERRED : taken.end);
  return true;
}

/* What nearly every call of the facade comes to: one WQE by one lane, without a loop. build(writer) writes it and returns its ep_efa_request. */
template <uint32_t Sharing, class Ctx, class Build>
EP_HD_SMALL bool efa_post_one(Ctx& ctx, ep_efa_qp& qp, const Build& build, const efa_post_options& options, ep_kernel_status* status) {
  efa_taken taken;
  if (!efa_take<Sharing>(ctx, qp, 1, options.peer, &taken, status)) [[unlikely]] return false;
  efa_write(ctx, qp, taken.first, build);
  return efa_publish<Sharing>(ctx, qp, taken, options, status);
}

/* One batch: at most max_batch WQEs, and depth. The number behind the last one, or efa_refused, on every lane.
 * All lanes release what they wrote but the first, which does so when it publishes. */
template <uint32_t Sharing, class Ctx, class Group, class Build>
EP_HD uint64_t efa_post_batch(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint32_t count, const Build& build, const efa_post_options& options,
                              ep_kernel_status* status) {
  efa_taken taken{efa_refused, efa_refused, 0, false};
  if (group.lane() == 0) efa_take<Sharing>(ctx, qp, count, options.peer, &taken, status);
  const uint64_t first = group.from_first(taken.first);
  if (first == efa_refused) return first;
  for (uint32_t i = group.lane(); i < count; i += group.lanes()) {
    efa_write(ctx, qp, first + i, [&](const efa_writer<Ctx>& writer) { return build(i, writer); });
  }
  if (group.lane() != 0 && group.lane() < count) register_fence(ctx);
  group.sync();
  if (group.lane() == 0 && !efa_publish<Sharing>(ctx, qp, taken, options, status)) taken.end = efa_refused;
  return group.from_first(taken.end);
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
    end = efa_post_batch<Sharing>(ctx, group, qp, batch, part, options, status);
    if (end == efa_refused) return end;
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
