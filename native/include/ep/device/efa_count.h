/* Signals and counters of EFA: counts that the NIC keeps in memory, which nobody else writes and of which 31 bits mean something. */
#ifndef EP_DEVICE_EFA_COUNT_H
#define EP_DEVICE_EFA_COUNT_H

#include "ep/abi/efa_cqe.h"
#include "ep/abi/efa_gda.h"
#include "efa_queue.h"

EP_MACHINE_BEGIN

/* `raw` as if it had 64 bits, where `last` is what it was before. HAZARD: a count must be looked at before it has moved by 2^30, or it seems to stand still. */
EP_HD uint64_t efa_widen(uint64_t last, uint64_t raw) {
  const uint64_t step = (raw - last) & EP_EFA_COUNTER_MASK;
  return step <= EP_EFA_COUNTER_MASK / 2 ? last + step : last; /* otherwise `last` is newer: another reader was faster */
}

/* Whether a value of `bits` bits that wraps, 1 to 64, has reached another one. */
EP_HD bool efa_reached(uint64_t value, uint64_t wanted, uint32_t bits) {
  const uint64_t mask = bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  return ((value - wanted) & mask) <= mask / 2;
}

/* A look that finds the count this far from where it was last read has whoever waits read it again, so that the next look starts from there. HAZARD: looks write
 * nothing, and a wait for more than 2^30 would otherwise see the count stand still when it has come that far. */
constexpr uint64_t efa_count_far = (EP_EFA_COUNTER_MASK + uint64_t{1}) / 8;

template <class Ctx> EP_HD uint64_t efa_count_widened(Ctx& ctx, ep_efa_count& count) {
  const uint64_t last = load_acquire(ctx, &count.widened);
  const uint64_t now = efa_widen(last, load_acquire(ctx, reinterpret_cast<const uint64_t*>(count.count)));
  if (now != last) poster_words<EP_EFA_SHARE_DEVICE>::raise(ctx, &count.widened, now);
  return now;
}

/* Since the last reset. */
template <class Ctx> EP_HD uint64_t efa_count_read(Ctx& ctx, ep_efa_count& count) {
  const uint64_t now = efa_count_widened(ctx, count);
  return now - load_relaxed(ctx, &count.offset);
}

/* Zero is wherever the count stands now: its memory is the NIC's. HAZARD: not beside a wait for the same count, nor while it moves. */
template <class Ctx> EP_HD void efa_count_reset(Ctx& ctx, ep_efa_count& count) { store_release(ctx, &count.offset, efa_count_widened(ctx, count)); }

/* For whoever looks at the count himself: (*pointer - offset) & EP_EFA_COUNTER_MASK. */
struct efa_count_pointer {
  const uint64_t* pointer;
  uint64_t offset;
};

template <class Ctx> EP_HD efa_count_pointer efa_pointer_of(Ctx& ctx, const ep_efa_count& count) {
  return {reinterpret_cast<const uint64_t*>(count.count), load_relaxed(ctx, &count.offset) & EP_EFA_COUNTER_MASK};
}

/* What ends a wait for a count besides its value: arrivals that failed, or (`qp`) a completion of one's own, which says more than a count of failures that
 * may come before it. */
struct efa_count_wait_look {
  const ep_efa_count& count;
  const ep_efa_qp* qp;
  const uint64_t* broken;
  uint64_t wanted;
  uint32_t bits;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    const uint64_t last = load_acquire(here, &count.widened);
    const uint64_t now = efa_widen(last, load_acquire(here, reinterpret_cast<const uint64_t*>(count.count)));
    *found = now - load_relaxed(here, &count.offset);
    if (efa_reached(*found, wanted, bits) || now - last >= efa_count_far || load_acquire(here, broken) != 0) return true;
    return qp != nullptr ? efa_has_completion(*qp) : load_acquire(here, reinterpret_cast<const uint64_t*>(count.failed)) != 0;
  }
};

EP_MACHINE_END

#endif
