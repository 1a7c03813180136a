/* How WQEs are posted to an EFA queue pair.
 *
 * A post of `count` WQEs: take numbers, wait until the ring has room for them and no more than a batch would be written and not rung, write, release each
 * writer's stores, wait for the turn, ring or leave that to a later post, pass the turn on.
 * HAZARD: room is awaited for the numbers that were taken. Looked for before, it may be gone to others by then, and a WQE that the NIC has not read is
 * overwritten.
 * HAZARD: WQEs that were left unrung complete only when somebody rings. Whoever waits behind them (for room, for the batch, for their end) rings them itself
 * when it has the turn; nobody else will.
 *
 * Who may ring: whoever has the turn (`ready` is its number) and finds all WQEs below rung, for then nobody else has any to ring; and whoever holds `ringer`,
 * up to the turn. So what rings nothing, or rings at once, takes a number and needs no other locked operation.
 *
 * With `by_marks` in `Sharing` there are no turns: a post marks what it has written, in any order, and whoever holds `ringer` rings for all up to the first number that is not marked.
 * Kernels of a GPU do so, where a turn is passed on in some microseconds, whatever number of blocks waits for it. */
#ifndef EP_DEVICE_EFA_POST_H
#define EP_DEVICE_EFA_POST_H

#include "efa_queue.h"
#include "marks.h"

EP_MACHINE_BEGIN

constexpr uint64_t efa_refused = UINT64_MAX;

/* How posters that share so post on this machine. */
#if defined(__CUDACC__)
template <uint32_t Sharing> constexpr uint32_t efa_way = Sharing | by_marks;
#else
template <uint32_t Sharing> constexpr uint32_t efa_way = Sharing;
#endif
template <uint32_t Sharing> constexpr bool efa_in_turn = (Sharing & by_marks) == 0;

EP_HD slot_marks efa_marks(const ep_efa_qp& qp) { return {reinterpret_cast<uint64_t*>(qp.marks), qp.depth}; }

/* Whether something seems to be marked that nobody rings for. Orders nothing, so that a GPU loads all of it at once. */
template <class Ctx> EP_HD bool efa_is_left(Ctx& ctx, ep_efa_qp& qp) {
  const uint64_t ringer = load_relaxed(ctx, &qp.ringer);
  return efa_marks(qp).seems_marked(ctx, load_relaxed(ctx, &qp.rung)) && ringer == 0;
}

/* Rings for all that is marked, unless somebody else will. By whoever has marked some, or waits for some. */
template <uint32_t Sharing, class Ctx> EP_HD_SELDOM void efa_ring_marked(Ctx& ctx, ep_efa_qp& qp) {
  using words = poster_words<Sharing>;
  const slot_marks marks = efa_marks(qp);
  if constexpr (words::alone) {
    const uint64_t end = marks.template first_unmarked<Sharing>(ctx, qp.rung);
    if (end != qp.rung) efa_tell(ctx, qp, end);
  } else {
    /* Whoever finds the flag taken leaves: its holder drops it by an exchange that sees this one, and then looks at the marks again. */
    while (words::flag_take(ctx, &qp.ringer)) {
      const uint64_t rung = load_relaxed(ctx, &qp.rung); /* which the flag orders */
      const uint64_t end = marks.template first_unmarked<Sharing>(ctx, rung);
      if (end != rung) efa_tell(ctx, qp, end);
      words::flag_drop(ctx, &qp.ringer);
      const uint64_t taken = words::load(ctx, &qp.taken);
      if (taken == end) return;
      const uint64_t marked = marks.template first_unmarked<Sharing>(ctx, end);
      if (marked >= taken) continue;
      /* What is marked before that number, or behind it, is left to whoever has taken it and has not marked it: he sees so behind his mark, or by then has made it. While he waits for room he
       * rings anyway. */
      words::raise(ctx, &qp.left, marked + 1);
      if (!marks.template is_marked<Sharing>(ctx, marked)) return;
    }
  }
}

/* Rings what is published and not rung, unless somebody else is about to; false: there is nothing to do, or it is left to him.
 * HAZARD: `rung` is loaded behind `ready`. Less than a turn that had come before, it stays so until `ringer` is held; loaded first, it may be old, and whoever has
 * the turn rings a later number meanwhile. */
template <uint32_t Sharing, class Ctx> EP_HD_SELDOM bool efa_ring_left(Ctx& ctx, ep_efa_qp& qp) {
  using words = poster_words<Sharing>;
  if (!words::flag_take(ctx, &qp.ringer)) return false;
  const uint64_t ready = words::load(ctx, &qp.ready);
  const bool left = words::load(ctx, &qp.rung) < ready;
  if (left) efa_ring(ctx, qp, ready);
  words::store(ctx, &qp.ringer, 0);
  return left;
}

/* Whether numbers first to first + count - 1 may be written, or something can be done about it. Orders nothing: whoever has waited looks again. */
template <uint32_t Sharing, class Ctx> struct efa_room_look {
  ep_efa_qp& qp;
  uint64_t first;
  uint32_t count;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_relaxed(here, &qp.prefix);
    const uint64_t broken = load_relaxed(here, &qp.broken);
    const uint64_t rung = load_relaxed(here, &qp.rung);
    if (broken != EP_EFA_SOUND) return true;
    const bool room = first + count <= *found + qp.depth;
    if (room && first + count <= rung + qp.max_batch) return true;
    if constexpr (one_polls<Sharing, Ctx>) {
      polling_context polling;
      if (!room && efa_poll<Sharing>(polling, qp) != *found) return true;
    } else {
      if (!room && efa_has_completion(qp)) return true;
    }
    if constexpr (!efa_in_turn<Sharing>) return efa_is_left(here, qp);
    return (load_acquire(here, &qp.ready) == first && load_acquire(here, &qp.rung) < first && load_acquire(here, &qp.ringer) == 0);
  }
};

/* Waits for room. What was left unrung by those before is rung, if nothing else can be done. */
template <uint32_t Sharing, class Ctx>
EP_HD_SELDOM bool efa_wait_room(Ctx& ctx, ep_efa_qp& qp, uint64_t first, uint32_t count, int32_t peer, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  for (;;) {
    const bool room = first + count <= words::load(ctx, &qp.prefix) + qp.depth || first + count <= efa_poll<Sharing>(ctx, qp) + qp.depth;
    if (room && first + count <= words::load(ctx, &qp.rung) + qp.max_batch) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    if constexpr (!efa_in_turn<Sharing>) {
      if (efa_is_left(ctx, qp)) {
        efa_ring_marked<Sharing>(ctx, qp);
        continue;
      }
    } else if (words::load(ctx, &qp.ready) == first && efa_ring_left<Sharing>(ctx, qp)) {
      continue;
    }
    if (!ctx.wait_for(efa_room_look<Sharing, Ctx>{qp, first, count}, first + count - qp.depth, peer, EP_STAGE_ROOM, status)) {
      efa_break(ctx, qp, EP_STATUS_CLOSED, EP_EFA_STATUS_OK, first);
      return false;
    }
  }
}

/* A word of the queue pair has a value, or it is broken. */
struct efa_word_look {
  ep_efa_qp& qp;
  uint64_t* word;
  uint64_t value;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, word);
    return *found == value || load_acquire(here, &qp.broken) != EP_EFA_SOUND;
  }
};

template <uint32_t Sharing, class Ctx> EP_HD_SELDOM bool efa_wait_turn(Ctx& ctx, ep_efa_qp& qp, uint64_t first, int32_t peer, ep_kernel_status* status) {
  for (;;) {
    if (poster_words<Sharing>::load(ctx, &qp.ready) == first) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    if (!ctx.wait_for(efa_word_look{qp, &qp.ready, first}, first, peer, EP_STAGE_TURN, status)) {
      efa_break(ctx, qp, EP_STATUS_CLOSED, EP_EFA_STATUS_OK, first);
      return false;
    }
  }
}

/* Rings below `end`, when nobody else rings any more. By whoever has the turn of `first`, with WQEs below it that may be unrung. */
template <uint32_t Sharing, class Ctx>
EP_HD_SELDOM bool efa_ring_all(Ctx& ctx, ep_efa_qp& qp, uint64_t first, uint64_t end, int32_t peer, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  while (!words::flag_take(ctx, &qp.ringer)) {
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    if (!ctx.wait_for(efa_word_look{qp, &qp.ringer, 0}, first, peer, EP_STAGE_TURN, status)) {
      efa_break(ctx, qp, EP_STATUS_CLOSED, EP_EFA_STATUS_OK, first);
      return false;
    }
  }
  efa_ring(ctx, qp, end);
  words::store(ctx, &qp.ringer, 0);
  return true;
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
  uint64_t prefix; /* the same */
};

/* Takes `count` numbers and waits until their WQEs may be written. */
template <uint32_t Sharing, class Ctx>
EP_HD_SMALL bool efa_take(Ctx& ctx, ep_efa_qp& qp, uint32_t count, int32_t peer, efa_taken* taken, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  uint64_t rung = 0;
  uint64_t prefix = 0;
  if constexpr (!efa_in_turn<Sharing>) { /* all at once: each is a way through the caches of a GPU */
    rung = load_relaxed(ctx, &qp.rung);
    prefix = load_relaxed(ctx, &qp.prefix);
  }
  if (efa_state(ctx, qp) != EP_EFA_SOUND) [[unlikely]] {
    efa_report(ctx, qp, status);
    return false;
  }
  const uint64_t first = words::add(ctx, &qp.taken, count);
  const uint64_t end = first + count;
  if constexpr (!efa_in_turn<Sharing>) {
    words::acquire_loaded();
  } else {
    rung = words::load(ctx, &qp.rung);
    prefix = words::load(ctx, &qp.prefix);
  }
  *taken = {first, end, rung, prefix};
  if (end - prefix <= qp.depth && end - rung <= qp.max_batch) [[likely]] return true;
  return efa_wait_room<Sharing>(ctx, qp, first, count, peer, status);
}

/* Writes WQE `number` by build(writer). */
template <class Ctx, class Build> EP_HD_SMALL void efa_write(Ctx& ctx, ep_efa_qp& qp, uint64_t number, const Build& build) {
  const uint64_t slot = number & (qp.depth - 1);
  const efa_writer<Ctx> writer{ctx, qp.sq + slot * qp.wqe_bytes, number, qp.wqe_bytes, (number & qp.depth) != 0 ? 1u : 0u,
                               (qp.flags & EP_EFA_QP_WIDE_ID) != 0};
  ctx.point();
  reinterpret_cast<ep_efa_request*>(qp.requests)[slot] = build(writer);
}

/* Completions are taken out before room runs out, by one who has nothing else to do for others, while those go on: each look at the CQ may be one across the bus, and where all wait for room they wait for as many looks as the ring has WQEs. */
template <uint32_t Sharing, class Ctx> EP_HD void efa_poll_ahead(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken) {
  if constexpr (!poster_words<Sharing>::alone) {
    if (taken.end - taken.prefix > qp.depth / 2 && taken.end - poster_words<Sharing>::load(ctx, &qp.prefix) > qp.depth / 2) efa_poll<Sharing>(ctx, qp);
  }
}

/* Waits for the turn of what was taken and written, rings or leaves that to others, and passes the turn on; or marks it and rings or leaves that: then this lane has fenced what it wrote, too. */
template <uint32_t Sharing, class Ctx>
EP_HD_SMALL bool efa_publish(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken, const efa_post_options& options, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  if constexpr (!efa_in_turn<Sharing>) {
    efa_marks(qp).template mark<Sharing, true>(ctx, taken.first, static_cast<uint32_t>(taken.end - taken.first));
    const bool is_last = words::alone || load_relaxed(ctx, &qp.taken) == taken.end; /* others would soon wait for the batch */
    const bool leaves = options.deferred && is_last && (taken.end - taken.rung < qp.max_batch || taken.end - words::load(ctx, &qp.rung) < qp.max_batch);
    if constexpr (words::alone) {
      if (!leaves) efa_tell(ctx, qp, taken.end);
    } else if (!leaves || words::load(ctx, &qp.left) == taken.first + 1) {
      efa_ring_marked<Sharing>(ctx, qp);
    }
    efa_poll_ahead<Sharing>(ctx, qp, taken);
    return true;
  }
  if (words::load(ctx, &qp.ready) != taken.first && !efa_wait_turn<Sharing>(ctx, qp, taken.first, options.peer, status)) [[unlikely]] return false;
  if (options.deferred && (taken.end - taken.rung < qp.max_batch || taken.end - words::load(ctx, &qp.rung) < qp.max_batch)) {
    register_fence(ctx);
  } else if (words::load(ctx, &qp.rung) == taken.first) {
    efa_ring(ctx, qp, taken.end);
  } else if (!efa_ring_all<Sharing>(ctx, qp, taken.first, taken.end, options.peer, status)) {
    return false;
  }
  words::store(ctx, &qp.ready, taken.end);
  return true;
}

/* What nearly every call of the facade comes to: one WQE by one lane, without a loop. build(writer) writes it and returns its ep_efa_request. */
template <uint32_t Sharing, class Ctx, class Build>
EP_HD_SMALL bool efa_post_one(Ctx& ctx, ep_efa_qp& qp, const Build& build, const efa_post_options& options, ep_kernel_status* status) {
  constexpr uint32_t way = efa_way<Sharing>;
  efa_taken taken;
  if (!efa_take<way>(ctx, qp, 1, options.peer, &taken, status)) [[unlikely]] return false;
  efa_write(ctx, qp, taken.first, build);
  if constexpr (!efa_in_turn<way>) register_fence(ctx);
  return efa_publish<way>(ctx, qp, taken, options, status);
}

/* One batch: at most max_batch WQEs, and depth. The number behind the last one, or efa_refused, on every lane.
 * All lanes release what they wrote; in turn but the first, which does so when it publishes. */
template <uint32_t Sharing, class Ctx, class Group, class Build>
EP_HD uint64_t efa_post_batch(Ctx& ctx, const Group& group, ep_efa_qp& qp, uint32_t count, const Build& build, const efa_post_options& options,
                              ep_kernel_status* status) {
  efa_taken taken{efa_refused, efa_refused, 0, 0};
  if (group.lane() == 0) efa_take<Sharing>(ctx, qp, count, options.peer, &taken, status);
  const uint64_t first = group.from_first(taken.first);
  if (first == efa_refused) return first;
  for (uint32_t i = group.lane(); i < count; i += group.lanes()) {
    efa_write(ctx, qp, first + i, [&](const efa_writer<Ctx>& writer) { return build(i, writer); });
  }
  if ((!efa_in_turn<Sharing> || group.lane() != 0) && group.lane() < count) register_fence(ctx);
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
    end = efa_post_batch<efa_way<Sharing>>(ctx, group, qp, batch, part, options, status);
    if (end == efa_refused) return end;
  }
  return end;
}

template <uint32_t Sharing> struct efa_tail_look {
  ep_efa_qp& qp;
  uint64_t needed;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, &qp.rung);
    if (*found >= needed || load_acquire(here, &qp.broken) != EP_EFA_SOUND) return true;
    if constexpr (!efa_in_turn<Sharing>) return efa_is_left(here, qp);
    return load_acquire(here, &qp.ringer) == 0;
  }
};

/* Rings what was left, at least below `needed`, which has been published, or, out of turn, taken. */
template <uint32_t Sharing, class Ctx> EP_HD bool efa_ring_tail(Ctx& ctx, ep_efa_qp& qp, uint64_t needed, ep_kernel_status* status) {
  for (;;) {
    if (poster_words<Sharing>::load(ctx, &qp.rung) >= needed) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    if constexpr (!efa_in_turn<Sharing>) {
      efa_ring_marked<Sharing>(ctx, qp);
      if (poster_words<Sharing>::load(ctx, &qp.rung) >= needed) return true;
      if (!ctx.wait_for(efa_tail_look<Sharing>{qp, needed}, needed, -1, EP_STAGE_TURN, status)) return false;
    } else if (!efa_ring_left<Sharing>(ctx, qp) && !ctx.wait_for(efa_tail_look<Sharing>{qp, needed}, needed, -1, EP_STAGE_TURN, status)) {
      return false;
    }
  }
}

/* Rings what was left of the WQEs that are published now (out of turn: that have been begun) and waits until all of them have completed. Others go on posting meanwhile. */
template <uint32_t Sharing, class Ctx> EP_HD bool efa_quiet(Ctx& ctx, ep_efa_qp& qp, ep_kernel_status* status) {
  constexpr uint32_t way = efa_way<Sharing>;
  const uint64_t posted = poster_words<way>::load(ctx, efa_in_turn<way> ? &qp.ready : &qp.taken);
  return efa_ring_tail<way>(ctx, qp, posted, status) && efa_wait_done<way>(ctx, qp, posted, -1, status);
}

EP_MACHINE_END

#endif
