#include "wraps.hpp"

#include "hostile/engine.hpp"

namespace ep::binding {
namespace {

struct hostile_wrap : Napi::ObjectWrap<hostile_wrap> {
  static constexpr napi_type_tag type_tag{0x6570686f7374696cull, 9};
  static void define(Napi::Env env, Napi::Object exports);
  explicit hostile_wrap(const Napi::CallbackInfo& info);
  void attach(const Napi::CallbackInfo& info);
  Napi::Value put(const Napi::CallbackInfo& info);
  Napi::Value put_value(const Napi::CallbackInfo& info);
  Napi::Value signal(const Napi::CallbackInfo& info);
  Napi::Value flush(const Napi::CallbackInfo& info);
  void nudge(const Napi::CallbackInfo& info);
  Napi::Value counts(const Napi::CallbackInfo& info);
  Napi::Value violation(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  hostile_engine& open(Napi::Env env) const;
  hostile_request request_to(const Napi::CallbackInfo& info, uint64_t bytes, size_t signal_first) const;
  Napi::Value post(Napi::Env env, hostile_request request) const;

  // Shared with the environment's end, which may come after this wrap's finalizer. `engine` is null after close().
  struct holder {
    std::unique_ptr<hostile_engine> engine;
  };
  std::shared_ptr<holder> native;
  std::shared_ptr<rank_context> context; // null after close()
  uint64_t end_key = 0;
};

// (rank: RankContext, seed, maxDelayUs, ringCapacity)
hostile_wrap::hostile_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  context = unwrap<rank_wrap>(info[0], "rank").native->context;
  if (!context) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rank was closed"});
  hostile_options options;
  options.seed = arg_u64(info[1], "seed");
  options.max_delay_ns = static_cast<int64_t>(arg_size(info[2], "maxDelayUs")) * 1000;
  options.ring_capacity = arg_size(info[3], "ringCapacity");
  if (options.max_delay_ns > 60'000'000'000) throw_invalid(env, "maxDelayUs is more than a minute");
  if (options.ring_capacity == 0 || options.ring_capacity > 65536 || (options.ring_capacity & (options.ring_capacity - 1)) != 0) {
    throw_invalid(env, "ringCapacity " + std::to_string(options.ring_capacity) + " is not a power of two in 1..65536");
  }
  native = std::make_shared<holder>();
  auto made = hostile_engine::create(context, state_of(env), options);
  native->engine = std::move(value_or_throw(env, made));
  end_key = state_of(env).at_end([held = native] { held->engine.reset(); });
  tag<hostile_wrap>(info.This().As<Napi::Object>());
}

hostile_engine& hostile_wrap::open(Napi::Env env) const {
  if (!native->engine) throw_failure(env, {EP_STATUS_CLOSED, 0, "the hostile engine was closed"});
  return *native->engine;
}

// (memory)
void hostile_wrap::attach(const Napi::CallbackInfo& info) {
  symmetric_memory& memory = unwrap<memory_wrap>(info[0], "memory").open(info.Env());
  open(info.Env()).attach(memory);
}

// Arguments (memory, peer, dstOffset) and, from `signal_first` on, (slot or -1, add). Signals of this transport only add.
hostile_request hostile_wrap::request_to(const Napi::CallbackInfo& info, uint64_t bytes, size_t signal_first) const {
  const Napi::Env env = info.Env();
  memory_wrap& memory = unwrap<memory_wrap>(info[0], "memory");
  hostile_request request;
  open(env);
  memory.open(env);
  request.memory = memory.native;
  request.peer = arg_int(info[1], "peer");
  if (request.peer < 0 || request.peer >= context->world_size()) {
    throw_invalid(env, "peer " + std::to_string(request.peer) + " is not in a world of " + std::to_string(context->world_size()));
  }
  request.dst_offset = arg_size(info[2], "dstOffset");
  const uint64_t size = request.memory->byte_length();
  if (request.dst_offset > size || bytes > size - request.dst_offset) {
    throw_invalid(env, "bytes " + std::to_string(request.dst_offset) + " + " + std::to_string(bytes) + " exceed a memory of " + std::to_string(size));
  }
  const int32_t slot = arg_int(info[signal_first], "slot");
  if (slot < 0) return request;
  if (static_cast<uint64_t>(slot) >= request.memory->signal_slots()) {
    throw_invalid(env, "slot " + std::to_string(slot) + " of a pad with " + std::to_string(request.memory->signal_slots()) + " slots");
  }
  request.slot = static_cast<uint64_t>(slot);
  request.add = arg_u64(info[signal_first + 1], "add");
  return request;
}

Napi::Value hostile_wrap::post(Napi::Env env, hostile_request request) const {
  hostile_engine& engine = open(env);
  request.operation_id = state_of(env).begin(env, std::make_shared<cancel_flag>());
  const auto id = static_cast<double>(request.operation_id);
  engine.post(std::move(request));
  return Napi::Number::New(env, id);
}

// (memory, peer, dstOffset, source, srcOffset, byteLength, slot, add) -> operation that ends when it has landed
Napi::Value hostile_wrap::put(const Napi::CallbackInfo& info) {
  const uint64_t bytes = arg_size(info[5], "byteLength");
  hostile_request request = request_to(info, bytes, 6);
  const operand source = operand_of(info[3], "source");
  const uint64_t from = arg_size(info[4], "srcOffset");
  if (from > source.byte_length || bytes > source.byte_length - from) {
    throw_invalid(info.Env(), "source bytes " + std::to_string(from) + " + " + std::to_string(bytes) + " exceed " + std::to_string(source.byte_length));
  }
  request.keep = source.keep;
  request.src = source.address + from;
  request.src_stride = bytes;
  request.row_bytes = bytes;
  request.rows = 1;
  return post(info.Env(), std::move(request));
}

// (memory, peer, dstOffset, width, value, slot, add) -> operation
Napi::Value hostile_wrap::put_value(const Napi::CallbackInfo& info) {
  const uint64_t width = arg_size(info[3], "width");
  if (width != 1 && width != 2 && width != 4 && width != 8) throw_invalid(info.Env(), "width must be 1, 2, 4 or 8, got " + std::to_string(width));
  hostile_request request = request_to(info, width, 5);
  if (request.dst_offset % width != 0) {
    throw_invalid(info.Env(), "a word of " + std::to_string(width) + " bytes at offset " + std::to_string(request.dst_offset) + " is not aligned");
  }
  request.word_bytes = static_cast<uint32_t>(width);
  request.word = arg_u64(info[4], "value");
  return post(info.Env(), std::move(request));
}

// (memory, peer, slot, add) -> operation
Napi::Value hostile_wrap::signal(const Napi::CallbackInfo& info) {
  memory_wrap& memory = unwrap<memory_wrap>(info[0], "memory");
  memory.open(info.Env());
  open(info.Env());
  hostile_request request;
  request.memory = memory.native;
  request.peer = arg_int(info[1], "peer");
  request.slot = arg_size(info[2], "slot");
  request.add = arg_u64(info[3], "add");
  if (request.peer < 0 || request.peer >= context->world_size()) throw_invalid(info.Env(), "peer " + std::to_string(request.peer) + " is not in the world");
  if (request.slot >= request.memory->signal_slots()) throw_invalid(info.Env(), "slot " + std::to_string(request.slot) + " lies beyond the pad");
  return post(info.Env(), std::move(request));
}

// (peer, timeoutMs) -> operation
Napi::Value hostile_wrap::flush(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  hostile_engine& engine = open(env);
  const int32_t peer = arg_int(info[0], "peer");
  if (peer < 0 || peer >= context->world_size()) throw_invalid(env, "peer " + std::to_string(peer) + " is not in the world");
  const double timeout = arg_double(info[1], "timeoutMs");
  auto cancel = std::make_shared<cancel_flag>();
  const uint64_t id = state_of(env).begin(env, cancel);
  engine.flush(id, std::move(cancel), peer, deadline_after(timeout));
  return Napi::Number::New(env, static_cast<double>(id));
}

void hostile_wrap::nudge(const Napi::CallbackInfo& info) { open(info.Env()).nudge(); }

Napi::Value hostile_wrap::counts(const Napi::CallbackInfo& info) {
  const hostile_counts counts = open(info.Env()).counts();
  auto out = Napi::Object::New(info.Env());
  out["landed"] = static_cast<double>(counts.landed);
  out["overtakes"] = static_cast<double>(counts.overtakes);
  out["pieces"] = static_cast<double>(counts.pieces);
  return out;
}

Napi::Value hostile_wrap::violation(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), open(info.Env()).violation()); }

void hostile_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->engine.reset();
  context.reset();
}

void hostile_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["HostileEngine"] = DefineClass(
      env, "HostileEngine",
      {InstanceMethod<&hostile_wrap::attach>("attach"), InstanceMethod<&hostile_wrap::put>("put"), InstanceMethod<&hostile_wrap::put_value>("putValue"),
       InstanceMethod<&hostile_wrap::signal>("signal"), InstanceMethod<&hostile_wrap::flush>("flush"), InstanceMethod<&hostile_wrap::nudge>("nudge"),
       InstanceMethod<&hostile_wrap::counts>("counts"), InstanceMethod<&hostile_wrap::violation>("violation"),
       InstanceMethod<&hostile_wrap::close>("close")});
}

} // namespace

void bind_hostile(Napi::Env env, Napi::Object exports) { hostile_wrap::define(env, exports); }

} // namespace ep::binding
