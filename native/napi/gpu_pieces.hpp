// What lies beside a kernel on a stream: small pieces that the host has filled in, or that it looks at.
//
// Each copy by the engine takes the stream 4 us or more, so a kernel may copy all of them at once. HAZARD: streams share the few queues of a GPU, and a kernel that waits for the one before it holds up what others have put
// into that queue since. If the one before it awaits a rank whose call is behind in the same queue, none of them ends. So that is for what has no ranks beside it in this process that are launched later: all of them
// in one launch, or a graph, whose calls lie behind each other anyway.
#pragma once

#include <vector>

#include "gpu/stream.hpp"

namespace ep::binding {

enum class copied_by { engine, kernel };

class gpu_pieces {
 public:
  gpu_pieces(gpu::stream& stream, copied_by how) : stream_(stream), most_small_(how == copied_by::kernel ? 16 << 10 : 0) {}
  // Addresses on boundaries of 4 bytes.
  void add(const ep_cuda_piece& piece) {
    if (piece.bytes == 0 || error_ != 0) return;
    if (piece.bytes > most_small_) {
      error_ = stream_.of()->table().copy(stream_.native(), piece.to, piece.from, piece.bytes);
      return;
    }
    if (small_.size() == EP_CUDA_MOST_PIECES) put();
    small_.push_back(piece);
  }
  // Puts what was added on the stream. As the functions of the table.
  int put() {
    if (!small_.empty() && error_ == 0) error_ = stream_.of()->table().copy_pieces(stream_.native(), small_.data(), static_cast<uint32_t>(small_.size()));
    small_.clear();
    return error_;
  }

 private:
  gpu::stream& stream_;
  uint64_t most_small_;
  std::vector<ep_cuda_piece> small_;
  int error_ = 0;
};

} // namespace ep::binding
