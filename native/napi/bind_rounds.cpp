#include "fabric_engine.hpp"
#include "round_wraps.hpp"

#include <algorithm>
#include <cstring>

#include "fabric/round_puts.hpp"

namespace ep::binding {
namespace {

enum exchange_end : uint32_t { late = 0, unlike = 1, alike = 2 };

ep_segment_handle leader_of(Napi::Value value) {
  const std::vector<ep_segment_handle> handles = segment_handles(value, "leader");
  if (handles.size() != 1) throw_invalid(value.Env(), "a leader has one segment, got " + std::to_string(handles.size()) + " handles");
  return handles[0];
}

} // namespace

// (nic, memory, group, token, ranks: Int32Array, hosts: Uint32Array, self, what fabricRoundsPart() said on the leader, members as they are folded: Uint32Array, of each host the first of them there: Uint32Array)
rounds_wrap::rounds_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const memory_wrap& memory = unwrap<memory_wrap>(info[1], "memory");
  memory.open(env);
  auto way = std::make_unique<fabric::round_puts>(fabric_engine_of(info[0]), memory.native);
  round_place place;
  place.group = arg_size(info[2], "group");
  place.token = arg_u64(info[3], "token");
  place.ranks = arg_numbers<int32_t>(info[4], "ranks");
  place.hosts = arg_numbers<uint32_t>(info[5], "hosts");
  const uint64_t self = arg_size(info[6], "self");
  if (self >= place.ranks.size()) throw_invalid(env, "member " + std::to_string(self) + " of " + std::to_string(place.ranks.size()));
  place.self = static_cast<uint32_t>(self);
  auto order = std::make_unique<host_fold>(arg_numbers<uint32_t>(info[8], "folded"), arg_numbers<uint32_t>(info[9], "foldedHosts"));
  if (!order->sound(static_cast<uint32_t>(place.ranks.size()))) throw_invalid(env, "the order of folds does not have every member once");
  auto made = rounds::open(memory.native, std::move(way), std::move(place), leader_of(info[7]));
  native = std::move(value_or_throw(env, made));
  folds = std::move(order);
  tag<rounds_wrap>(info.This().As<Napi::Object>());
}

uint8_t* rounds_wrap::entries(Napi::Value into) const {
  const byte_span out = arg_bytes(into, "into");
  if (out.size < native->members() * round_entry_bytes) throw_invalid(into.Env(), "into has " + std::to_string(out.size) + " bytes for " + std::to_string(native->members()) + " members");
  return const_cast<uint8_t*>(out.data);
}

bool rounds_wrap::take(uint64_t round, uint8_t* at) const {
  for (uint32_t member = 0; member < native->members(); ++member, at += round_entry_bytes) {
    const uint32_t bytes = native->read(round, member, at + sizeof(uint64_t));
    if (bytes == UINT32_MAX) return false;
    std::memcpy(at, &bytes, sizeof(bytes));
  }
  return true;
}

bool rounds_wrap::are_alike(const uint8_t* at, byte_span head, uint64_t given_bytes) const {
  for (uint32_t member = 0; member < native->members(); ++member, at += round_entry_bytes) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, at, sizeof(bytes));
    if (bytes < head.size || std::memcmp(at + sizeof(uint64_t), head.data, head.size) != 0) return false;
    if (given_bytes != UINT64_MAX && bytes - head.size != given_bytes) return false;
  }
  return true;
}

// (round, said, mostMs, into) -> whether the round is there, and `into` has what all said
Napi::Value rounds_wrap::enter(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  rounds& table = open(env);
  const uint64_t round = arg_size(info[0], "round");
  const byte_span said = arg_bytes(info[1], "said");
  if (said.size > round_layout::most_bytes) throw_invalid(env, std::to_string(said.size) + " bytes are more than a round takes of a member");
  uint8_t* into = entries(info[3]);
  const int64_t most_ns = arg_hold_ns(info[2]);
  table.enter(round, {said.data, said.size});
  return Napi::Boolean::New(env, table.hold(round, most_ns) && take(round, into));
}

// (round, head, given or undefined, mostMs, into, [type, reduction, factor, output]) -> exchange_end. As enter() of the head with what is given behind it; where all have that head and `output` is there, what
// all give is folded into it.
Napi::Value rounds_wrap::exchange(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  rounds& table = open(env);
  const auto ends = [env](exchange_end end) { return Napi::Number::New(env, end); };
  const uint64_t round = arg_size(info[0], "round");
  const byte_span head = arg_bytes(info[1], "head");
  const byte_span gives = info[2].IsUndefined() ? byte_span{nullptr, 0} : arg_bytes(info[2], "given");
  if (head.size > round_layout::most_bytes || gives.size > round_layout::most_bytes - head.size) throw_invalid(env, std::to_string(head.size + gives.size) + " bytes are more than a round takes of a member");
  uint8_t* into = entries(info[4]);
  const bool folded = info.Length() > 5;
  element_type type{};
  reduce_op op{};
  double factor = 0;
  byte_span output{nullptr, 0};
  if (folded) {
    type = static_cast<element_type>(arg_size(info[5], "type"));
    op = static_cast<reduce_op>(arg_size(info[6], "reduction"));
    factor = arg_double(info[7], "factor");
    output = arg_bytes(info[8], "output");
    if (!reduces(op, type)) throw_invalid(env, "rounds do not fold this reduction");
    if (output.size != gives.size || output.size % element_bytes(type) != 0) throw_invalid(env, "what is folded is not as long as what is given");
  }
  const int64_t most_ns = arg_hold_ns(info[3]);
  table.enter(round, {head.data, head.size}, {gives.data, gives.size});
  if (!table.hold(round, most_ns) || !take(round, into)) return ends(late);
  const uint32_t members = table.members();
  if (!are_alike(into, head, folded ? gives.size : UINT64_MAX)) return ends(unlike);
  if (!folded || output.size == 0) return ends(alike);
  const uint64_t stride = (gives.size + sizeof(uint64_t) - 1) / sizeof(uint64_t);
  given.resize(std::max<uint64_t>(given.size(), members * stride));
  const void* sources[round_layout::most_members];
  for (uint32_t member = 0; member < members; ++member) {
    uint64_t* aligned = given.data() + member * stride;
    std::memcpy(aligned, into + member * round_entry_bytes + sizeof(uint64_t) + head.size, gives.size);
    sources[member] = aligned;
  }
  folds->run(const_cast<uint8_t*>(output.data), {sources, members}, output.size / element_bytes(type), type, op, factor);
  return ends(alike);
}

// (round, into) -> as enter()
Napi::Value rounds_wrap::look(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  rounds& table = open(env);
  const uint64_t round = arg_size(info[0], "round");
  uint8_t* into = entries(info[1]);
  return Napi::Boolean::New(env, table.look(round) && take(round, into));
}

namespace {

// (worldSize, groups) -> of a memory for the rounds of so many groups
Napi::Value size_of(const Napi::CallbackInfo& info) {
  const round_layout layout{static_cast<uint32_t>(std::min<uint64_t>(arg_size(info[0], "worldSize"), UINT32_MAX))};
  auto out = Napi::Object::New(info.Env());
  const uint64_t groups = arg_size(info[1], "groups");
  out["byteLength"] = static_cast<double>(layout.memory_bytes(groups));
  out["signalSlots"] = static_cast<double>(groups * layout.group_slots());
  out["mostMembers"] = round_layout::most_members;
  out["mostBytes"] = static_cast<double>(round_layout::most_bytes);
  out["entryBytes"] = static_cast<double>(round_entry_bytes);
  return out;
}

// (memory) -> what members of this host open() with, of rounds where this rank leads
Napi::Value part_of(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = unwrap<memory_wrap>(info[0], "memory").open(info.Env());
  return bytes_copy(info.Env(), &memory.handle(), sizeof(ep_segment_handle));
}

} // namespace

void bind_rounds(Napi::Env env, Napi::Object exports) {
  exports["fabricRoundsSize"] = Napi::Function::New(env, size_of);
  exports["fabricRoundsPart"] = Napi::Function::New(env, part_of);
  using wrap = rounds_wrap;
  exports["FabricRounds"] =
      wrap::DefineClass(env, "FabricRounds", {wrap::InstanceMethod<&wrap::enter>("enter"), wrap::InstanceMethod<&wrap::exchange>("exchange"), wrap::InstanceMethod<&wrap::look>("look"), wrap::InstanceMethod<&wrap::close>("close")});
}

} // namespace ep::binding
