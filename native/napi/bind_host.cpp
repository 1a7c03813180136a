#include "wraps.hpp"

#include "limits.hpp"

namespace ep::binding {
namespace {

// Node aborts the process on an external ArrayBuffer of one byte more.
constexpr uint64_t largest_window = uint64_t{4} << 30;

Napi::Value number_or_null(Napi::Env env, uint64_t value) {
  return value == UINT64_MAX ? env.Null() : Napi::Value(Napi::Number::New(env, static_cast<double>(value)));
}

Napi::Value facts(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const host_facts facts = host_facts_read();
  const memory_limit limit = memory_limit_now();
  const memory_limit pins = pin_limit_now();
  auto out = Napi::Object::New(env);
  out["onlineCores"] = facts.online_cores;
  out["affinityCores"] = facts.affinity_cores;
  out["quotaCores"] = facts.quota_cores > 0 ? Napi::Value(Napi::Number::New(env, facts.quota_cores)) : env.Null();
  out["usableCores"] = facts.usable_cores;
  out["memoryTotal"] = number_or_null(env, facts.memory_total);
  out["memoryAvailable"] = number_or_null(env, facts.memory_available);
  out["cgroupLimit"] = number_or_null(env, facts.cgroup_limit);
  out["cgroupUsed"] = number_or_null(env, facts.cgroup_used);
  out["addressSpaceLimit"] = number_or_null(env, facts.address_space);
  out["memlockLimit"] = number_or_null(env, facts.memlock);
  out["openFilesLimit"] = number_or_null(env, facts.open_files);
  out["mapCountLimit"] = number_or_null(env, facts.map_count);
  out["allocatable"] = number_or_null(env, limit.bytes);
  out["allocatableSource"] = Napi::String::New(env, limit.source);
  out["pinnable"] = number_or_null(env, pins.bytes);
  out["kernel"] = Napi::String::New(env, facts.kernel);
  out["cpuModel"] = Napi::String::New(env, facts.cpu_model);
  return out;
}

Napi::Value leaks(const Napi::CallbackInfo& info) {
  auto out = Napi::Object::New(info.Env());
  out["segments"] = static_cast<double>(segment_count());
  out["pending"] = static_cast<double>(state_of(info.Env()).pending());
  return out;
}

} // namespace

Napi::ArrayBuffer window_over(Napi::Env env, uint8_t* data, uint64_t size, std::shared_ptr<const void> keep) {
  if (size > largest_window) {
    throw_invalid(env, "a window of " + std::to_string(size) + " bytes: an ArrayBuffer holds at most " + std::to_string(largest_window));
  }
  if (size == 0) return Napi::ArrayBuffer::New(env, 0);
  auto* held = new std::shared_ptr<const void>(std::move(keep));
  // Only drops a reference: at worker teardown finalizers run before the environment's cleanup hooks.
  return Napi::ArrayBuffer::New(env, data, size, [](Napi::Env, void*, std::shared_ptr<const void>* hint) { delete hint; }, held);
}

host_memory_wrap::host_memory_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  auto made = host_memory::create(arg_size(info[0], "byteLength"));
  native = value_or_throw(info.Env(), made);
  tag<host_memory_wrap>(info.This().As<Napi::Object>());
}

Napi::Value host_memory_wrap::address(const Napi::CallbackInfo& info) {
  return Napi::BigInt::New(info.Env(), reinterpret_cast<uint64_t>(native->data()));
}

Napi::Value host_memory_wrap::window(const Napi::CallbackInfo& info) {
  const uint64_t offset = arg_size(info[0], "byteOffset");
  const uint64_t size = arg_size(info[1], "byteLength");
  if (offset > native->byte_length() || size > native->byte_length() - offset) {
    throw_invalid(info.Env(), "window " + std::to_string(offset) + " + " + std::to_string(size) + " exceeds " + std::to_string(native->byte_length()) + " bytes");
  }
  return window_over(info.Env(), native->data() + offset, size, native);
}

void host_memory_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["HostMemory"] = DefineClass(env, "HostMemory", {InstanceMethod<&host_memory_wrap::address>("address"), InstanceMethod<&host_memory_wrap::window>("window")});
}

void bind_host(Napi::Env env, Napi::Object exports) {
  host_memory_wrap::define(env, exports);
  exports["hostFacts"] = Napi::Function::New(env, facts);
  exports["leaks"] = Napi::Function::New(env, leaks);
  exports["detach"] = Napi::Function::New(env, [](const Napi::CallbackInfo& info) {
    if (!info[0].IsArrayBuffer()) throw_invalid(info.Env(), "detach takes an ArrayBuffer");
    auto buffer = info[0].As<Napi::ArrayBuffer>();
    if (!buffer.IsDetached()) buffer.Detach();
  });
}

} // namespace ep::binding
