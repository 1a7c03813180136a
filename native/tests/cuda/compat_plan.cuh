// A plan as the per-token kernel takes it: its buffers in every rank's memory, and the metadata of one rank.
#pragma once

#include "plan_world.cuh"

namespace ep::test {

// Bytes of the send and of the receive buffer, of query and key-value rows.
struct compat_layout {
  uint64_t send[2];
  uint64_t receive[2];
  explicit compat_layout(const plan_world& world) {
    for (size_t part = 0; part < 2; ++part) {
      send[part] = world.options.tokens * world.options.row_bytes[part];
      receive[part] = world.capacity_rows[part] * world.options.row_bytes[part];
    }
  }
  uint64_t bytes() const { return send[0] + send[1] + receive[0] + receive[1]; }
};

// All but where the memory lies (memory.peers). `output` has lease_bytes() of the world.
inline ep_compat_args compat_args(const plan_world& world, size_t self, uint8_t* output) {
  const plan_options& wanted = world.options;
  const size_t count = world.ranks.size();
  const compat_layout layout(world);
  std::vector<uint64_t> rows[2];
  for (auto& part : rows) part.assign(count + 1, 0);
  for (const arriving_run& run : world.arriving[self]) {
    rows[run.part][static_cast<size_t>(run.src_rank)] += run.rows;
    rows[run.part][count] += run.rows;
  }
  const auto& shards = world.shards[self];
  const auto replicas = wanted.replicas;
  std::vector<uint32_t> lengths;
  std::vector<int32_t> ranks[2];
  std::vector<uint32_t> offsets[2];
  size_t next[2] = {0, 0};
  for (const plan_world::shard& each : shards) {
    lengths.push_back(each.tokens);
    ranks[0].push_back(each.query_to);
    offsets[0].push_back(static_cast<uint32_t>(world.entries[self][0][next[0]++].dst_row));
    for (uint32_t replica = 0; replica < replicas; ++replica) {
      const bool there = replica < each.key_value_to.size();
      ranks[1].push_back(there ? each.key_value_to[replica] : -1);
      offsets[1].push_back(there ? static_cast<uint32_t>(world.entries[self][1][next[1]++].dst_row) : 0);
    }
  }
  ep_compat_args made{};
  made.memory = world.ranks[self].call.args.memory;
  made.memory.byte_length = layout.bytes();
  made.tokens = wanted.tokens;
  made.seq_len = bits(gpu_array(lengths));
  made.num_seqs = static_cast<uint32_t>(shards.size());
  made.status = world.ranks[self].call.args.status;
  uint64_t at = 0;
  for (int part = 0; part < 2; ++part) {
    ep_compat_route& route = part == 0 ? made.query : made.key_value;
    route.src = bits(world.ranks[self].source[part]);
    route.dst = bits(output) + (part == 0 ? 0 : layout.receive[0]);
    route.row_bytes = wanted.row_bytes[part];
    route.send_offset = at;
    route.recv_offset = at + layout.send[part];
    at += layout.send[part] + layout.receive[part];
    route.signal_slot = static_cast<uint64_t>(part) * count;
    route.dst_rank = bits(gpu_array(ranks[part]));
    route.dst_offset = bits(gpu_array(offsets[part]));
    route.num_recv_tokens = bits(gpu_array(rows[part]));
    route.replicas = part == 0 ? 1 : replicas;
  }
  return made;
}

} // namespace ep::test
