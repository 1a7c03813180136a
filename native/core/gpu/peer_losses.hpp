// Which peers of a rank are gone, where kernels see it: a GPU sees no process end, so a thread of the host looks for it.
#pragma once

#include <mutex>
#include <vector>

#include "blocks.hpp"
#include "rank.hpp"

namespace ep::gpu {

constexpr int64_t closed_peers_grace_ns = 1'000'000'000; // far above the time of any copy

// HAZARD: of what waits for the same ranks for as long as it lives, not of a launch. Slots are used again and graphs keep theirs, so a word there could end waits of a launch that it was not meant for; a
// rank that is gone is so for all of them, since nobody takes its place in memory that GPUs map.
class peer_losses {
 public:
  static result<std::shared_ptr<peer_losses>> create(std::shared_ptr<rank_context> context, library_ref of, int device);
  // Of a uint32_t for each rank (ep_cuda_launch.lost).
  uint64_t address() const { return words_->address(); }
  // Whoever is found gone ends the waits of kernels for it. Any thread.
  void look();

 private:
  explicit peer_losses(std::shared_ptr<rank_context> context) : context_(std::move(context)) {}
  std::shared_ptr<rank_context> context_;
  std::shared_ptr<const pinned_block> words_;
  std::mutex mutex_;
  std::vector<int64_t> closed_ns_; // when each rank was first seen to have closed
};

} // namespace ep::gpu
