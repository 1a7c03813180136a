#include "fabric_engine.hpp"
#include "round_wraps.hpp"

#include <algorithm>

#include "carrier.hpp"
#include "fabric/round_puts.hpp"

namespace ep::binding {
namespace {

// Large calls of a group over the backing `fabric`; for the rank's own thread.
struct carrier_wrap : Napi::ObjectWrap<carrier_wrap> {
  static constexpr napi_type_tag type_tag{0x6570636172726965ull, 46};
  static constexpr const char* type_name = "FabricCarrier";
  explicit carrier_wrap(const Napi::CallbackInfo& info);
  void begin(const Napi::CallbackInfo& info);
  Napi::Value join(const Napi::CallbackInfo& info);
  void lengthen(const Napi::CallbackInfo& info);
  Napi::Value carry(const Napi::CallbackInfo& info);
  Napi::Value sent(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), static_cast<double>(open(info.Env()).sent())); }
  void close(const Napi::CallbackInfo&) { native.reset(); }

  carrier& open(Napi::Env env) const {
    if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the carrier was closed"});
    return *native;
  }

  std::unique_ptr<carrier> native;
  std::vector<uint64_t> lengths; // of its inputs, then its outputs; empty before the first turn
};

std::vector<carried_bytes> arrays_of(Napi::Value value, const char* what) {
  if (!value.IsArray()) throw_invalid(value.Env(), std::string(what) + " is no array");
  const auto list = value.As<Napi::Array>();
  std::vector<carried_bytes> arrays;
  for (uint32_t i = 0; i < list.Length(); ++i) {
    const byte_span bytes = arg_bytes(list.Get(i), what);
    arrays.push_back({const_cast<uint8_t*>(bytes.data), bytes.size});
  }
  return arrays;
}

} // namespace

// (nic, memory, group, ranks: Int32Array, hosts: Uint32Array, self, memories of the host's members as fabricRoundsPart() has them, one after the other)
carrier_wrap::carrier_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const memory_wrap& memory = unwrap<memory_wrap>(info[1], "memory");
  memory.open(env);
  auto way = std::make_unique<fabric::round_puts>(fabric_engine_of(info[0]), memory.native);
  round_place place;
  place.group = arg_size(info[2], "group");
  place.ranks = arg_numbers<int32_t>(info[3], "ranks");
  place.hosts = arg_numbers<uint32_t>(info[4], "hosts");
  const uint64_t self = arg_size(info[5], "self");
  if (self >= place.ranks.size()) throw_invalid(env, "member " + std::to_string(self) + " of " + std::to_string(place.ranks.size()));
  place.self = static_cast<uint32_t>(self);
  auto made = carrier::open(memory.native, std::move(way), std::move(place), segment_handles(info[6], "parts"));
  native = std::move(value_or_throw(env, made));
  tag<carrier_wrap>(info.This().As<Napi::Object>());
}

namespace {

// From `at` on: number, kind, type, reduction, factor, longest, root
struct numbered_call {
  uint64_t number = 0;
  carried_call call;
};

numbered_call call_of(const Napi::CallbackInfo& info, size_t at) {
  const uint64_t number = arg_size(info[at], "number");
  const uint64_t kind = arg_size(info[at + 1], "kind");
  if (kind > static_cast<uint64_t>(carried_kind::scatter)) throw_invalid(info.Env(), "a carrier has no calls of kind " + std::to_string(kind));
  carried_call call;
  call.kind = static_cast<carried_kind>(kind);
  call.type = static_cast<element_type>(arg_size(info[at + 2], "type"));
  call.op = static_cast<reduce_op>(arg_size(info[at + 3], "reduction"));
  call.factor = arg_double(info[at + 4], "factor");
  call.longest = arg_size(info[at + 5], "longest");
  call.root = static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[at + 6], "root"), UINT32_MAX));
  return {number, call};
}

std::vector<uint64_t> lengths_of(const std::vector<carried_bytes>& inputs, const std::vector<carried_bytes>& outputs) {
  std::vector<uint64_t> found;
  for (const auto* list : {&inputs, &outputs}) for (const carried_bytes& one : *list) found.push_back(one.bytes);
  return found;
}

constexpr const char* not_its_arrays = "these are not the arrays of the call, or one is not as long as it says";

enum join_end : uint32_t { late = 0, unlike = 1, alike = 2, over = 3 };

} // namespace

// (as call_of)
void carrier_wrap::begin(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  carrier& table = open(env);
  const auto [number, call] = call_of(info, 0);
  auto begun = table.begin(call, number);
  value_or_throw(env, begun);
  lengths.clear();
}

// (longest)
void carrier_wrap::lengthen(const Napi::CallbackInfo& info) { open(info.Env()).lengthen(arg_size(info[0], "longest")); }

// (rounds, head, mostMs for the round, mostMs for the rest, into, then as call_of, whose number is that of the round, inputs, outputs) -> join_end. Begins a call that is not sure, and says its word in the round, as
// FabricRounds.exchange() does. What can be prepared before all have said theirs is prepared meanwhile; once all have said the same, as carry().
Napi::Value carrier_wrap::join(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  carrier& table = open(env);
  const auto ends = [env](join_end end) { return Napi::Number::New(env, end); };
  const rounds_wrap& words = unwrap<rounds_wrap>(info[0], "rounds");
  rounds& said = words.open(env);
  const byte_span head = arg_bytes(info[1], "head");
  if (head.size > round_layout::most_bytes) throw_invalid(env, std::to_string(head.size) + " bytes are more than a round takes of a member");
  const int64_t round_ns = arg_hold_ns(info[2]);
  const int64_t most_ns = arg_hold_ns(info[3]);
  uint8_t* into = words.entries(info[4]);
  const auto [round, call] = call_of(info, 5);
  const std::vector<carried_bytes> inputs = arrays_of(info[12], "inputs");
  const std::vector<carried_bytes> outputs = arrays_of(info[13], "outputs");
  if (!table.fits(call, inputs, outputs)) throw_invalid(env, not_its_arrays);
  auto begun = table.begin(call, round, false);
  value_or_throw(env, begun);
  lengths = lengths_of(inputs, outputs);
  said.enter(round, {head.data, head.size});
  if (!said.hold(round, round_ns, [&] { return table.prepare(inputs, outputs); }) || !words.take(round, into)) return ends(late);
  if (!words.are_alike(into, head, 0)) return ends(unlike);
  return ends(table.hold(inputs, outputs, most_ns) == carrier::state::over ? over : alike);
}

// (inputs, outputs, mostMs) -> 0: the call is over, 1: it has moved, 2: it has not
Napi::Value carrier_wrap::carry(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  carrier& table = open(env);
  const std::vector<carried_bytes> inputs = arrays_of(info[0], "inputs");
  const std::vector<carried_bytes> outputs = arrays_of(info[1], "outputs");
  const int64_t most_ns = arg_hold_ns(info[2]);
  std::vector<uint64_t> found = lengths_of(inputs, outputs);
  // HAZARD: JS ran since the turn before, and may have taken the memory away.
  if (!lengths.empty() && lengths != found) throw_invalid(env, "an array of a call is not as long as it was");
  if (!table.fits(inputs, outputs)) throw_invalid(env, not_its_arrays);
  lengths = std::move(found);
  const carrier::state state = table.hold(inputs, outputs, most_ns);
  // Who is gone is told of otherwise, to all alike.
  if (table.broken() && table.refused()->status != EP_STATUS_PEER_LOST) throw_failure(env, *table.refused());
  return Napi::Number::New(env, state == carrier::state::over ? 0 : state == carrier::state::moved ? 1 : 2);
}

namespace {

// (worldSize, groups) -> of a memory for the carriers of so many groups
Napi::Value size_of(const Napi::CallbackInfo& info) {
  const carrier_layout layout{static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[0], "worldSize"), UINT32_MAX))};
  const uint64_t groups = arg_size(info[1], "groups");
  auto out = Napi::Object::New(info.Env());
  out["byteLength"] = static_cast<double>(carrier_layout::memory_bytes(groups));
  out["signalSlots"] = static_cast<double>(groups * layout.group_slots());
  return out;
}

// (memory, group): before any member opens it
void clear(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = unwrap<memory_wrap>(info[0], "memory").open(info.Env());
  const uint64_t group = arg_size(info[1], "group");
  const carrier_layout layout{static_cast<uint32_t>(memory.context().world_size())};
  const bool fits = memory.byte_length() >= carrier_layout::memory_bytes(1) && group < (memory.byte_length() - carrier_layout::head_bytes) / carrier_layout::group_bytes() && group < memory.signal_slots() / layout.group_slots();
  if (!fits) throw_invalid(info.Env(), "a group that does not fit the memory");
  carrier::clear(memory, group);
}

// (type, reduction) -> whether what folds so is carried
Napi::Value carries(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), reduces(static_cast<reduce_op>(arg_size(info[1], "reduction")), static_cast<element_type>(arg_size(info[0], "type"))));
}

} // namespace

void bind_carrier(Napi::Env env, Napi::Object exports) {
  exports["fabricCarrierSize"] = Napi::Function::New(env, size_of);
  exports["fabricCarrierClear"] = Napi::Function::New(env, clear);
  exports["fabricCarries"] = Napi::Function::New(env, carries);
  using wrap = carrier_wrap;
  exports["FabricCarrier"] = wrap::DefineClass(env, "FabricCarrier", {wrap::InstanceMethod<&wrap::begin>("begin"), wrap::InstanceMethod<&wrap::join>("join"), wrap::InstanceMethod<&wrap::lengthen>("lengthen"), wrap::InstanceMethod<&wrap::carry>("carry"), wrap::InstanceMethod<&wrap::sent>("sent"), wrap::InstanceMethod<&wrap::close>("close")});
}

} // namespace ep::binding
