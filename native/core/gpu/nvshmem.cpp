#include "nvshmem.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "thread.hpp"
#include "waiting.hpp"

namespace ep::gpu {
namespace {

constexpr uint64_t granule = 512;

struct of_process {
  std::mutex mutex;
  std::shared_ptr<nvshmem_world> world;
};
of_process& process() {
  static auto* made = new of_process; // leaked on purpose: threads of NVSHMEM go on until the process ends
  return *made;
}

// HAZARD: read by NVSHMEM when it begins, a user's own settings stay. Ranks are on one host: without the first it looks for network cards, and keeps a thread for them; the heap of the second is otherwise too small.
void settle_environment(uint64_t heap_bytes) {
  setenv("NVSHMEM_REMOTE_TRANSPORT", "none", 0);
  constexpr uint64_t beside = uint64_t{64} << 20; // what its own barriers and teams take
  setenv("NVSHMEM_SYMMETRIC_SIZE", std::to_string(heap_bytes + beside).c_str(), 0);
}

} // namespace

std::shared_ptr<nvshmem_world> nvshmem_world::here() {
  const std::lock_guard lock(process().mutex);
  return process().world;
}

result<std::shared_ptr<nvshmem_world>> nvshmem_world::join(std::shared_ptr<const dl::nvshmem_symbols> nvshmem, library_ref of, const nvshmem_place& place) {
  const std::lock_guard lock(process().mutex);
  std::shared_ptr<nvshmem_world>& known = process().world;
  if (known) {
    const nvshmem_place& has = known->place_;
    if (std::memcmp(&has.id, &place.id, sizeof place.id) == 0 && has.pe == place.pe && has.pes == place.pes && has.device == place.device) return known;
    return failure{EP_STATUS_BUSY, 0,
                   "this process is PE " + std::to_string(has.pe) + " of " + std::to_string(has.pes) + " on GPU " + std::to_string(has.device) +
                       " of another world of NVSHMEM: a process is one PE of one world for as long as it lives"};
  }
  if (place.heap_bytes % granule != 0 || place.heap_bytes == 0) return failure{EP_STATUS_INVALID, 0, "a heap of " + std::to_string(place.heap_bytes) + " bytes: expected a multiple of 512"};
  known.reset(new nvshmem_world(std::move(nvshmem), std::move(of), place));
  return known;
}

std::string nvshmem_world::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

bool nvshmem_world::ready() const {
  const std::lock_guard lock(mutex_);
  return state_ == state::ready;
}

bool nvshmem_world::mapped() const {
  return std::none_of(heaps_.begin(), heaps_.end(), [](uint64_t heap) { return heap == 0; });
}

void nvshmem_world::end(state how, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    // Somebody gave it up meanwhile: the others have been told so.
    const bool given_up = !failed_.empty();
    state_ = given_up ? state::failed : how;
    if (!given_up) failed_ = why;
  }
  changed_.notify_all();
}

// On a thread of its own, which may never come back.
void nvshmem_world::initialize() {
  if (const int error = of_->table().device_use(place_.device); error != 0) return end(state::failed, of_->error(error, "using GPU " + std::to_string(place_.device)).message);
  settle_environment(place_.heap_bytes);
  dl::nvshmem_init_attr attr;
  dl::nvshmem_unique_id id = place_.id;
  if (const int error = nvshmem_->nvshmemx_set_attr_uniqueid_args(place_.pe, place_.pes, &id, &attr); error != 0) {
    return end(state::failed, "NVSHMEM takes no unique id (error " + std::to_string(error) + ")");
  }
  if (const int error = nvshmem_->nvshmemx_hostlib_init_attr(dl::nvshmem_with_unique_id, &attr); error != 0) {
    return end(state::failed, "NVSHMEM does not begin (error " + std::to_string(error) + "); NVSHMEM_DEBUG=INFO has it say why");
  }
  const int status = nvshmem_->nvshmemx_init_status();
  if (status < dl::nvshmem_initialized || nvshmem_->nvshmem_my_pe() != place_.pe || nvshmem_->nvshmem_n_pes() != place_.pes) {
    return end(state::failed, "NVSHMEM says that this is PE " + std::to_string(nvshmem_->nvshmem_my_pe()) + " of " + std::to_string(nvshmem_->nvshmem_n_pes()) + ", in state " + std::to_string(status) +
                                  ": expected PE " + std::to_string(place_.pe) + " of " + std::to_string(place_.pes));
  }
  void* own = nvshmem_->nvshmem_malloc(place_.heap_bytes);
  if (own == nullptr) {
    return end(state::failed, "NVSHMEM has no symmetric memory of " + std::to_string(place_.heap_bytes) + " bytes (heapBytes; NVSHMEM_SYMMETRIC_SIZE limits it, if that is set)");
  }
  std::vector<uint64_t> heaps;
  for (int pe = 0; pe < place_.pes; ++pe) heaps.push_back(reinterpret_cast<uint64_t>(pe == place_.pe ? own : nvshmem_->nvshmem_ptr(own, pe)));
  {
    const std::lock_guard lock(mutex_);
    status_ = status;
    heaps_ = std::move(heaps);
  }
  end(state::ready, "");
}

outcome nvshmem_world::meet(const cancel_flag& cancel, int64_t deadline_ns) {
  outcome how;
  std::unique_lock lock(mutex_);
  if (state_ == state::idle) {
    state_ = state::meeting;
    auto started = thread_start("ep-nvshmem", [self = shared_from_this()] { self->initialize(); }, "thread on which NVSHMEM begins; raise the limit on tasks");
    if (!started.ok()) {
      state_ = state::idle;
      return {started.why().status, -1, 0, 0, 0, started.why().message};
    }
    started.value().detach();
  }
  while (state_ == state::meeting) {
    changed_.wait_for(lock, std::chrono::milliseconds(5));
    if (state_ != state::meeting) break;
    const bool aborted = cancel.value.load(std::memory_order_acquire) != 0;
    if (!aborted && clock_now_ns() < deadline_ns) continue;
    how.status = aborted ? EP_STATUS_ABORTED : EP_STATUS_TIMEOUT;
    // Whoever comes later would be one PE too few for ever.
    if (failed_.empty()) failed_ = "NVSHMEM began, and not all PEs came";
    return how;
  }
  if (state_ == state::failed || !failed_.empty()) return {EP_STATUS_SYSTEM, -1, 0, 0, 0, failed_};
  return how;
}

result<std::shared_ptr<const nvshmem_world::part>> nvshmem_world::take(uint64_t bytes, uint64_t from) {
  const uint64_t whole = std::max(granule, (bytes + granule - 1) / granule * granule);
  const std::lock_guard lock(mutex_);
  uint64_t at = (from + granule - 1) / granule * granule;
  for (const auto& [offset, length] : taken_) {
    if (offset + length <= at) continue;
    if (offset >= at && offset - at >= whole) break;
    at = offset + length;
  }
  if (at > place_.heap_bytes || whole > place_.heap_bytes - at) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0, std::to_string(bytes) + " bytes do not fit into the symmetric heap of " + std::to_string(place_.heap_bytes) + " bytes (heapBytes), from " + std::to_string(from) + " on"};
  }
  taken_[at] = whole;
  return std::shared_ptr<const part>(std::make_shared<const part>(shared_from_this(), at, whole));
}

void nvshmem_world::give_back(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  taken_.erase(offset);
}

uint64_t nvshmem_world::bytes_free() const {
  const std::lock_guard lock(mutex_);
  uint64_t used = 0;
  for (const auto& [offset, length] : taken_) used += length;
  return place_.heap_bytes - used;
}

result<std::shared_ptr<nvshmem_opening>> nvshmem_opening::start(std::shared_ptr<nvshmem_world> world, uint64_t operation, cancel_ref cancel, int64_t deadline_ns, completion_sink& sink) {
  std::shared_ptr<nvshmem_opening> made(new nvshmem_opening(cancel));
  auto started = thread_start("ep-nvshmem-wait", [world = std::move(world), operation, cancel = std::move(cancel), deadline_ns, &sink] { sink.complete(operation, world->meet(*cancel, deadline_ns)); },
                              "thread that waits for NVSHMEM; raise the limit on tasks");
  if (!started.ok()) return started.why();
  made->thread_ = std::move(started.value());
  return made;
}

nvshmem_opening::~nvshmem_opening() {
  cancel_->value.store(1, std::memory_order_release);
  if (thread_.joinable()) thread_.join();
}

} // namespace ep::gpu
