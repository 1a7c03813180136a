#include <algorithm>
#include <cstring>

#include "collective/reduce.hpp"
#include "ep/device/group_call.h"
#include "gpu_wraps.hpp"

namespace ep::binding {

static_assert(EP_ELEMENT_F64 == static_cast<uint32_t>(element_type::f64) && EP_ELEMENT_BF16 == static_cast<uint32_t>(element_type::bf16) &&
              EP_ELEMENT_U8 == static_cast<uint32_t>(element_type::u8));
static_assert(EP_FOLD_SUM == static_cast<uint32_t>(reduce_op::sum) && EP_FOLD_MIN == static_cast<uint32_t>(reduce_op::min) &&
              EP_FOLD_PREMUL_SUM == static_cast<uint32_t>(reduce_op::premul_sum));

// ({memory, blocks, lanes}); blocks 0: half of this rank's share of the device
gpu_group_wrap::gpu_group_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a group is made from a description");
  const auto description = info[0].As<Napi::Object>();
  auto& memory = unwrap<gpu_symmetric_wrap>(description.Get("memory"), "memory");
  memory.open(env);
  const uint64_t blocks = arg_size(description.Get("blocks"), "blocks");
  if (blocks > EP_GROUP_MOST_BLOCKS) throw_invalid(env, std::to_string(blocks) + " blocks: expected at most " + std::to_string(EP_GROUP_MOST_BLOCKS));
  auto made = gpu::group::create(memory.native, static_cast<uint32_t>(blocks), static_cast<uint32_t>(arg_size(description.Get("lanes"), "lanes")));
  native = value_or_throw(env, made);
  tag<gpu_group_wrap>(info.This().As<Napi::Object>());
}
gpu::group& gpu_group_wrap::open(Napi::Env env) const {
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the group was released"});
  return *native;
}
// () -> {blocks, lanes, resident}
Napi::Value gpu_group_wrap::shape(const Napi::CallbackInfo& info) {
  const gpu::group& group = open(info.Env());
  auto made = Napi::Object::New(info.Env());
  made["blocks"] = Napi::Number::New(info.Env(), group.blocks());
  made["lanes"] = Napi::Number::New(info.Env(), group.lanes());
  made["resident"] = Napi::Number::New(info.Env(), group.resident());
  return made;
}
// (blocks that all ranks have) -> bytes of a slot
Napi::Value gpu_group_wrap::lay_out(const Napi::CallbackInfo& info) {
  gpu::group& group = open(info.Env());
  auto done = group.lay_out(static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[0], "blocks"), UINT32_MAX)));
  value_or_throw(info.Env(), done);
  return Napi::Number::New(info.Env(), static_cast<double>(group.args().slot_bytes));
}
void gpu_group_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_group_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuGroup"] = DefineClass(env, "GpuGroup",
                                    {InstanceMethod<&gpu_group_wrap::shape>("shape"), InstanceMethod<&gpu_group_wrap::lay_out>("layOut"),
                                     InstanceMethod<&gpu_group_wrap::release>("release")});
}

// (group, {mode, element, fold, factor, signature, even, timeoutMs}, then three for the output, for each rank's send and for each rank's take: operand, byteOffset, byteLength).
// `even`: all ranks know the longest pair of any of them. -> operation
Napi::Value gpu_stream_wrap::group_call(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  if (capturing) throw_invalid(env, "the stream is being captured: collective calls are launched as they are");
  const auto& wrap = unwrap<gpu_group_wrap>(info[0], "group");
  const gpu::group& group = wrap.open(env);
  const gpu::symmetric_memory& memory = *group.memory();
  if (memory.device() != stream.device()) {
    throw_invalid(env, "the group is of GPU " + std::to_string(memory.device()) + ", the stream of GPU " + std::to_string(stream.device()));
  }
  ep_group_args args = group.args();
  if (args.blocks == 0) throw_invalid(env, "a group takes calls after layOut()");
  if (!info[1].IsObject()) throw_invalid(env, "a call of a group is made from a description");
  const auto description = info[1].As<Napi::Object>();
  const uint64_t mode = arg_size(description.Get("mode"), "mode");
  const uint64_t element = arg_size(description.Get("element"), "element");
  const uint64_t fold = arg_size(description.Get("fold"), "fold");
  if (mode > EP_GROUP_FOLD_ALL || fold > EP_FOLD_PREMUL_SUM || element > static_cast<uint64_t>(element_type::ue8m0)) throw_invalid(env, "a call of a group names no mode, element or fold");
  const auto type = static_cast<element_type>(element);
  if (mode != EP_GROUP_EXCHANGE && !reduces(static_cast<reduce_op>(fold), type)) throw_invalid(env, "these elements cannot be folded so");
  args.mode = static_cast<uint32_t>(mode);
  args.element = static_cast<uint32_t>(element);
  args.fold = static_cast<uint32_t>(fold);
  const double factor = arg_double(description.Get("factor"), "factor");
  std::memcpy(&args.factor_bits, &factor, sizeof factor);
  args.signature = arg_u64(description.Get("signature"), "signature");
  const double timeout = arg_double(description.Get("timeoutMs"), "timeoutMs");
  const auto world = static_cast<size_t>(memory.context().world_size());
  constexpr size_t fixed = 2;
  if (info.Length() != fixed + 3 * (1 + 2 * world)) throw_invalid(env, "a call of a group of " + std::to_string(world) + " takes three arguments for the output, each send and each take");
  std::vector<std::shared_ptr<const void>> keep{wrap.native, gpu::kernels_wait()};
  const uint64_t each = element_bytes(type);
  size_t at = fixed;
  const auto next = [&](const char* what) -> ep_group_piece {
    const uint64_t bytes = arg_size(info[at + 2], "byteLength");
    const size_t from = at;
    at += 3;
    if (bytes == 0) return {0, 0};
    const operand found = gpu_operand_of(info[from], what, stream, false);
    const uint64_t offset = arg_size(info[from + 1], "byteOffset");
    if (offset > found.byte_length || bytes > found.byte_length - offset || bytes % each != 0 || (found.address + offset) % each != 0) {
      throw_invalid(env, std::string(what) + " of " + std::to_string(bytes) + " bytes from " + std::to_string(offset) + " of " + std::to_string(found.byte_length) + ", elements of " +
                             std::to_string(each));
    }
    keep.push_back(found.keep);
    return {found.address + offset, bytes};
  };
  args.out = next("the output");
  for (size_t rank = 0; rank < world; ++rank) args.sends[rank] = next("a source");
  for (size_t rank = 0; rank < world; ++rank) args.takes[rank] = next("a target");
  if (mode == EP_GROUP_FOLD_ALL && args.out.bytes <= group_flat_bytes) {
    args.mode = EP_GROUP_FOLD;
    for (size_t rank = 0; rank < world; ++rank) {
      args.sends[rank] = args.sends[0];
      args.takes[rank] = {0, args.out.bytes};
    }
  }
  // HAZARD: all ranks launch as many blocks, or channels that some have wait for ever.
  uint64_t blocks = args.blocks;
  if (description.Get("even").ToBoolean()) {
    const uint64_t chunks = args.mode == EP_GROUP_FOLD_ALL ? group_chunks(args, args.out.bytes, world) : group_chunks(args, arg_size(description.Get("longest"), "longest"), 1);
    blocks = std::clamp<uint64_t>(chunks, 1, blocks);
  }
  auto slot = stream.slot();
  const gpu::slot_ref own = value_or_throw(env, slot);
  args.status = reinterpret_cast<uint64_t>(&own->status);
  const ep_cuda_launch launch = stream.launch(static_cast<uint32_t>(blocks), group.lanes(), group.cycles(timeout), own);
  check(env, stream.of()->table().group_call(&launch, &args), "launching a collective call");
  gpu::stream::watch how;
  how.slots.push_back(own);
  how.deadline_ns = deadline_after(timeout);
  how.context = memory.shared_context();
  how.keep = std::move(keep);
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

} // namespace ep::binding
