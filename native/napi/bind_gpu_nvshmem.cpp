#include <cstring>

#include "gpu_wraps.hpp"

namespace ep::binding {
namespace {

constexpr uint64_t no_signal = 0;
constexpr uint64_t adds = 1;

dl::nvshmem_unique_id id_of(Napi::Value value) {
  const byte_span bytes = arg_bytes(value, "id");
  dl::nvshmem_unique_id id;
  if (bytes.size != sizeof id) throw_invalid(value.Env(), "a unique id of NVSHMEM has " + std::to_string(sizeof id) + " bytes, not " + std::to_string(bytes.size));
  std::memcpy(&id, bytes.data, sizeof id);
  return id;
}

} // namespace

// (path, as dlopen takes it)
nvshmem_library_wrap::nvshmem_library_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  if (!info[0].IsString()) throw_invalid(info.Env(), "NVSHMEM is opened by its name or path");
  auto loaded = dl::nvshmem_symbols_load(info[0].As<Napi::String>().Utf8Value());
  native = value_or_throw(info.Env(), loaded);
  tag<nvshmem_library_wrap>(info.This().As<Napi::Object>());
}
Napi::Value nvshmem_library_wrap::version(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), dl::nvshmem_version_text(native->version)); }
// () -> what a world is made by on all of its PEs
Napi::Value nvshmem_library_wrap::unique_id(const Napi::CallbackInfo& info) {
  dl::nvshmem_unique_id id;
  if (const int error = native->nvshmemx_get_uniqueid(&id); error != 0) throw_failure(info.Env(), {EP_STATUS_SYSTEM, 0, "NVSHMEM gives no unique id (error " + std::to_string(error) + ")"});
  return bytes_copy(info.Env(), &id, sizeof id);
}
// () -> {id, pe, pes, device, heapBytes, failed} of the process's world, or undefined
Napi::Value nvshmem_library_wrap::here(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto world = gpu::nvshmem_world::here();
  if (!world) return env.Undefined();
  const gpu::nvshmem_place& place = world->place();
  auto made = Napi::Object::New(env);
  made["id"] = bytes_copy(env, &place.id, sizeof place.id);
  made["pe"] = Napi::Number::New(env, place.pe);
  made["pes"] = Napi::Number::New(env, place.pes);
  made["device"] = Napi::Number::New(env, place.device);
  made["heapBytes"] = Napi::Number::New(env, static_cast<double>(place.heap_bytes));
  made["failed"] = Napi::String::New(env, world->failed());
  return made;
}
void nvshmem_library_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["NvshmemLibrary"] = DefineClass(env, "NvshmemLibrary",
                                          {InstanceMethod<&nvshmem_library_wrap::version>("version"), InstanceMethod<&nvshmem_library_wrap::unique_id>("uniqueId"),
                                           InstanceMethod<&nvshmem_library_wrap::here>("here")});
}

// (nvshmem, GPUs' library, device, pe, pes, id, heapBytes)
nvshmem_world_wrap::nvshmem_world_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& nvshmem = unwrap<nvshmem_library_wrap>(info[0], "nvshmem").native;
  const auto& of = unwrap<gpu_library_wrap>(info[1], "library").native;
  gpu::nvshmem_place place;
  place.device = arg_int(info[2], "device");
  place.pe = arg_int(info[3], "pe");
  place.pes = arg_int(info[4], "pes");
  place.id = id_of(info[5]);
  place.heap_bytes = arg_size(info[6], "heapBytes");
  if (place.device < 0 || place.device >= of->device_count()) throw_invalid(env, "GPU " + std::to_string(place.device) + " is not one of " + std::to_string(of->device_count()));
  if (place.pes < 1 || place.pe < 0 || place.pe >= place.pes) throw_invalid(env, "PE " + std::to_string(place.pe) + " of " + std::to_string(place.pes));
  auto joined = gpu::nvshmem_world::join(nvshmem, of, place);
  native = value_or_throw(env, joined);
  waits = std::make_shared<holder>();
  // Its wait completes an operation of this environment.
  state_of(env).at_end([held = waits] { held->opening.reset(); });
  tag<nvshmem_world_wrap>(info.This().As<Napi::Object>());
}

// (timeoutMs) -> operation that ends when all PEs have come; one at a time
Napi::Value nvshmem_world_wrap::meet(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const int64_t deadline = deadline_after(arg_double(info[0], "timeoutMs"));
  waits->opening.reset();
  auto cancel = std::make_shared<cancel_flag>();
  const uint64_t id = state_of(env).begin(env, cancel);
  auto started = gpu::nvshmem_opening::start(native, id, std::move(cancel), deadline, state_of(env));
  if (started.ok()) {
    waits->opening = started.value();
  } else {
    outcome end;
    end.status = started.why().status;
    end.message = started.why().message;
    state_of(env).complete(id, end);
  }
  return Napi::Number::New(env, static_cast<double>(id));
}

// () -> why it is of no use any more, or undefined
Napi::Value nvshmem_world_wrap::failed(const Napi::CallbackInfo& info) {
  const std::string why = native->failed();
  return why.empty() ? info.Env().Undefined() : Napi::String::New(info.Env(), why);
}

// () -> {mapped, byTurns, bytesFree}; once all have met
Napi::Value nvshmem_world_wrap::facts(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!native->ready()) throw_failure(env, {EP_STATUS_CLOSED, 0, "NVSHMEM has not begun"});
  auto made = Napi::Object::New(env);
  made["mapped"] = Napi::Boolean::New(env, native->mapped());
  made["byTurns"] = Napi::Boolean::New(env, native->by_turns());
  made["bytesFree"] = Napi::Number::New(env, static_cast<double>(native->bytes_free()));
  return made;
}

// (byteLength, signalSlots, from) -> NvshmemPart, the first that is free from an offset on
Napi::Value nvshmem_world_wrap::take(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!native->ready()) throw_failure(env, {EP_STATUS_CLOSED, 0, "NVSHMEM has not begun"});
  const uint64_t bytes = arg_size(info[0], "byteLength");
  const uint64_t slots = arg_size(info[1], "signalSlots");
  if (slots > (uint64_t{1} << 32)) throw_invalid(env, std::to_string(slots) + " signal slots");
  auto taken = native->take(gpu::symmetric_memory::signal_bytes(slots) + bytes, arg_size(info[2], "from"));
  auto part = value_or_throw(env, taken);
  const Napi::Object made = state_of(env).classes["NvshmemPart"].New({});
  nvshmem_part_wrap::Unwrap(made)->native = std::move(part);
  return made;
}

// (rank, part, byteLength, signalSlots) -> GpuSymmetricMemory: this PE's, zeroed
Napi::Value nvshmem_world_wrap::memory(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& rank = unwrap<rank_wrap>(info[0], "rank");
  rank.open(env);
  const auto& part = unwrap<nvshmem_part_wrap>(info[1], "part").native;
  if (!part || part->of() != native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the part of the heap was released, or is another world's"});
  const uint64_t bytes = arg_size(info[2], "byteLength");
  const uint64_t slots = arg_size(info[3], "signalSlots");
  const uint64_t whole = gpu::symmetric_memory::signal_bytes(slots) + bytes;
  if (whole > part->byte_length()) throw_invalid(env, std::to_string(whole) + " bytes in a part of " + std::to_string(part->byte_length()));
  const gpu::nvshmem_place& place = native->place();
  const uint64_t at = native->heap(place.pe) + part->offset();
  auto made = gpu::symmetric_memory::create_for_nic(rank.native->context, native->of(), place.device, bytes, slots, at, part);
  auto memory = value_or_throw(env, made);
  auto zeroed = gpu::fill_now(native->of(), place.device, at, 0, part->byte_length(), "zeroing symmetric memory");
  value_or_throw(env, zeroed);
  const Napi::Object wrapped = state_of(env).classes["GpuSymmetricMemory"].New({});
  gpu_symmetric_wrap::Unwrap(wrapped)->native = std::move(memory);
  return wrapped;
}

// (memory, handles: one of each rank, concatenated, part)
void nvshmem_world_wrap::connect(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto& memory = unwrap<gpu_symmetric_wrap>(info[0], "memory").native;
  const auto& part = unwrap<nvshmem_part_wrap>(info[2], "part").native;
  if (!memory || !part || memory->nic_part() != part) throw_failure(env, {EP_STATUS_CLOSED, 0, "the device memory was closed, or is none of this part"});
  std::vector<uint64_t> signals;
  for (int pe = 0; pe < native->place().pes; ++pe) signals.push_back(native->heap(pe) == 0 ? 0 : native->heap(pe) + part->offset());
  auto connected = memory->connect_by_library(gpu_handles_of(info[1]), signals);
  value_or_throw(env, connected);
}

// (memory) -> this PE's bytes, of a device whose memory is the host's, as a stand-in's: the heap stays until the process ends
Napi::Value nvshmem_world_wrap::window(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const gpu::symmetric_memory& memory = unwrap<gpu_symmetric_wrap>(info[0], "memory").open(env);
  ep_cuda_facts facts{};
  const int error = native->of()->table().device_facts(native->place().device, &facts);
  if (error != 0 || std::strcmp(facts.runs_on, "host threads") != 0) throw_invalid(env, "JS cannot look into the memory of a GPU");
  return window_over(env, reinterpret_cast<uint8_t*>(memory.data(memory.context().rank())), memory.byte_length(), native);
}

struct nvshmem_world_wrap::place {
  std::shared_ptr<gpu::symmetric_memory> memory;
  int pe;
  uint64_t signals; // of this PE: NVSHMEM names a peer's bytes by one's own

  uint8_t* bytes(Napi::Env env, Napi::Value offset, uint64_t length) const {
    const uint64_t at = arg_size(offset, "offset");
    if (at > memory->byte_length() || length > memory->byte_length() - at) {
      throw_invalid(env, std::to_string(length) + " bytes from " + std::to_string(at) + " of " + std::to_string(memory->byte_length()));
    }
    return reinterpret_cast<uint8_t*>(memory->data(memory->context().rank())) + at;
  }
  uint64_t* slot(Napi::Env env, Napi::Value number) const {
    const uint64_t at = arg_size(number, "slot");
    if (at >= memory->signal_slots()) throw_invalid(env, "signal slot " + std::to_string(at) + " of " + std::to_string(memory->signal_slots()));
    return reinterpret_cast<uint64_t*>(signals) + at;
  }
};

// The stream, at first: its device is the calling thread's from here on.
gpu::stream& nvshmem_world_wrap::on(const Napi::CallbackInfo& info) const {
  const Napi::Env env = info.Env();
  auto& wrap = unwrap<gpu_stream_wrap>(info[0], "stream");
  gpu::stream& stream = wrap.open(env);
  if (wrap.capturing) throw_invalid(env, "the stream is being captured: what NVSHMEM starts from the host is put on it as it is");
  if (const std::string why = native->failed(); !why.empty()) throw_failure(env, {EP_STATUS_CLOSED, 0, why});
  if (stream.device() != native->place().device) throw_invalid(env, "the stream is of GPU " + std::to_string(stream.device()) + ", the PE of GPU " + std::to_string(native->place().device));
  if (const int error = native->of()->table().device_use(stream.device()); error != 0) throw_failure(env, native->of()->error(error, "using GPU " + std::to_string(stream.device())));
  return stream;
}

// A memory of this world and, behind it, a peer.
nvshmem_world_wrap::place nvshmem_world_wrap::reached(const Napi::CallbackInfo& info, size_t memory) const {
  const Napi::Env env = info.Env();
  auto& wrap = unwrap<gpu_symmetric_wrap>(info[memory], "memory");
  const gpu::symmetric_memory& of = wrap.open(env);
  const int32_t pe = arg_int(info[memory + 1], "peer");
  if (pe < 0 || pe >= native->place().pes) throw_invalid(env, "peer " + std::to_string(pe) + " is not in the world");
  return {wrap.native, pe, of.signals(of.context().rank())};
}

// Three arguments: op (0: none, 1: add, 2: set), slot, value.
void nvshmem_world_wrap::raise_signal(const Napi::CallbackInfo& info, gpu::stream& stream, const place& at, size_t op) const {
  const uint64_t which = arg_size(info[op], "op");
  if (which == no_signal) return;
  uint64_t* slot = at.slot(info.Env(), info[op + 1]);
  native->calls().nvshmemx_signal_op_on_stream(slot, arg_u64(info[op + 2], "value"), which == adds ? dl::nvshmem_signal_add : dl::nvshmem_signal_set, at.pe,
                                               stream.of()->table().stream_handle(stream.native()));
}

Napi::Value nvshmem_world_wrap::followed(const Napi::CallbackInfo& info, std::vector<std::shared_ptr<const void>> keep) const {
  gpu::stream::watch how;
  how.keep = std::move(keep);
  return Napi::Number::New(info.Env(), static_cast<double>(unwrap<gpu_stream_wrap>(info[0], "stream").begin(info.Env(), std::move(how))));
}

// (stream, memory, peer, dstOffset, source, srcOffset, byteLength, op, slot, value) -> operation that ends when the source is free again
Napi::Value nvshmem_world_wrap::put(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = on(info);
  const place at = reached(info, 1);
  const uint64_t length = arg_size(info[6], "byteLength");
  uint8_t* to = at.bytes(env, info[3], length);
  const operand from = gpu_operand_of(info[4], "the source of a put", stream, false);
  const uint64_t offset = arg_size(info[5], "srcOffset");
  if (offset > from.byte_length || length > from.byte_length - offset) throw_invalid(env, "a put of " + std::to_string(length) + " bytes from " + std::to_string(offset) + " of " + std::to_string(from.byte_length));
  const uint64_t op = arg_size(info[7], "op");
  const auto* source = reinterpret_cast<const void*>(from.address + offset);
  void* native_stream = stream.of()->table().stream_handle(stream.native());
  if (length == 0) {
    raise_signal(info, stream, at, 7);
  } else if (op == no_signal) {
    native->calls().nvshmemx_putmem_on_stream(to, source, length, at.pe, native_stream);
  } else {
    uint64_t* slot = at.slot(env, info[8]);
    native->calls().nvshmemx_putmem_signal_on_stream(to, source, length, slot, arg_u64(info[9], "value"), op == adds ? dl::nvshmem_signal_add : dl::nvshmem_signal_set, at.pe, native_stream);
  }
  return followed(info, {at.memory, from.keep});
}

// (stream, memory, peer, dstOffset, width, word, op, slot, value)
Napi::Value nvshmem_world_wrap::put_value(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = on(info);
  const place at = reached(info, 1);
  const uint64_t width = arg_size(info[4], "width");
  if (width != 1 && width != 2 && width != 4 && width != 8) throw_invalid(env, "a word of " + std::to_string(width) + " bytes: expected 1, 2, 4 or 8");
  uint8_t* to = at.bytes(env, info[3], width);
  const uint64_t word = arg_u64(info[5], "word");
  if (arg_size(info[6], "op") != no_signal) at.slot(env, info[7]); // before anything is written
  const dl::nvshmem_symbols& calls = native->calls();
  void* native_stream = stream.of()->table().stream_handle(stream.native());
  if (reinterpret_cast<uint64_t>(to) % width != 0) {
    // NVSHMEM stores words where they are aligned.
    for (uint64_t byte = 0; byte < width; ++byte) calls.nvshmemx_uint8_p_on_stream(to + byte, static_cast<uint8_t>(word >> (8 * byte)), at.pe, native_stream);
  } else if (width == 1) {
    calls.nvshmemx_uint8_p_on_stream(to, static_cast<uint8_t>(word), at.pe, native_stream);
  } else if (width == 2) {
    calls.nvshmemx_uint16_p_on_stream(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(word), at.pe, native_stream);
  } else if (width == 4) {
    calls.nvshmemx_uint32_p_on_stream(reinterpret_cast<uint32_t*>(to), static_cast<uint32_t>(word), at.pe, native_stream);
  } else {
    calls.nvshmemx_uint64_p_on_stream(reinterpret_cast<uint64_t*>(to), word, at.pe, native_stream);
  }
  if (arg_size(info[6], "op") != no_signal) calls.nvshmemx_quiet_on_stream(native_stream); // a signal must not pass the word
  raise_signal(info, stream, at, 6);
  return followed(info, {at.memory});
}

// (stream, memory, peer, op, slot, value)
Napi::Value nvshmem_world_wrap::signal(const Napi::CallbackInfo& info) {
  gpu::stream& stream = on(info);
  const place at = reached(info, 1);
  raise_signal(info, stream, at, 3);
  return followed(info, {at.memory});
}

// (stream, memory, peer, srcOffset, target, dstOffset, byteLength)
Napi::Value nvshmem_world_wrap::get(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = on(info);
  const place at = reached(info, 1);
  const uint64_t length = arg_size(info[6], "byteLength");
  const uint8_t* from = at.bytes(env, info[3], length);
  const operand to = gpu_operand_of(info[4], "the target of a get", stream, false);
  const uint64_t offset = arg_size(info[5], "dstOffset");
  if (offset > to.byte_length || length > to.byte_length - offset) throw_invalid(env, "a get of " + std::to_string(length) + " bytes to " + std::to_string(offset) + " of " + std::to_string(to.byte_length));
  if (length != 0) {
    native->calls().nvshmemx_getmem_on_stream(reinterpret_cast<void*>(to.address + offset), from, length, at.pe, stream.of()->table().stream_handle(stream.native()));
  }
  return followed(info, {at.memory, to.keep});
}

// (stream, timeoutMs): all that was put before has landed at its peers
Napi::Value nvshmem_world_wrap::quiet(const Napi::CallbackInfo& info) {
  gpu::stream& stream = on(info);
  native->calls().nvshmemx_quiet_on_stream(stream.of()->table().stream_handle(stream.native()));
  gpu::stream::watch how;
  how.deadline_ns = deadline_after(arg_double(info[1], "timeoutMs"));
  return Napi::Number::New(info.Env(), static_cast<double>(unwrap<gpu_stream_wrap>(info[0], "stream").begin(info.Env(), std::move(how))));
}

// (stream, rank, timeoutMs) HAZARD: what is put on the stream waits for all PEs for ever. The operation ends with a death or in time; the stream does not.
Napi::Value nvshmem_world_wrap::barrier(const Napi::CallbackInfo& info) {
  gpu::stream& stream = on(info);
  auto& rank = unwrap<rank_wrap>(info[1], "rank");
  rank.open(info.Env());
  native->calls().nvshmemx_barrier_all_on_stream(stream.of()->table().stream_handle(stream.native()));
  gpu::stream::watch how;
  how.deadline_ns = deadline_after(arg_double(info[2], "timeoutMs"));
  how.context = rank.native->context;
  return Napi::Number::New(info.Env(), static_cast<double>(unwrap<gpu_stream_wrap>(info[0], "stream").begin(info.Env(), std::move(how))));
}

void nvshmem_world_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["NvshmemWorld"] = DefineClass(
      env, "NvshmemWorld",
      {InstanceMethod<&nvshmem_world_wrap::meet>("meet"), InstanceMethod<&nvshmem_world_wrap::failed>("failed"), InstanceMethod<&nvshmem_world_wrap::facts>("facts"),
       InstanceMethod<&nvshmem_world_wrap::take>("take"), InstanceMethod<&nvshmem_world_wrap::memory>("memory"), InstanceMethod<&nvshmem_world_wrap::connect>("connect"),
       InstanceMethod<&nvshmem_world_wrap::window>("window"), InstanceMethod<&nvshmem_world_wrap::put>("put"), InstanceMethod<&nvshmem_world_wrap::put_value>("putValue"),
       InstanceMethod<&nvshmem_world_wrap::signal>("signal"), InstanceMethod<&nvshmem_world_wrap::get>("get"), InstanceMethod<&nvshmem_world_wrap::quiet>("quiet"),
       InstanceMethod<&nvshmem_world_wrap::barrier>("barrier")});
}

// Made by NvshmemWorld.take only.
nvshmem_part_wrap::nvshmem_part_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) { tag<nvshmem_part_wrap>(info.This().As<Napi::Object>()); }
Napi::Value nvshmem_part_wrap::offset(const Napi::CallbackInfo& info) {
  if (!native) throw_failure(info.Env(), {EP_STATUS_CLOSED, 0, "the part of the heap was released"});
  return Napi::Number::New(info.Env(), static_cast<double>(native->offset()));
}
// Memory made in it keeps it.
void nvshmem_part_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void nvshmem_part_wrap::define(Napi::Env env, Napi::Object exports) {
  const Napi::Function made = DefineClass(env, "NvshmemPart", {InstanceMethod<&nvshmem_part_wrap::offset>("offset"), InstanceMethod<&nvshmem_part_wrap::release>("release")});
  exports["NvshmemPart"] = made;
  state_of(env).classes["NvshmemPart"] = Napi::Persistent(made);
}

} // namespace ep::binding
