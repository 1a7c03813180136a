// Everything that a program allocates after `gpu_arena_begin` is reachable from the device at the same address, so that the host's cases are usable there as they
// are. Nothing is given back: the program is short. Include it in one unit of the program.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "gpu_memory.hpp"

namespace ep::test::arena {

inline uint8_t* begin = nullptr;
inline uint8_t* end = nullptr;
inline std::atomic<uint8_t*> next{nullptr};

inline bool start(size_t bytes) {
  auto* memory = static_cast<uint8_t*>(gpu_pinned(bytes));
  if (memory == nullptr) return false;
  end = memory + bytes;
  next = memory;
  begin = memory;
  return true;
}

inline void* take(size_t bytes) {
  if (begin == nullptr) return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  uint8_t* at = next.fetch_add(static_cast<ptrdiff_t>((bytes + 127) / 64 * 64));
  if (at + bytes > end) std::abort();
  return at;
}

inline void give(void* at) noexcept {
  if (begin == nullptr || at < begin || at >= end) std::free(at);
}

} // namespace ep::test::arena

void* operator new(size_t bytes) { return ep::test::arena::take(bytes); }
void* operator new[](size_t bytes) { return ep::test::arena::take(bytes); }
void* operator new(size_t bytes, std::align_val_t) { return ep::test::arena::take(bytes); }
void* operator new[](size_t bytes, std::align_val_t) { return ep::test::arena::take(bytes); }
void operator delete(void* at) noexcept { ep::test::arena::give(at); }
void operator delete[](void* at) noexcept { ep::test::arena::give(at); }
void operator delete(void* at, size_t) noexcept { ep::test::arena::give(at); }
void operator delete[](void* at, size_t) noexcept { ep::test::arena::give(at); }
void operator delete(void* at, std::align_val_t) noexcept { ep::test::arena::give(at); }
void operator delete[](void* at, std::align_val_t) noexcept { ep::test::arena::give(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { ep::test::arena::give(at); }
void operator delete[](void* at, size_t, std::align_val_t) noexcept { ep::test::arena::give(at); }
