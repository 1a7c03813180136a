// Calls of experts of several ranks of this process by one launch.
#include "gpu_moe_call.hpp"

namespace ep::binding {
namespace {

// Of each rank in a launch.
template <class Args> struct member {
  gpu_moe_buffer_wrap* wrap;
  gpu_half job;
  Args args{};
};

// As run_half of bind_gpu_moe.cpp, of all ranks. `begin` and `seen`: where what the host has filled in of a routing begins, and where what it looks at ends.
template <class Args, class Begin, class Seen, class Of> int run_together(std::vector<member<Args>>& members, const gpu_stream_wrap& on, gpu::stream& stream, const Begin& begin, const Seen& seen, const Of& of) {
  gpu_pieces before(stream, copied_by::kernel);
  for (member<Args>& one : members) {
    if (const int error = fill_in(before, one.job, stream, begin(*one.job.routing)); error != 0) return error;
    if constexpr (std::is_same_v<Args, ep_moe_combine_args>) mirror_weights(before, one.job, one.args);
  }
  if (const int error = before.put(); error != 0) return error;
  std::vector<ep_cuda_moe_rank> ranks;
  for (const member<Args>& one : members) ranks.push_back(of(one));
  const gpu::share& share = *members.front().wrap->native->share;
  const ep_cuda_launch launch = stream.launch(share.blocks(), share.lanes(), 0, nullptr);
  if (const int error = stream.of()->table().moe_together(&launch, ranks.data(), static_cast<uint32_t>(ranks.size()), members.front().job.halves); error != 0) return error;
  gpu_pieces after(stream, copied_by::kernel);
  for (const member<Args>& one : members) hand_back(after, one.job, on, seen(*one.job.routing));
  int error = after.put();
  for (const member<Args>& one : members) {
    if (error == 0) error = take_back_in(one.job, stream);
  }
  if (error != 0) {
    const std::string why = stream.of()->error(error, "copying from the device what a call has left").message;
    for (member<Args>& one : members) one.job.failed = why;
  }
  return 0;
}

template <class Args> ep_cuda_moe_rank rank_of(const member<Args>& one) {
  const gpu_moe_contents& own = *one.wrap->native;
  return {&one.job.buffer, nullptr, nullptr, own.share->cycles(one.job.timeout_ms), address_of(&one.job.slot->cancel), own.losses->address()};
}

template <class Args> Napi::Value follow_all(Napi::Env env, gpu_stream_wrap& on, std::vector<member<Args>>& members, int error, const char* what) {
  auto operations = Napi::Array::New(env, members.size());
  for (uint32_t i = 0; i < members.size(); ++i) operations[i] = Napi::Number::New(env, follow_half(env, on, members[i].job, *members[i].wrap->native, error, what));
  return operations;
}

void check_together(Napi::Env env, const std::vector<gpu_moe_buffer_wrap*>& buffers) {
  const gpu_moe_contents& first = *buffers.front()->native;
  const auto memory = first.device_memory.lock();
  if (!memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of these buffers was closed"});
  std::vector<bool> taken(first.world_size);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const gpu_moe_contents& own = *buffers[i]->native;
    const std::string named = "buffers[" + std::to_string(i) + "], of rank " + std::to_string(own.rank) + ", ";
    const auto theirs = own.device_memory.lock();
    if (!theirs) throw_failure(env, {EP_STATUS_CLOSED, 0, named + "has lost its symmetric memory, which was closed"});
    // What the first one reaches as that rank's part is that rank's own: one opening, of one world.
    if (own.world_size != first.world_size || memory->data(own.rank) != theirs->data(own.rank)) {
      throw_invalid(env, named + "was not opened with buffers[0], of rank " + std::to_string(first.rank) + ": expected buffers of one openDeviceMoeBuffer of all ranks");
    }
    if (taken[static_cast<size_t>(own.rank)]) throw_invalid(env, named + "is the second one of that rank");
    taken[static_cast<size_t>(own.rank)] = true;
  }
}

} // namespace

// (buffers: GpuMoeBuffer[])
gpu_moe_union_wrap::gpu_moe_union_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto given = info[0].As<Napi::Array>();
  if (given.Length() == 0 || given.Length() > EP_CUDA_MOST_MOE_RANKS) {
    throw_invalid(env, std::to_string(given.Length()) + " buffers, a launch takes 1 to " + std::to_string(EP_CUDA_MOST_MOE_RANKS) + " ranks");
  }
  std::vector<gpu_moe_buffer_wrap*> wraps;
  for (uint32_t i = 0; i < given.Length(); ++i) {
    const Napi::Value one = given.Get(i);
    wraps.push_back(&unwrap<gpu_moe_buffer_wrap>(one, "buffer"));
    if (!wraps.back()->native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the buffer was closed"});
    buffers.push_back(Napi::Persistent(one.As<Napi::Object>()));
  }
  check_together(env, wraps);
  tag<gpu_moe_union_wrap>(info.This().As<Napi::Object>());
}

// The members of a call, each with its half of `info`. Throws.
template <class Args> std::vector<member<Args>> gpu_moe_union_members(const std::vector<Napi::ObjectReference>& buffers, const Napi::CallbackInfo& info) {
  const auto halves = info[1].As<Napi::Array>();
  if (halves.Length() != buffers.size()) throw_invalid(info.Env(), std::to_string(halves.Length()) + " calls of " + std::to_string(buffers.size()) + " buffers");
  std::vector<member<Args>> members(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    members[i].wrap = gpu_moe_buffer_wrap::Unwrap(buffers[i].Value());
    if (!members[i].wrap->native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the buffer was closed"});
  }
  return members;
}

// (stream, halves: as of GpuMoeBuffer.dispatch, one for each buffer) -> an operation for each
Napi::Value gpu_moe_union_wrap::dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& on = unwrap<gpu_stream_wrap>(info[0], "stream");
  gpu::stream& stream = on.open(env);
  auto members = gpu_moe_union_members<ep_moe_dispatch_args>(buffers, info);
  const auto half = [&](size_t i) { return info[1].As<Napi::Array>().Get(static_cast<uint32_t>(i)).As<Napi::Object>(); };
  for (size_t i = 0; i < members.size(); ++i) read_gpu_dispatch(members[i].job, members[i].args, *members[i].wrap, on, half(i));
  for (size_t i = 0; i < members.size(); ++i) place_candidates(members[i].job, *members[i].wrap, stream, members[i].args.call.slot, half(i));
  const int error = run_together(
      members, on, stream, [](const moe_routing_wrap::contents&) { return uint64_t{0}; }, [](const moe_routing_wrap::contents& routing) { return routing.seen; },
      [](const member<ep_moe_dispatch_args>& one) {
        ep_cuda_moe_rank made = rank_of(one);
        made.dispatch = &one.args;
        return made;
      });
  return follow_all(env, on, members, error, "launching a dispatch to experts of several ranks");
}

// (stream, halves: as of GpuMoeBuffer.combine, one for each buffer) -> an operation for each
Napi::Value gpu_moe_union_wrap::combine(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& on = unwrap<gpu_stream_wrap>(info[0], "stream");
  gpu::stream& stream = on.open(env);
  auto members = gpu_moe_union_members<ep_moe_combine_args>(buffers, info);
  for (size_t i = 0; i < members.size(); ++i) {
    read_gpu_combine(members[i].job, members[i].args, *members[i].wrap, on, info[1].As<Napi::Array>().Get(static_cast<uint32_t>(i)).As<Napi::Object>());
  }
  const auto status = [](const moe_routing_wrap::contents& routing) { return routing.status; };
  const auto filled = [](const moe_routing_wrap::contents& routing) { return routing.filled; };
  const int error = run_together(members, on, stream, status, filled, [](const member<ep_moe_combine_args>& one) {
    ep_cuda_moe_rank made = rank_of(one);
    made.combine = &one.args;
    return made;
  });
  return follow_all(env, on, members, error, "launching a combine of experts of several ranks");
}

void gpu_moe_union_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuMoeUnion"] = DefineClass(env, "GpuMoeUnion",
                                       {InstanceMethod<&gpu_moe_union_wrap::dispatch>("dispatch"), InstanceMethod<&gpu_moe_union_wrap::combine>("combine")});
}

} // namespace ep::binding
