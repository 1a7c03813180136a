/* Cooperation scopes: which lanes do a thing together.
 *
 * A context (Ctx) is the machine that a kernel runs on. It offers:
 *   block(), blocks()            this block and how many run
 *   lane(), lanes()              this lane and how many a block has
 *   warp_lanes()                 lanes of a warp
 *   sync_block(), sync_block_and(bool), sync_warp(), sync_grid()
 *   shuffle(value, lane), ballot(bool), match_any(value)        within a warp
 *   point()                      a place where the simt executor may switch
 *   wait(word, value, rank, stage, status)  until *word >= value; false when the wait ended otherwise, with *status filled in
 *   wait_equal(...)                         the same until *word == value; only for the `compat` kernel: a value that passes by is missed
 *   wait_for(look, expected, rank, stage, status)   until look(&found), which may be called by another lane's stack: it never calls point()
 *   fail(status, EP_STATUS_*, rank, stage, expected, found)  how the kernel failed, if nobody has said so before
 *   clock_ns()                   for statistics only
 *   wake(address of ep_wake_word)           after a signal: wakes sleepers of that rank
 *   static constexpr bool wakes_nobody      only where wake does nothing: no fence is needed before it
 *   static constexpr bool never_sleeps      only where waits look until they find: one lane may look for all, and nobody wakes the others
 *   static constexpr bool single_lane       true where a block is one lane (the host's `fast` executor)
 *
 * Which copy path runs is decided by the scope's `single` member, never by __CUDA_ARCH__: otherwise the simt executor would never run the
 * path that the GPU takes. */
#ifndef EP_DEVICE_COOP_H
#define EP_DEVICE_COOP_H

#include "config.h"

EP_MACHINE_BEGIN

template <class Ctx> struct thread_coop {
  static constexpr bool single = true;
  Ctx& ctx;
  EP_HD uint32_t lane() const { return 0; }
  EP_HD uint32_t lanes() const { return 1; }
  EP_HD void sync() const {}
  EP_HD bool sync_and(bool value) const { return value; }
};

template <class Ctx> struct warp_coop {
  static constexpr bool single = Ctx::single_lane;
  Ctx& ctx;
  EP_HD uint32_t lane() const { return ctx.lane() % ctx.warp_lanes(); }
  EP_HD uint32_t lanes() const { return ctx.warp_lanes(); }
  EP_HD void sync() const { ctx.sync_warp(); }
  EP_HD bool sync_and(bool value) const { return ctx.ballot(!value) == 0; }
};

template <class Ctx> struct block_coop {
  static constexpr bool single = Ctx::single_lane;
  Ctx& ctx;
  EP_HD uint32_t lane() const { return ctx.lane(); }
  EP_HD uint32_t lanes() const { return ctx.lanes(); }
  EP_HD void sync() const { ctx.sync_block(); }
  EP_HD bool sync_and(bool value) const { return ctx.sync_block_and(value); }
};

EP_MACHINE_END

#endif
