// Launch rule of the `compat` kernel, and the input that it must not be given outside of its tests.
#pragma once

#include <cstdint>

#include "ep/abi/compat.h"

namespace ep {

constexpr uint32_t compat_block_warps = 10;
constexpr uint32_t compat_block_lanes = 320;

// Blocks of a launch: 0, which no launch accepts, when the rank has nothing to send.
inline uint64_t compat_blocks(uint64_t at_most, uint64_t tokens) { return tokens < at_most ? tokens : at_most; }

// Null, or which kept defect the arguments would trip. Looks at no array, so the arguments may point into a device.
inline const char* compat_refusal(const ep_compat_args& args) {
  if (args.tokens == 0) return "compat: expected rows to send, found none: it launches one block per row, so this rank could not even receive";
  if (args.key_value.src != 0 && args.key_value.replicas > compat_block_warps - 1) {
    return "compat: expected at most 9 replicas, found more: the tenth has no warp, and its receiver would wait for ever";
  }
  if (args.query.row_bytes % 16 != 0 || (args.key_value.src != 0 && args.key_value.row_bytes % 16 != 0)) {
    return "compat: expected rows of whole 16-byte vectors, found another row size";
  }
  return nullptr;
}

// The same for the lengths of a gradient's home shards, where they lie in host memory.
inline const char* compat_gradient_refusal(const uint32_t* seq_len, uint32_t seqs) {
  if (seqs != 0 && seq_len[0] != 0) return nullptr;
  return "compat: expected a first home shard with rows, found an empty one: the receive cursor would never leave it";
}

} // namespace ep
