// What the table of libep_cuda.so promises of a GPU: looking at it makes no context, and wider blocks never fit more often than narrow ones (core/gpu/fit.hpp counts on it).
#include <cstdio>

#include <dlfcn.h>

#include "cuda/table.h"

extern "C" const ep_cuda_table* ep_cuda_table_of(uint32_t version);

namespace {

using context_state = int (*)(int device, unsigned* flags, int* active);

int failures = 0;

void check(bool ok, const char* what, int device) {
  if (ok) return;
  std::fprintf(stderr, "GPU %d: %s\n", device, what);
  ++failures;
}

} // namespace

int main() {
  const ep_cuda_table* table = ep_cuda_table_of(EP_CUDA_TABLE_VERSION);
  int devices = 0;
  if (table == nullptr || table->device_count(&devices) != 0 || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto state = driver == nullptr ? nullptr : reinterpret_cast<context_state>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
  if (state == nullptr) {
    std::fprintf(stderr, "the driver has no cuDevicePrimaryCtxGetState\n");
    return 1;
  }
  const auto has_context = [state](int device) {
    unsigned flags = 0;
    int active = -1;
    check(state(device, &flags, &active) == 0, "cuDevicePrimaryCtxGetState failed", device);
    return active != 0;
  };
  for (int device = 0; device < devices; ++device) {
    ep_cuda_facts facts{};
    check(table->device_facts(device, &facts) == 0, "device_facts failed", device);
    check(facts.memory_bytes > 0 && facts.multiprocessors > 0 && facts.pci[0] != 0, "facts are missing", device);
    for (int peer = 0; peer < devices; ++peer) {
      int reaches = -1;
      check(table->peer_access(device, peer, &reaches) == 0, "peer_access failed", device);
      check(reaches == 0 || (reaches == 1 && peer != device), "it is its own peer, or peer_access said nothing", device);
    }
    check(!has_context(device), "looking at it made a context", device);
  }
  for (int device = 0; device < devices; ++device) {
    uint32_t narrower = UINT32_MAX;
    for (uint32_t lanes = 32; lanes <= 1024; lanes += 32) {
      uint32_t blocks = 0;
      check(table->resident(device, EP_CUDA_KERNEL_DISPATCH, lanes, &blocks) == 0 && blocks > 0, "resident failed", device);
      check(blocks <= narrower, "more wide blocks fit than narrow ones", device);
      narrower = blocks;
    }
    check(has_context(device), "cuDevicePrimaryCtxGetState does not see a context where one was made", device);
  }
  std::printf("%d GPUs, %d failures\n", devices, failures);
  return failures == 0 ? 0 : 1;
}
