// Views as they lie in shared memory, where others may be reading them.
#pragma once

#include <atomic>
#include <memory>

#include "../segment.hpp"
#include "layout.hpp"

namespace ep {

template <class T> std::atomic_ref<T> shared(const T& word) { return std::atomic_ref<T>(const_cast<T&>(word)); }

inline constexpr size_t view_words = sizeof(group_view) / sizeof(uint64_t);

inline bool is_in(const group_view& view, int32_t rank) { return (view.active[rank / 64] >> (rank % 64) & 1) != 0; }
inline void put_in(group_view& view, int32_t rank, uint32_t incarnation) {
  view.active[rank / 64] |= uint64_t{1} << (rank % 64);
  view.incarnation[rank] = incarnation;
}

// A view that somebody may be reading.
inline void publish_view(group_view& to, const group_view& view) {
  auto* words = reinterpret_cast<uint64_t*>(&to);
  const auto* from = reinterpret_cast<const uint64_t*>(&view);
  shared(words[0]).store(0, std::memory_order_seq_cst);
  for (size_t i = 1; i < view_words; ++i) shared(words[i]).store(from[i], std::memory_order_release);
  shared(words[0]).store(view.epoch, std::memory_order_seq_cst);
}

inline bool read_view(const group_view& from, group_view& view) {
  const auto* words = reinterpret_cast<const uint64_t*>(&from);
  auto* to = reinterpret_cast<uint64_t*>(&view);
  to[0] = shared(words[0]).load(std::memory_order_seq_cst);
  if (to[0] == 0) return false;
  for (size_t i = 1; i < view_words; ++i) to[i] = shared(words[i]).load(std::memory_order_acquire);
  return shared(words[0]).load(std::memory_order_seq_cst) == to[0];
}

inline group_member* member_in(const std::shared_ptr<segment>& mapping) { return reinterpret_cast<group_member*>(mapping->data()); }

} // namespace ep
