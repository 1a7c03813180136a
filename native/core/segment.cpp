#include "segment.hpp"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "huge_pages.hpp"
#include "limits.hpp"

namespace ep {

failure failure_errno(const char* call, int error, const std::string& about) {
  return {EP_STATUS_SYSTEM, error, std::string(call) + " failed: " + std::strerror(error) + " (errno " + std::to_string(error) + ")" + (about.empty() ? "" : ", " + about)};
}

namespace {

struct segment_key {
  uint64_t inode;
  uint64_t nonce;
  auto operator<=>(const segment_key&) const = default;
};

// Leaked on purpose: worker threads may still close segments while static destructors run.
std::mutex& registry_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<segment_key, std::weak_ptr<segment>>& registry() {
  static auto* map = new std::map<segment_key, std::weak_ptr<segment>>;
  return *map;
}

std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

failure map_failure(int error, const std::string& about) {
  failure why = failure_errno("mmap", error, about);
  if (error == ENOMEM) why.status = EP_STATUS_MEMORY_LIMIT;
  return why;
}

// Fills the page table for memory that the file already holds, so that no copy pays for faults. Before Linux 5.14 the first touches do it.
void map_now(uint8_t* base, uint64_t bytes) { madvise(base, bytes, advice_populate_write); }

// Room that is left to the rest of the machine: a segment that takes the last byte gets somebody killed later.
constexpr uint64_t memory_reserve = 64u << 20;

std::string name_of(const ep_segment_handle& handle) { return "segment " + std::to_string(handle.fd) + " of process " + std::to_string(handle.pid); }

uint64_t total_of(uint64_t data_bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (EP_SEGMENT_DATA_OFFSET + data_bytes + page - 1) / page * page;
}

result<nothing> check_handle(const ep_segment_handle& handle) {
  if (handle.header.magic != EP_MAGIC_SEGMENT || handle.header.byte_length != sizeof(ep_segment_handle)) {
    return failure{EP_STATUS_INVALID, 0, "these bytes are not a segment handle"};
  }
  if (handle.header.abi_major != EP_ABI_MAJOR) {
    return failure{EP_STATUS_ABI_MISMATCH, 0,
                   "segment handle has ABI " + std::to_string(handle.header.abi_major) + ", this build has " + std::to_string(EP_ABI_MAJOR)};
  }
  return nothing{};
}

// Maps what a handle names, verified.
result<uint8_t*> map_of(const ep_segment_handle& handle) {
  const std::string who = name_of(handle);
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  // O_NONBLOCK: whatever has this number now, a pipe say, must not hold us up. A memfd does not care.
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    failure why = failure_errno("open", errno, who + " (is the process alive, in the same pid namespace, and of the same user?)");
    why.status = EP_STATUS_STALE_HANDLE;
    return why;
  }
  struct stat facts {};
  const bool known = fstat(fd, &facts) == 0;
  const uint64_t total = total_of(handle.data_bytes);
  if (!known || facts.st_ino != handle.inode || facts.st_dev != handle.device || static_cast<uint64_t>(facts.st_size) != total) {
    close(fd);
    return failure{EP_STATUS_STALE_HANDLE, 0, who + " is another file now: the process that made it closed it"};
  }
  uint8_t* const base = map_for_huge_pages(fd, total);
  const int map_error = errno;
  close(fd); // the mapping keeps the memory
  if (base == nullptr) return map_failure(map_error, who + " of " + bytes_text(total));
  map_now(base, total);
  ep_segment_header header{};
  std::memcpy(&header, base, sizeof header);
  if (header.header.magic != EP_MAGIC_SEGMENT || header.nonce != handle.nonce || header.data_bytes != handle.data_bytes) {
    munmap(base, total);
    return failure{EP_STATUS_STALE_HANDLE, 0, who + " has another nonce: the handle is of an earlier segment"};
  }
  return base;
}

} // namespace

result<std::shared_ptr<segment>> segment::create(uint64_t data_bytes) {
  if (data_bytes > (uint64_t{1} << 46)) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0, "segment of " + bytes_text(data_bytes) + " exceeds the address space"};
  }
  const uint64_t total = total_of(data_bytes);
  const memory_limit limit = memory_limit_now();
  if (limit.bytes != UINT64_MAX && total + memory_reserve > limit.bytes) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0,
                   "segment of " + bytes_text(total) + " does not fit: " + limit.source + " leaves " + bytes_text(limit.bytes) + ", of which " +
                       bytes_text(memory_reserve) + " are kept free"};
  }
  std::shared_ptr<segment> made(new segment);
  made->fd_ = memfd_create("ep-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made->fd_ < 0) return failure_errno("memfd_create", errno, "segment of " + bytes_text(total));
  if (ftruncate(made->fd_, static_cast<off_t>(total)) != 0) return failure_errno("ftruncate", errno, "segment of " + bytes_text(total));
  made->base_ = map_for_huge_pages(made->fd_, total);
  if (made->base_ == nullptr) return map_failure(errno, "segment of " + bytes_text(total));
  made->data_bytes_ = data_bytes;
  huge_pages_fill(made->base_, total);
  // ftruncate of any size succeeds; without this the failure would come as SIGBUS at the first touch.
  if (fallocate(made->fd_, 0, 0, static_cast<off_t>(total)) != 0) {
    const int error = errno;
    failure why = failure_errno("fallocate", error, "segment of " + bytes_text(total));
    if (error == ENOSPC || error == ENOMEM) why.status = EP_STATUS_MEMORY_LIMIT;
    return why;
  }
  map_now(made->base_, total);
  if (fcntl(made->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return failure_errno("fcntl(F_ADD_SEALS)", errno, "segment of " + bytes_text(total));
  }
  struct stat facts {};
  if (fstat(made->fd_, &facts) != 0) return failure_errno("fstat", errno, "own segment");
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != static_cast<ssize_t>(sizeof nonce)) return failure_errno("getrandom", errno, "nonce of a segment");
  ep_segment_header header{};
  header.header = {EP_MAGIC_SEGMENT, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_segment_header)};
  header.nonce = nonce;
  header.data_bytes = data_bytes;
  std::memcpy(made->base_, &header, sizeof header);
  ep_segment_handle& handle = made->handle_;
  handle.header = {EP_MAGIC_SEGMENT, EP_ABI_MAJOR, EP_ABI_MINOR, 1, sizeof(ep_segment_handle)};
  handle.pid = static_cast<int32_t>(getpid());
  handle.fd = made->fd_;
  handle.inode = facts.st_ino;
  handle.device = facts.st_dev;
  handle.nonce = nonce;
  handle.data_bytes = data_bytes;
  const std::lock_guard lock(registry_mutex());
  std::erase_if(registry(), [](const auto& entry) { return entry.second.expired(); });
  registry()[{handle.inode, nonce}] = made;
  return made;
}

result<std::shared_ptr<segment>> segment::open(const ep_segment_handle& handle) {
  auto sound = check_handle(handle);
  if (!sound.ok()) return sound.why();
  // Held across open and insert: two ranks of one process must not map the same segment twice.
  const std::lock_guard lock(registry_mutex());
  const auto found = registry().find({handle.inode, handle.nonce});
  if (found != registry().end()) {
    if (auto existing = found->second.lock()) {
      if (existing->data_bytes() == handle.data_bytes) return existing;
      return failure{EP_STATUS_STALE_HANDLE, 0,
                     name_of(handle) + " has " + bytes_text(existing->data_bytes()) + ", its handle says " + std::to_string(handle.data_bytes)};
    }
  }
  auto mapped = map_of(handle);
  if (!mapped.ok()) return mapped.why();
  std::shared_ptr<segment> opened(new segment);
  opened->base_ = mapped.value();
  opened->data_bytes_ = handle.data_bytes;
  opened->handle_ = handle;
  registry()[{handle.inode, handle.nonce}] = opened;
  return opened;
}

result<std::shared_ptr<segment>> segment::stand_in(uint64_t data_bytes) {
  std::shared_ptr<segment> made(new segment);
  made->base_ = map_for_huge_pages(-1, total_of(data_bytes));
  if (made->base_ == nullptr) return map_failure(errno, "a stand-in of " + bytes_text(data_bytes));
  made->data_bytes_ = data_bytes;
  return made;
}

result<nothing> segment::replace(const ep_segment_handle& handle) {
  auto sound = check_handle(handle);
  if (!sound.ok()) return sound.why();
  const std::lock_guard lock(registry_mutex());
  if (handle.inode == handle_.inode && handle.nonce == handle_.nonce) return nothing{};
  if (handle.data_bytes != data_bytes_) {
    return failure{EP_STATUS_MISMATCH, 0, name_of(handle) + " has " + bytes_text(handle.data_bytes) + ", the one whose place it takes has " + bytes_text(data_bytes_)};
  }
  if (!replaceable()) return failure{EP_STATUS_BUSY, 0, "the rank whose place " + name_of(handle) + " takes is still closing in this process"};
  auto mapped = map_of(handle);
  if (!mapped.ok()) return mapped.why();
  const uint64_t total = total_of(data_bytes_);
  if (mremap(mapped.value(), total, total, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED) {
    const int error = errno;
    munmap(mapped.value(), total);
    return failure_errno("mremap", error, name_of(handle));
  }
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  registry().erase({handle_.inode, handle_.nonce});
  handle_ = handle;
  std::weak_ptr<segment>& known = registry()[{handle.inode, handle.nonce}];
  if (known.expired()) known = weak_from_this(); // else its maker's, or one that was opened by another rank of this process
  return nothing{};
}

result<nothing> segment::vacate(segment& stand_in) {
  if (stand_in.data_bytes_ != data_bytes_ || stand_in.fd_ >= 0 || stand_in.base_ == nullptr) {
    return failure{EP_STATUS_INVALID, 0, "not a stand-in of " + bytes_text(data_bytes_)};
  }
  const std::lock_guard lock(registry_mutex());
  if (!replaceable()) return failure{EP_STATUS_BUSY, 0, "the rank whose place is to be empty is still closing in this process"};
  const uint64_t total = total_of(data_bytes_);
  if (mremap(stand_in.base_, total, total, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED) return failure_errno("mremap", errno, "a stand-in of " + bytes_text(total));
  stand_in.base_ = nullptr; // its mapping is here now
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  // Its maker's entry, if there is one in this process, stays.
  const auto known = registry().find({handle_.inode, handle_.nonce});
  if (known != registry().end() && known->second.lock().get() == this) registry().erase(known);
  handle_ = {};
  return nothing{};
}

bool segment::shows(const ep_segment_handle& handle) const {
  const std::lock_guard lock(registry_mutex());
  return handle.inode == handle_.inode && handle.nonce == handle_.nonce;
}

result<nothing> segment::move() {
  if (fd_ < 0) return failure{EP_STATUS_INVALID, 0, "a segment is moved by the process that made it"};
  auto made = create(data_bytes_);
  if (!made.ok()) return made.why();
  segment& other = *made.value();
  std::memcpy(other.data(), data(), data_bytes_);
  const uint64_t total = total_of(data_bytes_);
  const std::lock_guard lock(registry_mutex());
  if (mremap(other.base_, total, total, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED) return failure_errno("mremap", errno, "segment of " + bytes_text(total));
  other.base_ = nullptr; // its mapping is here now; with it goes what was this one's file
  std::swap(fd_, other.fd_);
  const auto old = registry().find({handle_.inode, handle_.nonce});
  std::weak_ptr<segment> self = old == registry().end() ? std::weak_ptr<segment>{} : old->second;
  if (old != registry().end()) registry().erase(old);
  registry()[{other.handle_.inode, other.handle_.nonce}] = self;
  std::swap(handle_, other.handle_);
  return nothing{};
}

std::shared_ptr<segment> segment::containing(const void* address, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(registry_mutex());
  for (const auto& entry : registry()) {
    auto one = entry.second.lock();
    if (!one) continue;
    const auto data = reinterpret_cast<uintptr_t>(one->data());
    if (begin >= data && begin - data <= one->data_bytes() && bytes <= one->data_bytes() - (begin - data)) return one;
  }
  return nullptr;
}

segment::~segment() {
  if (base_ != nullptr) munmap(base_, total_of(data_bytes_));
  if (fd_ >= 0) close(fd_);
}

uint64_t segment_count() {
  const std::lock_guard lock(registry_mutex());
  std::erase_if(registry(), [](const auto& entry) { return entry.second.expired(); });
  return registry().size();
}

} // namespace ep
