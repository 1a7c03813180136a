#include "fabric_engine.hpp"
#include "wraps.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fabric/round_puts.hpp"
#include "rounds.hpp"

namespace ep::binding {
namespace {

// Short exchanges of a group over the backing `fabric`; for the rank's own thread.
struct rounds_wrap : Napi::ObjectWrap<rounds_wrap> {
  static constexpr napi_type_tag type_tag{0x6570726f756e6473ull, 45};
  static constexpr const char* type_name = "FabricRounds";
  explicit rounds_wrap(const Napi::CallbackInfo& info);
  Napi::Value enter(const Napi::CallbackInfo& info);
  Napi::Value look(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo&) { native.reset(); }

  rounds& open(Napi::Env env) const {
    if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rounds were closed"});
    return *native;
  }
  Napi::Value take(Napi::Env env, bool there, uint64_t round, Napi::Value into) const;

  std::unique_ptr<rounds> native;
};

// Of what a round says of a member: its length, then its bytes.
constexpr uint64_t entry_bytes = sizeof(uint64_t) + round_layout::most_bytes;

round_handles leader_of(Napi::Value value) {
  const std::vector<ep_segment_handle> handles = segment_handles(value, "leader");
  if (handles.size() != 2) throw_invalid(value.Env(), "a leader has two segments, got " + std::to_string(handles.size()) + " handles");
  return {handles[0], handles[1]};
}

template <class T> std::vector<T> numbers_of(Napi::Value value, const char* what) {
  const byte_span bytes = arg_bytes(value, what);
  std::vector<T> numbers(bytes.size / sizeof(T));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data, numbers.size() * sizeof(T));
  return numbers;
}

} // namespace

// (nic, memory, group, token, ranks: Int32Array, hosts: Uint32Array, self, what fabricRoundsPart() said on the leader)
rounds_wrap::rounds_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const memory_wrap& memory = unwrap<memory_wrap>(info[1], "memory");
  memory.open(env);
  auto way = std::make_unique<fabric::round_puts>(fabric_engine_of(info[0]), memory.native);
  round_place place;
  place.group = arg_size(info[2], "group");
  place.token = arg_u64(info[3], "token");
  place.ranks = numbers_of<int32_t>(info[4], "ranks");
  place.hosts = numbers_of<uint32_t>(info[5], "hosts");
  const uint64_t self = arg_size(info[6], "self");
  if (self >= place.ranks.size()) throw_invalid(env, "member " + std::to_string(self) + " of " + std::to_string(place.ranks.size()));
  place.self = static_cast<uint32_t>(self);
  auto made = rounds::open(memory.native, std::move(way), std::move(place), leader_of(info[7]));
  native = std::move(value_or_throw(env, made));
  tag<rounds_wrap>(info.This().As<Napi::Object>());
}

// False where the round is not there.
Napi::Value rounds_wrap::take(Napi::Env env, bool there, uint64_t round, Napi::Value into) const {
  if (!there) return Napi::Boolean::New(env, false);
  const byte_span out = arg_bytes(into, "into");
  if (out.size < native->members() * entry_bytes) throw_invalid(env, "into has " + std::to_string(out.size) + " bytes for " + std::to_string(native->members()) + " members");
  auto* at = const_cast<uint8_t*>(out.data);
  for (uint32_t member = 0; member < native->members(); ++member, at += entry_bytes) {
    const uint32_t bytes = native->read(round, member, at + sizeof(uint64_t));
    if (bytes == UINT32_MAX) return Napi::Boolean::New(env, false);
    std::memcpy(at, &bytes, sizeof(bytes));
  }
  return Napi::Boolean::New(env, true);
}

// (round, said, mostMs, into) -> whether the round is there, and `into` has what all said
Napi::Value rounds_wrap::enter(const Napi::CallbackInfo& info) {
  rounds& table = open(info.Env());
  const uint64_t round = arg_size(info[0], "round");
  const byte_span said = arg_bytes(info[1], "said");
  if (said.size > round_layout::most_bytes) throw_invalid(info.Env(), std::to_string(said.size) + " bytes are more than a round takes of a member");
  const double ms = arg_double(info[2], "mostMs");
  if (!(ms >= 0 && ms <= 10)) throw_invalid(info.Env(), "mostMs is not in 0..10");
  table.enter(round, {said.data, said.size});
  const bool there = ms > 0 ? table.hold(round, std::llround(ms * 1e6)) : table.look(round);
  return take(info.Env(), there, round, info[3]);
}

// (round, into) -> the same
Napi::Value rounds_wrap::look(const Napi::CallbackInfo& info) {
  const uint64_t round = arg_size(info[0], "round");
  return take(info.Env(), open(info.Env()).look(round), round, info[1]);
}

namespace {

// (worldSize) -> of the places of a group
Napi::Value size_of(const Napi::CallbackInfo& info) {
  const round_layout layout{static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[0], "worldSize"), UINT32_MAX))};
  auto out = Napi::Object::New(info.Env());
  out["byteLength"] = static_cast<double>(layout.group_bytes());
  out["signalSlots"] = static_cast<double>(layout.group_slots());
  out["mostMembers"] = round_layout::most_members;
  out["mostBytes"] = static_cast<double>(round_layout::most_bytes);
  out["entryBytes"] = static_cast<double>(entry_bytes);
  return out;
}

// (memory) -> what members of this host open() with where this rank leads: its part, and the segment with the word that wakes it
Napi::Value part_of(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = unwrap<memory_wrap>(info[0], "memory").open(info.Env());
  const round_handles part{memory.handle(), memory.context().handle()};
  return bytes_copy(info.Env(), &part, sizeof(part));
}

} // namespace

void bind_rounds(Napi::Env env, Napi::Object exports) {
  exports["fabricRoundsSize"] = Napi::Function::New(env, size_of);
  exports["fabricRoundsPart"] = Napi::Function::New(env, part_of);
  using wrap = rounds_wrap;
  exports["FabricRounds"] =
      wrap::DefineClass(env, "FabricRounds", {wrap::InstanceMethod<&wrap::enter>("enter"), wrap::InstanceMethod<&wrap::look>("look"), wrap::InstanceMethod<&wrap::close>("close")});
}

} // namespace ep::binding
