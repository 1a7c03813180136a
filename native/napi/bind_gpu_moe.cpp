#include "gpu_moe_call.hpp"

#include <algorithm>
#include <cstring>

namespace ep::binding {
namespace {

// On the stream of a call: what the host has filled in, from `begin` on; the kernel; and what the host looks at, to `seen`. before(pieces): what else the kernel is given.
template <class Before, class Launch> int run_half(gpu_half& job, const gpu_stream_wrap& on, gpu::stream& stream, uint64_t begin, uint64_t seen, const Before& before, const Launch& launch) {
  gpu_pieces given(stream, copied_by::engine);
  if (const int error = fill_in(given, job, stream, begin); error != 0) return error;
  before(given);
  if (const int error = given.put(); error != 0) return error;
  if (const int error = launch(stream.of()->table()); error != 0) return error;
  gpu_pieces left(stream, copied_by::engine);
  hand_back(left, job, on, seen);
  int error = left.put();
  if (error == 0) error = take_back_in(job, stream);
  if (error != 0) job.failed = stream.of()->error(error, "copying from the device what a call has left").message;
  return 0;
}

constexpr auto nothing_else = [](gpu_pieces&) {};

} // namespace

// ({memory: GpuSymmetricMemory, lanes, blocks, and what MoeBuffer takes but handle and simt})
gpu_moe_buffer_wrap::gpu_moe_buffer_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a buffer is made from a description");
  const auto from = info[0].As<Napi::Object>();
  auto& symmetric = unwrap<gpu_symmetric_wrap>(from.Get("memory"), "memory");
  const gpu::symmetric_memory& memory = symmetric.open(env);
  if (memory.by_nic()) throw_invalid(env, "experts on a GPU store to all ranks' parts: they reach none by a NIC");
  auto made = std::make_shared<gpu_moe_contents>();
  made->device_memory = symmetric.native;
  describe_moe(*made, from, memory.device_handle());
  auto taken = gpu::share::take(memory, EP_CUDA_KERNEL_MOE, static_cast<uint32_t>(arg_size(from.Get("blocks"), "blocks")), static_cast<uint32_t>(arg_size(from.Get("lanes"), "lanes")));
  made->share = value_or_throw(env, taken);
  auto losses = gpu::peer_losses::create(memory.shared_context(), memory.of(), memory.device());
  made->losses = value_or_throw(env, losses);
  ep_moe_buffer& b = made->buffer;
  // Other processes: a GPU of their own, or turns on this one.
  if (memory.ranks_here() < static_cast<uint32_t>(b.memory.world_size)) b.flags |= EP_MOE_LINKED;
  const uint64_t rank_bytes = rounded(made->replica_rank.size() * sizeof(int32_t));
  const uint64_t expert_bytes = rounded(made->replica_expert.size() * sizeof(int32_t));
  const uint64_t begin_bytes = rounded(made->rank_begin.size() * sizeof(uint32_t));
  made->first_candidates = rank_bytes + expert_bytes + begin_bytes;
  made->candidate_bytes = rounded((uint64_t{b.experts.experts} + 1) * sizeof(uint32_t)) + rounded(uint64_t{b.experts.replicas} * sizeof(uint32_t));
  auto tables = gpu::device_block::allocate(memory.of(), memory.device(), made->first_candidates + uint64_t{b.calls} * tables_of_slot * made->candidate_bytes);
  made->tables = value_or_throw(env, tables);
  auto staged = gpu::pinned_block::allocate(memory.of(), memory.device(), uint64_t{b.calls} * tables_of_slot * made->candidate_bytes);
  made->staged_candidates = value_or_throw(env, staged);
  made->placed.resize(size_t{b.calls} * tables_of_slot);
  std::vector<uint8_t> constant(made->first_candidates);
  std::memcpy(constant.data(), made->replica_rank.data(), made->replica_rank.size() * sizeof(int32_t));
  std::memcpy(constant.data() + rank_bytes, made->replica_expert.data(), made->replica_expert.size() * sizeof(int32_t));
  std::memcpy(constant.data() + rank_bytes + expert_bytes, made->rank_begin.data(), made->rank_begin.size() * sizeof(uint32_t));
  auto copied = gpu::copy_now(memory.of(), memory.device(), made->tables->address(), address_of(constant.data()), constant.size(), "copying the places of experts to the device");
  value_or_throw(env, copied);
  b.experts.replica_rank = made->tables->address();
  b.experts.replica_expert = b.experts.replica_rank + rank_bytes;
  b.experts.rank_begin = b.experts.replica_expert + expert_bytes;
  auto peers = gpu::device_block::allocate(memory.of(), memory.device(), made->peers.size() * sizeof(ep_moe_peer));
  made->peers_block = value_or_throw(env, peers);
  b.peers = made->peers_block->address();
  native = std::move(made);
  tag<gpu_moe_buffer_wrap>(info.This().As<Napi::Object>());
}

const gpu_moe_contents* gpu_moe_of(Napi::Value value, std::shared_ptr<const moe_contents>& as) {
  bool same = false;
  if (value.IsObject()) napi_check_object_type_tag(value.Env(), value, &gpu_moe_buffer_wrap::type_tag, &same);
  if (!same) return nullptr;
  const auto& native = gpu_moe_buffer_wrap::Unwrap(value.As<Napi::Object>())->native;
  if (!native) throw_failure(value.Env(), {EP_STATUS_CLOSED, 0, "the buffer was closed"});
  as = native;
  return native.get();
}

void place_in_pinned(Napi::Env env, const gpu_moe_contents& of, moe_routing_wrap::contents& made) {
  const auto memory = of.device_memory.lock();
  if (!memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  auto block = gpu::pinned_block::allocate(memory->of(), memory->device(), made.bytes);
  const std::shared_ptr<const gpu::pinned_block> own = value_or_throw(env, block);
  made.data = own->data();
  made.memory = own;
  const uint64_t weights = rounded(uint64_t{of.buffer.max_tokens} * of.buffer.top_k * sizeof(float));
  auto mirror = gpu::device_block::allocate(memory->of(), memory->device(), made.bytes + weights);
  made.mirror = value_or_throw(env, mirror);
}

// (): so that calls may be captured before any was made. Before any kernel runs.
void gpu_moe_buffer_wrap::place_candidates_now(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!native || !candidates) throw_failure(env, {EP_STATUS_CLOSED, 0, "the buffer was closed, or has no candidates"});
  const auto memory = native->device_memory.lock();
  if (!memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  const uint64_t tables = uint64_t{native->buffer.calls} * tables_of_slot;
  for (uint64_t table = 0; table < tables; ++table) stage_candidates(*candidates, native->staged_candidates->data() + table * native->candidate_bytes);
  auto copied = gpu::copy_now(memory->of(), memory->device(), native->tables->address() + native->first_candidates, address_of(native->staged_candidates->data()),
                              tables * native->candidate_bytes, "copying the candidates of calls to the device");
  value_or_throw(env, copied);
  std::ranges::fill(native->placed, candidates);
}

// () -> {blocks, lanes, resident}
Napi::Value gpu_moe_buffer_wrap::shape(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the buffer was closed"});
  auto made = Napi::Object::New(env);
  made["blocks"] = Napi::Number::New(env, native->share->blocks());
  made["lanes"] = Napi::Number::New(env, native->share->lanes());
  made["resident"] = Napi::Number::New(env, native->share->resident());
  return made;
}

// (begin: Int32Array [experts + 1], replicas: Int32Array)
void gpu_moe_buffer_wrap::set_candidates(const Napi::CallbackInfo& info) {
  if (!native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the buffer was closed"});
  auto made = candidates_of(native->buffer, info[0], info[1]);
  if (made->begin.back() > native->buffer.experts.replicas) throw_invalid(info.Env(), "candidates name a replica more than once");
  candidates = std::move(made);
}

// (stream, half): as MoeBuffer.dispatch, of memory that the GPU reaches
Napi::Value gpu_moe_buffer_wrap::dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& on = unwrap<gpu_stream_wrap>(info[0], "stream");
  gpu::stream& stream = on.open(env);
  gpu_half job;
  ep_moe_dispatch_args args{};
  const auto description = info[1].As<Napi::Object>();
  read_gpu_dispatch(job, args, *this, on, description);
  if ((job.halves & send_half) != 0) place_candidates(job, *this, stream, args.call.slot, description);
  const gpu::share& share = *native->share;
  const ep_cuda_launch launch = stream.launch(share.blocks(), share.lanes(), share.cycles(job.timeout_ms), job.slot, native->losses->address());
  const int error = run_half(job, on, stream, 0, job.routing->seen, nothing_else, [&](const ep_cuda_table& table) { return table.moe_dispatch(&launch, &job.buffer, &args, job.halves); });
  return Napi::Number::New(env, follow_half(env, on, job, *native, error, "launching a dispatch to experts"));
}

// (stream, half): as MoeBuffer.combine
Napi::Value gpu_moe_buffer_wrap::combine(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& on = unwrap<gpu_stream_wrap>(info[0], "stream");
  gpu::stream& stream = on.open(env);
  gpu_half job;
  ep_moe_combine_args args{};
  read_gpu_combine(job, args, *this, on, info[1].As<Napi::Object>());
  const gpu::share& share = *native->share;
  const ep_cuda_launch launch = stream.launch(share.blocks(), share.lanes(), share.cycles(job.timeout_ms), job.slot, native->losses->address());
  const auto weights = [&](gpu_pieces& given) { mirror_weights(given, job, args); };
  const int error = run_half(job, on, stream, job.routing->status, job.routing->filled, weights, [&](const ep_cuda_table& table) { return table.moe_combine(&launch, &job.buffer, &args, job.halves); });
  return Napi::Number::New(env, follow_half(env, on, job, *native, error, "launching a combine of experts"));
}

// (stream, call): as MoeBuffer.release
Napi::Value gpu_moe_buffer_wrap::release(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& on = unwrap<gpu_stream_wrap>(info[0], "stream");
  gpu::stream& stream = on.open(env);
  gpu_half job;
  ep_moe_call call{};
  begin_call(job, call, *this, on, info[1].As<Napi::Object>());
  const gpu::share& share = *native->share;
  call.flags |= EP_MOE_DEVICE_EPOCH;
  const ep_cuda_launch launch = stream.launch(share.blocks(), share.lanes(), share.cycles(job.timeout_ms), job.slot, native->losses->address());
  // With the report: whoever was out of the call gets no credit for it.
  const int error = run_half(job, on, stream, job.routing->status, job.routing->filled, nothing_else, [&](const ep_cuda_table& table) { return table.moe_release(&launch, &job.buffer, &call); });
  return Napi::Number::New(env, follow_half(env, on, job, *native, error, "launching a release"));
}

void gpu_moe_buffer_wrap::close(const Napi::CallbackInfo&) {
  // Routings hold the rest until they are collected; calls under way and graphs hold it themselves.
  if (native) native->share.reset();
  native.reset();
}

void gpu_moe_buffer_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuMoeBuffer"] =
      DefineClass(env, "GpuMoeBuffer",
                  {InstanceMethod<&gpu_moe_buffer_wrap::shape>("shape"), InstanceMethod<&gpu_moe_buffer_wrap::set_candidates>("setCandidates"),
                   InstanceMethod<&gpu_moe_buffer_wrap::place_candidates_now>("placeCandidates"),
                   InstanceMethod<&gpu_moe_buffer_wrap::dispatch>("dispatch"), InstanceMethod<&gpu_moe_buffer_wrap::combine>("combine"),
                   InstanceMethod<&gpu_moe_buffer_wrap::release>("release"), InstanceMethod<&gpu_moe_buffer_wrap::close>("close")});
}

} // namespace ep::binding
