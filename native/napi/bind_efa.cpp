#include "efa_wraps.hpp"

#include <cstring>

#include "dl/efa_libfabric.hpp"
#include "dl/shim/fabric_attach.hpp"
#include "efa/device_choice.hpp"
#include "nic_network.hpp"

namespace ep::binding {
namespace {

namespace soft_nic = nic::efa;

Napi::Value failure_object(Napi::Env env, const efa::pair_failure& why) {
  if (why.status == EP_STATUS_OK) return env.Undefined();
  auto out = Napi::Object::New(env);
  out["status"] = why.status;
  out["efaStatus"] = why.efa_status;
  out["qpn"] = why.qpn;
  out["wqe"] = static_cast<double>(why.wqe);
  out["remoteAddress"] = Napi::BigInt::New(env, why.remote_address);
  out["peer"] = why.peer;
  return out;
}

// What the software NIC can tell, and whom it wakes: hardware has none of it.
efa::emulator_hooks hooks_of(soft_nic::soft_device* device) {
  efa::emulator_hooks hooks;
  if (device == nullptr) return hooks;
  hooks.doorbell_wake = reinterpret_cast<uint64_t>(device->doorbell_wake());
  hooks.region_wake = [device](const dl::efa_mr& mr, const ep_wake_word* wake) { return device->region_wake(mr, wake); };
  hooks.counter_wake = [device](const dl::efa_counter& counter, const ep_wake_word* wake) { return device->counter_wake(counter, wake); };
  hooks.cq_wake = [device](const dl::efa_cq& cq, ep_wake_word* wake) { return device->cq_wake(cq, wake); };
  hooks.cq_consumer = [device](const dl::efa_cq& cq, const uint64_t* polled) { return device->cq_polled(cq, polled); };
  return hooks;
}

uint64_t number_in(const Napi::Object& description, const char* name, uint64_t most) {
  const uint64_t value = arg_size(description.Get(name), name);
  if (value > most) throw_invalid(description.Env(), std::string(name) + " " + std::to_string(value) + " exceeds " + std::to_string(most));
  return value;
}

// A NIC of software, as {seed, traceEvents, maxCounters, fragmentBytes, network} have it.
soft_nic::soft_options soft_options_of(const Napi::Object& description) {
  soft_nic::soft_options soft;
  soft.engine.seed = number_in(description, "seed", UINT64_MAX);
  soft.engine.trace_events = number_in(description, "traceEvents", uint64_t{1} << 24);
  soft.engine.max_counters = static_cast<uint32_t>(number_in(description, "maxCounters", soft_nic::port_max_counters));
  soft.engine.fragment_bytes = static_cast<uint32_t>(number_in(description, "fragmentBytes", uint64_t{1} << 30));
  soft.network = network_of(description.Get("network"));
  if (!soft.network) return soft;
  if (soft.engine.fragment_bytes > ep::nic::net::part_bytes) {
    throw_invalid(description.Env(), "fragmentBytes exceeds what goes over a network at a time, " + std::to_string(ep::nic::net::part_bytes));
  }
  soft.engine.silent_ns = soft.network->silence_ns;
  return soft;
}

// (path of the shim, NativeEfaOptions of the software NIC behind it): for tests of the hardware's path. The shim is one of a process, as libfabric is, so the driver behind it
// stays until the process ends.
void attach_fabric_shim(const Napi::CallbackInfo& info) {
  if (!info[0].IsString() || !info[1].IsObject()) throw_invalid(info.Env(), "a shim is attached by its path and a description of a NIC");
  const soft_nic::soft_options soft = soft_options_of(info[1].As<Napi::Object>());
  auto behind = std::make_unique<soft_nic::soft_driver>(soft);
  const dl::fabric_shim_manner manner{.endpoints = soft.engine.max_endpoints, .counters = soft.engine.max_counters};
  auto attached = dl::fabric_shim_attach(info[0].As<Napi::String>().Utf8Value(), behind.get(), manner);
  value_or_throw(info.Env(), attached);
  (void)behind.release();
}

} // namespace

// (rank, {queuePairs, depth, inlineValues, hardware, library, device, seed, traceEvents, maxCounters, inlineWrite, fragmentBytes})
efa_wrap::efa_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& owner = unwrap<rank_wrap>(info[0], "rank").native->context;
  if (!owner) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rank was closed"});
  if (!info[1].IsObject()) throw_invalid(env, "a NIC is made from a description");
  const auto description = info[1].As<Napi::Object>();
  efa::endpoint_options options;
  options.queue_pairs = static_cast<uint32_t>(number_in(description, "queuePairs", 1024));
  options.depth = static_cast<uint32_t>(number_in(description, "depth", 32768));
  options.inline_values = description.Get("inlineValues").ToBoolean();
  std::unique_ptr<dl::efa_driver> driver;
  bool apart = false;
  if (description.Get("hardware").ToBoolean()) {
    auto loaded = dl::efa_libfabric_driver(description.Get("library").ToString().Utf8Value());
    driver = std::move(value_or_throw(env, loaded));
  } else {
    const soft_nic::soft_options soft = soft_options_of(description);
    apart = soft.network.has_value();
    if (apart && owner->connected()) throw_invalid(env, "the rank is connected to its peers already");
    driver = std::make_unique<soft_nic::soft_driver>(soft);
  }
  auto opened = efa::device_open(*driver, description.Get("device").ToString().Utf8Value());
  std::unique_ptr<dl::efa_device> device = std::move(value_or_throw(env, opened));
  native = std::make_shared<holder>();
  native->soft = dynamic_cast<soft_nic::soft_device*>(device.get());
  if (apart) owner->connect_apart();
  auto made = efa::rank_nic::create(owner, std::move(driver), std::move(device), options, hooks_of(native->soft));
  native->nic = value_or_throw(env, made);
  rank = Napi::Persistent(info[0].As<Napi::Object>());
  end_key = state_of(env).at_end([held = native] { held->stop(false); });
  tag<efa_wrap>(info.This().As<Napi::Object>());
}

efa::rank_nic& efa_wrap::open(Napi::Env env) const {
  if (!native->nic) throw_failure(env, {EP_STATUS_CLOSED, 0, "the NIC was closed"});
  return *native->nic;
}

soft_nic::soft_device& efa_wrap::emulator(Napi::Env env) const {
  open(env);
  if (native->soft == nullptr) throw_invalid(env, "only a software NIC tells this");
  return *native->soft;
}

// -> {name, depth, wqeBytes, maxBatch, maxMessageBytes, counters, values}
Napi::Value efa_wrap::device(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const efa::rank_endpoints& endpoints = open(env).endpoints();
  const ep_efa_qp& qp = endpoints.kernel_qp(0);
  auto out = Napi::Object::New(env);
  out["name"] = endpoints.nic().name();
  out["depth"] = qp.depth;
  out["wqeBytes"] = qp.wqe_bytes;
  out["maxBatch"] = qp.max_batch;
  out["maxMessageBytes"] = static_cast<double>(endpoints.device().max_message);
  out["counters"] = endpoints.counters_left();
  out["values"] = qp.values == 0 ? "inline" : "staged";
  return out;
}

Napi::Value efa_wrap::address(const Napi::CallbackInfo& info) {
  const efa::rank_address own = open(info.Env()).endpoints().address();
  return bytes_copy(info.Env(), &own, sizeof own);
}

void efa_wrap::connect(const Napi::CallbackInfo& info) {
  std::vector<efa::rank_address> addresses;
  for (const std::vector<uint8_t>& bytes : blobs_of(info[0], "addresses")) {
    if (bytes.empty()) {
      addresses.emplace_back().rank = -1;
      continue;
    }
    if (bytes.size() != sizeof(efa::rank_address)) throw_invalid(info.Env(), "an address has " + std::to_string(sizeof(efa::rank_address)) + " bytes");
    std::memcpy(&addresses.emplace_back(), bytes.data(), bytes.size());
  }
  efa::rank_nic& mine = open(info.Env());
  if (native->soft != nullptr && native->soft->hub() != nullptr) {
    std::vector<ep::nic::gid_bytes> gids;
    // Addresses begin with the GID.
    for (const efa::rank_address& one : addresses) std::memcpy(gids.emplace_back().data(), one.data.bytes.data(), sizeof(ep::nic::gid_bytes));
    tell_hub(info.Env(), *native->soft->hub(), unwrap<rank_wrap>(rank.Value(), "rank").native->context, gids, info[1]);
  }
  auto connected = mine.endpoints().connect(addresses);
  value_or_throw(info.Env(), connected);
}

Napi::Value efa_wrap::signal_slots_left(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), open(info.Env()).endpoints().signal_slots_left());
}

Napi::Value efa_wrap::part_bytes(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(efa::rank_nic::part_bytes(arg_size(info[0], "signalSlots"))));
}

Napi::Value efa_wrap::gin_address_bytes(const Napi::CallbackInfo& info) {
  efa::gin_spec spec;
  spec.signals = static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[0], "signals"), efa::gin_max_ids));
  return Napi::Number::New(info.Env(), static_cast<double>(efa::gin_context::address_bytes(spec)));
}

Napi::Value efa_wrap::add_memory(const Napi::CallbackInfo& info) {
  auto added = open(info.Env()).add_memory(unwrap<memory_wrap>(info[0], "memory").made(info.Env()));
  const std::vector<uint8_t>& bytes = value_or_throw(info.Env(), added);
  return bytes_copy(info.Env(), bytes.data(), bytes.size());
}

// (memory, parts: Uint8Array[] by rank)
void efa_wrap::route(const Napi::CallbackInfo& info) {
  auto routed = open(info.Env()).route(unwrap<memory_wrap>(info[0], "memory").made(info.Env()), blobs_of(info[1], "parts"));
  value_or_throw(info.Env(), routed);
}

void efa_wrap::renew(const Napi::CallbackInfo& info) {
  auto renewed = open(info.Env()).renew();
  value_or_throw(info.Env(), renewed);
}

// (memory)
Napi::Value efa_wrap::own_part(const Napi::CallbackInfo& info) {
  auto part = open(info.Env()).part(unwrap<memory_wrap>(info[0], "memory").made(info.Env()));
  const std::vector<uint8_t>& bytes = value_or_throw(info.Env(), part);
  return bytes_copy(info.Env(), bytes.data(), bytes.size());
}

// (memory, rank, part)
void efa_wrap::replace_part(const Napi::CallbackInfo& info) {
  symmetric_memory& memory = unwrap<memory_wrap>(info[0], "memory").made(info.Env());
  const int32_t peer = peer_argument(info[1], memory.context());
  const byte_span bytes = arg_bytes(info[2], "part");
  auto replaced = open(info.Env()).replace_part(memory, peer, {bytes.data, bytes.data + bytes.size});
  value_or_throw(info.Env(), replaced);
}

void efa_wrap::remove_memory(const Napi::CallbackInfo& info) {
  if (native->nic) native->nic->remove_memory(unwrap<memory_wrap>(info[0], "memory").made(info.Env()));
}

// (address, byteLength) -> number of the adopted memory
Napi::Value efa_wrap::adopt(const Napi::CallbackInfo& info) {
  adopted_memory memory{arg_u64(info[0], "address"), arg_size(info[1], "byteLength"), std::make_shared<char>()};
  auto ready = open(info.Env()).prepare_source(memory.address, memory.byte_length, memory.keep);
  value_or_throw(info.Env(), ready);
  native->adopted.known.emplace(native->adopted.next, std::move(memory));
  return Napi::Number::New(info.Env(), static_cast<double>(native->adopted.next++));
}

void efa_wrap::disown(const Napi::CallbackInfo& info) { native->adopted.known.erase(arg_size(info[0], "adopted")); }

// The NIC may read and write it from here on.
operand efa_wrap::prepared_operand(Napi::Value value, const char* what) const {
  const operand found = local_operand(native->adopted, value, what);
  auto ready = open(value.Env()).prepare_source(found.address, found.byte_length, found.keep);
  value_or_throw(value.Env(), ready);
  return found;
}

// The first arguments of a request: (memory, peer, ...).
efa::host_request efa_wrap::request_to(const symmetric_memory& memory, const Napi::CallbackInfo& info) const {
  efa::host_request request;
  request.peer = peer_argument(info[1], memory.context());
  if (!open(info.Env()).knows(memory)) throw_invalid(info.Env(), "the memory belongs to another transport");
  return request;
}

// Arguments (op, slot, value); op 0 is none.
void efa_wrap::add_signal(efa::host_request& request, const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first) {
  const uint64_t op = arg_size(info[first], "op");
  if (op > 1) throw_invalid(info.Env(), op == 2 ? "a signal cannot be set over EFA: arrivals are counted" : "signal op " + std::to_string(op) + " is not one of 0..2");
  if (op == 0) return;
  request.slot = arg_size(info[first + 1], "slot");
  if (request.slot >= memory.signal_slots()) {
    throw_invalid(info.Env(), "slot " + std::to_string(request.slot) + " of a pad with " + std::to_string(memory.signal_slots()) + " slots");
  }
  request.signals = true;
  request.add = arg_u64(info[first + 2], "signal value");
}

// 0: it has ended. Otherwise its number, for watch(). A NIC of software mostly has it done in a few microseconds.
Napi::Value efa_wrap::post(Napi::Env env, const symmetric_memory& memory, const efa::host_request& request) const {
  efa::rank_nic& nic = open(env);
  auto posted = nic.post(memory, request);
  const uint64_t number = value_or_throw(env, posted);
  const rank_context& owner = context(env);
  wait_policy brief = owner.policy();
  brief.inline_sleep_ns = 0;
  const bool done = wait_inline(brief, owner.wake(), [&] { return nic.look(request.peer, number) != efa::request_state::pending; }) &&
                    nic.look(request.peer, number) == efa::request_state::done;
  return Napi::Number::New(env, done ? 0 : static_cast<double>(number));
}

// (memory, peer, dstOffset, source, srcOffset, byteLength, op, slot, value)
Napi::Value efa_wrap::put(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = memory_argument(info[0]);
  efa::host_request request = request_to(memory, info);
  const operand source = prepared_operand(info[3], "source");
  request.what = efa::host_request::kind::write;
  request.bytes = arg_size(info[5], "byteLength");
  request.offset = checked_range(env, info[2], request.bytes, memory.byte_length(), "byteOffset");
  request.local = source.address + checked_range(env, info[4], request.bytes, source.byte_length, "srcOffset");
  request.keep = source.keep;
  add_signal(request, memory, info, 6);
  return post(env, memory, request);
}

// (memory, peer, dstOffset, width, value, op, slot, value)
Napi::Value efa_wrap::put_value(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  efa::host_request request = request_to(memory, info);
  request.what = efa::host_request::kind::word;
  request.bytes = word_bytes(info[3]);
  request.offset = word_offset(info[2], request.bytes, memory.byte_length());
  request.word = arg_u64(info[4], "value");
  if (request.bytes < 8) request.word &= (uint64_t{1} << 8 * request.bytes) - 1;
  add_signal(request, memory, info, 5);
  return post(info.Env(), memory, request);
}

// (memory, peer, op, slot, value)
Napi::Value efa_wrap::signal(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  efa::host_request request = request_to(memory, info);
  add_signal(request, memory, info, 2);
  if (!request.signals) throw_invalid(info.Env(), "signal op 0 is no signal");
  return post(info.Env(), memory, request);
}

// (memory, peer, srcOffset, target, dstOffset, byteLength)
Napi::Value efa_wrap::get(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = memory_argument(info[0]);
  efa::host_request request = request_to(memory, info);
  const operand target = prepared_operand(info[3], "target");
  request.what = efa::host_request::kind::read;
  request.bytes = arg_size(info[5], "byteLength");
  request.offset = checked_range(env, info[2], request.bytes, memory.byte_length(), "byteOffset");
  request.local = target.address + checked_range(env, info[4], request.bytes, target.byte_length, "dstOffset");
  request.keep = target.keep;
  return post(env, memory, request);
}

Napi::Value efa_wrap::accepted(const Napi::CallbackInfo& info) {
  efa::rank_nic& nic = open(info.Env());
  return Napi::Number::New(info.Env(), static_cast<double>(nic.accepted(peer_argument(info[0], context(info.Env())))));
}

// (peer, number, timeoutMs) -> operation that ends with the request; `found` is 0 where it is done, 1 where the queue pair broke, 2 where all of them were made anew
Napi::Value efa_wrap::watch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  open(env);
  rank_wrap& owner = unwrap<rank_wrap>(rank.Value(), "rank");
  const int32_t peer = peer_argument(info[0], owner.open(env));
  const uint64_t number = arg_size(info[1], "number");
  const auto ended = [nic = native->nic, peer, number](outcome& end) {
    const efa::request_state state = nic->look(peer, number);
    end.found = state == efa::request_state::renewed ? 2 : state == efa::request_state::failed ? 1 : 0;
    return state != efa::request_state::pending;
  };
  return Napi::Number::New(env, static_cast<double>(owner.watch_until(env, arg_double(info[2], "timeoutMs"), {peer}, ended)));
}

Napi::Value efa_wrap::failure_of(const Napi::CallbackInfo& info) {
  efa::rank_nic& nic = open(info.Env());
  return failure_object(info.Env(), nic.failure_of(peer_argument(info[0], context(info.Env()))));
}

// -> of the queue pair of kernels that broke first, or undefined
Napi::Value efa_wrap::kernel_failure(const Napi::CallbackInfo& info) { return failure_object(info.Env(), open(info.Env()).kernel_failure()); }

Napi::Value efa_wrap::counts(const Napi::CallbackInfo& info) {
  const soft_nic::engine_counts counts = emulator(info.Env()).counts();
  auto out = Napi::Object::New(info.Env());
  out["doorbells"] = static_cast<double>(counts.doorbells);
  out["requests"] = static_cast<double>(counts.requests);
  out["completions"] = static_cast<double>(counts.completions);
  out["bytes"] = static_cast<double>(counts.bytes);
  out["violations"] = static_cast<double>(counts.violations);
  return out;
}

Napi::Value efa_wrap::violations(const Napi::CallbackInfo& info) {
  auto out = Napi::Array::New(info.Env());
  for (const soft_nic::violation& one : emulator(info.Env()).violations()) out[out.Length()] = soft_nic::violation_text(one);
  return out;
}

// (format)
Napi::Value efa_wrap::trace(const Napi::CallbackInfo& info) { return trace_text(info[0], emulator(info.Env())); }

// (script)
void efa_wrap::set_faults(const Napi::CallbackInfo& info) {
  if (!info[0].IsString()) throw_invalid(info.Env(), "a fault script is a string");
  auto set = emulator(info.Env()).set_faults(info[0].As<Napi::String>().Utf8Value());
  value_or_throw(info.Env(), set);
}

void efa_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->stop(true);
}

void efa_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["EfaNic"] = DefineClass(
      env, "EfaNic",
      {InstanceMethod<&efa_wrap::device>("device"), InstanceMethod<&efa_wrap::address>("address"), InstanceMethod<&efa_wrap::connect>("connect"),
       InstanceMethod<&efa_wrap::signal_slots_left>("signalSlotsLeft"), InstanceMethod<&efa_wrap::part_bytes>("partBytes"), InstanceMethod<&efa_wrap::gin_address_bytes>("ginAddressBytes"),
       InstanceMethod<&efa_wrap::add_memory>("addMemory"), InstanceMethod<&efa_wrap::route>("route"),
       InstanceMethod<&efa_wrap::renew>("renew"), InstanceMethod<&efa_wrap::own_part>("ownPart"), InstanceMethod<&efa_wrap::replace_part>("replacePart"),
       InstanceMethod<&efa_wrap::remove_memory>("removeMemory"), InstanceMethod<&efa_wrap::adopt>("adopt"), InstanceMethod<&efa_wrap::disown>("disown"),
       InstanceMethod<&efa_wrap::put>("put"), InstanceMethod<&efa_wrap::put_value>("putValue"), InstanceMethod<&efa_wrap::signal>("signal"),
       InstanceMethod<&efa_wrap::get>("get"), InstanceMethod<&efa_wrap::accepted>("accepted"), InstanceMethod<&efa_wrap::watch>("watch"),
       InstanceMethod<&efa_wrap::failure_of>("failure"), InstanceMethod<&efa_wrap::kernel_failure>("kernelFailure"),
       InstanceMethod<&efa_wrap::counts>("counts"), InstanceMethod<&efa_wrap::violations>("violations"), InstanceMethod<&efa_wrap::trace>("trace"),
       InstanceMethod<&efa_wrap::set_faults>("setFaults"), InstanceMethod<&efa_wrap::close>("close")});
}

void bind_efa(Napi::Env env, Napi::Object exports) {
  efa_wrap::define(env, exports);
  gin_wrap::define(env, exports);
  exports["attachFabricShim"] = Napi::Function::New(env, attach_fabric_shim);
  bind_efa_bench(env, exports);
}

} // namespace ep::binding
