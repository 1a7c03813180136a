#include "compat_call.hpp"

#include <cstring>

#include "device/compat.hpp"

namespace ep::binding {
namespace {

template <class Word> std::vector<Word> array_of(Napi::Value value, const char* what, napi_typedarray_type type) {
  const byte_span bytes = arg_bytes(value, what);
  if (value.As<Napi::TypedArray>().TypedArrayType() != type) throw_invalid(value.Env(), std::string(what) + " is a typed array of another type");
  std::vector<Word> made(bytes.size / sizeof(Word));
  if (bytes.size != 0) std::memcpy(made.data(), bytes.data, bytes.size);
  return made;
}

uint64_t sum_of(const std::vector<uint32_t>& lengths) {
  uint64_t sum = 0;
  for (const uint32_t length : lengths) sum += length;
  return sum;
}

bool fits(uint64_t offset, uint64_t rows, uint64_t row_bytes, uint64_t available) {
  return offset <= available && rows <= (available - offset) / row_bytes;
}

// `received`: rows that come, UINT64_MAX: as many as the counts say.
compat_way read_way(const compat_plan& plan, Napi::Value value, const char* what, uint64_t received, const compat_room& room) {
  const Napi::Env env = value.Env();
  if (!value.IsObject()) throw_invalid(env, std::string(what) + " is no description of a tensor's way");
  const auto from = value.As<Napi::Object>();
  const auto size = [&](const char* name) { return arg_size(from.Get(name), name); };
  const auto world = static_cast<uint64_t>(room.world_size);
  compat_way way;
  ep_compat_route& out = way.native;
  out.row_bytes = size("rowBytes");
  if (out.row_bytes == 0 || out.row_bytes > (uint64_t{1} << 32)) throw_invalid(env, "rowBytes " + std::to_string(out.row_bytes) + " is not in 1..2^32");
  out.send_offset = size("sendOffset");
  out.recv_offset = size("recvOffset");
  out.signal_slot = size("signalSlot");
  const uint64_t replicas = size("replicas");
  const uint64_t recv_rows = size("recvRows");
  way.dst_rank = array_of<int32_t>(from.Get("dstRank"), "dstRank", napi_int32_array);
  way.dst_offset = array_of<uint32_t>(from.Get("dstRow"), "dstRow", napi_uint32_array);
  way.counts = array_of<uint64_t>(from.Get("counts"), "counts", napi_biguint64_array);
  if (replicas == 0 || replicas > UINT32_MAX || way.dst_rank.size() != plan.seq_len.size() * replicas || way.dst_offset.size() != way.dst_rank.size() ||
      way.counts.size() != world + 1) {
    throw_invalid(env, "dstRank and dstRow have one entry per shard and replica, counts one per rank and their sum");
  }
  out.replicas = static_cast<uint32_t>(replicas);
  way.received = received == UINT64_MAX ? way.counts.back() : received;
  if (!fits(out.send_offset, plan.args.tokens, out.row_bytes, room.byte_length) || !fits(out.recv_offset, recv_rows, out.row_bytes, room.byte_length) ||
      way.received > recv_rows || out.signal_slot > room.signal_slots || world > room.signal_slots - out.signal_slot) {
    throw_invalid(env, "buffers of " + std::to_string(recv_rows) + " rows or counters at slot " + std::to_string(out.signal_slot) + " exceed the memory");
  }
  for (size_t i = 0; i < way.dst_rank.size(); ++i) {
    const int32_t rank = way.dst_rank[i];
    if (rank < -1 || rank >= room.world_size) throw_invalid(env, "destination rank " + std::to_string(rank) + " is not in the world");
    if (rank >= 0 && uint64_t{way.dst_offset[i]} + plan.seq_len[i / replicas] > recv_rows) throw_invalid(env, "rows of a shard exceed a receive buffer");
  }
  return way;
}

} // namespace

compat_plan read_compat_plan(const Napi::Object& description, const compat_room& room) {
  const Napi::Env env = description.Env();
  compat_plan plan;
  ep_compat_args& args = plan.args;
  plan.seq_len = array_of<uint32_t>(description.Get("seqLen"), "seqLen", napi_uint32_array);
  args.tokens = sum_of(plan.seq_len);
  args.num_seqs = static_cast<uint32_t>(plan.seq_len.size());
  uint64_t received = UINT64_MAX;
  const Napi::Value gradient = description.Get("gradient");
  if (!gradient.IsUndefined()) {
    const auto shape = gradient.As<Napi::Object>();
    plan.recv_mask = array_of<uint32_t>(shape.Get("mask"), "mask", napi_uint32_array);
    plan.recv_seq_len = array_of<uint32_t>(shape.Get("seqLen"), "gradient.seqLen", napi_uint32_array);
    const uint64_t replicas = arg_size(shape.Get("replicas"), "replicas");
    args.recv_tokens = sum_of(plan.recv_seq_len);
    if (replicas == 0 || replicas > UINT32_MAX || plan.recv_mask.empty() || plan.recv_mask.size() != plan.recv_seq_len.size() * replicas) {
      throw_invalid(env, "mask has one entry per home shard and replica, and at least one");
    }
    if (const char* why = compat_gradient_refusal(plan.recv_seq_len.data(), static_cast<uint32_t>(plan.recv_seq_len.size()))) throw_invalid(env, why);
    args.recv_seqs = static_cast<uint32_t>(plan.recv_seq_len.size());
    args.recv_replicas = static_cast<uint32_t>(replicas);
    received = args.recv_tokens * replicas;
  }
  plan.ways.push_back(read_way(plan, description.Get("query"), "query", received, room));
  const Napi::Value key_value = description.Get("keyValue");
  if (!key_value.IsUndefined()) plan.ways.push_back(read_way(plan, key_value, "keyValue", UINT64_MAX, room));
  return plan;
}

ep_compat_route compat_route_of(const compat_plan& plan, const compat_way& way, const operand& source, Napi::Value src_offset, const operand& target, Napi::Value dst_offset) {
  const uint64_t src = arg_size(src_offset, "srcOffset");
  const uint64_t dst = arg_size(dst_offset, "dstOffset");
  if (!fits(src, plan.args.tokens, way.native.row_bytes, source.byte_length) || !fits(dst, way.received, way.native.row_bytes, target.byte_length)) {
    throw_invalid(src_offset.Env(), std::to_string(plan.args.tokens) + " rows to send or " + std::to_string(way.received) + " to receive exceed the tensor");
  }
  ep_compat_route route = way.native;
  route.src = source.address + src;
  route.dst = target.address + dst;
  return route;
}

void refuse_compat(Napi::Env env, const ep_compat_args& args) {
  if (const char* why = compat_refusal(args)) throw_invalid(env, why);
}

} // namespace ep::binding
