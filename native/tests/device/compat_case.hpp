// Random plans in the shapes of the original's metadata, with their plain answer: query and key-value forward, and the key-value gradient back.
#pragma once

#include "ep/device/compat_dispatch.h"
#include "world.hpp"

namespace ep::test {

class compat_case {
 public:
  // replicas 0: query only. Every rank has one to four shards of one to six rows.
  compat_case(int32_t world_size, uint32_t replica_count, uint64_t seed) : size(world_size), replicas(replica_count), random(seed) {
    ranks.resize(static_cast<size_t>(size));
    for (one_rank& rank : ranks) {
      for (uint64_t shards = 1 + below(random, 4); shards > 0; --shards) {
        rank.seq_len.push_back(static_cast<uint32_t>(1 + below(random, 6)));
        rank.tokens += rank.seq_len.back();
      }
    }
    route(query_bytes, 1, &one_rank::query);
    if (replicas != 0) route(kv_bytes, replicas, &one_rank::key_value);
    for (const one_rank& rank : ranks) {
      send_rows = std::max(send_rows, rank.tokens);
      recv_rows = std::max<uint64_t>({recv_rows, rank.query.received.size() / query_bytes, rank.key_value.received.size() / kv_bytes});
      gradient_rows = std::max(gradient_rows, rank.tokens * replicas);
    }
    make_gradient();
  }

  uint64_t bytes() const { return (send_rows + recv_rows) * (query_bytes + kv_bytes) + (recv_rows + gradient_rows) * kv_bytes; }
  uint64_t slots() const { return 2 * static_cast<uint64_t>(size); }
  uint64_t tokens(int32_t rank) const { return ranks[static_cast<size_t>(rank)].tokens; }
  ep_kernel_status& status(int32_t rank) { return ranks[static_cast<size_t>(rank)].status; }

  ep_compat_args forward_args(const world& memory, int32_t rank) {
    one_rank& own = ranks[static_cast<size_t>(rank)];
    ep_compat_args args{};
    args.memory = memory.memory(rank);
    args.query = route_args(own.query, query_bytes, 1);
    args.query.recv_offset = send_rows * query_bytes;
    if (replicas != 0) {
      args.key_value = route_args(own.key_value, kv_bytes, replicas);
      args.key_value.send_offset = (send_rows + recv_rows) * query_bytes;
      args.key_value.recv_offset = args.key_value.send_offset + send_rows * kv_bytes;
      args.key_value.signal_slot = static_cast<uint64_t>(size);
    }
    args.tokens = own.tokens;
    args.seq_len = reinterpret_cast<uint64_t>(own.seq_len.data());
    args.num_seqs = static_cast<uint32_t>(own.seq_len.size());
    args.status = reinterpret_cast<uint64_t>(&own.status);
    return args;
  }

  ep_compat_args gradient_args(const world& memory, int32_t rank) {
    one_rank& own = ranks[static_cast<size_t>(rank)];
    ep_compat_args args{};
    args.memory = memory.memory(rank);
    args.query = route_args(own.gradient, kv_bytes, 1);
    args.query.recv_offset = recv_rows * kv_bytes;
    args.tokens = own.back_tokens;
    args.seq_len = reinterpret_cast<uint64_t>(own.back_seq_len.data());
    args.num_seqs = static_cast<uint32_t>(own.back_seq_len.size());
    args.recv_mask = reinterpret_cast<uint64_t>(own.mask.data());
    args.recv_seq_len = reinterpret_cast<uint64_t>(own.seq_len.data());
    args.recv_tokens = own.tokens;
    args.recv_seqs = static_cast<uint32_t>(own.seq_len.size());
    args.recv_replicas = replicas;
    args.status = reinterpret_cast<uint64_t>(&own.status);
    return args;
  }

  bool forward_right(int32_t rank) const {
    const one_rank& own = ranks[static_cast<size_t>(rank)];
    return own.query.output == own.query.received && own.key_value.output == own.key_value.received;
  }
  bool gradient_right(int32_t rank) const {
    const one_rank& own = ranks[static_cast<size_t>(rank)];
    return own.gradient.output == own.gradient.received;
  }

 private:
  static constexpr uint64_t query_bytes = 48;
  static constexpr uint64_t kv_bytes = 32;

  struct one_route {
    std::vector<uint8_t> source;
    std::vector<int32_t> dst_rank;
    std::vector<uint32_t> dst_offset;
    std::vector<uint64_t> counts;
    std::vector<uint8_t> received; // what the output must be
    std::vector<uint8_t> output;
  };
  struct one_rank {
    std::vector<uint32_t> seq_len;
    uint64_t tokens = 0;
    one_route query;
    one_route key_value;
    one_route gradient;
    std::vector<uint32_t> mask;
    std::vector<uint32_t> back_seq_len; // of the key-value shards this rank has received
    uint64_t back_tokens = 0;
    ep_kernel_status status{};
  };

  ep_compat_route route_args(one_route& from, uint64_t row_bytes, uint32_t count) const {
    ep_compat_route made{};
    made.src = reinterpret_cast<uint64_t>(from.source.data());
    made.dst = reinterpret_cast<uint64_t>(from.output.data());
    made.row_bytes = row_bytes;
    made.dst_rank = reinterpret_cast<uint64_t>(from.dst_rank.data());
    made.dst_offset = reinterpret_cast<uint64_t>(from.dst_offset.data());
    made.num_recv_tokens = reinterpret_cast<uint64_t>(from.counts.data());
    made.replicas = count;
    return made;
  }

  std::vector<uint8_t> random_rows(uint64_t rows, uint64_t row_bytes) {
    std::vector<uint8_t> made(rows * row_bytes);
    for (uint8_t& byte : made) byte = static_cast<uint8_t>(random());
    return made;
  }

  void route(uint64_t row_bytes, uint32_t count, one_route one_rank::*member) {
    const auto world_size = static_cast<size_t>(size);
    for (one_rank& rank : ranks) (rank.*member).counts.resize(world_size + 1);
    for (size_t from = 0; from < world_size; ++from) {
      one_route& own = ranks[from].*member;
      own.source = random_rows(ranks[from].tokens, row_bytes);
      uint64_t row = 0;
      for (const uint32_t length : ranks[from].seq_len) {
        for (uint32_t replica = 0; replica < count; ++replica) {
          const auto to = static_cast<int32_t>(below(random, world_size + (count > 1 ? 1 : 0))) - (count > 1 ? 1 : 0);
          own.dst_rank.push_back(to);
          if (to < 0) {
            own.dst_offset.push_back(0);
            continue;
          }
          one_route& target = ranks[static_cast<size_t>(to)].*member;
          own.dst_offset.push_back(static_cast<uint32_t>(target.received.size() / row_bytes));
          const uint8_t* rows = own.source.data() + row * row_bytes;
          target.received.insert(target.received.end(), rows, rows + length * row_bytes);
          target.counts[from] += length;
          target.counts[world_size] += length;
        }
        row += length;
      }
    }
    for (one_rank& rank : ranks) (rank.*member).output.assign((rank.*member).received.size(), 0xcc);
  }

  // Servers send every key-value row they got back to where it came from, replica-major.
  void make_gradient() {
    const auto world_size = static_cast<size_t>(size);
    for (one_rank& rank : ranks) {
      rank.gradient.counts.resize(world_size + 1);
      rank.gradient.received.assign(rank.tokens * replicas * kv_bytes, 0xcc);
      rank.gradient.output = rank.gradient.received;
      rank.gradient.source = random_rows(rank.key_value.received.size() / kv_bytes, kv_bytes);
    }
    for (size_t home = 0; home < world_size; ++home) {
      one_rank& own = ranks[home];
      uint64_t row = 0;
      for (size_t shard = 0; shard < own.seq_len.size(); ++shard) {
        const uint32_t length = own.seq_len[shard];
        for (uint32_t replica = 0; replica < replicas; ++replica) {
          const int32_t to = own.key_value.dst_rank[shard * replicas + replica];
          own.mask.push_back(to >= 0 ? 1 : 0);
          if (to < 0) continue;
          one_rank& server = ranks[static_cast<size_t>(to)];
          const uint64_t target = replica * own.tokens + row;
          server.gradient.dst_rank.push_back(static_cast<int32_t>(home));
          server.gradient.dst_offset.push_back(static_cast<uint32_t>(target));
          server.back_seq_len.push_back(length);
          std::copy_n(server.gradient.source.begin() + static_cast<ptrdiff_t>(server.back_tokens * kv_bytes), length * kv_bytes,
                      own.gradient.received.begin() + static_cast<ptrdiff_t>(target * kv_bytes));
          server.back_tokens += length;
          own.gradient.counts[static_cast<size_t>(to)] += length;
          own.gradient.counts[world_size] += length;
        }
        row += length;
      }
    }
  }

  int32_t size;
  uint32_t replicas;
  random_source random;
  std::vector<one_rank> ranks;
  uint64_t send_rows = 0;
  uint64_t recv_rows = 0;
  uint64_t gradient_rows = 0;
};

} // namespace ep::test
