// Runs a kernel that JS launched on the executor that its description names.
#pragma once

#include "wraps.hpp"

#include "launch.hpp"
#include "simt/simt.hpp"

namespace ep::binding {

// The fields `blocks` and `simt` of a description. lanes 0: the `fast` executor.
simt_options executor_of(const Napi::Object& description);

struct memory_ways final : kernel_ways {
  explicit memory_ways(const symmetric_memory& of) : memory(of) {}
  bool end_way(int32_t rank) const override { return memory.end_way(rank); }
  bool own_fault(uint64_t found) const override { return memory.own_fault(found); }
  const symmetric_memory& memory;
};

// Waits until the engine or the NIC behind this memory, if it has one, reads no source of what was posted. Not cancellable: sources are freed after it. False:
// some of what kernels have posted is lost, and `status` says why, unless it said something before.
bool wait_for_engine(const symmetric_memory& memory, ep_kernel_status& status);

// `kernel(context)` on every block; it writes how it failed into `status`. `debts`: what it waits for of each rank, where it goes on with nobody missing.
template <class Kernel>
outcome run_kernel(const symmetric_memory& memory, const simt_options& simt, double timeout_ms, const std::atomic<uint32_t>& cancel, ep_kernel_status& status,
                   Kernel&& kernel, const wait_debts& debts = {}) {
  const memory_ways ways{memory};
  std::atomic<uint32_t> stopped{0};
  kernel_environment environment{memory.context().waits(&cancel, deadline_after(timeout_ms)), &ways};
  environment.waits.stopped = &stopped;
  environment.waits.debts = debts;
  outcome end;
  if (simt.lanes == 0) {
    const result<nothing> ran = fast_run(simt.blocks, environment, [&](fast_context& context) { return kernel(context); });
    if (!ran.ok()) {
      end.message = ran.why().message;
      status.status = ran.why().status;
    }
  } else {
    const simt_result result = simt_run(simt, environment, [&](simt_context& context) { return kernel(context); });
    if (result.outcome != simt_outcome::finished) {
      end.message = result.report;
      status.status = EP_STATUS_SYSTEM;
    }
  }
  wait_for_engine(memory, status);
  end.status = status.status;
  end.rank = status.rank;
  end.stage = status.stage;
  end.expected = status.expected;
  end.found = status.found;
  return end;
}

} // namespace ep::binding
