#include "host_memory.hpp"

#include <cerrno>
#include <string>

#include <sys/mman.h>

#include "huge_pages.hpp"
#include "limits.hpp"

namespace ep {
namespace {

// Takes all pages now. Left to the first touch, memory that is gone by then would be a signal that kills the process, and the limits would not count
// what was promised to earlier buffers. 0 or errno.
int commit(uint8_t* base, uint64_t byte_length) {
  if (madvise(base, byte_length, advice_populate_write) == 0) return 0;
  if (errno != EINVAL) return errno;
  constexpr uint64_t page = 4096;
  for (uint64_t at = 0; at < byte_length; at += page) *const_cast<volatile uint8_t*>(base + at) = 0;
  return 0;
}

} // namespace

result<std::shared_ptr<host_memory>> host_memory::create(uint64_t byte_length) {
  const memory_limit limit = memory_limit_now();
  if (limit.bytes != UINT64_MAX && byte_length > limit.bytes) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0,
                   "host memory of " + std::to_string(byte_length) + " bytes does not fit: " + limit.source + " leaves " + std::to_string(limit.bytes)};
  }
  std::shared_ptr<host_memory> made(new host_memory);
  made->byte_length_ = byte_length;
  if (byte_length == 0) return made;
  made->data_ = map_for_huge_pages(-1, byte_length);
  if (made->data_ == nullptr) {
    const int error = errno;
    failure why = failure_errno("mmap", error, "host memory of " + std::to_string(byte_length) + " bytes");
    if (error == ENOMEM) why.status = EP_STATUS_MEMORY_LIMIT;
    return why;
  }
  huge_pages_fill(made->data_, byte_length);
  if (const int error = commit(made->data_, byte_length); error != 0) {
    failure why = failure_errno("madvise(MADV_POPULATE_WRITE)", error, "host memory of " + std::to_string(byte_length) + " bytes");
    if (error == ENOMEM) why.status = EP_STATUS_MEMORY_LIMIT;
    return why;
  }
  return made;
}

host_memory::~host_memory() {
  if (data_ != nullptr) munmap(data_, byte_length_);
}

} // namespace ep
