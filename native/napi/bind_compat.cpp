#include "compat_call.hpp"
#include "kernel_run.hpp"

#include "device/compat.hpp"

#include "ep/device/compat_dispatch.h"
#include "ep/device/ibgda_endpoint.h"

namespace ep::binding {
namespace {

// Everything that a running call points into. Owned by its task.
struct compat_job {
  std::shared_ptr<symmetric_memory> memory;
  compat_plan plan;
  std::vector<std::shared_ptr<const void>> keep;
  ep_compat_args args{};
  ep_kernel_status status{};
  simt_options simt;
  double timeout_ms = -1;

  template <class Context> bool kernel(Context& context) const {
    if (args.memory.header.kind == EP_MEMORY_PROXY) return compat_dispatch(context, proxy_endpoint{args.memory}, args);
    if (args.memory.header.kind == EP_MEMORY_IBGDA) return compat_dispatch(context, ibgda_endpoint{args.memory}, args);
    return compat_dispatch(context, load_store_endpoint{args.memory}, args);
  }

  outcome run(const std::atomic<uint32_t>& cancel) {
    const outcome end = run_kernel(*memory, simt, timeout_ms, cancel, status, [this](auto& context) { return kernel(context); });
    // HAZARD: equality needs counters that begin at zero. Safe only because the caller runs a barrier of all ranks before each call: no peer signals now.
    const int32_t self = memory->context().rank();
    for (const ep_compat_route* route : {&args.query, &args.key_value}) {
      for (int32_t rank = 0; route->src != 0 && rank < memory->context().world_size(); ++rank) {
        std::atomic_ref<uint64_t>(*memory->signal(self, route->signal_slot + static_cast<uint64_t>(rank))).store(0, std::memory_order_seq_cst);
      }
    }
    return end;
  }
};

// {source, srcOffset, target, dstOffset}, beside what read_compat_plan takes
ep_compat_route route_of(compat_job& job, const compat_way& way, const Napi::Object& from) {
  const operand source = operand_of(from.Get("source"), "source");
  const operand target = operand_of(from.Get("target"), "target");
  job.keep.insert(job.keep.end(), {source.keep, target.keep});
  return compat_route_of(job.plan, way, source, from.Get("srcOffset"), target, from.Get("dstOffset"));
}

} // namespace

// ({handle, seqLen, query, keyValue?, gradient?, blocks, simt?, timeoutMs}) -> operation
Napi::Value stream_wrap::compat_dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "compatDispatch takes a description");
  const auto description = info[0].As<Napi::Object>();
  auto job = std::make_shared<compat_job>();
  job->memory = memory_of_handle(description.Get("handle"));
  const symmetric_memory& memory = *job->memory;
  switch (memory.device_handle().header.kind) {
    case EP_MEMORY_EFA:
    case EP_MEMORY_MIXED_EFA:
      throw_invalid(env, "the compatible kernel sets its counters back to zero after each call; over EFA they are counts that the NIC keeps");
    case EP_MEMORY_MIXED_IBGDA:
    case EP_MEMORY_MIXED_PROXY: throw_invalid(env, "the compatible kernel reaches all peers in one way");
    default: break;
  }
  job->plan = read_compat_plan(description, {memory.byte_length(), memory.signal_slots(), memory.context().world_size()});
  place_compat_arrays(job->plan, [](const auto& values) { return reinterpret_cast<uint64_t>(values.data()); });
  ep_compat_args& args = job->args;
  args = job->plan.args;
  args.memory = memory.device_handle();
  args.query = route_of(*job, job->plan.ways[0], description.Get("query").As<Napi::Object>());
  if (job->plan.ways.size() > 1) args.key_value = route_of(*job, job->plan.ways[1], description.Get("keyValue").As<Napi::Object>());
  args.status = reinterpret_cast<uint64_t>(&job->status);
  refuse_compat(env, args);
  job->simt = executor_of(description);
  job->simt.blocks = static_cast<uint32_t>(compat_blocks(job->simt.blocks, args.tokens));
  const uint32_t roles = 1 + (args.key_value.src != 0 ? args.key_value.replicas : 0);
  if (job->simt.lanes != 0 && job->simt.lanes / job->simt.warp_lanes < roles) {
    throw_invalid(env, "compat: expected at least " + std::to_string(roles) + " warps, one for the query and one for each replica, found " +
                           std::to_string(job->simt.lanes / job->simt.warp_lanes));
  }
  job->timeout_ms = arg_double(description.Get("timeoutMs"), "timeoutMs");
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) { return job->run(cancel); })));
}

} // namespace ep::binding
