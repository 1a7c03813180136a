/* An EFA queue pair under its posters: completions, failure, the doorbell. Posting itself is in efa_post.h.
 *
 * Completions come in any order. Those who need room or wait for the end of something take them out of the CQ and mark them, so that the number of WQEs that
 * have completed as have all before them (`prefix`) is known. HAZARD: a count of completions, the NIC's own included, says how many are done and not which.
 *
 * HAZARD: a queue pair whose poster gave up after it had taken numbers is broken: whoever took later ones would wait for its turn for ever. All waits end then. */
#ifndef EP_DEVICE_EFA_QUEUE_H
#define EP_DEVICE_EFA_QUEUE_H

#include "efa_wqe.h"
#include "ep/abi/dispatch.h"
#include "ep/abi/efa_cqe.h"
#include "ep/abi/status.h"
#include "posters.h"

EP_MACHINE_BEGIN

static_assert(EP_IBGDA_SHARE_DEVICE == EP_EFA_SHARE_DEVICE && EP_IBGDA_SHARE_BLOCK == EP_EFA_SHARE_BLOCK && EP_IBGDA_SHARE_THREAD == EP_EFA_SHARE_THREAD,
              "poster_words takes either");

/* The first 8 bytes of a completion, loaded at once. */
struct efa_cqe {
  uint64_t bits;
  EP_HD bool phase() const { return (bits >> 24 & 1) != 0; }
  EP_HD uint32_t status() const { return static_cast<uint32_t>(bits >> 16) & 0xffu; }
  EP_HD uint16_t id() const { return static_cast<uint16_t>(bits); }
};

/* What of a completion queue never changes: who takes many completions out loads it once. */
struct efa_cq {
  uint64_t base;
  uint64_t depth;
  uint64_t entry_bytes;
  bool wide_id;

  EP_HD explicit efa_cq(const ep_efa_qp& qp) : base(qp.cq), depth(qp.cq_depth), entry_bytes(qp.cq_entry_bytes), wide_id((qp.flags & EP_EFA_QP_WIDE_ID) != 0) {}
  EP_HD uint64_t entry(uint64_t polled) const { return base + (polled & (depth - 1)) * entry_bytes; }
  /* The first round of the ring has phase 1. */
  EP_HD uint64_t phase(uint64_t polled) const { return (polled & depth) == 0 ? 1 : 0; }
  template <class Ctx> EP_HD efa_cqe load(Ctx& ctx, uint64_t polled) const { return {load_acquire(ctx, reinterpret_cast<const uint64_t*>(entry(polled)))}; }
  EP_HD bool valid(uint64_t polled, const efa_cqe& cqe) const { return cqe.phase() == (phase(polled) != 0); }

  /* Number of the WQE that a completion is of. It is less than the send queue's depth behind the prefix, or the NIC has said something that cannot be. */
  template <class Ctx> EP_HD uint64_t number(Ctx& ctx, uint64_t polled, const efa_cqe& cqe, uint64_t prefix) const {
    if (!wide_id) return prefix + static_cast<uint16_t>(cqe.id() - static_cast<uint16_t>(prefix));
    const uint64_t high = load_relaxed(ctx, reinterpret_cast<const uint64_t*>(entry(polled) + 8));
    return cqe.id() | (cqe.bits >> 48) << 16 | (high & 0xffffffffu) << 32;
  }
  /* Completions of WQEs that follow each other and have succeeded. */
  struct run {
    uint64_t count;
    bool ended; /* what follows them is not there yet */
  };
  static constexpr uint32_t looks_ahead = 16; /* as many as a doorbell tells of */
  /* From completion `polled` on, those of WQEs polled, polled + 1 and so on: one comparison each says so. */
  template <class Ctx> EP_HD run in_order(Ctx& ctx, uint64_t polled) const {
    if (wide_id) return {0, false};
    const uint64_t place = polled & (depth - 1);
    const uint64_t round = depth - place; /* until phase and address jump */
    const uint64_t wraps = 0x10000u - (polled & 0xffffu);
    const uint64_t most = round < wraps ? round : wraps;
    const uint64_t first = (polled & 0xffffu) | phase(polled) << 24; /* id, EP_EFA_STATUS_OK, phase */
    const auto at = [&](uint64_t i) { return reinterpret_cast<const uint64_t*>(base + (place + i) * entry_bytes); };
    uint64_t i = 0;
    uint64_t last = 0;
    bool all = true;
    if constexpr (requires { Ctx::never_sleeps; }) {
      /* Several looks under way: one after the other, each as far as memory of the host is for a GPU, they took longer than all else of a put. */
      while (all && i < most) {
        uint64_t held[looks_ahead];
        const uint64_t from = i;
        EP_UNROLL for (uint32_t k = 0; k < looks_ahead; ++k) held[k] = load_relaxed(ctx, at(from + k < most ? from + k : from));
        EP_UNROLL for (uint32_t k = 0; k < looks_ahead; ++k) {
          if (!all || i == most) continue;
          last = held[k];
          all = (last & 0x1ffffffu) == first + i;
          if (all) ++i;
        }
      }
      if (i != 0) fence_order();
    } else {
      while (i < most) {
        last = load_acquire(ctx, at(i));
        all = (last & 0x1ffffffu) == first + i;
        if (!all) break;
        ++i;
      }
    }
    return {i, !all && !valid(polled + i, {last})};
  }
};
static_assert(EP_EFA_STATUS_OK == 0, "in_order compares with it");

template <class Ctx> EP_HD_SMALL uint64_t efa_state(Ctx& ctx, ep_efa_qp& qp) { return poster_words<EP_EFA_SHARE_DEVICE>::load(ctx, &qp.broken); }

/* Breaks the queue pair, unless it is broken. `number`: of the WQE that failed, or that a poster gave up (efa_status 0). */
template <class Ctx> EP_HD_SELDOM void efa_break(Ctx& ctx, ep_efa_qp& qp, uint32_t status, uint32_t efa_status, uint64_t number) {
  if (!reserve(ctx, &qp.broken, EP_EFA_SOUND)) return;
  ep_efa_request request{0, -1, 0}; /* of a WQE that was given up there may be none yet */
  if (efa_status != EP_EFA_STATUS_OK) request = reinterpret_cast<const ep_efa_request*>(qp.requests)[number & (qp.depth - 1)];
  qp.status = status;
  qp.efa_status = efa_status;
  qp.wqe = number;
  qp.remote_address = request.remote_address;
  qp.peer = request.peer;
  qp.slot = request.slot;
  store_release(ctx, &qp.broken, static_cast<uint64_t>(EP_EFA_BROKEN));
}

EP_HD uint32_t efa_status_of(uint32_t efa_status) {
  const bool silent = efa_status == EP_EFA_STATUS_UNRESPONSIVE || efa_status == EP_EFA_STATUS_UNREACHABLE;
  return silent ? EP_STATUS_PEER_LOST : EP_STATUS_SYSTEM;
}

/* Says that the queue pair is broken, and how. Always false. */
template <class Ctx> EP_HD_SELDOM bool efa_report(Ctx& ctx, ep_efa_qp& qp, ep_kernel_status* status) {
  if (!ctx.wait_for(word_look{&qp.broken, EP_EFA_BROKEN}, EP_EFA_BROKEN, -1, EP_STAGE_NIC, status)) return false; /* whoever found it writes a few words, the peer among them */
  const uint64_t found = static_cast<uint64_t>(qp.efa_status) << EP_NIC_FOUND_SYNDROME | (qp.wqe & 0xffffu) << EP_NIC_FOUND_INDEX |
                         static_cast<uint64_t>(qp.qpn) << EP_NIC_FOUND_QPN;
  ctx.fail(status, qp.status, qp.peer, EP_STAGE_NIC, qp.remote_address, found);
  return false;
}

/* Notes one completion; the prefix after it. By the poller. */
EP_HD uint64_t efa_finish(ep_efa_qp& qp, uint64_t prefix, uint64_t number) {
  auto* bits = reinterpret_cast<uint64_t*>(qp.finished);
  const uint64_t mask = qp.depth - 1;
  if (number != prefix) {
    bits[(number & mask) / 64] |= uint64_t{1} << (number & mask) % 64;
    return prefix;
  }
  for (;;) {
    ++prefix;
    uint64_t& word = bits[(prefix & mask) / 64];
    const uint64_t bit = uint64_t{1} << (prefix & mask) % 64;
    if ((word & bit) == 0) return prefix;
    word &= ~bit;
  }
}

/* Takes completions out of the CQ; how many WQEs have completed as have all before them. Breaks the queue pair when one has failed. */
template <uint32_t Sharing, class Ctx> EP_HD uint64_t efa_poll(Ctx& ctx, ep_efa_qp& qp) {
  using words = poster_words<Sharing>;
  if constexpr (one_polls<Sharing, Ctx>) {
    if (words::load(ctx, &qp.poller) != 0) return words::load(ctx, &qp.prefix);
  }
  if (!words::flag_take(ctx, &qp.poller)) return words::load(ctx, &qp.prefix);
  const efa_cq cq(qp);
  uint64_t prefix = words::load(ctx, &qp.prefix);
  uint64_t polled = qp.polled;
  uint64_t failed = 0;
  uint32_t failure = EP_EFA_STATUS_OK;
  bool ended = false;
  if (polled == prefix) { /* as many were taken out as are below the prefix: nothing is marked */
    for (;;) {
      const efa_cq::run run = cq.in_order(ctx, polled);
      polled += run.count;
      ended = run.ended;
      if (run.count == 0 || ended) break;
    }
    prefix = polled;
  }
  for (; !ended; ++polled) {
    const efa_cqe cqe = cq.load(ctx, polled);
    if (!cq.valid(polled, cqe)) break;
    const uint64_t number = cq.number(ctx, polled, cqe, prefix);
    if (number - prefix >= qp.depth || cqe.status() != EP_EFA_STATUS_OK) {
      /* A request is flushed because another one failed, whose completion may come behind it. */
      if (failure == EP_EFA_STATUS_OK || failure == EP_EFA_STATUS_FLUSHED) {
        failed = number;
        failure = cqe.status() != EP_EFA_STATUS_OK ? cqe.status() : EP_EFA_STATUS_LOCAL_QP_INTERNAL;
      }
      continue;
    }
    prefix = efa_finish(qp, prefix, number);
  }
  if (polled != qp.polled) {
    words::store(ctx, &qp.polled, polled);
    words::store(ctx, &qp.prefix, prefix);
    if (failure != EP_EFA_STATUS_OK) efa_break(ctx, qp, efa_status_of(failure), failure, failed);
  }
  words::flag_drop(ctx, &qp.poller);
  return prefix;
}

/* Whether a poll would find something. */
EP_HD bool efa_has_completion(const ep_efa_qp& qp) {
  no_point here;
  const efa_cq cq(qp);
  const uint64_t polled = load_relaxed(here, &qp.polled);
  return cq.valid(polled, cq.load(here, polled));
}

struct efa_done_look {
  ep_efa_qp& qp;
  uint64_t needed;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, &qp.prefix);
    return *found >= needed || load_acquire(here, &qp.broken) != EP_EFA_SOUND || efa_has_completion(qp);
  }
};

/* The same where one poster at a time polls. */
template <uint32_t Sharing> struct efa_polled_look {
  ep_efa_qp& qp;
  uint64_t needed;
  EP_HD bool operator()(uint64_t* found) const {
    polling_context here;
    *found = poster_words<Sharing>::load(here, &qp.prefix);
    if (*found >= needed || load_acquire(here, &qp.broken) != EP_EFA_SOUND) return true;
    *found = efa_poll<Sharing>(here, qp);
    return *found >= needed;
  }
};

/* Waits until all WQEs with numbers below `needed` have completed. They must have been rung. */
template <uint32_t Sharing, class Ctx>
EP_HD bool efa_wait_done(Ctx& ctx, ep_efa_qp& qp, uint64_t needed, int32_t peer, ep_kernel_status* status) {
  for (;;) {
    if (poster_words<Sharing>::load(ctx, &qp.prefix) >= needed || efa_poll<Sharing>(ctx, qp) >= needed) return true;
    if (efa_state(ctx, qp) != EP_EFA_SOUND) return efa_report(ctx, qp, status);
    bool found;
    if constexpr (one_polls<Sharing, Ctx>) found = ctx.wait_for(efa_polled_look<Sharing>{qp, needed}, needed, peer, EP_STAGE_COMPLETION, status);
    else found = ctx.wait_for(efa_done_look{qp, needed}, needed, peer, EP_STAGE_COMPLETION, status);
    if (!found) return false;
  }
}

/* Tells the NIC of all WQEs below `producer`, each of which its writer has fenced. By whoever may ring (efa_post.h): a doorbell never goes back. */
template <class Ctx> EP_HD_SMALL void efa_tell(Ctx& ctx, ep_efa_qp& qp, uint64_t producer) {
  register_store(ctx, qp.doorbell, static_cast<uint32_t>(producer));
  if (qp.nic_wake != 0) {
    register_fence(ctx);
    fence_system(ctx); /* the NIC's half of the eventcount: ring before looking for sleepers */
    ctx.wake(qp.nic_wake);
    store_release(ctx, &qp.rung, producer);
  } else {
    register_publish(ctx, &qp.rung, producer);
  }
}

/* The same behind what this lane has written.
 * HAZARD: the fence orders what this lane has written and what it has seen of others; a lane that wrote WQEs has fenced them itself (registers.h). */
template <class Ctx> EP_HD_SMALL void efa_ring(Ctx& ctx, ep_efa_qp& qp, uint64_t producer) {
  register_fence(ctx);
  efa_tell(ctx, qp, producer);
}

EP_MACHINE_END

#endif
