#include "huge_pages.hpp"

#include <cerrno>

#include <sys/mman.h>
#include <unistd.h>

namespace ep {
namespace {

constexpr int advice_collapse = 25; // MADV_COLLAPSE, Linux 6.1; older headers do not name it

} // namespace

uint8_t* map_for_huge_pages(int fd, uint64_t byte_length) {
  const int sharing = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  if (byte_length < huge_page_bytes) {
    void* base = mmap(nullptr, byte_length, PROT_READ | PROT_WRITE, sharing, fd, 0);
    return base == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base);
  }
  // Kernels before 6.7 align no mapping by themselves: reserve one huge page more, map inside, give the rest back.
  const uint64_t reserved = byte_length + huge_page_bytes;
  void* room = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  const auto from = reinterpret_cast<uintptr_t>(room);
  const uintptr_t at = (from + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
  void* base = mmap(reinterpret_cast<void*>(at), byte_length, PROT_READ | PROT_WRITE, sharing | MAP_FIXED, fd, 0);
  const int error = errno;
  if (base == MAP_FAILED) {
    munmap(room, reserved);
    errno = error;
    return nullptr;
  }
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t end = (at + byte_length + page - 1) / page * page;
  if (at > from) munmap(room, at - from);
  if (from + reserved > end) munmap(reinterpret_cast<void*>(end), from + reserved - end);
  return static_cast<uint8_t*>(base);
}

uint64_t huge_pages_fill(uint8_t* base, uint64_t byte_length) {
  uint64_t filled = 0;
  if (byte_length >= huge_page_bytes) madvise(base, byte_length, MADV_HUGEPAGE);
  for (; filled + huge_page_bytes <= byte_length; filled += huge_page_bytes) {
    // A range without any page is refused: give it one first. Asked for like this, memory that is gone is an error; by a store it would be a signal.
    if (madvise(base + filled, 1, advice_populate_write) != 0) break;
    if (madvise(base + filled, huge_page_bytes, advice_collapse) != 0) break;
  }
  return filled;
}

} // namespace ep
