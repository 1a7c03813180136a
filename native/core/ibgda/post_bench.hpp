// How fast host threads post WQEs where nobody executes them: for `ep bench ibgda` and tests/device/ibgda_bench.cpp. Every run checks its counts, and fails where they
// are not as they should be (EP_STATUS_SYSTEM, EPROTO). With a NIC: nic/mlx5/speed.hpp.
#pragma once

#include <cstdint>
#include <span>

#include "status.hpp"

namespace ep::ibgda {

// A way to post (ep/device/mlx5_post.h) and how posters share the queue pair.
struct post_way {
  const char* name;    // "lock", "in-turn", "ringer"
  const char* sharing; // "device", "block", "thread"
  bool shared;         // by several posters; otherwise each has a queue pair of its own
};
// The lock is the first.
std::span<const post_way> post_ways();

struct post_load {
  uint32_t way = 0;     // in post_ways()
  uint32_t posters = 1; // threads
  uint32_t batch = 1;   // WQEs of each post: 1 to 512
  uint64_t posts = 0;   // of all posters together; rounded down to whole batches
};

// WQEs posted each second. Nobody executes them: whoever waits for room advances the completions itself, so that posting is all that is measured, and two posters
// have two cores.
result<double> drained_posts_per_second(const post_load& load);
// One thread, one queue pair and nothing else: for counting instructions. EP_STATUS_INVALID: no such way.
result<nothing> post_only(const char* way, const char* sharing, uint32_t batch, uint64_t posts);

} // namespace ep::ibgda
