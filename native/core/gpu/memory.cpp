#include "memory.hpp"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <sys/random.h>

namespace ep::gpu {
namespace {

constexpr uint64_t marked = uint64_t{1} << 62; // ids of ep::symmetric_memory never reach it
constexpr uint64_t alignment = 256;            // what kernels' vectors and copies like best

// Leaked on purpose: worker threads may still drop memories while static destructors run.
struct memory_registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<symmetric_memory>> alive;
  std::map<uint64_t, std::weak_ptr<const device_block>> blocks;
  uint64_t next = 1;
  uint64_t process[2] = {0, 0};
  memory_registry() {
    // Pids are no names: ranks may live in different pid namespaces.
    if (getrandom(process, sizeof process, 0) != static_cast<ssize_t>(sizeof process)) process[0] = reinterpret_cast<uint64_t>(this);
  }
};
memory_registry& registry() {
  static auto* made = new memory_registry;
  return *made;
}

std::string pci_of(const ep_gpu_memory_handle& handle) {
  const auto* text = reinterpret_cast<const char*>(handle.pci);
  return std::string(text, strnlen(text, sizeof handle.pci));
}

// Of each device, for what has to be there at once. HAZARD: not a stream for each copy: a GPU has few queues, 32 at most, which the driver gives to streams as they come. Ranks of one process that open a buffer made
// and destroyed some dozens of streams at once; of 288 openings by eight ranks of an H200, four left two ranks in one queue, one behind the kernel of the other, which waited for it.
class set_up_stream {
 public:
  static set_up_stream& of(const library& library, int device) {
    static auto* mutex = new std::mutex; // leaked on purpose: as the libraries, and blocks may be made while static destructors run
    static auto* all = new std::map<std::pair<const gpu::library*, int>, set_up_stream>;
    const std::lock_guard lock(*mutex);
    return (*all)[{&library, device}];
  }
  // What `work(table, stream)` has put there has run when this returns. As the functions of the table.
  template <class Work> int run(const ep_cuda_table& table, int device, const Work& work) {
    const std::lock_guard one_by_one(mutex_);
    if (stream_ == nullptr) {
      if (const int error = table.stream_create(device, 1, &stream_); error != 0) return error;
    }
    const int error = work(table, stream_);
    const int finished = table.stream_finish(stream_);
    return error != 0 ? error : finished;
  }

 private:
  std::mutex mutex_;
  void* stream_ = nullptr;
};

template <class Work> result<nothing> run_now(const library_ref& of, int device, const char* what, const Work& work) {
  if (const int error = set_up_stream::of(*of, device).run(of->table(), device, work); error != 0) return of->error(error, what);
  return nothing{};
}

} // namespace

result<nothing> copy_now(const library_ref& of, int device, uint64_t to, uint64_t from, uint64_t bytes, const char* what) {
  return run_now(of, device, what, [&](const ep_cuda_table& table, void* stream) { return table.copy(stream, to, from, bytes); });
}

result<nothing> fill_now(const library_ref& of, int device, uint64_t at, uint8_t value, uint64_t bytes, const char* what) {
  return run_now(of, device, what, [&](const ep_cuda_table& table, void* stream) { return table.fill(stream, at, value, bytes); });
}

uint64_t symmetric_memory::signal_bytes(uint64_t slots) { return (slots * sizeof(uint64_t) + alignment - 1) / alignment * alignment; }

// Without memory yet, and unknown to the registry.
result<std::shared_ptr<symmetric_memory>> symmetric_memory::described(std::shared_ptr<rank_context> context, library_ref of, int device, uint64_t byte_length, uint64_t signal_slots) {
  if (device < 0 || device >= of->device_count()) {
    return failure{EP_STATUS_INVALID, 0, "GPU " + std::to_string(device) + " is not one of " + std::to_string(of->device_count())};
  }
  if (byte_length > (uint64_t{1} << 46) || signal_slots > (uint64_t{1} << 32)) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0, std::to_string(byte_length) + " bytes and " + std::to_string(signal_slots) + " signal slots exceed the address space"};
  }
  ep_cuda_facts facts{};
  if (const int error = of->table().device_facts(device, &facts); error != 0) return of->error(error, "looking at GPU " + std::to_string(device));
  std::shared_ptr<symmetric_memory> memory(new symmetric_memory(std::move(context), std::move(of)));
  memory_registry& memories = registry();
  ep_gpu_memory_handle& handle = memory->handle_;
  handle.header = {EP_MAGIC_GPU_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof handle};
  std::memcpy(handle.process, memories.process, sizeof handle.process);
  handle.byte_length = byte_length;
  handle.signal_slots = signal_slots;
  handle.device = device;
  std::memcpy(handle.pci, facts.pci, sizeof handle.pci);
  return memory;
}

result<std::shared_ptr<symmetric_memory>> symmetric_memory::create(std::shared_ptr<rank_context> context, library_ref of, int device, uint64_t byte_length,
                                                                   uint64_t signal_slots) {
  auto made = described(std::move(context), of, device, byte_length, signal_slots);
  if (!made.ok()) return made;
  const std::shared_ptr<symmetric_memory>& memory = made.value();
  auto exported = export_lock::create();
  if (!exported.ok()) return exported.why();
  auto block = device_block::allocate(of, device, signal_bytes(signal_slots) + byte_length, exported.value());
  if (!block.ok()) return block.why();
  memory->own_ = block.value();
  memory->address_ = block.value()->address();
  ep_gpu_memory_handle& handle = memory->handle_;
  exported.value()->describe(handle);
  // Where it cannot be exported, ranks of this process can still use it: whoever needs the handle says what it misses.
  handle.shareable = of->table().memory_export(device, memory->address_, handle.ipc) == 0 ? 1 : 0;
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  handle.block = marked | memories.next++;
  memories.alive[handle.block] = memory;
  memories.blocks[handle.block] = block.value();
  return memory;
}

result<std::shared_ptr<symmetric_memory>> symmetric_memory::create_for_nic(std::shared_ptr<rank_context> context, library_ref of, int device, uint64_t byte_length,
                                                                           uint64_t signal_slots, uint64_t signals, std::shared_ptr<const void> keep) {
  auto made = described(std::move(context), std::move(of), device, byte_length, signal_slots);
  if (!made.ok()) return made;
  const std::shared_ptr<symmetric_memory>& memory = made.value();
  memory->nic_part_ = memory->own_ = std::move(keep);
  memory->address_ = signals;
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  memory->handle_.block = marked | memories.next++;
  memories.alive[memory->handle_.block] = memory;
  return memory;
}

std::shared_ptr<symmetric_memory> symmetric_memory::find(uint64_t memory_id) {
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  const auto found = memories.alive.find(memory_id);
  return found == memories.alive.end() ? nullptr : found->second.lock();
}

symmetric_memory::~symmetric_memory() {
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  memories.alive.erase(handle_.block);
  memories.blocks.erase(handle_.block);
}

result<nothing> symmetric_memory::connect(const std::vector<ep_gpu_memory_handle>& handles) {
  if (handles.size() != static_cast<size_t>(context_->world_size())) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(handles.size()) + " handles of device memory for " + std::to_string(context_->world_size()) + " ranks"};
  }
  memory_registry& memories = registry();
  std::vector<ep_peer_view> parts(handles.size());
  std::vector<std::shared_ptr<const void>> keep;
  uint32_t here = 0;
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    const ep_gpu_memory_handle& handle = handles[rank];
    const std::string who = "rank " + std::to_string(rank);
    if (auto checked = check_handle(handle, who); !checked.ok()) return checked;
    const bool same_device = std::memcmp(handle.pci, handle_.pci, sizeof handle.pci) == 0;
    uint64_t address = 0;
    if (std::memcmp(handle.process, memories.process, sizeof handle.process) == 0) {
      if (!same_device) {
        return failure{EP_STATUS_INVALID, EOPNOTSUPP, who + " has its memory on another GPU of this process: ranks on several GPUs are processes, one for each GPU"};
      }
      const std::lock_guard lock(memories.mutex);
      const auto found = memories.blocks.find(handle.block);
      const auto block = found == memories.blocks.end() ? nullptr : found->second.lock();
      if (!block) return failure{EP_STATUS_STALE_HANDLE, 0, who + " has freed its device memory already"};
      address = block->address();
      keep.push_back(block);
      ++here;
    } else {
      if (handle.shareable == 0) return failure{EP_STATUS_INVALID, EOPNOTSUPP, who + " is another process, and its GPU exports no memory (CUDA IPC): run its ranks as threads"};
      if (!same_device && !of_->reaches(device(), pci_of(handle))) {
        return failure{EP_STATUS_INVALID, EOPNOTSUPP,
                       who + " has its memory on the GPU at " + pci_of(handle) + ", which GPU " + std::to_string(device()) + " at " + pci_of(handle_) +
                           " does not reach: no peer access between the two (nvidia-smi topo -p2p r); choose GPUs that reach each other, or one for all ranks"};
      }
      auto opened = imported_block::import(of_, device(), handle, who);
      if (!opened.ok()) return opened.why();
      address = opened.value()->address();
      keep.push_back(opened.value());
    }
    parts[rank] = {address + signal_bytes(handle.signal_slots), address, 0, 0};
  }
  keep_ = std::move(keep);
  ranks_here_ = here;
  return finish(std::move(parts), EP_MEMORY_LOAD_STORE);
}

result<nothing> symmetric_memory::check_handle(const ep_gpu_memory_handle& handle, const std::string& who) const {
  if (handle.header.magic != EP_MAGIC_GPU_MEMORY || handle.header.abi_major != EP_ABI_MAJOR || handle.header.byte_length != sizeof handle) {
    return failure{EP_STATUS_ABI_MISMATCH, 0, who + " published no handle of device memory of ABI " + std::to_string(EP_ABI_MAJOR)};
  }
  if (handle.byte_length != handle_.byte_length || handle.signal_slots != handle_.signal_slots) {
    return failure{EP_STATUS_MISMATCH, 0,
                   "parts of a symmetric memory differ: this rank has " + std::to_string(handle_.byte_length) + " bytes and " + std::to_string(handle_.signal_slots) +
                       " signal slots, " + who + " has " + std::to_string(handle.byte_length) + " and " + std::to_string(handle.signal_slots)};
  }
  return nothing{};
}

result<nothing> symmetric_memory::connect_by_nic(const std::vector<ep_gpu_memory_handle>& handles, std::shared_ptr<memory_route> route, uint32_t kind, uint64_t address) {
  if (handles.size() != static_cast<size_t>(context_->world_size())) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(handles.size()) + " handles of device memory for " + std::to_string(context_->world_size()) + " ranks"};
  }
  uint32_t here = 0;
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    const ep_gpu_memory_handle& handle = handles[rank];
    if (auto checked = check_handle(handle, "rank " + std::to_string(rank)); !checked.ok()) return checked;
    const bool same_device = std::memcmp(handle.pci, handle_.pci, sizeof handle.pci) == 0;
    if (same_device && std::memcmp(handle.process, handle_.process, sizeof handle.process) == 0) ++here;
  }
  std::vector<ep_peer_view> parts(handles.size());
  parts[static_cast<size_t>(context_->rank())] = {address_ + signal_bytes(handle_.signal_slots), address_, 0, 0};
  ranks_here_ = here;
  route_ = std::move(route);
  device_handle_.proxy = address;
  return finish(std::move(parts), kind);
}

result<nothing> symmetric_memory::connect_by_library(const std::vector<ep_gpu_memory_handle>& handles, const std::vector<uint64_t>& signals) {
  if (handles.size() != static_cast<size_t>(context_->world_size()) || signals.size() != handles.size()) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(handles.size()) + " handles of device memory for " + std::to_string(context_->world_size()) + " ranks"};
  }
  std::vector<ep_peer_view> parts(handles.size());
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    if (auto checked = check_handle(handles[rank], "rank " + std::to_string(rank)); !checked.ok()) return checked;
    if (signals[rank] != 0) parts[rank] = {signals[rank] + signal_bytes(handle_.signal_slots), signals[rank], 0, 0};
  }
  ranks_here_ = 1;
  return finish(std::move(parts), EP_MEMORY_LOAD_STORE);
}

result<nothing> symmetric_memory::finish(std::vector<ep_peer_view> parts, uint32_t kind) {
  // HAZARD: what a NIC or a library made is none of the runtime's: nobody but we would wait for kernels that still use it.
  struct under_kernels {
    std::shared_ptr<const void> part;
    std::shared_ptr<memory_route> route;
  };
  std::shared_ptr<const void> beside = nic_part_ ? std::make_shared<const under_kernels>(under_kernels{own_, route_}) : nullptr;
  auto views = device_block::allocate(of_, device(), parts.size() * sizeof(ep_peer_view), nullptr, std::move(beside));
  if (!views.ok()) return views.why();
  auto copied = copy_now(of_, device(), views.value()->address(), reinterpret_cast<uint64_t>(parts.data()), parts.size() * sizeof(ep_peer_view), "copying the table of ranks");
  if (!copied.ok()) return copied.why();
  views_ = views.value();
  parts_ = std::move(parts);
  device_handle_.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, kind, sizeof(ep_memory_handle)};
  device_handle_.rank = context_->rank();
  device_handle_.world_size = context_->world_size();
  device_handle_.byte_length = handle_.byte_length;
  device_handle_.signal_slots = handle_.signal_slots;
  device_handle_.peers = views_->address();
  device_handle_.memory_id = handle_.block;
  return nothing{};
}

result<nothing> symmetric_memory::prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) const {
  if (!route_ || bytes == 0) return nothing{};
  // What one rank's part holds is registered as a whole.
  if (address >= address_ && bytes <= signal_bytes(handle_.signal_slots) + handle_.byte_length &&
      address - address_ <= signal_bytes(handle_.signal_slots) + handle_.byte_length - bytes) return nothing{};
  return route_->prepare_source(address, bytes, keep);
}

result<std::vector<uint64_t>> symmetric_memory::read_signals(uint64_t first, uint64_t count) const {
  std::vector<uint64_t> values(count);
  if (first > handle_.signal_slots || count > handle_.signal_slots - first) {
    return failure{EP_STATUS_INVALID, 0, "signal slots " + std::to_string(first) + " + " + std::to_string(count) + " exceed " + std::to_string(handle_.signal_slots)};
  }
  auto copied = copy_now(of_, device(), reinterpret_cast<uint64_t>(values.data()), address_ + first * sizeof(uint64_t), count * sizeof(uint64_t), "reading signal words");
  if (!copied.ok()) return copied.why();
  return values;
}

} // namespace ep::gpu
