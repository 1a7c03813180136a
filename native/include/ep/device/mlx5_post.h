/* Ways to post WQEs to an mlx5 queue pair.
 *
 * A post of `count` WQEs: take numbers, wait until the ring has room for them, write, wait for the turn, publish, ring once; or mark as written, and let one
 * poster ring for all.
 * HAZARD: room is awaited for the numbers that were taken. Looked for before, it may be gone to others by then, and a WQE that the NIC has not read is
 * overwritten.
 *
 * How posters share the queue pair is a template parameter (EP_IBGDA_SHARE_*), and how they post is another: `post_in_turn`, `post_by_ringer`, and
 * `post_under_lock`, the spin lock with a doorbell for each WQE that ours are measured against. */
#ifndef EP_DEVICE_MLX5_POST_H
#define EP_DEVICE_MLX5_POST_H

#include "marks.h"
#include "mlx5_queue.h"

EP_MACHINE_BEGIN

constexpr uint64_t mlx5_refused = UINT64_MAX;

/* The first lane's part before WQEs are written: the number of the first, or mlx5_refused. */
template <uint32_t Sharing, class Ctx> EP_HD_SMALL uint64_t mlx5_take(Ctx& ctx, ep_ibgda_qp& qp, uint32_t count, ep_kernel_status* status) {
  using words = poster_words<Sharing>;
  if (mlx5_state(ctx, qp) != EP_IBGDA_SOUND) [[unlikely]] {
    mlx5_report(ctx, qp, status);
    return mlx5_refused;
  }
  const uint64_t first = words::add(ctx, &qp.taken, count);
  const uint64_t end = first + count;
  /* As far as was seen when somebody looked last; `done` is never above what was taken. */
  if (end - words::load(ctx, &qp.done) <= qp.depth) [[likely]] return first;
  if (mlx5_wait_done<Sharing>(ctx, qp, end - qp.depth, EP_STAGE_ROOM, status)) return first;
  mlx5_break(ctx, qp, EP_STATUS_CLOSED, 0, 0, first);
  return mlx5_refused;
}

struct mlx5_turn_look {
  ep_ibgda_qp& qp;
  uint64_t first;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, &qp.ready);
    return *found == first || load_acquire(here, &qp.broken) != EP_IBGDA_SOUND;
  }
};

template <uint32_t Sharing, class Ctx> EP_HD_SELDOM bool mlx5_wait_turn(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, ep_kernel_status* status) {
  if (!ctx.wait_for(mlx5_turn_look{qp, first}, first, qp.peer, EP_STAGE_TURN, status)) {
    mlx5_break(ctx, qp, EP_STATUS_CLOSED, 0, 0, first);
    return false;
  }
  return poster_words<Sharing>::load(ctx, &qp.ready) == first || mlx5_report(ctx, qp, status);
}

/* A way to post offers: post<Sharing>(ctx, group, qp, count, build, status), which returns the number of the first WQE or mlx5_refused, on every lane.
 * `count` is at most qp.depth. build(i, writer) writes WQE i of the post. The last one of a post asks for a CQE, so `count` WQEs make room again at once. */
template <class Ctx, class Group, class Build>
EP_HD void mlx5_build(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, uint64_t first, uint32_t count, const Build& build) {
  for (uint32_t i = group.lane(); i < count; i += group.lanes()) {
    const uint64_t number = first + i;
    ctx.point();
    build(i, mlx5_writer{reinterpret_cast<vector16*>(qp.sq + (number & (qp.depth - 1)) * EP_IBGDA_WQE_BYTES), qp.qpn, number, i + 1 == count});
  }
  group.sync();
}

/* Whose turn it is rings, then passes the turn on. */
struct post_in_turn {
  static constexpr bool whole = true; /* a post has one doorbell */

  /* WQEs that have been posted. */
  template <class Ctx> EP_HD static uint64_t posted(Ctx& ctx, ep_ibgda_qp& qp) { return load_acquire(ctx, &qp.ready); }

  template <uint32_t Sharing, class Ctx, class Group, class Build>
  EP_HD static uint64_t post(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, uint32_t count, const Build& build, ep_kernel_status* status) {
    uint64_t first = mlx5_refused;
    if (group.lane() == 0) first = mlx5_take<Sharing>(ctx, qp, count, status);
    first = group.from_first(first);
    if (first == mlx5_refused) return first;
    mlx5_build(ctx, group, qp, first, count, build);
    if (group.lane() == 0) {
      if (poster_words<Sharing>::load(ctx, &qp.ready) == first || mlx5_wait_turn<Sharing>(ctx, qp, first, status)) {
        mlx5_ring(ctx, qp, first + count);
        poster_words<Sharing>::store(ctx, &qp.ready, first + count);
      } else {
        first = mlx5_refused;
      }
    }
    return group.from_first(first);
  }
};

EP_HD slot_marks mlx5_marks(const ep_ibgda_qp& qp) { return {reinterpret_cast<uint64_t*>(qp.marks), qp.depth}; }

/* Rings for all up to the first number that is not marked, unless somebody else will. By whoever has marked some. */
template <uint32_t Sharing, class Ctx> EP_HD void mlx5_ring_marked(Ctx& ctx, ep_ibgda_qp& qp) {
  using words = poster_words<Sharing>;
  for (;;) {
    /* Whoever finds a ringer leaves: that one ends by an exchange that sees this look, and then looks at the marks again. */
    const uint64_t held = words::set(ctx, &qp.ringer, 1);
    if ((held & 1) != 0) return;
    const uint64_t rung = held / 2;
    const uint64_t end = mlx5_marks(qp).template first_unmarked<Sharing>(ctx, rung);
    if (end != rung) mlx5_ring(ctx, qp, end);
    words::exchange(ctx, &qp.ringer, end * 2);
    const uint64_t taken = words::load(ctx, &qp.taken);
    if (taken == end) return;
    const uint64_t marked = mlx5_marks(qp).template first_unmarked<Sharing>(ctx, end);
    if (marked == end) return;
    /* Whoever took that number has not marked it, and comes here when he has. HAZARD: not if he waits for room that the next doorbell makes. */
    if (taken > marked && taken - end <= qp.depth) return;
  }
}

/* No turns: whoever has written marks that, and leaves; one of them rings for all. Fewer doorbells where posters meet, and none of them waits for another one,
 * unless for room. */
struct post_by_ringer {
  static constexpr bool whole = true;

  /* What will have been rung for once all posts that have begun are over. */
  template <class Ctx> EP_HD static uint64_t posted(Ctx& ctx, ep_ibgda_qp& qp) { return load_acquire(ctx, &qp.taken); }

  template <uint32_t Sharing, class Ctx, class Group, class Build>
  EP_HD static uint64_t post(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, uint32_t count, const Build& build, ep_kernel_status* status) {
    if constexpr (poster_words<Sharing>::alone) {
      return post_in_turn::post<Sharing>(ctx, group, qp, count, build, status);
    } else {
      uint64_t first = mlx5_refused;
      if (group.lane() == 0) first = mlx5_take<Sharing>(ctx, qp, count, status);
      first = group.from_first(first);
      if (first == mlx5_refused) return first;
      mlx5_build(ctx, group, qp, first, count, build);
      if (group.lane() == 0) {
        mlx5_marks(qp).template mark<Sharing>(ctx, first, count);
        mlx5_ring_marked<Sharing>(ctx, qp);
      }
      return first;
    }
  }
};

/* As Mooncake posts, with a room check, which is not there: a lock for each WQE, and a doorbell of its first 8 bytes to alternate halves of the register. */
struct post_under_lock {
  static constexpr bool whole = false; /* no WQE of several WQEBBs */
  template <class Ctx> EP_HD static uint64_t posted(Ctx& ctx, ep_ibgda_qp& qp) { return load_acquire(ctx, &qp.ready); }
  using words = poster_words<EP_IBGDA_SHARE_DEVICE>;
  using alone = poster_words<EP_IBGDA_SHARE_THREAD>;

  struct lock_look {
    ep_ibgda_qp& qp;
    EP_HD bool operator()(uint64_t* found) const {
      no_point here;
      *found = load_relaxed(here, &qp.lock);
      return *found == 0;
    }
  };

  template <uint32_t Sharing, class Ctx, class Group, class Build>
  EP_HD static uint64_t post(Ctx& ctx, const Group& group, ep_ibgda_qp& qp, uint32_t count, const Build& build, ep_kernel_status* status) {
    uint64_t first = mlx5_refused;
    if (group.lane() == 0) {
      for (uint32_t i = 0; i < count; ++i) {
        const uint64_t number = post_one(ctx, qp, i, build, status);
        if (number == mlx5_refused) {
          first = mlx5_refused;
          break;
        }
        if (i == 0) first = number;
      }
    }
    return group.from_first(first);
  }

  /* Under the lock: nobody else takes numbers, but others may look for completions. */
  template <class Ctx> EP_HD static uint64_t take_one(Ctx& ctx, ep_ibgda_qp& qp, ep_kernel_status* status) {
    if (mlx5_state(ctx, qp) != EP_IBGDA_SOUND) {
      mlx5_report(ctx, qp, status);
      return mlx5_refused;
    }
    const uint64_t number = alone::add(ctx, &qp.taken, 1);
    if (number + 1 - words::load(ctx, &qp.done) <= qp.depth) [[likely]] return number;
    if (mlx5_wait_done<EP_IBGDA_SHARE_DEVICE>(ctx, qp, number + 1 - qp.depth, EP_STAGE_ROOM, status)) return number;
    mlx5_break(ctx, qp, EP_STATUS_CLOSED, 0, 0, number);
    return mlx5_refused;
  }

  template <class Ctx, class Build>
  EP_HD static uint64_t post_one(Ctx& ctx, ep_ibgda_qp& qp, uint32_t i, const Build& build, ep_kernel_status* status) {
    while (!words::flag_take(ctx, &qp.lock)) {
      /* Backs off: only looks, until the lock is free. */
      if (!ctx.wait_for(lock_look{qp}, 0, qp.peer, EP_STAGE_TURN, status)) return mlx5_refused;
    }
    const uint64_t number = take_one(ctx, qp, status);
    if (number != mlx5_refused) {
      auto* wqe = reinterpret_cast<vector16*>(qp.sq + (number & (qp.depth - 1)) * EP_IBGDA_WQE_BYTES);
      build(i, mlx5_writer{wqe, qp.qpn, number, true});
      mlx5_ring(ctx, qp, number + 1, static_cast<uint64_t>(wqe->word[1]) << 32 | wqe->word[0], qp.bf_offset);
      qp.bf_offset ^= EP_MLX5_BF_HALF_BYTES;
      alone::store(ctx, &qp.ready, number + 1);
    }
    words::store(ctx, &qp.lock, 0);
    return number;
  }
};

EP_MACHINE_END

#endif
