#include "nic_arguments.hpp"

#include <cstring>

#include "gpu_wraps.hpp"
#include "ibgda/rank_nic.hpp"
#include "nic/mlx5/soft_device.hpp"
#include "nic_driver.hpp"
#include "nic_network.hpp"

namespace ep::binding {
namespace {

// The NIC of a rank and its queue pairs, for packages/ibgda.
struct ibgda_wrap : Napi::ObjectWrap<ibgda_wrap> {
  static constexpr napi_type_tag type_tag{0x6570696267646131ull, 11};
  static constexpr const char* type_name = "IbgdaNic";
  static void define(Napi::Env env, Napi::Object exports);
  explicit ibgda_wrap(const Napi::CallbackInfo& info);
  Napi::Value port(const Napi::CallbackInfo& info);
  Napi::Value connection(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  void reset_peer(const Napi::CallbackInfo& info);
  Napi::Value end_way(const Napi::CallbackInfo& info);
  void connect_peer(const Napi::CallbackInfo& info);
  Napi::Value add_memory(const Napi::CallbackInfo& info);
  void route(const Napi::CallbackInfo& info);
  Napi::Value own_part(const Napi::CallbackInfo& info);
  void replace_remote(const Napi::CallbackInfo& info);
  void remove_memory(const Napi::CallbackInfo& info);
  Napi::Value device_memory(const Napi::CallbackInfo& info);
  Napi::Value add_device_memory(const Napi::CallbackInfo& info);
  void route_device(const Napi::CallbackInfo& info);
  void remove_device_memory(const Napi::CallbackInfo& info);
  Napi::Value adopt(const Napi::CallbackInfo& info);
  void disown(const Napi::CallbackInfo& info);
  Napi::Value put(const Napi::CallbackInfo& info);
  Napi::Value put_value(const Napi::CallbackInfo& info);
  Napi::Value signal(const Napi::CallbackInfo& info);
  Napi::Value get(const Napi::CallbackInfo& info);
  Napi::Value fetch_add(const Napi::CallbackInfo& info);
  Napi::Value compare_swap(const Napi::CallbackInfo& info);
  Napi::Value accepted(const Napi::CallbackInfo& info);
  Napi::Value watch(const Napi::CallbackInfo& info);
  Napi::Value failure_of(const Napi::CallbackInfo& info);
  Napi::Value kernel_failure(const Napi::CallbackInfo& info);
  Napi::Value counts(const Napi::CallbackInfo& info);
  Napi::Value violations(const Napi::CallbackInfo& info);
  Napi::Value trace(const Napi::CallbackInfo& info);
  void set_faults(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  // Shared with the environment's end, which may come after this wrap's finalizer. `nic` is null after close().
  struct holder {
    std::shared_ptr<ibgda::rank_nic> nic;
    nic::soft_device* soft = nullptr; // null: hardware
    adopted_memories adopted;
    // Not orderly: the environment went away without close().
    void stop(bool orderly) {
      if (!orderly && nic && soft != nullptr && soft->hub() != nullptr) soft->hub()->die();
      adopted.known.clear();
      if (nic) nic->stop();
      nic.reset();
    }
  };

  ibgda::rank_nic& open(Napi::Env env) const;
  nic::soft_device& emulator(Napi::Env env) const;
  operand prepared_operand(Napi::Value value, const char* what) const;
  ibgda::host_request request_to(const symmetric_memory& memory, const Napi::CallbackInfo& info) const;
  void add_signal(ibgda::host_request& request, const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first) const;
  Napi::Value post(Napi::Env env, ibgda::host_request request) const;
  ibgda::host_request atomic_request(const Napi::CallbackInfo& info, ibgda::host_request::kind what) const;

  std::shared_ptr<holder> native;
  std::optional<nic_description::gpu_kernels> kernels; // none: those of the host
  Napi::ObjectReference rank;
  uint64_t end_key = 0;
};

Napi::Value failure_object(Napi::Env env, const ibgda::pair_failure& why) {
  if (why.status == EP_STATUS_OK) return env.Undefined();
  auto out = Napi::Object::New(env);
  out["status"] = why.status;
  out["syndrome"] = why.syndrome;
  out["firstSyndrome"] = why.first_syndrome;
  out["vendorSyndrome"] = why.vendor_syndrome;
  out["qpn"] = why.qpn;
  out["opcode"] = why.opcode;
  out["index"] = why.index;
  out["rkey"] = why.rkey;
  out["remoteAddress"] = Napi::BigInt::New(env, why.remote_address);
  return out;
}

// Uint8Array[] by rank
std::vector<ep_ibgda_remote> remotes_of(Napi::Value value) {
  std::vector<ep_ibgda_remote> remotes;
  for (const std::vector<uint8_t>& bytes : blobs_of(value, "remotes")) {
    if (bytes.size() != sizeof(ep_ibgda_remote)) throw_invalid(value.Env(), "a remote part has " + std::to_string(sizeof(ep_ibgda_remote)) + " bytes");
    std::memcpy(&remotes.emplace_back(), bytes.data(), bytes.size());
  }
  return remotes;
}

} // namespace

// (rank, options): native/js/ibgda.ts has them.
ibgda_wrap::ibgda_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& context = unwrap<rank_wrap>(info[0], "rank").native->context;
  if (!context) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rank was closed"});
  const nic_description asked = nic_description_of(info[1]);
  const bool apart = asked.table == nic_description::backing::soft && asked.soft.network.has_value();
  if (apart && context->connected()) throw_invalid(env, "the rank is connected to its peers already");
  auto loaded = driver_of(asked);
  std::unique_ptr<dl::mlx5_driver> driver = std::move(value_or_throw(env, loaded));
  auto opened = ibgda::device_open(*driver, asked.wish);
  ibgda::open_port port = std::move(value_or_throw(env, opened));
  native = std::make_shared<holder>();
  native->soft = dynamic_cast<nic::soft_device*>(port.device.get());
  ibgda::emulator_hooks hooks;
  if (native->soft != nullptr) {
    hooks.adds_as_processors = true;
    hooks.doorbell_wake = reinterpret_cast<uint64_t>(native->soft->doorbell_wake());
    hooks.region_wake = [device = native->soft](const dl::mlx5_mr& mr, const ep_wake_word* wake) { return device->region_wake(mr, wake); };
  }
  auto places = places_of(asked);
  ibgda::control_places chosen = std::move(value_or_throw(env, places));
  if (apart) context->connect_apart();
  auto made = ibgda::rank_nic::create(context, std::move(driver), std::move(port), asked.queues, std::move(hooks), std::move(chosen));
  kernels = asked.kernels;
  native->nic = value_or_throw(env, made);
  rank = Napi::Persistent(info[0].As<Napi::Object>());
  end_key = state_of(env).at_end([held = native] { held->stop(false); });
  tag<ibgda_wrap>(info.This().As<Napi::Object>());
}

ibgda::rank_nic& ibgda_wrap::open(Napi::Env env) const {
  if (!native->nic) throw_failure(env, {EP_STATUS_CLOSED, 0, "the NIC was closed"});
  return *native->nic;
}

nic::soft_device& ibgda_wrap::emulator(Napi::Env env) const {
  open(env);
  if (native->soft == nullptr) throw_invalid(env, "only a software NIC tells this");
  return *native->soft;
}

// Where the connection goes and what stood in the way: {device, port, link, gid, distance, passedOver, maxMessageBytes, atomics, maskedSwap, kernels, placement, fallbacks}
Napi::Value ibgda_wrap::port(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  ibgda::rank_nic& nic = open(env);
  const ibgda::open_port& port = nic.queues().port();
  auto out = Napi::Object::New(env);
  out["device"] = port.device->name();
  out["port"] = port.port;
  out["link"] = port.facts.link == dl::mlx5_link::ethernet ? "ethernet" : "infiniband";
  out["gid"] = ibgda::gid_text(port.gid.gid.raw);
  out["distance"] = ibgda::distance_name(port.far);
  out["passedOver"] = strings_of(env, port.passed_over);
  out["maxMessageBytes"] = static_cast<double>(nic.max_message());
  out["atomics"] = Napi::Boolean::New(env, nic.has_atomics());
  out["maskedSwap"] = Napi::Boolean::New(env, nic.has_masked_swap());
  out["kernels"] = kernels ? "cuda:" + std::to_string(kernels->device) : "host";
  out["placement"] = ibgda::placement_name(nic.queues().where());
  auto fallbacks = Napi::Array::New(env);
  for (const ibgda::fallback& one : nic.fallbacks()) {
    fallbacks[fallbacks.Length()] = std::string(ibgda::placement_name(one.wished)) + ": " + one.why;
  }
  out["fallbacks"] = fallbacks;
  return out;
}

Napi::Value ibgda_wrap::connection(const Napi::CallbackInfo& info) {
  const std::vector<uint8_t> bytes = open(info.Env()).queues().connection();
  return bytes_copy(info.Env(), bytes.data(), bytes.size());
}

// (connections, keys?): by rank, empty for ranks that are not here; keys of both directions, for a NIC on a network
void ibgda_wrap::connect(const Napi::CallbackInfo& info) {
  ibgda::rank_nic& mine = open(info.Env());
  const std::vector<std::vector<uint8_t>> connections = blobs_of(info[0], "connections");
  if (native->soft != nullptr && native->soft->hub() != nullptr) {
    std::vector<nic::gid_bytes> gids;
    for (const std::vector<uint8_t>& bytes : connections) {
      if (bytes.size() < sizeof(ep_ibgda_peer)) throw_invalid(info.Env(), "connection data of " + std::to_string(bytes.size()) + " bytes");
      std::memcpy(gids.emplace_back().data(), bytes.data() + offsetof(ep_ibgda_peer, gid), sizeof(nic::gid_bytes));
    }
    tell_hub(info.Env(), *native->soft->hub(), unwrap<rank_wrap>(rank.Value(), "rank").native->context, gids, info[1]);
  }
  auto connected = mine.queues().connect(connections);
  value_or_throw(info.Env(), connected);
}

// (peer)
void ibgda_wrap::reset_peer(const Napi::CallbackInfo& info) {
  ibgda::rank_nic& mine = open(info.Env());
  auto reset = mine.reset_peer(peer_argument(info[0], unwrap<rank_wrap>(rank.Value(), "rank").open(info.Env())));
  value_or_throw(info.Env(), reset);
}

// (peer)
Napi::Value ibgda_wrap::end_way(const Napi::CallbackInfo& info) {
  ibgda::rank_nic& mine = open(info.Env());
  return Napi::Boolean::New(info.Env(), mine.end_way(peer_argument(info[0], unwrap<rank_wrap>(rank.Value(), "rank").open(info.Env()))));
}

// (peer, connection)
void ibgda_wrap::connect_peer(const Napi::CallbackInfo& info) {
  ibgda::rank_nic& mine = open(info.Env());
  const int32_t peer = peer_argument(info[0], unwrap<rank_wrap>(rank.Value(), "rank").open(info.Env()));
  const byte_span bytes = arg_bytes(info[1], "connection");
  auto connected = mine.connect_peer(peer, {bytes.data, bytes.data + bytes.size});
  value_or_throw(info.Env(), connected);
}

Napi::Value ibgda_wrap::add_memory(const Napi::CallbackInfo& info) {
  auto added = open(info.Env()).add_memory(unwrap<memory_wrap>(info[0], "memory").made(info.Env()));
  return bytes_copy(info.Env(), &value_or_throw(info.Env(), added), sizeof(ep_ibgda_remote));
}

// (memory, remotes: Uint8Array[] by rank)
void ibgda_wrap::route(const Napi::CallbackInfo& info) {
  auto routed = open(info.Env()).route(unwrap<memory_wrap>(info[0], "memory").made(info.Env()), remotes_of(info[1]));
  value_or_throw(info.Env(), routed);
}

// (memory) -> what add_memory() gave for it, once it is routed
Napi::Value ibgda_wrap::own_part(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  const ep_ibgda_remote* part = open(info.Env()).remote(memory, memory.context().rank());
  if (part == nullptr) throw_invalid(info.Env(), "the memory belongs to another transport");
  return bytes_copy(info.Env(), part, sizeof *part);
}

// (memory, rank, remote)
void ibgda_wrap::replace_remote(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  const int32_t peer = peer_argument(info[1], memory.context());
  const byte_span bytes = arg_bytes(info[2], "remote");
  ep_ibgda_remote remote;
  if (bytes.size != sizeof remote) throw_invalid(info.Env(), "a remote part has " + std::to_string(sizeof remote) + " bytes");
  std::memcpy(&remote, bytes.data, sizeof remote);
  auto replaced = open(info.Env()).replace_remote(memory, peer, remote);
  value_or_throw(info.Env(), replaced);
}

void ibgda_wrap::remove_memory(const Napi::CallbackInfo& info) {
  if (native->nic) native->nic->remove_memory(unwrap<memory_wrap>(info[0], "memory").made(info.Env()));
}

// (byteLength, signalSlots) -> GpuSymmetricMemory: this rank's part, in the place of the kernels' queues
Napi::Value ibgda_wrap::device_memory(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  ibgda::rank_nic& nic = open(env);
  if (!kernels) throw_invalid(env, "the kernels of this NIC run on the host");
  const uint64_t size = arg_size(info[0], "byteLength");
  const uint64_t slots = arg_size(info[1], "signalSlots");
  const uint64_t signals = gpu::symmetric_memory::signal_bytes(slots);
  auto block = nic.queues().beside_queues(signals + size);
  const ibgda::control_block part = value_or_throw(env, block);
  const auto& context = unwrap<rank_wrap>(rank.Value(), "rank").native->context;
  // Whoever holds the memory holds the block, and so knows how the NIC may reach it.
  auto made = gpu::symmetric_memory::create_for_nic(context, kernels->library, kernels->device, size, slots, part.address, std::make_shared<const ibgda::control_block>(part));
  const Napi::Object memory = state_of(env).classes["GpuSymmetricMemory"].New({});
  gpu_symmetric_wrap::Unwrap(memory)->native = value_or_throw(env, made);
  return memory;
}

// (memory) -> ep_ibgda_remote bytes: registers it
Napi::Value ibgda_wrap::add_device_memory(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto& memory = unwrap<gpu_symmetric_wrap>(info[0], "memory").native;
  if (!memory || !memory->nic_part()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the device memory was closed, or is none that deviceMemory() made"});
  const auto& block = *static_cast<const ibgda::control_block*>(memory->nic_part().get());
  auto added = open(env).add_part(memory->handle().block, block, gpu::symmetric_memory::signal_bytes(memory->signal_slots()), memory->byte_length());
  return bytes_copy(env, &value_or_throw(env, added), sizeof(ep_ibgda_remote));
}

// (memory, handles, remotes: Uint8Array[] by rank)
void ibgda_wrap::route_device(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto& memory = unwrap<gpu_symmetric_wrap>(info[0], "memory").native;
  if (!memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the device memory was closed"});
  auto routed = open(env).route_part(memory->handle().block, remotes_of(info[2]));
  ibgda::rank_nic::kernel_route& way = value_or_throw(env, routed);
  auto connected = memory->connect_by_nic(gpu_handles_of(info[1]), std::move(way.route), EP_MEMORY_IBGDA, way.address);
  value_or_throw(env, connected);
}

void ibgda_wrap::remove_device_memory(const Napi::CallbackInfo& info) {
  const auto& memory = unwrap<gpu_symmetric_wrap>(info[0], "memory").native;
  if (native->nic && memory) native->nic->remove_part(memory->handle().block);
}

// (address, byteLength) -> number of the adopted memory
Napi::Value ibgda_wrap::adopt(const Napi::CallbackInfo& info) {
  adopted_memory memory{arg_u64(info[0], "address"), arg_size(info[1], "byteLength"), std::make_shared<char>()};
  auto ready = open(info.Env()).prepare_source(memory.address, memory.byte_length, memory.keep);
  value_or_throw(info.Env(), ready);
  native->adopted.known.emplace(native->adopted.next, std::move(memory));
  return Napi::Number::New(info.Env(), static_cast<double>(native->adopted.next++));
}

void ibgda_wrap::disown(const Napi::CallbackInfo& info) { native->adopted.known.erase(arg_size(info[0], "adopted")); }

// The NIC may read and write it from here on.
operand ibgda_wrap::prepared_operand(Napi::Value value, const char* what) const {
  const operand found = local_operand(native->adopted, value, what);
  auto ready = open(value.Env()).prepare_source(found.address, found.byte_length, found.keep);
  value_or_throw(value.Env(), ready);
  return found;
}

// The first arguments of a request: (memory, peer, ...).
ibgda::host_request ibgda_wrap::request_to(const symmetric_memory& memory, const Napi::CallbackInfo& info) const {
  ibgda::host_request request;
  request.peer = peer_argument(info[1], memory.context());
  const ep_ibgda_remote* part = open(info.Env()).remote(memory, request.peer);
  if (part == nullptr) throw_invalid(info.Env(), "the memory belongs to another transport");
  request.remote = {part->data, part->data_rkey};
  return request;
}

// Arguments (op, slot, value); op 0 is none.
void ibgda_wrap::add_signal(ibgda::host_request& request, const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first) const {
  const uint64_t op = arg_size(info[first], "op");
  if (op > 2) throw_invalid(info.Env(), "signal op " + std::to_string(op) + " is not one of 0..2");
  if (op == 0) return;
  const uint64_t slot = arg_size(info[first + 1], "slot");
  if (slot >= memory.signal_slots()) {
    throw_invalid(info.Env(), "slot " + std::to_string(slot) + " of a pad with " + std::to_string(memory.signal_slots()) + " slots");
  }
  request.signal = static_cast<signal_op>(op);
  request.slot = ibgda::rank_nic::signal_place(memory, *open(info.Env()).remote(memory, request.peer), slot, request.signal);
  request.value = arg_u64(info[first + 2], "signal value");
}

// 0: it has ended. Otherwise its number, for watch(). A NIC of software mostly has it done in a few microseconds.
Napi::Value ibgda_wrap::post(Napi::Env env, ibgda::host_request request) const {
  ibgda::rank_nic& nic = open(env);
  auto posted = nic.post(request);
  const uint64_t number = value_or_throw(env, posted);
  const auto& context = unwrap<rank_wrap>(rank.Value(), "rank").native->context;
  wait_policy brief = context->policy();
  brief.inline_sleep_ns = 0;
  const bool done = wait_inline(brief, context->wake(), [&] { return nic.look(request.peer, number) != ibgda::request_state::pending; }) &&
                    nic.look(request.peer, number) == ibgda::request_state::done;
  return Napi::Number::New(env, done ? 0 : static_cast<double>(number));
}

// (memory, peer, dstOffset, source, srcOffset, byteLength, op, slot, value)
Napi::Value ibgda_wrap::put(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = memory_argument(info[0]);
  ibgda::host_request request = request_to(memory, info);
  const operand source = prepared_operand(info[3], "source");
  request.what = ibgda::host_request::kind::write;
  request.bytes = arg_size(info[5], "byteLength");
  request.remote.address += checked_range(env, info[2], request.bytes, memory.byte_length(), "byteOffset");
  request.local = source.address + checked_range(env, info[4], request.bytes, source.byte_length, "srcOffset");
  request.keep = source.keep;
  add_signal(request, memory, info, 6);
  return post(env, std::move(request));
}

// (memory, peer, dstOffset, width, value, op, slot, value)
Napi::Value ibgda_wrap::put_value(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  ibgda::host_request request = request_to(memory, info);
  request.what = ibgda::host_request::kind::word;
  request.bytes = word_bytes(info[3]);
  request.remote.address += word_offset(info[2], request.bytes, memory.byte_length());
  request.word = arg_u64(info[4], "value");
  add_signal(request, memory, info, 5);
  return post(info.Env(), std::move(request));
}

// (memory, peer, op, slot, value)
Napi::Value ibgda_wrap::signal(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  ibgda::host_request request = request_to(memory, info);
  add_signal(request, memory, info, 2);
  if (request.signal == signal_op::none) throw_invalid(info.Env(), "signal op 0 is neither 1 nor 2");
  return post(info.Env(), std::move(request));
}

// (memory, peer, srcOffset, target, dstOffset, byteLength)
Napi::Value ibgda_wrap::get(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = memory_argument(info[0]);
  ibgda::host_request request = request_to(memory, info);
  const operand target = prepared_operand(info[3], "target");
  request.what = ibgda::host_request::kind::read;
  request.bytes = arg_size(info[5], "byteLength");
  request.remote.address += checked_range(env, info[2], request.bytes, memory.byte_length(), "byteOffset");
  request.local = target.address + checked_range(env, info[4], request.bytes, target.byte_length, "dstOffset");
  request.keep = target.keep;
  return post(env, std::move(request));
}

// The first arguments of an atomic: (memory, peer, byteOffset, target, targetOffset, ...). The word's old value lands in the target.
ibgda::host_request ibgda_wrap::atomic_request(const Napi::CallbackInfo& info, ibgda::host_request::kind what) const {
  const symmetric_memory& memory = memory_argument(info[0]);
  ibgda::host_request request = request_to(memory, info);
  const operand target = prepared_operand(info[3], "target");
  request.what = what;
  request.bytes = sizeof(uint64_t);
  request.remote.address += checked_range(info.Env(), info[2], request.bytes, memory.byte_length(), "byteOffset");
  request.local = target.address + checked_range(info.Env(), info[4], request.bytes, target.byte_length, "targetOffset");
  request.keep = target.keep;
  return request;
}

// (memory, peer, byteOffset, target, targetOffset, add)
Napi::Value ibgda_wrap::fetch_add(const Napi::CallbackInfo& info) {
  ibgda::host_request request = atomic_request(info, ibgda::host_request::kind::fetch_add);
  request.word = arg_u64(info[5], "add");
  return post(info.Env(), std::move(request));
}

// (memory, peer, byteOffset, target, targetOffset, compare, swap, compareMask, swapMask): without masks, of the whole word
Napi::Value ibgda_wrap::compare_swap(const Napi::CallbackInfo& info) {
  const bool masked = !info[7].IsUndefined();
  ibgda::host_request request = atomic_request(info, masked ? ibgda::host_request::kind::masked_swap : ibgda::host_request::kind::compare_swap);
  request.compare = arg_u64(info[5], "compare");
  request.word = arg_u64(info[6], "swap");
  if (masked) {
    request.compare_mask = arg_u64(info[7], "compareMask");
    request.swap_mask = arg_u64(info[8], "swapMask");
  }
  return post(info.Env(), std::move(request));
}

Napi::Value ibgda_wrap::accepted(const Napi::CallbackInfo& info) {
  ibgda::rank_nic& nic = open(info.Env());
  const int32_t peer = peer_argument(info[0], unwrap<rank_wrap>(rank.Value(), "rank").open(info.Env()));
  return Napi::Number::New(info.Env(), static_cast<double>(nic.accepted(peer)));
}

// (peer, number, timeoutMs) -> operation that ends with the request; `found` is 0 where it is done, 1 where the queue pair broke, 2 where another process has come in the peer's place
Napi::Value ibgda_wrap::watch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  open(env);
  rank_wrap& owner = unwrap<rank_wrap>(rank.Value(), "rank");
  const int32_t peer = peer_argument(info[0], owner.open(env));
  const uint64_t number = arg_size(info[1], "number");
  const auto ended = [nic = native->nic, peer, number](outcome& end) {
    const ibgda::request_state state = nic->look(peer, number);
    end.found = state == ibgda::request_state::replaced ? 2 : state == ibgda::request_state::failed ? 1 : 0;
    return state != ibgda::request_state::pending;
  };
  return Napi::Number::New(env, static_cast<double>(owner.watch_until(env, arg_double(info[2], "timeoutMs"), {peer}, ended)));
}

Napi::Value ibgda_wrap::failure_of(const Napi::CallbackInfo& info) {
  ibgda::rank_nic& nic = open(info.Env());
  return failure_object(info.Env(), nic.failure_of(peer_argument(info[0], unwrap<rank_wrap>(rank.Value(), "rank").open(info.Env()))));
}

// -> {peer, ...} of the queue pair of kernels that broke first, or undefined
Napi::Value ibgda_wrap::kernel_failure(const Napi::CallbackInfo& info) {
  int32_t peer = -1;
  const Napi::Value found = failure_object(info.Env(), open(info.Env()).kernel_failure(&peer));
  if (found.IsObject()) found.As<Napi::Object>()["peer"] = peer;
  return found;
}

Napi::Value ibgda_wrap::counts(const Napi::CallbackInfo& info) {
  const nic::engine_counts counts = emulator(info.Env()).counts();
  auto out = Napi::Object::New(info.Env());
  out["doorbells"] = static_cast<double>(counts.doorbells);
  out["requests"] = static_cast<double>(counts.requests);
  out["completions"] = static_cast<double>(counts.completions);
  out["retries"] = static_cast<double>(counts.retries);
  out["bytes"] = static_cast<double>(counts.bytes);
  out["violations"] = static_cast<double>(counts.violations);
  return out;
}

Napi::Value ibgda_wrap::violations(const Napi::CallbackInfo& info) {
  auto out = Napi::Array::New(info.Env());
  for (const nic::violation& one : emulator(info.Env()).violations()) out[out.Length()] = nic::violation_text(one);
  return out;
}

// (format)
Napi::Value ibgda_wrap::trace(const Napi::CallbackInfo& info) { return trace_text(info[0], emulator(info.Env())); }

// (script)
void ibgda_wrap::set_faults(const Napi::CallbackInfo& info) {
  if (!info[0].IsString()) throw_invalid(info.Env(), "a fault script is a string");
  auto set = emulator(info.Env()).set_faults(info[0].As<Napi::String>().Utf8Value());
  value_or_throw(info.Env(), set);
}

void ibgda_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->stop(true);
}

void ibgda_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["IbgdaNic"] = DefineClass(
      env, "IbgdaNic",
      {InstanceMethod<&ibgda_wrap::port>("port"), InstanceMethod<&ibgda_wrap::connection>("connection"), InstanceMethod<&ibgda_wrap::connect>("connect"),
       InstanceMethod<&ibgda_wrap::reset_peer>("resetPeer"), InstanceMethod<&ibgda_wrap::end_way>("endWay"), InstanceMethod<&ibgda_wrap::connect_peer>("connectPeer"),
       InstanceMethod<&ibgda_wrap::add_memory>("addMemory"), InstanceMethod<&ibgda_wrap::route>("route"),
       InstanceMethod<&ibgda_wrap::own_part>("ownPart"), InstanceMethod<&ibgda_wrap::replace_remote>("replaceRemote"),
       InstanceMethod<&ibgda_wrap::remove_memory>("removeMemory"), InstanceMethod<&ibgda_wrap::adopt>("adopt"),
       InstanceMethod<&ibgda_wrap::device_memory>("deviceMemory"), InstanceMethod<&ibgda_wrap::add_device_memory>("addDeviceMemory"),
       InstanceMethod<&ibgda_wrap::route_device>("routeDevice"), InstanceMethod<&ibgda_wrap::remove_device_memory>("removeDeviceMemory"),
       InstanceMethod<&ibgda_wrap::disown>("disown"), InstanceMethod<&ibgda_wrap::put>("put"), InstanceMethod<&ibgda_wrap::put_value>("putValue"),
       InstanceMethod<&ibgda_wrap::signal>("signal"), InstanceMethod<&ibgda_wrap::get>("get"), InstanceMethod<&ibgda_wrap::fetch_add>("fetchAdd"),
       InstanceMethod<&ibgda_wrap::compare_swap>("compareSwap"), InstanceMethod<&ibgda_wrap::accepted>("accepted"),
       InstanceMethod<&ibgda_wrap::watch>("watch"), InstanceMethod<&ibgda_wrap::failure_of>("failure"),
       InstanceMethod<&ibgda_wrap::kernel_failure>("kernelFailure"), InstanceMethod<&ibgda_wrap::counts>("counts"),
       InstanceMethod<&ibgda_wrap::violations>("violations"), InstanceMethod<&ibgda_wrap::trace>("trace"),
       InstanceMethod<&ibgda_wrap::set_faults>("setFaults"), InstanceMethod<&ibgda_wrap::close>("close")});
}

void bind_ibgda(Napi::Env env, Napi::Object exports) {
  ibgda_wrap::define(env, exports);
  bind_nic_driver(env, exports);
  bind_ibgda_bench(env, exports);
}

} // namespace ep::binding
