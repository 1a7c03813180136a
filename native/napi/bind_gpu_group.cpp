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

namespace {

constexpr uint64_t most_sections = 1024;

uint32_t arg_up_to(const Napi::Env& env, Napi::Value value, const char* what, uint64_t most) {
  const uint64_t given = arg_size(value, what);
  if (given > most) throw_invalid(env, std::to_string(given) + " " + what + ": expected at most " + std::to_string(most));
  return static_cast<uint32_t>(given);
}

} // namespace

// ({memory, sections, blocks, lanes}); blocks 0: half of this rank's share of the device. Without a description by beside() only.
gpu_group_arena_wrap::gpu_group_arena_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (info.Length() == 0) {
    tag<gpu_group_arena_wrap>(info.This().As<Napi::Object>());
    return;
  }
  if (!info[0].IsObject()) throw_invalid(env, "the arena of groups is made from a description");
  const auto description = info[0].As<Napi::Object>();
  auto& memory = unwrap<gpu_symmetric_wrap>(description.Get("memory"), "memory");
  memory.open(env);
  const uint32_t sections = arg_up_to(env, description.Get("sections"), "sections", most_sections);
  const uint32_t blocks = arg_up_to(env, description.Get("blocks"), "blocks", EP_GROUP_MOST_BLOCKS);
  auto made = gpu::group_arena::create(memory.native, sections, blocks, arg_up_to(env, description.Get("lanes"), "lanes", 1024));
  native = value_or_throw(env, made);
  tag<gpu_group_arena_wrap>(info.This().As<Napi::Object>());
}
const std::shared_ptr<gpu::group_arena>& gpu_group_arena_wrap::open(Napi::Env env) const {
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the arena of groups was released"});
  return native;
}
// (blocks, as of the description) -> GpuGroupArena
Napi::Value gpu_group_arena_wrap::beside(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto made = open(env)->beside(arg_up_to(env, info[0], "blocks", EP_GROUP_MOST_BLOCKS));
  auto native = value_or_throw(env, made);
  const Napi::Object arena = state_of(env).classes["GpuGroupArena"].New({});
  gpu_group_arena_wrap::Unwrap(arena)->native = std::move(native);
  return arena;
}
// () -> {blocks, lanes, resident}
Napi::Value gpu_group_arena_wrap::shape(const Napi::CallbackInfo& info) {
  const gpu::group_arena& arena = *open(info.Env());
  auto made = Napi::Object::New(info.Env());
  made["blocks"] = Napi::Number::New(info.Env(), arena.blocks());
  made["lanes"] = Napi::Number::New(info.Env(), arena.lanes());
  made["resident"] = Napi::Number::New(info.Env(), arena.resident());
  return made;
}
void gpu_group_arena_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_group_arena_wrap::define(Napi::Env env, Napi::Object exports) {
  const Napi::Function made = DefineClass(env, "GpuGroupArena",
                                          {InstanceMethod<&gpu_group_arena_wrap::beside>("beside"), InstanceMethod<&gpu_group_arena_wrap::shape>("shape"),
                                           InstanceMethod<&gpu_group_arena_wrap::release>("release")});
  exports["GpuGroupArena"] = made;
  state_of(env).classes["GpuGroupArena"] = Napi::Persistent(made);
}

// ({arena, section, byteOffset, byteLength, ranks: Int32Array of world ranks})
gpu_group_wrap::gpu_group_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a group is made from a description");
  const auto description = info[0].As<Napi::Object>();
  const auto& arena = unwrap<gpu_group_arena_wrap>(description.Get("arena"), "arena").open(env);
  const gpu::group::section at{arg_up_to(env, description.Get("section"), "section", most_sections), arg_size(description.Get("byteOffset"), "byteOffset"),
                               arg_size(description.Get("byteLength"), "byteLength")};
  const byte_span given = arg_bytes(description.Get("ranks"), "ranks");
  if (given.size % sizeof(int32_t) != 0) throw_invalid(env, "ranks must be an Int32Array");
  std::vector<int32_t> ranks(given.size / sizeof(int32_t));
  if (given.size != 0) std::memcpy(ranks.data(), given.data, given.size);
  auto made = gpu::group::create(arena, at, std::move(ranks));
  native = value_or_throw(env, made);
  tag<gpu_group_wrap>(info.This().As<Napi::Object>());
}
gpu::group& gpu_group_wrap::open(Napi::Env env) const {
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the group was released"});
  return *native;
}
// (blocks that all members have) -> bytes of a slot
Napi::Value gpu_group_wrap::lay_out(const Napi::CallbackInfo& info) {
  gpu::group& group = open(info.Env());
  auto done = group.lay_out(static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[0], "blocks"), UINT32_MAX)));
  value_or_throw(info.Env(), done);
  return Napi::Number::New(info.Env(), static_cast<double>(group.args().slot_bytes));
}
void gpu_group_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_group_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuGroup"] = DefineClass(env, "GpuGroup",
                                    {InstanceMethod<&gpu_group_wrap::lay_out>("layOut"), InstanceMethod<&gpu_group_wrap::release>("release")});
}

// (group, {mode, element, fold, factor, signature, even, timeoutMs}, then three for the output, for each rank's send and for each rank's take: operand, byteOffset, byteLength).
// `even`: all members know the longest pair of any of them. Each send and take is of a rank of the group; what ends the operation names ranks of the world. -> operation; 0 while
// the stream is being captured: then a replay's own limit ends the call
Napi::Value gpu_stream_wrap::group_call(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const auto& wrap = unwrap<gpu_group_wrap>(info[0], "group");
  const gpu::group& group = wrap.open(env);
  const gpu::group_arena& arena = group.arena();
  const gpu::symmetric_memory& memory = *arena.memory();
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
  const size_t size = group.ranks()->size();
  constexpr size_t fixed = 2;
  if (info.Length() != fixed + 3 * (1 + 2 * size)) throw_invalid(env, "a call of a group of " + std::to_string(size) + " takes three arguments for the output, each send and each take");
  std::vector<std::shared_ptr<const void>> keep{wrap.native};
  // A captured call waits when it is replayed.
  if (!capturing) keep.push_back(gpu::kernels_wait());
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
  for (size_t rank = 0; rank < size; ++rank) args.sends[rank] = next("a source");
  for (size_t rank = 0; rank < size; ++rank) args.takes[rank] = next("a target");
  if (mode == EP_GROUP_FOLD_ALL && args.out.bytes <= group_flat_bytes) {
    args.mode = EP_GROUP_FOLD;
    for (size_t rank = 0; rank < size; ++rank) {
      args.sends[rank] = args.sends[0];
      args.takes[rank] = {0, args.out.bytes};
    }
  }
  // HAZARD: all ranks launch as many blocks, or channels that some have wait for ever.
  uint64_t blocks = args.blocks;
  if (description.Get("even").ToBoolean()) {
    const uint64_t chunks = args.mode == EP_GROUP_FOLD_ALL ? group_chunks(args, args.out.bytes, size) : group_chunks(args, arg_size(description.Get("longest"), "longest"), 1);
    blocks = std::clamp<uint64_t>(chunks, 1, blocks);
  }
  auto slot = stream.slot();
  const gpu::slot_ref own = value_or_throw(env, slot);
  args.status = reinterpret_cast<uint64_t>(&own->status);
  const ep_cuda_launch launch = stream.launch(static_cast<uint32_t>(blocks), arena.lanes(), capturing ? 0 : arena.cycles(timeout), own);
  check(env, stream.of()->table().group_call(&launch, &args), "launching a collective call");
  if (capturing) {
    capturing->kernels.push_back({own, group.ranks()});
    capturing->keep.insert(capturing->keep.end(), keep.begin(), keep.end());
    capturing->context = memory.shared_context();
    return Napi::Number::New(env, 0);
  }
  gpu::stream::watch how;
  how.kernels.push_back({own, group.ranks()});
  how.deadline_ns = deadline_after(timeout);
  how.context = memory.shared_context();
  how.keep = std::move(keep);
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

} // namespace ep::binding
