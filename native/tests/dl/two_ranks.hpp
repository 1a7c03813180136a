// Two ranks of this process, connected by the control path over a driver; each with 4 KiB and a signal word that the other writes.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/ibgda/queues.hpp"
#include "device/fast.hpp"
#include "ep/device/mlx5_post.h"
#include "segment.hpp"

namespace ep::test {

inline constexpr uint32_t all_rights =
    dl::MLX5_ACCESS_LOCAL_WRITE | dl::MLX5_ACCESS_REMOTE_WRITE | dl::MLX5_ACCESS_REMOTE_READ | dl::MLX5_ACCESS_REMOTE_ATOMIC;

template <class Value> Value must(result<Value> got) {
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

inline bool says(const std::string& message, const std::string& part) {
  const bool found = message.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "  '%s' does not say '%s'\n", message.c_str(), part.c_str());
  return found;
}

class two_ranks {
 public:
  // `wishes`: which device each rank takes. The driver outlives this object.
  two_ranks(dl::mlx5_driver& driver, const std::array<ibgda::device_wish, 2>& wishes, bool collapsed, uint8_t ack_timeout = 18) {
    std::vector<std::vector<uint8_t>> said;
    for (int32_t rank = 0; rank < 2; ++rank) {
      ibgda::queue_options options;
      options.rank = rank;
      options.world_size = 2;
      options.qps_per_peer = 2;
      options.depth = 16;
      options.collapsed = collapsed;
      options.ack_timeout = ack_timeout;
      ibgda::control_memory* const sources[] = {control_.get()};
      queues[rank] = must(ibgda::rank_queues::create(must(ibgda::device_open(driver, wishes[static_cast<size_t>(rank)])), options, sources));
      said.push_back(queues[rank]->connection());
      memory_[rank] = must(segment::create(4096 + 64));
      remote[rank] = must(queues[rank]->register_memory({reinterpret_cast<uint64_t>(memory_[rank]->data()), memory_[rank]->data_bytes()}, all_rights));
    }
    for (auto& one : queues) {
      const auto connected = one->connect(said);
      if (!connected.ok()) std::fprintf(stderr, "%s\n", connected.why().message.c_str());
      EP_CHECK(connected.ok());
    }
  }
  ~two_ranks() {
    for (auto& one : queues) {
      const auto closed = one->close();
      if (!closed.ok()) std::fprintf(stderr, "%s\n", closed.why().message.c_str());
      EP_CHECK(closed.ok());
    }
  }

  ep_ibgda_qp& qp(int rank, uint32_t index) const {
    const auto* device = reinterpret_cast<const ep_ibgda_device*>(queues[rank]->device_address());
    return reinterpret_cast<ep_ibgda_qp*>(device->qps)[index];
  }
  uint8_t* data(int rank) const { return memory_[rank]->data(); }
  uint64_t& signal(int rank) const { return *reinterpret_cast<uint64_t*>(memory_[rank]->data() + 4096); }

  // Posts `count` requests, built by build(i, writer), on queue pair `index` of `from`, and waits for them. False: the queue pair broke.
  template <class Build> bool post(int from, uint32_t index, uint32_t count, const Build& build, ep_kernel_status* status) const {
    kernel_environment environment;
    environment.waits.wake = &wake_;
    environment.waits.deadline_ns = deadline_after(20'000);
    environment.waits.policy = wait_policy{0, 50'000, 100'000};
    fast_context context{environment, 0, 1, nullptr};
    ep_ibgda_qp& pair = qp(from, index);
    const uint64_t first = post_in_turn::post<EP_IBGDA_SHARE_DEVICE>(context, lone_poster<fast_context>{context}, pair, count, build, status);
    return first != mlx5_refused && mlx5_wait_done<EP_IBGDA_SHARE_DEVICE>(context, pair, first + count, EP_STAGE_ROOM, status);
  }

  // A write of 4 KiB and a signal behind it.
  bool put(int from, int to, uint32_t index, uint32_t rkey, ep_kernel_status* status) const {
    const ep_ibgda_qp& pair = qp(from, index);
    const auto build = [&](uint64_t i, const mlx5_writer& writer) {
      if (i == 0) return writer.write({reinterpret_cast<uint64_t>(data(to)), rkey}, {reinterpret_cast<uint64_t>(data(from)), remote[from].mr.lkey}, 4096);
      writer.fetch_add8({reinterpret_cast<uint64_t>(&signal(to)), rkey}, 1, {pair.response, pair.response_lkey});
    };
    return post(from, index, 2, build, status);
  }

  std::unique_ptr<ibgda::rank_queues> queues[2];
  ibgda::registered_memory remote[2];

 private:
  std::unique_ptr<ibgda::control_memory> control_ = ibgda::host_control_memory();
  std::shared_ptr<segment> memory_[2];
  mutable ep_wake_word wake_{};
};

// More than a ring's worth on each queue pair, those to oneself included.
inline void move_bytes_and_signals(const two_ranks& world, int turns) {
  for (uint32_t index = 0; index < 4; ++index) EP_CHECK_EQ(world.queues[0]->state(index).value(), uint32_t{EP_MLX5_QP_STATE_RTS});
  ep_kernel_status status{};
  uint64_t signals[2] = {0, 0};
  for (int turn = 0; turn < turns; ++turn) {
    for (const int from : {0, 1}) {
      for (const int to : {0, 1}) {
        for (uint32_t k = 0; k < 2; ++k) {
          for (int i = 0; i < 4096; ++i) world.data(from)[i] = static_cast<uint8_t>(i * 7 + turn * 31 + from * 5 + static_cast<int>(k));
          EP_CHECK(world.put(from, to, static_cast<uint32_t>(to) * 2 + k, world.remote[to].mr.rkey, &status));
          EP_CHECK(std::memcmp(world.data(to), world.data(from), 4096) == 0);
          EP_CHECK_EQ(world.signal(to), ++signals[to]);
        }
      }
    }
  }
}

// Queue pairs that were ended at one side, and have broken at both, are made anew by both; those that each rank has to itself stay.
inline void break_and_meet_again(const two_ranks& world) {
  ep_kernel_status status{};
  for (int again = 0; again < 2; ++again) {
    EP_CHECK(world.queues[0]->cut(1).ok());
    EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
    EP_CHECK(!world.put(1, 0, 0, world.remote[0].mr.rkey, &status));
    for (const int rank : {0, 1}) EP_CHECK(world.queues[rank]->reset(1 - rank).ok());
    const std::vector<uint8_t> said[2] = {world.queues[0]->connection(), world.queues[1]->connection()};
    for (const int rank : {0, 1}) EP_CHECK(world.queues[rank]->connect(1 - rank, said[1 - rank]).ok());
    for (const int rank : {0, 1}) world.signal(rank) = 0;
    status = {};
    move_bytes_and_signals(world, 12 + again);
  }
}

} // namespace ep::test
