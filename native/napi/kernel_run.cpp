#include "kernel_run.hpp"

#include "ep/device/efa_endpoint.h"
#include "ep/device/ibgda_endpoint.h"

namespace ep::binding {

simt_options executor_of(const Napi::Object& description) {
  const Napi::Env env = description.Env();
  simt_options made{.blocks = 1, .lanes = 0};
  made.blocks = static_cast<uint32_t>(arg_size(description.Get("blocks"), "blocks"));
  if (made.blocks < 1 || made.blocks > 1024) throw_invalid(env, "blocks " + std::to_string(made.blocks) + " is not in 1..1024");
  const Napi::Value simt = description.Get("simt");
  if (simt.IsUndefined()) return made;
  const auto shape = simt.As<Napi::Object>();
  made.lanes = static_cast<uint32_t>(arg_size(shape.Get("lanes"), "lanes"));
  made.warp_lanes = static_cast<uint32_t>(arg_size(shape.Get("warpLanes"), "warpLanes"));
  made.seed = arg_size(shape.Get("seed"), "seed");
  if (made.lanes < 1 || made.lanes > 1024 || made.warp_lanes < 1 || made.warp_lanes > 32 || made.lanes % made.warp_lanes != 0) {
    throw_invalid(env, "a block of " + std::to_string(made.lanes) + " lanes in warps of " + std::to_string(made.warp_lanes) +
                           ": lanes must be in 1..1024 and a multiple of warpLanes, which is in 1..32");
  }
  return made;
}

namespace {

bool wait_for_proxy(const ep_memory_handle& handle, const wait_scope& scope, ep_kernel_status& status) {
  auto& ring = *reinterpret_cast<ep_proxy_ring*>(handle.proxy);
  const uint64_t posted = std::atomic_ref<uint64_t>(ring.tail).load(std::memory_order_acquire) & ~EP_PROXY_STOPPED;
  // It ends, as an engine that stops counts what it loses as completed.
  const uint64_t found = wait_word(scope, &ring.completed, comparison::ge, posted, any_rank).found;
  if (found != EP_PROXY_LOST) return true;
  kernel_status_fail(&status, {EP_STATUS_CLOSED, handle.rank, found}, EP_STAGE_ROOM, posted);
  return false;
}

// It ends, as a NIC completes what was posted or breaks the queue pair.
template <class Endpoint> bool wait_for_nic(const ep_memory_handle& handle, const wait_scope& scope, ep_kernel_status& status) {
  const kernel_environment environment{scope};
  fast_context context{environment, 0, 1, nullptr};
  const Endpoint endpoint{handle};
  bool ok = true;
  for (int32_t peer = 0; peer < handle.world_size; ++peer) ok = endpoint.quiet(context, thread_coop<fast_context>{context}, peer, &status) && ok;
  return ok;
}

} // namespace

bool wait_for_engine(const symmetric_memory& memory, ep_kernel_status& status) {
  const ep_memory_handle handle = memory.device_handle();
  wait_scope scope;
  scope.wake = memory.context().wake();
  scope.policy = memory.context().policy();
  switch (handle.header.kind) {
    case EP_MEMORY_PROXY:
    case EP_MEMORY_MIXED_PROXY: return wait_for_proxy(handle, scope, status);
    case EP_MEMORY_IBGDA:
    case EP_MEMORY_MIXED_IBGDA: return wait_for_nic<ibgda_endpoint>(handle, scope, status);
    case EP_MEMORY_EFA:
    case EP_MEMORY_MIXED_EFA: return wait_for_nic<efa_endpoint>(handle, scope, status);
    default: return true;
  }
}

} // namespace ep::binding
