#include "fabric_arguments.hpp"
#include "fabric_engine.hpp"

#include <cstring>

#include "fabric/engine.hpp"
#include "fabric/gpu_source.hpp"
#include "mapped.hpp"
#include "nic_network.hpp"

namespace ep::binding {
namespace {

// The endpoint of a rank in a network and its engine, for the backing `fabric` of packages/nvshmem.
struct fabric_wrap : Napi::ObjectWrap<fabric_wrap> {
  static constexpr napi_type_tag type_tag{0x6570666162726963ull, 17};
  static constexpr const char* type_name = "FabricNic";
  static void define(Napi::Env env, Napi::Object exports);
  explicit fabric_wrap(const Napi::CallbackInfo& info);
  Napi::Value offer(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value witness(const Napi::CallbackInfo& info);
  Napi::Value listen(const Napi::CallbackInfo& info);
  void set_lines(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  Napi::Value part_bytes(const Napi::CallbackInfo& info);
  Napi::Value add_memory(const Napi::CallbackInfo& info);
  void route(const Napi::CallbackInfo& info);
  void remove_memory(const Napi::CallbackInfo& info);
  Napi::Value gpu_memory(const Napi::CallbackInfo& info);
  Napi::Value gpu_address(const Napi::CallbackInfo& info);
  void gpu_write(const Napi::CallbackInfo& info);
  void gpu_read(const Napi::CallbackInfo& info);
  Napi::Value adopt(const Napi::CallbackInfo& info);
  void disown(const Napi::CallbackInfo& info);
  Napi::Value put(const Napi::CallbackInfo& info);
  Napi::Value put_value(const Napi::CallbackInfo& info);
  Napi::Value signal(const Napi::CallbackInfo& info);
  Napi::Value get(const Napi::CallbackInfo& info);
  Napi::Value fetch_add(const Napi::CallbackInfo& info);
  Napi::Value compare_swap(const Napi::CallbackInfo& info);
  Napi::Value accepted(const Napi::CallbackInfo& info);
  Napi::Value request_try(const Napi::CallbackInfo& info);
  Napi::Value watch(const Napi::CallbackInfo& info);
  Napi::Value failure_of(const Napi::CallbackInfo& info);
  Napi::Value counts(const Napi::CallbackInfo& info);
  Napi::Value violation(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  // Shared with the environment's end, which may come after this wrap's finalizer, and with waits that look. `engine` stays after close(), stopped.
  struct holder {
    std::shared_ptr<fabric::engine> engine;
    std::unique_ptr<fabric::gpu_source> gpu; // null: none was named
    adopted_memories adopted;
    std::map<uint64_t, std::shared_ptr<fabric::gpu_range>> ranges; // by the number that `adopted` has for it
    bool closed = false;
    void stop(bool orderly) {
      closed = true;
      adopted.known.clear();
      ranges.clear();
      engine->stop(orderly);
    }
  };

  fabric::engine& open(Napi::Env env) const;
  Napi::Value keep_range(Napi::Env env, result<std::shared_ptr<fabric::gpu_range>> made) const;
  const std::shared_ptr<fabric::gpu_range>& range_of(Napi::Value number) const;
  rank_context& context(Napi::Env env) const { return unwrap<rank_wrap>(rank.Value(), "rank").open(env); }
  fabric::request request_to(const symmetric_memory& memory, const Napi::CallbackInfo& info) const;
  static void add_signal(fabric::request& wanted, const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first);
  void set_bytes(fabric::request& wanted, const symmetric_memory& memory, const Napi::CallbackInfo& info, const char* what, const char* remote, const char* local) const;
  fabric::request atomic_request(const symmetric_memory& memory, const Napi::CallbackInfo& info, fabric::remote_atomic what) const;
  Napi::Value post(Napi::Env env, const symmetric_memory& memory, fabric::request wanted) const;

  std::shared_ptr<holder> native;
  Napi::ObjectReference rank;
  uint64_t end_key = 0;
};

Napi::Object offer_object(Napi::Env env, const dl::fabric_offer& offer) {
  auto out = Napi::Object::New(env);
  out["provider"] = offer.provider;
  out["domain"] = offer.domain;
  out["version"] = offer.version;
  out["maxMessageBytes"] = static_cast<double>(std::min<uint64_t>(offer.max_message, uint64_t{1} << 53));
  out["dataBytes"] = offer.data_bytes;
  out["keyBytes"] = offer.key_bytes;
  out["noAtomics"] = offer.no_atomics;
  out["noGpu"] = offer.no_gpu;
  return out;
}

// (query) -> what FabricNic would choose
Napi::Value probe(const Napi::CallbackInfo& info) {
  auto found = dl::probe_fabric(fabric_query_of(info[0]));
  return offer_object(info.Env(), value_or_throw(info.Env(), found));
}

} // namespace

// (rank, {library, provider, address, heartbeatMs, silenceMs, ringCapacity}): the rank is connected by it
fabric_wrap::fabric_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& owner = unwrap<rank_wrap>(info[0], "rank").native->context;
  if (!owner) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rank was closed"});
  if (owner->connected()) throw_invalid(env, "the rank is connected to its peers already");
  const dl::fabric_query query = fabric_query_of(info[1]);
  const auto description = info[1].As<Napi::Object>();
  const auto number = [&](const char* name, uint64_t least, uint64_t most) {
    const uint64_t value = arg_size(description.Get(name), name);
    if (value < least || value > most) throw_invalid(env, std::string(name) + " " + std::to_string(value) + " is not in " + std::to_string(least) + ".." + std::to_string(most));
    return value;
  };
  fabric::engine_options options;
  constexpr uint64_t day_ms = 86'400'000;
  options.heartbeat_ns = static_cast<int64_t>(number("heartbeatMs", 1, day_ms)) * 1'000'000;
  options.silence_ns = static_cast<int64_t>(number("silenceMs", 1, day_ms)) * 1'000'000;
  options.ring_capacity = number("ringCapacity", 1, 65536);
  if ((options.ring_capacity & (options.ring_capacity - 1)) != 0) throw_invalid(env, "ringCapacity " + std::to_string(options.ring_capacity) + " is not a power of two");
  native = std::make_shared<holder>();
  if (query.gpu >= 0) {
    auto gpu = fabric::gpu_source::open(description.Get("cuda").ToString().Utf8Value(), query.gpu);
    value_or_throw(env, gpu);
    native->gpu = std::move(gpu.value());
  }
  auto port = dl::open_fabric(query);
  value_or_throw(env, port);
  owner->connect_apart();
  native->engine = std::make_shared<fabric::engine>(owner, std::move(port.value()), options);
  rank = Napi::Persistent(info[0].As<Napi::Object>());
  end_key = state_of(env).at_end([held = native] { held->stop(false); });
  tag<fabric_wrap>(info.This().As<Napi::Object>());
}

fabric::engine& fabric_wrap::open(Napi::Env env) const {
  if (native->closed) throw_failure(env, {EP_STATUS_CLOSED, 0, "the fabric was closed"});
  return *native->engine;
}

Napi::Value fabric_wrap::offer(const Napi::CallbackInfo& info) { return offer_object(info.Env(), open(info.Env()).offer()); }

Napi::Value fabric_wrap::address(const Napi::CallbackInfo& info) {
  auto bytes = open(info.Env()).address();
  const auto& found = value_or_throw(info.Env(), bytes);
  return bytes_copy(info.Env(), found.data(), found.size());
}

// (control segments of all ranks) -> of how many this rank sees in shared memory whether they live
Napi::Value fabric_wrap::witness(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), open(info.Env()).witness(segment_handles(info[0], "handles"))); }

// -> where it does
Napi::Value fabric_wrap::listen(const Napi::CallbackInfo& info) {
  auto place = open(info.Env()).listen();
  const auto& bytes = value_or_throw(info.Env(), place);
  return bytes_copy(info.Env(), bytes.data(), bytes.size());
}

// (places, far): by rank; `far` a byte each
void fabric_wrap::set_lines(const Napi::CallbackInfo& info) {
  const auto world = static_cast<size_t>(context(info.Env()).world_size());
  std::vector<fabric::line_place> places;
  for (const std::vector<uint8_t>& bytes : blobs_of(info[0], "places")) {
    if (bytes.size() != fabric::line_place_bytes) throw_invalid(info.Env(), "a place has " + std::to_string(fabric::line_place_bytes) + " bytes");
    std::memcpy(places.emplace_back().data(), bytes.data(), bytes.size());
  }
  const byte_span far = arg_bytes(info[1], "far");
  if (places.size() != world || far.size != world) throw_invalid(info.Env(), "a place and a distance are of each of " + std::to_string(world) + " ranks");
  open(info.Env()).set_lines(std::move(places), {far.data, far.data + far.size});
}

// (addresses, keys): of each rank those of both directions, this rank's first
void fabric_wrap::connect(const Napi::CallbackInfo& info) {
  auto done = open(info.Env()).connect(blobs_of(info[0], "addresses"), link_keys_of(info[1]));
  value_or_throw(info.Env(), done);
}

Napi::Value fabric_wrap::part_bytes(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), static_cast<double>(fabric::engine::part_bytes)); }

Napi::Value fabric_wrap::keep_range(Napi::Env env, result<std::shared_ptr<fabric::gpu_range>> made) const {
  const std::shared_ptr<fabric::gpu_range> range = value_or_throw(env, made);
  const uint64_t number = native->adopted.next++;
  native->adopted.known[number] = {range->address(), range->byte_length(), range};
  native->ranges[number] = range;
  return Napi::Number::New(env, static_cast<double>(number));
}

const std::shared_ptr<fabric::gpu_range>& fabric_wrap::range_of(Napi::Value number) const {
  const auto known = native->ranges.find(arg_size(number, "memory of a GPU"));
  if (known == native->ranges.end()) throw_failure(number.Env(), {EP_STATUS_CLOSED, 0, "the memory of a GPU was closed"});
  return known->second;
}

// (byteLength) -> number, as of an adopted memory: new memory of the GPU
Napi::Value fabric_wrap::gpu_memory(const Napi::CallbackInfo& info) {
  fabric::engine& engine = open(info.Env());
  if (native->gpu == nullptr) throw_failure(info.Env(), {EP_STATUS_SYSTEM, EOPNOTSUPP, engine.offer().no_gpu});
  return keep_range(info.Env(), native->gpu->allocate(engine, arg_size(info[0], "byteLength")));
}

// (number) -> bigint
Napi::Value fabric_wrap::gpu_address(const Napi::CallbackInfo& info) { return Napi::BigInt::New(info.Env(), range_of(info[0])->address()); }

// (number, byteOffset, bytes)
void fabric_wrap::gpu_write(const Napi::CallbackInfo& info) {
  const auto& range = range_of(info[0]);
  const byte_span from = arg_bytes(info[2], "bytes");
  auto done = native->gpu->write(*range, checked_range(info.Env(), info[1], from.size, range->byte_length(), "byteOffset"), from.data, from.size);
  value_or_throw(info.Env(), done);
}

// (number, byteOffset, into)
void fabric_wrap::gpu_read(const Napi::CallbackInfo& info) {
  const auto& range = range_of(info[0]);
  const byte_span into = arg_bytes(info[2], "into");
  auto done = native->gpu->read(*range, checked_range(info.Env(), info[1], into.size, range->byte_length(), "byteOffset"), into.data, into.size);
  value_or_throw(info.Env(), done);
}

// (memory, number?) -> what peers need for route(); with the number, its bytes are that memory of the GPU
Napi::Value fabric_wrap::add_memory(const Napi::CallbackInfo& info) {
  const memory_wrap& memory = unwrap<memory_wrap>(info[0], "memory");
  memory.made(info.Env());
  auto part = open(info.Env()).add_memory(memory.native, info[1].IsUndefined() ? nullptr : range_of(info[1]));
  const auto& bytes = value_or_throw(info.Env(), part);
  return bytes_copy(info.Env(), bytes.data(), bytes.size());
}

// (memory, parts)
void fabric_wrap::route(const Napi::CallbackInfo& info) {
  const memory_wrap& memory = unwrap<memory_wrap>(info[0], "memory");
  auto done = open(info.Env()).route(memory.made(info.Env()), blobs_of(info[1], "parts"));
  value_or_throw(info.Env(), done);
}

// (memory)
void fabric_wrap::remove_memory(const Napi::CallbackInfo& info) {
  const memory_wrap& memory = unwrap<memory_wrap>(info[0], "memory");
  if (!native->closed) native->engine->remove_memory(memory.made(info.Env()));
}

// (address, byteLength) -> its number
Napi::Value fabric_wrap::adopt(const Napi::CallbackInfo& info) {
  fabric::engine& engine = open(info.Env());
  const uint64_t address = arg_u64(info[0], "address");
  const uint64_t bytes = arg_size(info[1], "byteLength");
  if (native->gpu != nullptr && native->gpu->owns(address)) return keep_range(info.Env(), native->gpu->adopt(engine, address, bytes));
  auto mapped = check_mapped(address, bytes);
  if (!mapped.ok() && native->gpu == nullptr) {
    throw_failure(info.Env(), {mapped.why().status, mapped.why().sys_errno, mapped.why().message + "; for memory of a GPU, name that as `device` when the fabric is opened"});
  }
  value_or_throw(info.Env(), mapped);
  const uint64_t number = native->adopted.next++;
  native->adopted.known[number] = {address, bytes, nullptr};
  return Napi::Number::New(info.Env(), static_cast<double>(number));
}

void fabric_wrap::disown(const Napi::CallbackInfo& info) {
  native->adopted.known.erase(arg_size(info[0], "number"));
  native->ranges.erase(arg_size(info[0], "number"));
}

fabric::request fabric_wrap::request_to(const symmetric_memory& memory, const Napi::CallbackInfo& info) const {
  open(info.Env());
  fabric::request wanted;
  wanted.peer = peer_argument(info[1], memory.context());
  return wanted;
}

void fabric_wrap::add_signal(fabric::request& wanted, const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first) {
  const uint64_t op = arg_size(info[first], "op");
  if (op > 2) throw_invalid(info.Env(), "signal op " + std::to_string(op) + " is not one of 0..2");
  wanted.op = static_cast<signal_op>(op);
  wanted.unawaited = info[first + 3].ToBoolean();
  if (op == 0) return;
  wanted.slot = arg_size(info[first + 1], "slot");
  if (wanted.slot >= memory.signal_slots()) {
    throw_invalid(info.Env(), "slot " + std::to_string(wanted.slot) + " of a pad with " + std::to_string(memory.signal_slots()) + " slots");
  }
  wanted.value = arg_u64(info[first + 2], "signal value");
}

// Arguments 2 to 5: place there, memory here, place here, byteLength.
void fabric_wrap::set_bytes(fabric::request& wanted, const symmetric_memory& memory, const Napi::CallbackInfo& info, const char* what, const char* remote, const char* local) const {
  const operand here = local_operand(native->adopted, info[3], what);
  if (info[3].IsNumber()) {
    const auto range = native->ranges.find(arg_size(info[3], what));
    wanted.of_gpu = range != native->ranges.end();
    if (wanted.of_gpu) wanted.descriptor = range->second->region().descriptor;
  }
  wanted.row_bytes = wanted.stride = arg_size(info[5], "byteLength");
  wanted.rows = 1;
  wanted.offset = checked_range(info.Env(), info[2], wanted.row_bytes, open(info.Env()).byte_length(memory), remote);
  wanted.local = here.address + checked_range(info.Env(), info[4], wanted.row_bytes, here.byte_length, local);
  wanted.keep = here.keep;
}

// 0: it has ended. Otherwise its number, for watch().
Napi::Value fabric_wrap::post(Napi::Env env, const symmetric_memory& memory, fabric::request wanted) const {
  fabric::engine& engine = open(env);
  const int32_t peer = wanted.peer;
  auto posted = engine.post(memory, std::move(wanted));
  const uint64_t number = value_or_throw(env, posted);
  const bool done = engine.look(peer, number) == fabric::request_state::done;
  return Napi::Number::New(env, done ? 0 : static_cast<double>(number));
}

// (memory, peer, dstOffset, source, srcOffset, byteLength, op, slot, value, unawaited)
Napi::Value fabric_wrap::put(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  fabric::request wanted = request_to(memory, info);
  set_bytes(wanted, memory, info, "source", "dstOffset", "srcOffset");
  add_signal(wanted, memory, info, 6);
  return post(info.Env(), memory, std::move(wanted));
}

// (memory, peer, dstOffset, width, value, op, slot, value, unawaited)
Napi::Value fabric_wrap::put_value(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  fabric::request wanted = request_to(memory, info);
  wanted.word_bytes = static_cast<uint32_t>(word_bytes(info[3]));
  wanted.offset = word_offset(info[2], wanted.word_bytes, open(info.Env()).byte_length(memory));
  wanted.word = arg_u64(info[4], "value");
  add_signal(wanted, memory, info, 5);
  return post(info.Env(), memory, std::move(wanted));
}

// (memory, peer, op, slot, value, unawaited)
Napi::Value fabric_wrap::signal(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  fabric::request wanted = request_to(memory, info);
  add_signal(wanted, memory, info, 2);
  if (wanted.op == signal_op::none) throw_invalid(info.Env(), "signal op 0 is no signal");
  return post(info.Env(), memory, std::move(wanted));
}

// (memory, peer, srcOffset, target, dstOffset, byteLength)
Napi::Value fabric_wrap::get(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  fabric::request wanted = request_to(memory, info);
  wanted.reads = true;
  set_bytes(wanted, memory, info, "target", "srcOffset", "dstOffset");
  return post(info.Env(), memory, std::move(wanted));
}

// The first arguments of an atomic: (memory, peer, byteOffset, target, targetOffset, ...). The word's old value lands in the target.
fabric::request fabric_wrap::atomic_request(const symmetric_memory& memory, const Napi::CallbackInfo& info, fabric::remote_atomic what) const {
  fabric::request wanted = request_to(memory, info);
  const operand target = local_operand(native->adopted, info[3], "target");
  wanted.atomic = what;
  wanted.word_bytes = sizeof wanted.word;
  wanted.offset = word_offset(info[2], wanted.word_bytes, open(info.Env()).byte_length(memory));
  wanted.local = target.address + word_offset(info[4], wanted.word_bytes, target.byte_length);
  wanted.keep = target.keep;
  return wanted;
}

// (memory, peer, byteOffset, target, targetOffset, add)
Napi::Value fabric_wrap::fetch_add(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  fabric::request wanted = atomic_request(memory, info, fabric::remote_atomic::fetch_add);
  wanted.word = arg_u64(info[5], "add");
  return post(info.Env(), memory, std::move(wanted));
}

// (memory, peer, byteOffset, target, targetOffset, compare, swap)
Napi::Value fabric_wrap::compare_swap(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = memory_argument(info[0]);
  fabric::request wanted = atomic_request(memory, info, fabric::remote_atomic::compare_swap);
  wanted.compare = arg_u64(info[5], "compare");
  wanted.word = arg_u64(info[6], "swap");
  return post(info.Env(), memory, std::move(wanted));
}

Napi::Value fabric_wrap::accepted(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(open(info.Env()).accepted(peer_argument(info[0], context(info.Env())))));
}

// (peer, number, patiently) -> 0: it is done; 1: nothing reaches the peer any more; -1: it is under way
Napi::Value fabric_wrap::request_try(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  fabric::engine& engine = open(env);
  const rank_context& owner = context(env);
  const int32_t peer = peer_argument(info[0], owner);
  const uint64_t number = arg_size(info[1], "number");
  fabric::request_state state = fabric::request_state::pending;
  const auto ended = [&] {
    owner.progress().run();
    state = engine.look(peer, number);
    return state != fabric::request_state::pending;
  };
  if (info[2].ToBoolean()) engine.want_end(peer);
  // What only the engine's thread carries takes longer than a thread of JS may wait.
  if (info[2].ToBoolean() && !engine.heavy()) {
    const auto holds = [&] { return engine.look(peer, number) != fabric::request_state::pending; };
    wait_inline(owner.policy(), owner.wake(), ended, &owner.progress(), &owner.sleepers(), holds);
  } else {
    ended();
  }
  return Napi::Number::New(env, state == fabric::request_state::pending ? -1 : state == fabric::request_state::failed ? 1 : 0);
}

// (peer, number, timeoutMs) -> operation that ends with the request; `found` is 0 where it is done, 1 where nothing reaches the peer any more
Napi::Value fabric_wrap::watch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  open(env);
  rank_wrap& owner = unwrap<rank_wrap>(rank.Value(), "rank");
  const int32_t peer = peer_argument(info[0], owner.open(env));
  const uint64_t number = arg_size(info[1], "number");
  native->engine->want_end(peer);
  const auto ended = [engine = native->engine, peer, number](outcome& end) {
    const fabric::request_state state = engine->look(peer, number);
    end.found = state == fabric::request_state::failed ? 1 : 0;
    return state != fabric::request_state::pending;
  };
  // The engine ends every request, also those to a peer that has gone: nobody's life ends this wait but one's own.
  const int32_t self = owner.open(env).rank();
  return Napi::Number::New(env, static_cast<double>(owner.watch_until(env, arg_double(info[2], "timeoutMs"), {self}, ended)));
}

// (peer) -> {status, text}, or undefined
Napi::Value fabric_wrap::failure_of(const Napi::CallbackInfo& info) {
  // Also after close(): requests that ended with it ask why.
  const int32_t peer = arg_int(info[0], "peer");
  if (peer < 0 || peer >= native->engine->world_size()) throw_invalid(info.Env(), "peer " + std::to_string(peer) + " is not in this world");
  const fabric::link_failure why = native->engine->failure_of(peer);
  if (why.status == EP_STATUS_OK) return info.Env().Undefined();
  auto out = Napi::Object::New(info.Env());
  out["status"] = why.status;
  out["text"] = why.text;
  return out;
}

Napi::Value fabric_wrap::counts(const Napi::CallbackInfo& info) {
  const fabric::engine_counts counts = open(info.Env()).counts();
  auto out = Napi::Object::New(info.Env());
  out["requests"] = static_cast<double>(counts.requests);
  out["applied"] = static_cast<double>(counts.applied);
  out["writes"] = static_cast<double>(counts.writes);
  out["atomics"] = static_cast<double>(counts.atomics);
  out["messages"] = static_cast<double>(counts.messages);
  out["full"] = static_cast<double>(counts.full);
  out["refused"] = static_cast<double>(counts.refused);
  out["registered"] = static_cast<double>(counts.registered);
  out["lines"] = static_cast<double>(counts.lines);
  out["carried"] = static_cast<double>(counts.carried);
  return out;
}

// -> what a kernel's request or a peer did wrong first, or ""
Napi::Value fabric_wrap::violation(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), open(info.Env()).violation()); }

void fabric_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->stop(true);
}

void fabric_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["FabricNic"] = DefineClass(
      env, "FabricNic",
      {InstanceMethod<&fabric_wrap::offer>("offer"), InstanceMethod<&fabric_wrap::address>("address"), InstanceMethod<&fabric_wrap::connect>("connect"), InstanceMethod<&fabric_wrap::witness>("witness"), InstanceMethod<&fabric_wrap::listen>("listen"), InstanceMethod<&fabric_wrap::set_lines>("setLines"),
       InstanceMethod<&fabric_wrap::part_bytes>("partBytes"), InstanceMethod<&fabric_wrap::add_memory>("addMemory"), InstanceMethod<&fabric_wrap::route>("route"),
       InstanceMethod<&fabric_wrap::remove_memory>("removeMemory"), InstanceMethod<&fabric_wrap::adopt>("adopt"), InstanceMethod<&fabric_wrap::gpu_memory>("gpuMemory"), InstanceMethod<&fabric_wrap::gpu_address>("gpuAddress"),
       InstanceMethod<&fabric_wrap::gpu_write>("gpuWrite"), InstanceMethod<&fabric_wrap::gpu_read>("gpuRead"), InstanceMethod<&fabric_wrap::disown>("disown"),
       InstanceMethod<&fabric_wrap::put>("put"), InstanceMethod<&fabric_wrap::put_value>("putValue"), InstanceMethod<&fabric_wrap::signal>("signal"),
       InstanceMethod<&fabric_wrap::get>("get"), InstanceMethod<&fabric_wrap::fetch_add>("fetchAdd"), InstanceMethod<&fabric_wrap::compare_swap>("compareSwap"),
       InstanceMethod<&fabric_wrap::accepted>("accepted"), InstanceMethod<&fabric_wrap::request_try>("requestTry"), InstanceMethod<&fabric_wrap::watch>("watch"),
       InstanceMethod<&fabric_wrap::failure_of>("failure"), InstanceMethod<&fabric_wrap::counts>("counts"), InstanceMethod<&fabric_wrap::violation>("violation"),
       InstanceMethod<&fabric_wrap::close>("close")});
}

std::shared_ptr<fabric::engine> fabric_engine_of(Napi::Value value) {
  const fabric_wrap& nic = unwrap<fabric_wrap>(value, "fabric");
  nic.open(value.Env());
  return nic.native->engine;
}

void bind_fabric(Napi::Env env, Napi::Object exports) {
  fabric_wrap::define(env, exports);
  exports["probeFabric"] = Napi::Function::New(env, probe);
}

} // namespace ep::binding
