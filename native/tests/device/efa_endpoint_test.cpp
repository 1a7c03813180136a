// The endpoint of the attention kernels over EFA: rows of every form to every rank, each put with a signal that shows only when the put has landed.
#include "../check.hpp"
#include "efa_cases.hpp"
#include "ep/device/efa_endpoint.h"

using namespace ep;
using namespace ep::test;

namespace {

using tested_endpoint = efa_endpoint_of<efa_test_way>;

const uint64_t samples = seeds_of(60);

struct endpoint_world {
  explicit endpoint_world(const efa_world_options& wanted) : world(wanted), ranks(static_cast<size_t>(wanted.size)) {
    for (int32_t i = 0; i < wanted.size; ++i) {
      rank_state& rank = ranks[static_cast<size_t>(i)];
      efa_world::rank_state& below = world.at(i);
      rank.signals.resize(wanted.signals);
      rank.views.resize(static_cast<size_t>(wanted.size));
      rank.views[static_cast<size_t>(i)] = {reinterpret_cast<uint64_t>(below.data), reinterpret_cast<uint64_t>(rank.signals.data()), 0, 0};
      rank.ranges = {1, 0, {below.part.address, below.part.address + wanted.bytes, below.mr.lkey, 0}};
      below.device.ranges = reinterpret_cast<uint64_t>(&rank.ranges);
      below.part.targets = reinterpret_cast<uint64_t>(below.targets.data());
      rank.memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_EFA, sizeof rank.memory};
      rank.memory.rank = i;
      rank.memory.world_size = wanted.size;
      rank.memory.byte_length = wanted.bytes;
      rank.memory.signal_slots = wanted.signals;
      rank.memory.peers = reinterpret_cast<uint64_t>(rank.views.data());
      rank.memory.proxy = reinterpret_cast<uint64_t>(&below.part);
    }
    // As a host that waits does it: what the NIC counted becomes the plain word.
    world.after_step = [this] {
      for (size_t i = 0; i < ranks.size(); ++i) {
        for (uint32_t s = 0; s < world.options.signals; ++s) ranks[i].signals[s] = world.counted(static_cast<int32_t>(i), 1 + s).arrived;
      }
    };
  }
  struct table {
    uint64_t count;
    uint64_t reserved;
    ep_ibgda_range one;
  };
  struct rank_state {
    std::vector<uint64_t> signals;
    std::vector<ep_peer_view> views;
    table ranges{};
    ep_memory_handle memory{};
  };
  tested_endpoint endpoint(int32_t rank) const { return {ranks[static_cast<size_t>(rank)].memory}; }
  efa_world world;
  std::vector<rank_state> ranks;
};

struct form {
  uint64_t stride;
  uint64_t row_bytes;
  uint64_t rows;
};
constexpr form forms[] = {{40, 40, 3}, {64, 24, 4}, {72, 72, 1}, {0, 0, 0}, {48, 16, 5}};
constexpr uint64_t slot_bytes = 128; // of one put at its target

// Chunk c of `from` to `to` has form c % 5. Slot `from` of a rank counts what comes from there.
void rows_of_every_form(uint64_t seed, uint32_t blocks, uint32_t sharing) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.size = 3;
  wanted.signals = 3;
  wanted.counters = 0;
  wanted.bytes = 8192;
  wanted.depth = 8;
  wanted.max_batch = 4;
  wanted.max_message = seed % 2 == 0 ? 32 : 1 << 20;
  wanted.inline_write = seed % 3 != 0;
  wanted.sharing = sharing;
  endpoint_world all(wanted);
  constexpr uint32_t chunks = 5;
  const auto byte = [](int32_t from, int32_t to, uint32_t chunk, uint64_t at) { return traffic_byte(static_cast<uint64_t>(from * 100 + to * 10) + chunk, at); };
  const auto source = [](int32_t to, uint32_t chunk) { return 4096 + static_cast<uint64_t>(to) * 5 * 256 + chunk * 256; };
  for (int32_t from = 0; from < 3; ++from) {
    for (int32_t to = 0; to < 3; ++to) {
      for (uint32_t c = 0; c < chunks; ++c) {
        for (uint64_t r = 0; r < forms[c].rows; ++r) {
          for (uint64_t i = 0; i < forms[c].row_bytes; ++i) all.world.data(from)[source(to, c) + r * forms[c].stride + i] = byte(from, to, c, r * forms[c].row_bytes + i);
        }
      }
    }
  }
  uint64_t corrupt = 0;
  const simt_result outcome = all.world.run(shape(blocks, 8, 4), [&](efa_context& ctx, int32_t rank) {
    const tested_endpoint endpoint = all.endpoint(rank);
    const block_coop<efa_context> coop{ctx};
    ep_kernel_status* status = &all.world.at(rank).status;
    bool ok = true;
    for (uint32_t c = ctx.block(); c < 3 * chunks && ok; c += ctx.blocks()) {
      const auto to = static_cast<int32_t>(c % 3);
      const form& f = forms[c / 3];
      const uint64_t at = (static_cast<uint64_t>(rank) * chunks + c / 3) * slot_bytes;
      ok = endpoint.put_rows(ctx, coop, to, at, all.world.data(rank) + source(to, c / 3), f.stride, f.row_bytes, f.rows, false, static_cast<uint64_t>(rank), 1, status);
    }
    for (int32_t from = 0; from < 3 && ok && ctx.block() == 0; ++from) {
      ok = coop.sync_and(ctx.lane() != 0 || ctx.wait(endpoint.local_signal(static_cast<uint64_t>(from)), chunks, from, EP_STAGE_ARRIVAL, status));
      if (ctx.lane() != 0) continue;
      for (uint32_t c = 0; c < chunks; ++c) {
        const uint8_t* here = all.world.data(rank) + (static_cast<uint64_t>(from) * chunks + c) * slot_bytes;
        for (uint64_t i = 0; i < forms[c].rows * forms[c].row_bytes; ++i) corrupt += here[i] != byte(from, rank, c, i) ? 1 : 0;
      }
    }
    return endpoint.quiet(ctx, coop, 0, status) && ok;
  });
  EP_CHECK(outcome.ok && all.world.clean());
  if (!outcome.ok) std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), outcome.report.c_str());
  EP_CHECK_EQ(corrupt, 0u);
}

// T12. One queue pair under four posters that each have a view of their own: a context of the facade, another context that names the same queue pairs, and the attention kernels' endpoint;
// values, puts with signals, reads, deferred doorbells and flushes. `apart`: the second context keeps an account of its own, as views of the pull request do (D2).
bool t12_views_meet(uint64_t seed, bool apart) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.counters = 0;
  wanted.depth = 8;
  wanted.max_batch = seed % 2 == 0 ? 4 : 2;
  wanted.inline_write = seed % 3 != 0;
  endpoint_world all(wanted);
  efa_world& world = all.world;
  constexpr uint64_t rounds = 6;
  constexpr uint64_t source = 2048;
  constexpr uint64_t got = 3072;
  for (uint64_t i = 0; i < 1024; ++i) world.data(0)[source + i] = traffic_byte(i, 5);
  for (uint64_t i = 0; i < 512; ++i) world.data(1)[source + i] = traffic_byte(i, 9);
  std::vector<ep_efa_qp> own = world.at(0).qps;
  ep_efa_device second = world.at(0).device;
  if (apart) second.qps = reinterpret_cast<uint64_t>(own.data());
  const simt_result outcome = world.run(shape(2, 2, 1), [&](efa_context& ctx, int32_t rank) {
    const thread_coop<efa_context> coop{ctx};
    const ep_efa_memory& part = world.part(0);
    const uint64_t view = ctx.block() * 2 + ctx.lane();
    if (rank == 1) return view != 0 || our_gin{world.at(1).device}.wait_signal(ctx, coop, 0, 2 * rounds, nullptr);
    const our_gin first{world.at(0).device};
    const our_gin other{second};
    const tested_endpoint endpoint = all.endpoint(0).with_key(0);
    bool ok = true;
    for (uint64_t i = 0; i < rounds && ok; ++i) {
      const uint64_t at = (view * rounds + i) * 24;
      const auto options = aggregated<our_way>((i + view) % 3 != 2);
      switch (view) {
        case 0: ok = first.put(ctx, coop, world.team(), 1, part, at, part, source + at, 24, gin_signal_inc{0}, gin_no_action{}, options, nullptr); break;
        case 1: ok = other.put_value(ctx, coop, world.team(), 1, part, at, i + 1, gin_no_action{}, options, nullptr); break;
        case 2: ok = endpoint.put_rows(ctx, coop, 1, at, world.data(0) + source + at, 24, 24, 1, false, 0, 1, nullptr); break;
        default: ok = other.get(ctx, coop, world.team(), 1, part, source + i * 24, part, got + i * 24, 24, options, nullptr); break;
      }
      if (view == 3 && i == rounds / 2) ok = first.flush(ctx, coop, nullptr) && ok;
    }
    return (view % 2 == 0 ? first : other).flush(ctx, coop, nullptr) && ok;
  });
  uint64_t wrong = outcome.ok && world.violations().empty() && (apart || world.qp(0, 0).prefix == 4 * rounds) ? 0 : 1;
  for (uint64_t i = 0; i < rounds * 24; ++i) {
    for (const uint64_t view : {0u, 2u}) wrong += world.data(1)[view * rounds * 24 + i] != traffic_byte(view * rounds * 24 + i, 5) ? 1 : 0;
    wrong += world.data(0)[got + i] != traffic_byte(i, 9) ? 1 : 0;
  }
  for (uint64_t i = 0; i < rounds; ++i) wrong += word_at(world, 1, (rounds + i) * 24) != i + 1 ? 1 : 0;
  return wrong == 0;
}

void additions_and_refusals() {
  efa_world_options wanted;
  wanted.signals = 2;
  endpoint_world all(wanted);
  ep_kernel_status status{};
  const auto by_0 = [&](const auto& body) {
    return all.world.run(shape(1, 4, 4), [&](efa_context& ctx, int32_t rank) {
      const block_coop<efa_context> coop{ctx};
      const tested_endpoint endpoint = all.endpoint(0);
      return rank != 0 || (body(ctx, coop, endpoint) && endpoint.quiet_key(ctx, coop, &status));
    }).ok;
  };
  EP_CHECK(by_0([&](efa_context& ctx, const auto& coop, const tested_endpoint& endpoint) {
    return endpoint.signal(ctx, coop, 1, 0, efa_max_add, &status) && endpoint.signal(ctx, coop, 0, 1, 1, &status) && endpoint.signal(ctx, coop, 1, 1, 0, &status) &&
           endpoint.put_rows(ctx, coop, 1, 0, all.world.data(0) + 2048, 8, 8, 1, false, EP_NO_SLOT, 0, &status);
  }));
  EP_CHECK_EQ(all.world.counted(1, 1).arrived, efa_max_add);
  EP_CHECK_EQ(all.world.counted(0, 2).arrived, 1u);
  EP_CHECK_EQ(all.world.counted(1, 2).arrived, 0u);
  EP_CHECK_EQ(all.world.counted(1, 0).arrived, 1u);
  const auto refused = [&](uint32_t stage, const auto& body) {
    status = {};
    EP_CHECK(!by_0(body));
    EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
    EP_CHECK_EQ(status.stage, stage);
  };
  refused(EP_STAGE_RANGE, [&](efa_context& ctx, const auto& coop, const tested_endpoint& endpoint) { return endpoint.signal(ctx, coop, 1, 0, efa_max_add + 1, &status); });
  refused(EP_STAGE_SOURCE, [&](efa_context& ctx, const auto& coop, const tested_endpoint& endpoint) {
    return endpoint.put_rows(ctx, coop, 1, 0, all.world.data(0) + 4090, 8, 8, 1, false, 0, 1, &status);
  });
  all.world.at(0).device.sharing = EP_EFA_SHARE_BLOCK;
  all.world.at(0).device.qp_count = 1;
  status = {};
  EP_CHECK(!all.world.run(shape(2, 4, 4), [&](efa_context& ctx, int32_t rank) {
    return rank != 0 || all.endpoint(0).signal(ctx, block_coop<efa_context>{ctx}, 1, 0, 1, &status);
  }).ok);
  EP_CHECK_EQ(status.stage, EP_STAGE_SHARING);
  EP_CHECK_EQ(status.expected, 1u);
  EP_CHECK_EQ(status.found, 2u);
}

} // namespace

int main() {
  additions_and_refusals();
  uint64_t caught = 0;
  for (uint64_t seed = 0; seed < samples; ++seed) {
    EP_CHECK(t12_views_meet(seed, false));
    caught += t12_views_meet(seed, true) ? 0 : 1;
    rows_of_every_form(seed, 1 + static_cast<uint32_t>(seed % 3), seed % 5 == 0 ? EP_EFA_SHARE_BLOCK : EP_EFA_SHARE_DEVICE);
  }
  std::printf("T12 views that keep accounts of their own: %llu of %llu seeds fail\n", static_cast<unsigned long long>(caught), static_cast<unsigned long long>(samples));
  EP_CHECK(caught * 2 > samples);
  return ep::check::finish();
}
