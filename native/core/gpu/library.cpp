#include "library.hpp"

#include <cerrno>
#include <map>
#include <mutex>

namespace ep::gpu {
namespace {

constexpr int out_of_memory = 2; // cudaErrorMemoryAllocation

std::string version_text(uint32_t version) { return version == 0 ? "none" : std::to_string(version); }

} // namespace

failure library::error(int number, const std::string& what) const {
  const char* text = table_->error_text(number);
  return {number == out_of_memory ? static_cast<uint32_t>(EP_STATUS_MEMORY_LIMIT) : static_cast<uint32_t>(EP_STATUS_SYSTEM), 0,
          what + ": " + (text == nullptr ? "no text" : text) + " (CUDA error " + std::to_string(number) + ")"};
}

std::vector<int> library::peers(int device) const {
  std::vector<int> found;
  for (int peer = 0; peer < devices_; ++peer) {
    int reaches = 0;
    if (peer != device && table_->peer_access(device, peer, &reaches) == 0 && reaches != 0) found.push_back(peer);
  }
  return found;
}

bool library::reaches(int device, const std::string& pci) const {
  for (int peer = 0; peer < devices_; ++peer) {
    if (pci_[static_cast<size_t>(peer)] != pci || peer == device) continue;
    int reached = 0;
    return table_->peer_access(device, peer, &reached) == 0 && reached != 0;
  }
  return true;
}

result<library_ref> library::open(const std::string& path) {
  // Leaked on purpose: worker threads may still hold libraries while static destructors run.
  static auto* mutex = new std::mutex;
  static auto* opened = new std::map<std::string, library_ref>;
  const std::lock_guard lock(*mutex);
  if (const auto known = opened->find(path); known != opened->end()) return known->second;
  auto file = dl::library::open(path);
  if (!file.ok()) return file.why();
  const auto of = reinterpret_cast<ep_cuda_table_function>(file.value()->find(EP_CUDA_TABLE_SYMBOL));
  const ep_cuda_table* table = of == nullptr ? nullptr : of(EP_CUDA_TABLE_VERSION);
  if (table == nullptr || table->version != EP_CUDA_TABLE_VERSION || table->byte_length != sizeof(ep_cuda_table) || table->abi_major != EP_ABI_MAJOR) {
    return failure{EP_STATUS_ABI_MISMATCH, ELIBBAD,
                   path + " has table version " + version_text(table == nullptr ? 0 : table->version) + ", this addon needs " + version_text(EP_CUDA_TABLE_VERSION) +
                       " with ABI " + std::to_string(EP_ABI_MAJOR) + ": build it again"};
  }
  std::shared_ptr<library> made(new library);
  made->file_ = file.value();
  made->table_ = table;
  int devices = 0;
  // Not kept as a failure: a driver may come later.
  if (const int error = table->device_count(&devices); error != 0) return made->error(error, "looking for GPUs");
  if (devices == 0) return failure{EP_STATUS_SYSTEM, ENODEV, "the driver finds no GPU"};
  made->devices_ = devices;
  // Here, once: asking for all facts of a device takes milliseconds.
  for (int device = 0; device < devices; ++device) {
    ep_cuda_facts facts{};
    made->pci_.emplace_back(table->device_facts(device, &facts) == 0 ? facts.pci : "");
  }
  (*opened)[path] = made;
  return library_ref(made);
}

} // namespace ep::gpu
