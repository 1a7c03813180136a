#include "compat_call.hpp"
#include "device/compat.hpp"
#include "gpu_image.hpp"
#include "gpu_wraps.hpp"

namespace ep::binding {

// ({memory, blocks}); blocks 0: half of this rank's share of the device
gpu_compat_wrap::gpu_compat_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "per-token calls are made from a description");
  const auto description = info[0].As<Napi::Object>();
  auto& memory = unwrap<gpu_symmetric_wrap>(description.Get("memory"), "memory");
  // Others have counters that a NIC keeps, or kernels whose share of the device nobody has asked for.
  if (memory.open(env).device_handle().header.kind != EP_MEMORY_LOAD_STORE) {
    throw_invalid(env, "compat: expected memory that kernels of all ranks reach by loads and stores, found some behind a NIC");
  }
  const uint64_t blocks = arg_size(description.Get("blocks"), "blocks");
  if (blocks > 65535) throw_invalid(env, std::to_string(blocks) + " blocks: expected at most 65535");
  auto share = gpu::share::take(*memory.native, EP_CUDA_KERNEL_COMPAT, static_cast<uint32_t>(blocks), compat_block_lanes);
  native = std::make_shared<const contents>(contents{memory.native, value_or_throw(env, share)});
  tag<gpu_compat_wrap>(info.This().As<Napi::Object>());
}
// () -> {blocks, lanes, resident}
Napi::Value gpu_compat_wrap::shape(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the per-token calls were released"});
  auto made = Napi::Object::New(env);
  made["blocks"] = Napi::Number::New(env, native->share->blocks());
  made["lanes"] = Napi::Number::New(env, native->share->lanes());
  made["resident"] = Napi::Number::New(env, native->share->resident());
  return made;
}
void gpu_compat_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_compat_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuCompat"] = DefineClass(env, "GpuCompat", {InstanceMethod<&gpu_compat_wrap::shape>("shape"), InstanceMethod<&gpu_compat_wrap::release>("release")});
}

// HAZARD: its memory is held weakly, as of gpu_dispatch_wrap.
struct gpu_compat_dispatch_wrap::contents {
  std::weak_ptr<const gpu_compat_wrap::contents> calls;
  std::shared_ptr<const gpu::device_block> arrays;
  compat_plan plan; // its arrays lie on the device
};

// ({compat, seqLen, query, keyValue?, gradient?})
gpu_compat_dispatch_wrap::gpu_compat_dispatch_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a per-token dispatch is made from a description");
  const auto description = info[0].As<Napi::Object>();
  const auto& calls = unwrap<gpu_compat_wrap>(description.Get("compat"), "compat").native;
  if (!calls) throw_failure(env, {EP_STATUS_CLOSED, 0, "the per-token calls were released"});
  const gpu::symmetric_memory& memory = *calls->memory;
  auto made = std::make_shared<contents>();
  made->plan = read_compat_plan(description, {memory.byte_length(), memory.signal_slots(), memory.context().world_size()});
  gpu_image arrays;
  place_compat_arrays(made->plan, [&](const auto& values) { return arrays.add(values); });
  auto block = gpu::device_block::allocate(memory.of(), memory.device(), arrays.byte_length());
  made->arrays = value_or_throw(env, block);
  const uint64_t base = made->arrays->address();
  gpu_image again; // their places, now that the block has an address
  place_compat_arrays(made->plan, [&](const auto& values) { return base + again.add(values); });
  auto copied = arrays.copy_to(memory.of(), memory.device(), base);
  value_or_throw(env, copied);
  made->calls = calls;
  native = std::move(made);
  tag<gpu_compat_dispatch_wrap>(info.This().As<Napi::Object>());
}
void gpu_compat_dispatch_wrap::define(Napi::Env env, Napi::Object exports) { exports["GpuCompatDispatch"] = DefineClass(env, "GpuCompatDispatch", {}); }

// (dispatch, ..., then for each tensor from argument `at` on: source, srcOffset, target, dstOffset): what a launch on this stream is given, checked, and in `keep` whatever that points into.
ep_compat_args gpu_stream_wrap::compat_call(const Napi::CallbackInfo& info, size_t at, std::vector<std::shared_ptr<const void>>& keep) {
  const Napi::Env env = info.Env();
  const gpu::stream& stream = open(env);
  const auto prepared = unwrap<gpu_compat_dispatch_wrap>(info[0], "dispatch").native;
  const auto calls = prepared->calls.lock();
  if (!calls) throw_failure(env, {EP_STATUS_CLOSED, 0, "the dispatcher of this dispatch was closed"});
  if (capturing) throw_invalid(env, "the stream is being captured: a per-token call needs a barrier of the host before each launch");
  const gpu::symmetric_memory& memory = *calls->memory;
  if (memory.device() != stream.device()) {
    throw_invalid(env, "the dispatch is of GPU " + std::to_string(memory.device()) + ", the stream of GPU " + std::to_string(stream.device()));
  }
  const compat_plan& plan = prepared->plan;
  constexpr size_t each = 4;
  if (info.Length() != at + each * plan.ways.size()) {
    throw_invalid(env, "a per-token dispatch of " + std::to_string(plan.ways.size()) + " tensors takes four arguments for each");
  }
  keep.insert(keep.end(), {prepared, calls});
  ep_compat_args args = plan.args;
  args.memory = memory.device_handle();
  for (size_t i = 0; i < plan.ways.size(); ++i, at += each) {
    const operand source = gpu_operand_of(info[at], "source", stream, false);
    // A tensor without rows may have no address.
    const operand target = plan.ways[i].received == 0 ? operand{} : gpu_operand_of(info[at + 2], "target", stream, false);
    (i == 0 ? args.query : args.key_value) = compat_route_of(plan, plan.ways[i], source, info[at + 1], target, info[at + 3]);
    keep.insert(keep.end(), {source.keep, target.keep});
  }
  refuse_compat(env, args);
  return args;
}

// (dispatch, then the tensors): throws what compat_dispatch would
void gpu_stream_wrap::compat_check(const Napi::CallbackInfo& info) {
  std::vector<std::shared_ptr<const void>> keep;
  compat_call(info, 1, keep);
}

// (dispatch, timeoutMs, then the tensors) -> operation. All ranks have passed a barrier since the end of their last one.
Napi::Value gpu_stream_wrap::compat_dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  gpu::stream::watch how;
  ep_compat_args args = compat_call(info, 2, how.keep);
  const auto& prepared = *unwrap<gpu_compat_dispatch_wrap>(info[0], "dispatch").native;
  const auto calls = prepared.calls.lock(); // held by how.keep
  const double timeout = arg_double(info[1], "timeoutMs");
  how.keep.push_back(gpu::kernels_wait());
  auto slot = stream.slot();
  const gpu::slot_ref own = value_or_throw(env, slot);
  args.status = reinterpret_cast<uint64_t>(&own->status);
  const auto blocks = static_cast<uint32_t>(compat_blocks(calls->share->blocks(), args.tokens));
  // The host ends its waits first, and says why: as of gpu::calls.
  const ep_cuda_launch launch = stream.launch(blocks, calls->share->lanes(), calls->share->cycles(2 * timeout), own);
  const ep_cuda_table& table = stream.of()->table();
  check(env, table.compat(&launch, &args), "launching a per-token dispatch");
  // HAZARD: equality needs counters that begin at zero. Safe only because the operation ends behind this, and a barrier of all ranks follows before any of them launches again.
  const gpu::symmetric_memory& memory = *calls->memory;
  const auto world = static_cast<uint64_t>(memory.context().world_size());
  for (const compat_way& way : prepared.plan.ways) {
    const uint64_t first = memory.signals(memory.context().rank()) + way.native.signal_slot * sizeof(uint64_t);
    const int error = table.fill(stream.native(), first, 0, world * sizeof(uint64_t));
    if (error != 0 && how.failed.empty()) how.failed = stream.of()->error(error, "zeroing the counters of a per-token dispatch").message;
  }
  how.kernels.push_back({own, nullptr});
  how.deadline_ns = deadline_after(timeout);
  how.context = memory.shared_context();
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

} // namespace ep::binding
