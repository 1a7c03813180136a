#include "gpu_wraps.hpp"

#include <cstring>

namespace ep::binding {
namespace {

const gpu::library_ref& library_of(Napi::Value value) { return unwrap<gpu_library_wrap>(value, "library").native; }

int device_of(const gpu::library_ref& of, Napi::Value value) {
  const int32_t device = arg_int(value, "device");
  if (device < 0 || device >= of->device_count()) {
    throw_invalid(value.Env(), "GPU " + std::to_string(device) + " is not one of the " + std::to_string(of->device_count()) + " that are here");
  }
  return device;
}

template <class Wrap> bool is(Napi::Value value) {
  bool same = false;
  if (value.IsObject()) napi_check_object_type_tag(value.Env(), value, &Wrap::type_tag, &same);
  return same;
}

} // namespace

std::vector<ep_gpu_memory_handle> gpu_handles_of(Napi::Value value) {
  const byte_span bytes = arg_bytes(value, "handles");
  if (bytes.size % sizeof(ep_gpu_memory_handle) != 0) throw_invalid(value.Env(), "handles are not whole ep_gpu_memory_handles");
  std::vector<ep_gpu_memory_handle> handles(bytes.size / sizeof(ep_gpu_memory_handle));
  if (!handles.empty()) std::memcpy(handles.data(), bytes.data, bytes.size);
  return handles;
}

operand gpu_operand_of(Napi::Value value, const char* what, const gpu::stream& on, bool host) {
  const Napi::Env env = value.Env();
  if (is<gpu_memory_wrap>(value)) {
    const auto& native = gpu_memory_wrap::Unwrap(value.As<Napi::Object>())->native;
    if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, std::string(what) + ": the device memory was released"});
    if (native->device() != on.device()) throw_invalid(env, std::string(what) + " lies on GPU " + std::to_string(native->device()) + ", the stream is of GPU " + std::to_string(on.device()));
    return {native->address(), native->byte_length(), native};
  }
  if (is<gpu_symmetric_wrap>(value)) {
    auto* wrap = gpu_symmetric_wrap::Unwrap(value.As<Napi::Object>());
    const gpu::symmetric_memory& memory = wrap->open(env);
    return {memory.data(memory.context().rank()), memory.byte_length(), wrap->native};
  }
  if (host && is<gpu_pinned_wrap>(value)) {
    const auto& native = gpu_pinned_wrap::Unwrap(value.As<Napi::Object>())->native;
    return {native->address(), native->byte_length(), native};
  }
  if (value.IsBigInt()) {
    const uint64_t address = arg_u64(value, what);
    uint64_t end = 0;
    if (const int error = on.of()->table().memory_find(on.device(), address, &end); error != 0) {
      throw_failure(env, {EP_STATUS_INVALID, 0, on.of()->error(error, std::string(what) + " is no address of GPU " + std::to_string(on.device())).message});
    }
    return {address, end - address, nullptr};
  }
  throw_invalid(env, std::string(what) + " is no memory that GPU " + std::to_string(on.device()) + " reaches");
}

// (path)
gpu_library_wrap::gpu_library_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  if (!info[0].IsString()) throw_invalid(info.Env(), "a library is opened by its path");
  auto opened = gpu::library::open(info[0].As<Napi::String>().Utf8Value());
  native = value_or_throw(info.Env(), opened);
  tag<gpu_library_wrap>(info.This().As<Napi::Object>());
}

// (device, address) -> {bytes} to the end of the allocation, or {why} it is no memory of this device
Napi::Value gpu_library_wrap::find(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const int device = device_of(native, info[0]);
  const uint64_t address = arg_u64(info[1], "address");
  uint64_t end = 0;
  auto found = Napi::Object::New(env);
  if (const int error = native->table().memory_find(device, address, &end); error != 0) {
    found["why"] = Napi::String::New(env, native->error(error, "the address is of no memory of GPU " + std::to_string(device)).message);
  } else {
    found["bytes"] = Napi::Number::New(env, static_cast<double>(end - address));
  }
  return found;
}

Napi::Value gpu_library_wrap::devices(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto all = Napi::Array::New(env);
  for (int device = 0; device < native->device_count(); ++device) {
    ep_cuda_facts facts{};
    auto one = Napi::Object::New(env);
    // One that fails must not hide the others.
    if (const int error = native->table().device_facts(device, &facts); error != 0) {
      facts = {};
      one["unusable"] = Napi::String::New(env, native->error(error, "looking at GPU " + std::to_string(device)).message);
    }
    const auto number = [&](const char* name, double value) { one[name] = Napi::Number::New(env, value); };
    const auto flag = [&](const char* name, int32_t value) { one[name] = Napi::Boolean::New(env, value != 0); };
    const auto version = [&](const char* name, int32_t value) {
      one[name] = Napi::String::New(env, std::to_string(value / 1000) + "." + std::to_string(value % 1000 / 10));
    };
    one["name"] = Napi::String::New(env, facts.name);
    one["pci"] = Napi::String::New(env, facts.pci);
    one["runsOn"] = Napi::String::New(env, facts.runs_on);
    one["compute"] = Napi::String::New(env, std::to_string(facts.compute_major) + "." + std::to_string(facts.compute_minor));
    number("memoryBytes", static_cast<double>(facts.memory_bytes));
    number("l2Bytes", static_cast<double>(facts.l2_bytes));
    number("multiprocessors", facts.multiprocessors);
    number("clockKhz", facts.clock_khz);
    number("copyEngines", facts.copy_engines);
    version("driver", facts.driver_version);
    version("runtime", facts.runtime_version);
    flag("cooperative", facts.cooperative);
    flag("ipc", facts.ipc);
    flag("gpudirect", facts.dmabuf);
    flag("hostAtomics", facts.host_atomics);
    flag("exclusive", facts.exclusive);
    auto peers = Napi::Array::New(env);
    for (const int peer : native->peers(device)) peers[peers.Length()] = Napi::Number::New(env, peer);
    one["peers"] = peers;
    all[static_cast<uint32_t>(device)] = one;
  }
  return all;
}
// () -> blocks of device memory, one's own or mapped, that this process has yet to free
Napi::Value gpu_library_wrap::held(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), static_cast<double>(gpu::blocks_held())); }
void gpu_library_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuLibrary"] = DefineClass(env, "GpuLibrary", {InstanceMethod<&gpu_library_wrap::devices>("devices"), InstanceMethod<&gpu_library_wrap::find>("find"), InstanceMethod<&gpu_library_wrap::held>("held")});
}

// (library, device, byteLength), or (library, device, handle: those bytes of another process's memory)
gpu_memory_wrap::gpu_memory_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  if (info.Length() == 0) { // over memory that somebody else has made
    tag<gpu_memory_wrap>(info.This().As<Napi::Object>());
    return;
  }
  const auto& of = library_of(info[0]);
  const int device = device_of(of, info[1]);
  if (info[2].IsTypedArray()) {
    const byte_span handle = arg_bytes(info[2], "handle");
    if (handle.size != EP_CUDA_IPC_BYTES) throw_invalid(info.Env(), "handle must be of " + std::to_string(EP_CUDA_IPC_BYTES) + " bytes");
    auto opened = gpu::device_block::open(of, device, handle.data);
    native = value_or_throw(info.Env(), opened);
    mapping = native->mapping();
  } else {
    auto made = gpu::device_block::allocate(of, device, arg_size(info[2], "byteLength"));
    native = value_or_throw(info.Env(), made);
  }
  tag<gpu_memory_wrap>(info.This().As<Napi::Object>());
}
Napi::Value gpu_memory_wrap::address(const Napi::CallbackInfo& info) {
  if (!native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the device memory was released"});
  return Napi::BigInt::New(info.Env(), native->address());
}
Napi::Value gpu_memory_wrap::byte_length(const Napi::CallbackInfo& info) {
  if (!native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the device memory was released"});
  return Napi::Number::New(info.Env(), static_cast<double>(native->byte_length()));
}
// () -> whether it is another process's and mapped here still
Napi::Value gpu_memory_wrap::mapped(const Napi::CallbackInfo& info) { return Napi::Boolean::New(info.Env(), !mapping.expired()); }
void gpu_memory_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_memory_wrap::define(Napi::Env env, Napi::Object exports) {
  const Napi::Function made = DefineClass(env, "GpuMemory", {InstanceMethod<&gpu_memory_wrap::address>("address"), InstanceMethod<&gpu_memory_wrap::byte_length>("byteLength"),
                                                                     InstanceMethod<&gpu_memory_wrap::mapped>("mapped"), InstanceMethod<&gpu_memory_wrap::release>("release")});
  exports["GpuMemory"] = made;
  state_of(env).classes["GpuMemory"] = Napi::Persistent(made);
}

// (library, device, byteLength)
gpu_pinned_wrap::gpu_pinned_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const auto& of = library_of(info[0]);
  auto made = gpu::pinned_block::allocate(of, device_of(of, info[1]), arg_size(info[2], "byteLength"));
  native = value_or_throw(info.Env(), made);
  tag<gpu_pinned_wrap>(info.This().As<Napi::Object>());
}
Napi::Value gpu_pinned_wrap::address(const Napi::CallbackInfo& info) { return Napi::BigInt::New(info.Env(), native->address()); }
// () -> ArrayBuffer over all of it
Napi::Value gpu_pinned_wrap::window(const Napi::CallbackInfo& info) { return window_over(info.Env(), native->data(), native->byte_length(), native); }
void gpu_pinned_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuPinned"] = DefineClass(env, "GpuPinned", {InstanceMethod<&gpu_pinned_wrap::address>("address"), InstanceMethod<&gpu_pinned_wrap::window>("window")});
}

// (library, device, timed)
gpu_event_wrap::gpu_event_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info), of(library_of(info[0])) {
  auto made = gpu::event::create(of, device_of(of, info[1]), info[2].ToBoolean());
  native = value_or_throw(info.Env(), made);
  tag<gpu_event_wrap>(info.This().As<Napi::Object>());
}
Napi::Value gpu_event_wrap::reached(const Napi::CallbackInfo& info) {
  auto reached = native->reached();
  return Napi::Boolean::New(info.Env(), value_or_throw(info.Env(), reached));
}
// (from) -> milliseconds from that timed event to this one; both reached
Napi::Value gpu_event_wrap::elapsed_ms(const Napi::CallbackInfo& info) {
  float milliseconds = 0;
  const auto& from = unwrap<gpu_event_wrap>(info[0], "from").native;
  if (const int error = of->table().event_elapsed(from->native(), native->native(), &milliseconds); error != 0) {
    throw_failure(info.Env(), of->error(error, "the time between two events, which must be timed and reached"));
  }
  return Napi::Number::New(info.Env(), static_cast<double>(milliseconds));
}
void gpu_event_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuEvent"] = DefineClass(env, "GpuEvent", {InstanceMethod<&gpu_event_wrap::reached>("reached"), InstanceMethod<&gpu_event_wrap::elapsed_ms>("elapsedMs")});
}

// (rank, library, device, byteLength, signalSlots); without arguments, by IbgdaNic.deviceMemory only
gpu_symmetric_wrap::gpu_symmetric_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  tag<gpu_symmetric_wrap>(info.This().As<Napi::Object>());
  if (info.Length() == 0) return;
  auto& rank = unwrap<rank_wrap>(info[0], "rank");
  rank.open(env);
  const auto& of = library_of(info[1]);
  auto made = gpu::symmetric_memory::create(rank.native->context, of, device_of(of, info[2]), arg_size(info[3], "byteLength"), arg_size(info[4], "signalSlots"));
  native = value_or_throw(env, made);
}
gpu::symmetric_memory& gpu_symmetric_wrap::open(Napi::Env env) const {
  if (!native || !native->connected()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric device memory was closed, or is not connected"});
  return *native;
}
Napi::Value gpu_symmetric_wrap::handle(const Napi::CallbackInfo& info) {
  if (!native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the symmetric device memory was closed"});
  return bytes_copy(info.Env(), &native->handle(), sizeof native->handle());
}
// (handles: one ep_gpu_memory_handle for each rank, concatenated)
void gpu_symmetric_wrap::connect(const Napi::CallbackInfo& info) {
  if (!native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the symmetric device memory was closed"});
  auto connected = native->connect(gpu_handles_of(info[0]));
  value_or_throw(info.Env(), connected);
}
Napi::Value gpu_symmetric_wrap::device_handle(const Napi::CallbackInfo& info) {
  const ep_memory_handle& handle = open(info.Env()).device_handle();
  return bytes_copy(info.Env(), &handle, sizeof handle);
}
// (peer) -> address of its data, for kernels
Napi::Value gpu_symmetric_wrap::address(const Napi::CallbackInfo& info) {
  const gpu::symmetric_memory& memory = open(info.Env());
  const int32_t peer = arg_int(info[0], "peer");
  if (peer < 0 || peer >= memory.context().world_size()) throw_invalid(info.Env(), "peer " + std::to_string(peer) + " is not in the world");
  if (memory.data(peer) == 0) throw_invalid(info.Env(), "rank " + std::to_string(peer) + " is reached by a NIC: its part has no address here");
  return Napi::BigInt::New(info.Env(), memory.data(peer));
}
Napi::Value gpu_symmetric_wrap::signal_address(const Napi::CallbackInfo& info) {
  const gpu::symmetric_memory& memory = open(info.Env());
  return Napi::BigInt::New(info.Env(), memory.signals(memory.context().rank()));
}
// (slot) -> value; waits for a copy of some microseconds
Napi::Value gpu_symmetric_wrap::peek(const Napi::CallbackInfo& info) {
  auto word = open(info.Env()).read_signals(arg_size(info[0], "slot"), 1);
  return Napi::BigInt::New(info.Env(), value_or_throw(info.Env(), word)[0]);
}
void gpu_symmetric_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_symmetric_wrap::define(Napi::Env env, Napi::Object exports) {
  const Napi::Function made = DefineClass(
      env, "GpuSymmetricMemory",
      {InstanceMethod<&gpu_symmetric_wrap::handle>("handle"), InstanceMethod<&gpu_symmetric_wrap::connect>("connect"),
       InstanceMethod<&gpu_symmetric_wrap::device_handle>("deviceHandle"), InstanceMethod<&gpu_symmetric_wrap::address>("address"),
       InstanceMethod<&gpu_symmetric_wrap::signal_address>("signalAddress"), InstanceMethod<&gpu_symmetric_wrap::peek>("peek"),
       InstanceMethod<&gpu_symmetric_wrap::release>("release")});
  exports["GpuSymmetricMemory"] = made;
  state_of(env).classes["GpuSymmetricMemory"] = Napi::Persistent(made);
}

void bind_gpu(Napi::Env env, Napi::Object exports) {
  gpu_library_wrap::define(env, exports);
  gpu_memory_wrap::define(env, exports);
  gpu_pinned_wrap::define(env, exports);
  gpu_event_wrap::define(env, exports);
  gpu_symmetric_wrap::define(env, exports);
  gpu_calls_wrap::define(env, exports);
  gpu_dispatch_wrap::define(env, exports);
  gpu_compat_wrap::define(env, exports);
  gpu_compat_dispatch_wrap::define(env, exports);
  gpu_group_arena_wrap::define(env, exports);
  gpu_group_wrap::define(env, exports);
  nccl_library_wrap::define(env, exports);
  nccl_communicator_wrap::define(env, exports);
  nvshmem_library_wrap::define(env, exports);
  nvshmem_world_wrap::define(env, exports);
  nvshmem_part_wrap::define(env, exports);
  gpu_attention_wrap::define(env, exports);
  gpu_graph_wrap::define(env, exports);
  gpu_stream_wrap::define(env, exports);
}

} // namespace ep::binding
