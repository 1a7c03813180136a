/* An mlx5 queue pair under its posters: their shared words, completions, failure, the doorbell. Posting itself is in mlx5_post.h.
 *
 * HAZARD: a queue pair whose poster gave up after it had taken numbers is broken: whoever took later ones would wait for its turn for ever. All waits end then. */
#ifndef EP_DEVICE_MLX5_QUEUE_H
#define EP_DEVICE_MLX5_QUEUE_H

#include "ep/abi/dispatch.h"
#include "ep/abi/mlx5_cqe.h"
#include "ep/abi/status.h"
#include "mlx5_wqe.h"
#include "order.h"
#include "posters.h"

EP_MACHINE_BEGIN

/* The last 8 bytes of a CQE, loaded at once. */
struct mlx5_cqe_tail {
  uint64_t bits;
  EP_HD uint32_t opcode() const { return static_cast<uint32_t>(bits >> 60); }
  EP_HD bool owner() const { return (bits >> 56 & 1) != 0; }
  EP_HD uint16_t counter() const { return static_cast<uint16_t>(be32(static_cast<uint32_t>(bits >> 32)) >> 16); }
};

template <class Ctx> EP_HD mlx5_cqe_tail mlx5_cqe_load(Ctx& ctx, uint64_t cqe) {
  return {load_acquire(ctx, reinterpret_cast<const uint64_t*>(cqe + 56))};
}

/* Whether a NIC has refused what was asked of it here, which no peer is to blame for. */
EP_HD constexpr bool mlx5_is_local(uint32_t syndrome) {
  return syndrome == EP_MLX5_SYNDROME_LOCAL_LENGTH || syndrome == EP_MLX5_SYNDROME_LOCAL_QP_OPERATION || syndrome == EP_MLX5_SYNDROME_LOCAL_PROTECTION ||
         syndrome == EP_MLX5_SYNDROME_MEMORY_WINDOW_BIND || syndrome == EP_MLX5_SYNDROME_LOCAL_ACCESS;
}

/* Number of the WQE with this 16-bit index, if it is one of the 2^16 from `done` on. */
EP_HD uint64_t mlx5_number(uint64_t done, uint16_t index) { return done + static_cast<uint16_t>(index - static_cast<uint16_t>(done)); }

EP_HD uint64_t mlx5_ring_entry(const ep_ibgda_qp& qp, uint64_t polled) { return qp.cq + (polled & (qp.cq_depth - 1)) * EP_MLX5_CQE_SIZE; }
EP_HD bool mlx5_ring_valid(const ep_ibgda_qp& qp, uint64_t polled, const mlx5_cqe_tail& tail) {
  return tail.opcode() != EP_MLX5_CQE_INVALID && tail.owner() == ((polled & qp.cq_depth) != 0);
}

template <class Ctx> EP_HD uint64_t mlx5_state(Ctx& ctx, ep_ibgda_qp& qp) { return poster_words<EP_IBGDA_SHARE_DEVICE>::load(ctx, &qp.broken); }

/* Breaks the queue pair, unless it is broken. `number`: of the WQE that failed, or that a poster gave up. */
template <class Ctx>
EP_HD_SELDOM void mlx5_break(Ctx& ctx, ep_ibgda_qp& qp, uint32_t status, uint32_t syndrome, uint32_t vendor, uint64_t number) {
  if (!reserve(ctx, &qp.broken, EP_IBGDA_SOUND)) return;
  const auto* wqe = reinterpret_cast<const uint32_t*>(qp.sq + (number & (qp.depth - 1)) * EP_IBGDA_WQE_BYTES);
  const bool failed = syndrome != 0; /* otherwise the slot may hold another WQE, or none */
  qp.status = status;
  qp.syndrome = syndrome;
  qp.vendor_syndrome = vendor;
  qp.wqe = number;
  qp.opcode = failed ? be32(wqe[0]) & 0xffu : 0;
  qp.remote_address = failed ? static_cast<uint64_t>(be32(wqe[4])) << 32 | be32(wqe[5]) : 0;
  qp.rkey = failed ? be32(wqe[6]) : 0;
  store_release(ctx, &qp.broken, static_cast<uint64_t>(EP_IBGDA_BROKEN));
}

template <class Ctx> EP_HD void mlx5_break_by_cqe(Ctx& ctx, ep_ibgda_qp& qp, uint64_t cqe, uint64_t number) {
  const uint64_t bits = load_acquire(ctx, reinterpret_cast<const uint64_t*>(cqe + 48));
  const uint32_t syndrome = static_cast<uint32_t>(bits >> 56);
  const bool silent = syndrome == EP_MLX5_SYNDROME_RETRY_EXCEEDED || syndrome == EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED;
  mlx5_break(ctx, qp, silent ? EP_STATUS_PEER_LOST : EP_STATUS_SYSTEM, syndrome, static_cast<uint32_t>(bits >> 48 & 0xff), number);
}

/* Says that the queue pair is broken, and how. Always false. */
template <class Ctx> EP_HD_SELDOM bool mlx5_report(Ctx& ctx, ep_ibgda_qp& qp, ep_kernel_status* status) {
  if (!ctx.wait_for(word_look{&qp.broken, EP_IBGDA_BROKEN}, EP_IBGDA_BROKEN, qp.peer, EP_STAGE_NIC, status)) return false; /* whoever found it writes a few words */
  const uint64_t found = static_cast<uint64_t>(qp.syndrome) << EP_NIC_FOUND_SYNDROME | static_cast<uint64_t>(qp.vendor_syndrome) << EP_NIC_FOUND_VENDOR |
                         (qp.wqe & 0xffffu) << EP_NIC_FOUND_INDEX | static_cast<uint64_t>(qp.qpn) << EP_NIC_FOUND_QPN;
  ctx.fail(status, qp.status, qp.peer, EP_STAGE_NIC, qp.remote_address, found);
  return false;
}

/* Of a collapsed CQ.
 * HAZARD: `done` first, with acquire. A CQE that is older than it would look like 2^16 completions more. */
template <uint32_t Sharing, class Ctx> EP_HD uint64_t mlx5_poll_collapsed(Ctx& ctx, ep_ibgda_qp& qp) {
  using words = poster_words<Sharing>;
  const uint64_t done = words::load(ctx, &qp.done);
  const mlx5_cqe_tail tail = mlx5_cqe_load(ctx, qp.cq);
  if (tail.opcode() == EP_MLX5_CQE_INVALID) return done;
  if (tail.opcode() != EP_MLX5_CQE_REQ) {
    mlx5_break_by_cqe(ctx, qp, qp.cq, mlx5_number(done, tail.counter()));
    return done;
  }
  const uint64_t now = mlx5_number(done, static_cast<uint16_t>(tail.counter() + 1));
  if (now != done) words::raise(ctx, &qp.done, now);
  return now;
}

/* How many WQEs have completed, as far as this poster may look. Breaks the queue pair when one has failed. */
template <uint32_t Sharing, class Ctx> EP_HD uint64_t mlx5_poll(Ctx& ctx, ep_ibgda_qp& qp) {
  using words = poster_words<Sharing>;
  if constexpr (one_polls<Sharing, Ctx>) {
    if (words::load(ctx, &qp.poller) != 0) return words::load(ctx, &qp.done);
  }
  if ((qp.flags & EP_IBGDA_CQ_COLLAPSED) != 0) {
    if constexpr (one_polls<Sharing, Ctx>) {
      if (!words::flag_take(ctx, &qp.poller)) return words::load(ctx, &qp.done);
      const uint64_t found = mlx5_poll_collapsed<Sharing>(ctx, qp);
      words::flag_drop(ctx, &qp.poller);
      return found;
    } else {
      return mlx5_poll_collapsed<Sharing>(ctx, qp);
    }
  }
  if (!words::flag_take(ctx, &qp.poller)) return words::load(ctx, &qp.done);
  uint64_t done = words::load(ctx, &qp.done);
  uint64_t polled = qp.polled;
  for (;; ++polled) {
    const uint64_t cqe = mlx5_ring_entry(qp, polled);
    const mlx5_cqe_tail tail = mlx5_cqe_load(ctx, cqe);
    if (!mlx5_ring_valid(qp, polled, tail)) break;
    if (tail.opcode() != EP_MLX5_CQE_REQ) {
      mlx5_break_by_cqe(ctx, qp, cqe, mlx5_number(done, tail.counter()));
      break;
    }
    done = mlx5_number(done, static_cast<uint16_t>(tail.counter() + 1));
  }
  if (polled != qp.polled) {
    words::store(ctx, &qp.polled, polled);
    if (qp.cq_dbr != 0) store_release(ctx, reinterpret_cast<uint32_t*>(qp.cq_dbr), be32(static_cast<uint32_t>(polled) & EP_MLX5_CQ_DBR_COUNTER_MASK));
    words::store(ctx, &qp.done, done);
  }
  words::flag_drop(ctx, &qp.poller);
  return done;
}

/* Until so many WQEs have completed, or a poll would find something. */
struct mlx5_done_look {
  ep_ibgda_qp& qp;
  uint64_t needed;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    const uint64_t done = load_acquire(here, &qp.done);
    *found = done;
    if (done >= needed || load_acquire(here, &qp.broken) != EP_IBGDA_SOUND) return true;
    if ((qp.flags & EP_IBGDA_CQ_COLLAPSED) != 0) {
      const mlx5_cqe_tail tail = mlx5_cqe_load(here, qp.cq);
      return tail.opcode() != EP_MLX5_CQE_INVALID && static_cast<uint16_t>(tail.counter() + 1) != static_cast<uint16_t>(done);
    }
    const uint64_t polled = load_relaxed(here, &qp.polled);
    return mlx5_ring_valid(qp, polled, mlx5_cqe_load(here, mlx5_ring_entry(qp, polled)));
  }
};

/* The same where one poster at a time looks: until so many WQEs have completed. */
template <uint32_t Sharing> struct mlx5_polled_look {
  ep_ibgda_qp& qp;
  uint64_t needed;
  EP_HD bool operator()(uint64_t* found) const {
    polling_context here;
    *found = poster_words<Sharing>::load(here, &qp.done);
    if (*found >= needed || mlx5_state(here, qp) != EP_IBGDA_SOUND) return true;
    *found = mlx5_poll<Sharing>(here, qp);
    return *found >= needed;
  }
};

/* Waits until WQEs with numbers below `needed` have completed. */
template <uint32_t Sharing, class Ctx>
EP_HD_SELDOM bool mlx5_wait_done(Ctx& ctx, ep_ibgda_qp& qp, uint64_t needed, uint32_t stage, ep_kernel_status* status) {
  for (;;) {
    if (poster_words<Sharing>::load(ctx, &qp.done) >= needed || mlx5_poll<Sharing>(ctx, qp) >= needed) return true;
    if (mlx5_state(ctx, qp) != EP_IBGDA_SOUND) return mlx5_report(ctx, qp, status);
    bool found;
    if constexpr (one_polls<Sharing, Ctx>) found = ctx.wait_for(mlx5_polled_look<Sharing>{qp, needed}, needed, qp.peer, stage, status);
    else found = ctx.wait_for(mlx5_done_look{qp, needed}, needed, qp.peer, stage, status);
    if (!found) return false;
  }
}

/* Tells the NIC of all WQEs below `producer`. One caller at a time.
 * HAZARD: WQEs, then the record, then the register, each visible before the next: the NIC fetches as soon as it sees either. */
template <class Ctx> EP_HD_SMALL void mlx5_ring(Ctx& ctx, ep_ibgda_qp& qp, uint64_t producer, uint64_t doorbell, uint64_t bf_offset) {
  store_release(ctx, reinterpret_cast<uint32_t*>(qp.dbr) + 1, be32(static_cast<uint32_t>(producer) & EP_MLX5_DBR_COUNTER_MASK));
  fence_register(); /* a register is mapped write-combining: no release orders it against memory */
  store_release(ctx, reinterpret_cast<uint64_t*>(qp.bf + bf_offset), doorbell);
  fence_register();
  if (qp.nic_wake != 0) {
    fence_system(); /* the NIC's half of the eventcount: ring before looking for sleepers */
    ctx.wake(qp.nic_wake);
  }
}

template <class Ctx> EP_HD void mlx5_ring(Ctx& ctx, ep_ibgda_qp& qp, uint64_t producer) {
  const uint64_t first = be32(static_cast<uint32_t>(producer) << 8);
  const uint64_t second = be32(qp.qpn << 8);
  mlx5_ring(ctx, qp, producer, first | second << 32, 0);
}

EP_MACHINE_END

#endif
