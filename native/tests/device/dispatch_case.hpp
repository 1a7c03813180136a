// Random dispatch plans with their plain answer: what must lie in each receive tensor after each call.
#pragma once

#include <atomic>

#include "ep/device/attention_dispatch.h"
#include "world.hpp"

namespace ep::test {

struct case_options {
  int32_t size = 2;
  uint32_t calls = 1;
  uint32_t leases = 1;   // call n writes into lease n % leases
  uint32_t parts = 1;
  bool credits = true;   // false: senders do not wait for the release of a lease
  bool counters_per_lease = true; // false: one running counter for all calls
};

class dispatch_case {
 public:
  dispatch_case(const case_options& wanted, uint64_t seed) : options(wanted), random(seed) {
    const auto world_size = static_cast<size_t>(wanted.size);
    for (uint32_t part = 0; part < wanted.parts; ++part) {
      static constexpr uint64_t sizes[] = {16, 48, 2, 7, 64, 130};
      const uint64_t row_bytes = sizes[below(random, 6)];
      shapes.push_back({row_bytes, row_bytes + (below(random, 2) != 0 ? 0 : 16 * below(random, 3) + below(random, 2)), 1 + below(random, 4)});
    }
    std::vector<uint64_t> capacity(wanted.leases * wanted.parts);
    std::vector<std::vector<uint64_t>> running(wanted.leases * world_size, std::vector<uint64_t>(world_size));
    for (uint32_t call = 0; call < wanted.calls; ++call) {
      const uint32_t lease = call % wanted.leases;
      const uint32_t counters = wanted.counters_per_lease ? lease : 0;
      std::vector<one_rank>& ranks = calls.emplace_back(world_size);
      for (uint32_t part = 0; part < wanted.parts; ++part) {
        make_part(ranks, part);
        for (const one_rank& rank : ranks) {
          uint64_t& bytes = capacity[lease * wanted.parts + part];
          bytes = std::max<uint64_t>(bytes, (rank.expected[part].size() + 63) / 64 * 64);
        }
      }
      for (size_t to = 0; to < world_size; ++to) {
        for (size_t from = 0; from < world_size; ++from) {
          uint64_t& count = running[counters * world_size + to][from];
          uint64_t chunks = 0;
          for (uint32_t part = 0; part < wanted.parts; ++part) chunks += chunks_between(ranks[from], part, static_cast<int32_t>(to));
          count += chunks;
          // Nothing owed by this source in this call: nothing to wait for.
          ranks[to].arrivals.push_back(chunks != 0 ? count : 0);
          ranks[from].credits.push_back(wanted.credits ? call / wanted.leases : 0);
        }
      }
    }
    uint64_t at = 64 * below(random, 3);
    for (const uint64_t bytes : capacity) {
      offsets.push_back(at);
      at += bytes;
    }
    memory_bytes = at;
  }

  uint64_t bytes() const { return memory_bytes; }
  uint64_t slots() const { return static_cast<uint64_t>(options.size) * options.leases * 2; }
  uint32_t call_count() const { return options.calls; }
  uint64_t credit_slot(uint32_t call) const { return arrival_slot(call) + static_cast<uint64_t>(options.size); }
  uint64_t arrival_slot(uint32_t call) const {
    return options.counters_per_lease ? static_cast<uint64_t>(call % options.leases) * 2 * static_cast<uint64_t>(options.size) : 0;
  }
  ep_kernel_status& status(int32_t rank) { return calls[0][static_cast<size_t>(rank)].status; }

  // Tells the world of all sources, which lie outside of its memory.
  template <class World> void adopt_sources(World& ranks) const {
    for (const std::vector<one_rank>& call : calls) {
      for (size_t rank = 0; rank < call.size(); ++rank) {
        for (uint32_t part = 0; part < options.parts; ++part) {
          ranks.adopt(static_cast<int32_t>(rank), call[rank].source[part].get(), call[rank].source_bytes[part]);
        }
      }
    }
  }

  // Points into this object.
  template <class World> ep_dispatch_args args(const World& ranks, int32_t rank, uint32_t call) {
    one_rank& own = calls[call][static_cast<size_t>(rank)];
    if (own.parts.empty()) {
      for (uint32_t part = 0; part < options.parts; ++part) {
        const row_shape& shape = shapes[part];
        own.parts.push_back({reinterpret_cast<uint64_t>(own.source[part].get()), shape.stride, shape.row_bytes,
                             offsets[call % options.leases * options.parts + part], reinterpret_cast<uint64_t>(own.entries[part].data()),
                             static_cast<uint32_t>(own.entries[part].size()), static_cast<uint32_t>(shape.chunk_rows),
                             own.chunk_count[part], 0});
      }
    }
    ep_dispatch_args made{};
    made.memory = ranks.memory(rank);
    made.parts = reinterpret_cast<uint64_t>(own.parts.data());
    made.part_count = options.parts;
    made.flags = call % 2 != 0 ? EP_DISPATCH_NON_TEMPORAL : 0;
    made.arrival_slot = arrival_slot(call);
    made.credit_slot = credit_slot(call);
    made.arrivals = reinterpret_cast<uint64_t>(own.arrivals.data());
    made.credits = reinterpret_cast<uint64_t>(own.credits.data());
    made.status = reinterpret_cast<uint64_t>(&status(rank));
    return made;
  }

  template <class World> bool arrived(World& ranks, int32_t rank, uint32_t call) const {
    const one_rank& own = calls[call][static_cast<size_t>(rank)];
    for (uint32_t part = 0; part < options.parts; ++part) {
      const std::vector<uint8_t>& expected = own.expected[part];
      const uint8_t* found = ranks.data(rank) + offsets[call % options.leases * options.parts + part];
      if (!std::equal(expected.begin(), expected.end(), found)) return false;
    }
    return true;
  }

 private:
  struct row_shape {
    uint64_t row_bytes;
    uint64_t stride;
    uint64_t chunk_rows;
  };
  struct one_rank {
    std::vector<aligned_bytes> source;
    std::vector<uint64_t> source_bytes;
    std::vector<std::vector<ep_dispatch_entry>> entries;
    std::vector<uint32_t> chunk_count;
    std::vector<std::vector<uint8_t>> expected;
    std::vector<uint64_t> arrivals;
    std::vector<uint64_t> credits;
    std::vector<ep_dispatch_part> parts;
    ep_kernel_status status{};
  };

  uint32_t chunks_of(uint32_t part, uint64_t rows) const {
    return static_cast<uint32_t>((rows + shapes[part].chunk_rows - 1) / shapes[part].chunk_rows);
  }

  uint64_t chunks_between(const one_rank& from, uint32_t part, int32_t to) const {
    uint64_t chunks = 0;
    for (const ep_dispatch_entry& entry : from.entries[part]) {
      if (entry.dst_rank == to) chunks += chunks_of(part, entry.rows);
    }
    return chunks;
  }

  // Destinations fill in the order of (home rank, shard), as plans do. Some ranks have no shards, some shards no rows.
  void make_part(std::vector<one_rank>& ranks, uint32_t part) {
    const row_shape& shape = shapes[part];
    for (one_rank& rank : ranks) rank.expected.emplace_back();
    for (one_rank& rank : ranks) {
      const uint64_t shards = below(random, 5);
      std::vector<ep_dispatch_entry>& entries = rank.entries.emplace_back();
      uint64_t rows = below(random, 2); // a row that nobody wants
      uint32_t chunks = 0;
      for (uint64_t shard = 0; shard < shards; ++shard) {
        const uint64_t length = below(random, 9);
        const auto to = static_cast<int32_t>(below(random, static_cast<uint64_t>(options.size)));
        const uint64_t filled = ranks[static_cast<size_t>(to)].expected[part].size() / shape.row_bytes;
        entries.push_back({rows, filled, length, to, chunks});
        ranks[static_cast<size_t>(to)].expected[part].resize((filled + length) * shape.row_bytes);
        rows += length;
        chunks += chunks_of(part, length);
      }
      rank.chunk_count.push_back(chunks);
      aligned_bytes& source = rank.source.emplace_back(make_aligned(rows * shape.stride));
      rank.source_bytes.push_back(rows * shape.stride);
      for (uint64_t i = 0; i < rows * shape.stride; ++i) source[i] = static_cast<uint8_t>(random());
      for (const ep_dispatch_entry& entry : entries) {
        std::vector<uint8_t>& expected = ranks[static_cast<size_t>(entry.dst_rank)].expected[part];
        for (uint64_t row = 0; row < entry.rows; ++row) {
          std::copy_n(source.get() + (entry.src_row + row) * shape.stride, shape.row_bytes,
                      expected.begin() + static_cast<ptrdiff_t>((entry.dst_row + row) * shape.row_bytes));
        }
      }
    }
  }

  case_options options;
  random_source random;
  std::vector<row_shape> shapes;
  std::vector<std::vector<one_rank>> calls;
  std::vector<uint64_t> offsets;
  uint64_t memory_bytes = 0;
};

// Runs all calls of one rank: dispatch, look at what arrived, release the lease to every sender. `wrong` counts tensors that were not what the
// plan says. `dispatch` is bool(ctx, endpoint, args).
template <class Ctx, class Endpoint, class World, class Dispatch>
bool run_calls(Ctx& ctx, const Endpoint& endpoint, World& ranks, dispatch_case& plan, int32_t rank, const std::vector<ep_dispatch_args>& args,
               std::atomic<uint32_t>& wrong, Dispatch&& dispatch) {
  for (uint32_t call = 0; call < plan.call_count(); ++call) {
    if (!dispatch(ctx, endpoint, args[call])) return false;
    if (ctx.lane() == 0 && !plan.arrived(ranks, rank, call)) wrong.fetch_add(1);
    ctx.sync_grid();
    if (ctx.block() != 0) continue;
    for (int32_t peer = 0; peer < ranks.size(); ++peer) {
      if (!endpoint.signal(ctx, block_coop<Ctx>{ctx}, peer, plan.credit_slot(call) + static_cast<uint64_t>(rank), 1, nullptr)) return false;
    }
  }
  return true;
}

template <class World> std::vector<std::vector<ep_dispatch_args>> all_args(dispatch_case& plan, World& ranks) {
  plan.adopt_sources(ranks);
  std::vector<std::vector<ep_dispatch_args>> args(static_cast<size_t>(ranks.size()));
  for (int32_t rank = 0; rank < ranks.size(); ++rank) {
    for (uint32_t call = 0; call < plan.call_count(); ++call) args[static_cast<size_t>(rank)].push_back(plan.args(ranks, rank, call));
  }
  return args;
}

} // namespace ep::test
