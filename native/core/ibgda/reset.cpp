// Queue pairs to a rank in whose place another process comes.
#include <cerrno>

#include <sys/random.h>

#include "ep/device/mlx5_queue.h"
#include "queues.hpp"

namespace ep::ibgda {
namespace {

constexpr uint64_t line = 64;
constexpr uint32_t psn_bits = 24;
// How far new packet numbers are from old ones: more packets than are ever under way, and less than half the range, beyond which old ones would lie ahead again.
constexpr uint32_t psn_gap = 1u << 22;

failure to_peer(int32_t peer, uint32_t k, const char* step, failure why) {
  why.message = std::string(step) + " of queue pair " + std::to_string(k) + " to rank " + std::to_string(peer) + ": " + why.message;
  return why;
}

} // namespace

result<uint32_t> rank_queues::draw_psn(std::optional<uint32_t> before) const {
  constexpr uint32_t mask = (1u << psn_bits) - 1;
  if (options_.starting_psn) return options_.starting_psn(before) & mask;
  uint32_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) return failure_errno("getrandom", errno, "first packet numbers of queue pairs");
  return before.has_value() ? (*before + psn_gap + random % psn_gap) & mask : random & mask;
}

result<nothing> rank_queues::reset(int32_t peer) {
  if (peer < 0 || peer >= options_.world_size || peer == options_.rank) {
    return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(peer) + " is no peer in a world of " + std::to_string(options_.world_size)};
  }
  for (bank* of : {&kernels_, &host_}) {
    const layout at = lay_out(*of);
    for (uint32_t k = 0; k < of->count; ++k) {
      if (auto done = reset_pair(*of, static_cast<uint32_t>(peer) * of->count + k, at); !done.ok()) return to_peer(peer, of->first + k, "reset", done.why());
    }
  }
  return tell_broken(peer);
}

result<nothing> rank_queues::connect(int32_t peer, const std::vector<uint8_t>& of_rank) {
  if (peer < 0 || peer >= options_.world_size || peer == options_.rank) {
    return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(peer) + " is no peer in a world of " + std::to_string(options_.world_size)};
  }
  auto remote = read_peer(peer, of_rank);
  if (!remote.ok()) return remote.why();
  if (auto connected = connect_peer(peer, remote.value()); !connected.ok()) return connected;
  return mark(peer, true);
}

result<nothing> rank_queues::reset_pair(bank& of, uint32_t i, const layout& at) {
  const uint32_t index = index_of(of, i);
  pair& known = pairs_[index];
  std::array<uint8_t, EP_MLX5_QUERY_QP_OUT_BYTES> out{};
  auto asked = device().obj_query(known.qp, object_command(EP_MLX5_CMD_QUERY_QP, known.qpn), out);
  if (!asked.ok()) return asked.why();
  const std::span<uint8_t> context = std::span<uint8_t>(out).subspan(EP_MLX5_QPC_AT);
  const bool received = prm_get(context, EP_MLX5_QPC_STATE) != EP_MLX5_QP_STATE_RST;
  auto first = draw_psn(received ? static_cast<uint32_t>(prm_get(context, EP_MLX5_QPC_NEXT_RCV_PSN)) : known.starting_psn);
  if (!first.ok()) return first.why();
  if (auto moved = modify(index, object_command(EP_MLX5_CMD_2RST_QP, known.qpn), "2RST"); !moved.ok()) return moved;
  known.starting_psn = first.value();

  // From here on the NIC neither reads the ring nor writes completions.
  if (auto filled = of.source->fill(of.queues, at.sqs + i * at.sq_bytes, 0, at.sq_bytes); !filled.ok()) return filled;
  if (auto filled = of.source->fill(of.queues, at.records + i * 2 * line + line, 0, line); !filled.ok()) return filled;
  if (auto filled = of.source->fill(of.structs, of.marks_offset + i * marks_bytes(), 0, marks_bytes()); !filled.ok()) return filled;
  ep_ibgda_qp fresh = struct_of(of, i, at);
  fresh.status = EP_STATUS_PEER_LOST;
  fresh.broken = EP_IBGDA_BROKEN;
  if (options_.collapsed) {
    if (auto filled = of.source->fill(of.queues, at.cqs + i * at.cq_bytes, 0xff, at.cq_bytes); !filled.ok()) return filled;
  } else if (auto emptied = empty_ring(of, i, at, fresh); !emptied.ok()) {
    return emptied;
  }
  return of.source->write(of.structs, i * sizeof fresh, &fresh, sizeof fresh);
}

// HAZARD: the NIC goes on in the completion queue where it was: what nobody has taken out yet is skipped, and ownership stays as it is.
result<nothing> rank_queues::empty_ring(bank& of, uint32_t i, const layout& at, ep_ibgda_qp& fresh) {
  ep_ibgda_qp old{};
  if (auto read = of.source->read(of.structs, i * sizeof old, &old, sizeof old); !read.ok()) return read;
  fresh.polled = old.polled;
  for (uint32_t looked = 0; looked < fresh.cq_depth; ++looked, ++fresh.polled) {
    mlx5_cqe_tail tail{};
    const uint64_t entry = mlx5_ring_entry(fresh, fresh.polled) - of.queues.address;
    if (auto read = of.source->read(of.queues, entry + EP_MLX5_CQE_SIZE - sizeof tail.bits, &tail.bits, sizeof tail.bits); !read.ok()) return read;
    if (!mlx5_ring_valid(fresh, fresh.polled, tail)) break;
  }
  const uint32_t counter = be32(static_cast<uint32_t>(fresh.polled) & EP_MLX5_CQ_DBR_COUNTER_MASK);
  return of.source->write(of.queues, at.records + i * 2 * line, &counter, sizeof counter);
}

result<nothing> rank_queues::mark(int32_t peer, bool usable) {
  const uint32_t status = usable ? EP_STATUS_OK : EP_STATUS_PEER_LOST;
  for (bank* of : {&kernels_, &host_}) {
    for (uint32_t k = 0; k < of->count; ++k) {
      const uint64_t at = (uint64_t{static_cast<uint32_t>(peer)} * of->count + k) * sizeof(ep_ibgda_qp);
      if (auto written = of->source->write(of->structs, at + offsetof(ep_ibgda_qp, status), &status, sizeof status); !written.ok()) return written;
      const uint64_t broken = usable ? EP_IBGDA_SOUND : EP_IBGDA_BROKEN;
      if (auto written = of->source->publish(of->structs, at + offsetof(ep_ibgda_qp, broken), broken); !written.ok()) return written;
    }
  }
  return nothing{};
}

// Those to the rank no longer count as broken by kernels; another one may.
result<nothing> rank_queues::tell_broken(int32_t peer) {
  auto known = device_now();
  if (!known.ok()) return known.why();
  const auto is_of = [&](uint32_t index) { return static_cast<int32_t>(index / kernels_.count) == peer; };
  if (known.value().broken == 0 || !is_of(static_cast<uint32_t>(known.value().broken - 1))) return nothing{};
  uint64_t broken = 0;
  for (uint32_t index = 0; index < size_of(kernels_) && broken == 0; ++index) {
    if (is_of(index)) continue;
    auto qp = pair_now(index);
    if (!qp.ok()) return qp.why();
    if (qp.value().broken == EP_IBGDA_BROKEN && qp.value().syndrome != 0) broken = 1 + uint64_t{index};
  }
  return kernels_.source->publish(kernels_.structs, kernels_.device_offset + offsetof(ep_ibgda_device, broken), broken);
}

} // namespace ep::ibgda
