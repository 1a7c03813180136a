// Calls of the per-token kernel as JS describes them, on the host or on a GPU: checked before anything is launched, since a kernel has no way to refuse.
#pragma once

#include "wraps.hpp"

#include "ep/abi/compat.h"

namespace ep::binding {

// The memory that a call sends and receives through.
struct compat_room {
  uint64_t byte_length;
  uint64_t signal_slots;
  int32_t world_size;
};

// One tensor's metadata, which `native` points into once it is placed. `native` has no tensors yet.
struct compat_way {
  std::vector<int32_t> dst_rank;
  std::vector<uint32_t> dst_offset;
  std::vector<uint64_t> counts;
  uint64_t received = 0; // rows
  ep_compat_route native{};
};

// A call with everything but its memory and its tensors.
struct compat_plan {
  std::vector<uint32_t> seq_len;
  std::vector<uint32_t> recv_mask; // empty: no gradient
  std::vector<uint32_t> recv_seq_len;
  std::vector<compat_way> ways; // the query's, and the key-values' if there are any
  ep_compat_args args{};
};

// {seqLen, query, keyValue?, gradient?: {mask, seqLen, replicas}}; a way is {rowBytes, sendOffset, recvOffset, recvRows, signalSlot, replicas, dstRank, dstRow, counts}
compat_plan read_compat_plan(const Napi::Object& description, const compat_room& room);

// `place` takes each array of the plan and says where the kernel finds it.
template <class Place> void place_compat_arrays(compat_plan& plan, Place&& place) {
  plan.args.seq_len = place(plan.seq_len);
  if (!plan.recv_mask.empty()) {
    plan.args.recv_mask = place(plan.recv_mask);
    plan.args.recv_seq_len = place(plan.recv_seq_len);
  }
  for (compat_way& way : plan.ways) {
    way.native.dst_rank = place(way.dst_rank);
    way.native.dst_offset = place(way.dst_offset);
    way.native.num_recv_tokens = place(way.counts);
  }
}

// A way with its tensors: rows to send from byte `srcOffset` of the source on, rows to receive from byte `dstOffset` of the target on.
ep_compat_route compat_route_of(const compat_plan& plan, const compat_way& way, const operand& source, Napi::Value src_offset, const operand& target, Napi::Value dst_offset);

// Throws what core/device/compat.hpp refuses.
void refuse_compat(Napi::Env env, const ep_compat_args& args);

} // namespace ep::binding
