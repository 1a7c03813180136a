#include "kernel.hpp"

namespace ep {

void kernel_status_fail(ep_kernel_status* status, const wait_result& result, uint32_t stage, uint64_t expected) {
  if (status == nullptr) return;
  uint32_t ok = EP_STATUS_OK;
  // PENDING marks the record as taken while its fields are written; the host reads it after the kernel has ended.
  if (!std::atomic_ref<uint32_t>(status->status).compare_exchange_strong(ok, EP_STATUS_PENDING)) return;
  status->rank = result.rank;
  status->stage = stage;
  status->expected = expected;
  status->found = result.found;
  std::atomic_ref<uint32_t>(status->status).store(result.status, std::memory_order_release);
}

} // namespace ep
