// WQEs of a GPU beside those of the host: post_bytes_test [seeds of each kind, 12]. The same posts are made by the host and by a kernel into the same rings, which lie in pinned host memory, and all that
// either leaves behind is compared byte for byte: every WQE of every round of a ring, doorbells in their order, records, registers, accounts. Then blocks of a GPU put over the software EFA
// (post_traffic.cpp). Where there is no GPU, runs of the host alone are compared, and it ends with 2. Built and run by run.mjs.
#include <cstdlib>
#include <memory>
#include <thread>

#include "gpu_arena.hpp"
#include "post_run.hpp"
#include "post_steps.hpp"
#include "post_traffic.hpp"

using namespace ep::test;

namespace {

void everyone(const post_shape& shape) {
  const bool mlx5 = is_mlx5(shape.way);
  const bool lanes = shape.way == post_way::lanes_device || shape.way == post_way::lanes_block || shape.way == post_way::pr_lanes;
  const bool puts = shape.way >= post_way::put_in_turn && mlx5;
  const bool whole = shape.way != post_way::lock && shape.way != post_way::put_lock;
  std::vector<uint8_t> steps;
  uint32_t count = 0;
  const auto take = [&](const auto& made) {
    steps = as_bytes(made);
    count = static_cast<uint32_t>(made.size());
  };
  if (puts) take(mlx5_puts_of(shape, whole));
  else if (mlx5) take(mlx5_posts_of(shape, whole, false));
  else if (lanes) take(lane_steps_of(shape));
  else if (shape.way == post_way::efa_endpoint) take(efa_rows_of(shape));
  else take(gin_steps_of(shape));

  const auto host = [&](bool marks, uint64_t seed) {
    return post(shape, steps, count, [&](const post_arguments& given) {
      const host_machine machine = machine_of(shape.way, marks);
      return seed == 0 && given.lanes == 1 ? machine.fast(given) : machine.simt(given, seed + 1);
    });
  };
  const post_outcome wanted = host(true, 0);
  uint64_t bytes = 0;
  for (const std::vector<uint8_t>& each : wanted.wqes) bytes += each.size();
  EP_CHECK(bytes > 2 * shape.depth * uint64_t{64});
  EP_CHECK(!wanted.rings.empty());
  compare("two schedules", shape, wanted, host(true, shape.seed + 1), compared::everything);
  /* Where the ring is full, either way rings for what was left at another moment. */
  if (!mlx5) compare("in turn, by marks", shape, host(false, 0), wanted, compared::wqes);
  if (mlx5 && shape.lanes != 1) {
    post_shape alone = shape;
    alone.lanes = 1;
    compare("a lane, a warp", shape, post(alone, steps, count, [&](const post_arguments& given) { return machine_of(shape.way, true).fast(given); }), wanted, compared::everything);
  }
  if (stream == nullptr) return;
  const auto gpu = [&](bool asks) { return post(shape, steps, count, [&](const post_arguments& given) { return on_gpu(given, shape.way, asks); }); };
  compare("host, GPU", shape, wanted, gpu(true), compared::everything);
  const bool kept = shape.way == post_way::in_turn_device || shape.way == post_way::ringer_device || shape.way == post_way::lock || shape.way == post_way::put_ringer || shape.way == post_way::gin_device ||
                    shape.way == post_way::lanes_device || shape.way == post_way::efa_endpoint || shape.way == post_way::pr || shape.way == post_way::pr_lanes;
  if (!kept) return;
  /* Counts that steps read are then as far as the NIC has come. */
  compare("host, GPU beside a NIC", shape, wanted, gpu(false), compared::wqes);
}

// Blocks that share a queue pair: each WQE of the ring is, byte for byte, what the host writes for that place of that block's post, and none is missing.
void blocks_together(const post_shape& shape, uint32_t blocks) {
  const std::vector<mlx5_step> steps = mlx5_posts_of(shape, shape.way != post_way::lock, true);
  const post_outcome seen = post(shape, as_bytes(steps), static_cast<uint32_t>(steps.size()), [&](const post_arguments& given) { return on_gpu(given, shape.way, false, blocks); });
  EP_CHECK(seen.ok);
  const std::vector<uint8_t>& wqes = seen.wqes[1];
  uint64_t posted = 0;
  for (const mlx5_step& step : steps) posted += step.count;
  EP_CHECK_EQ(wqes.size(), posted * blocks * 64);
  std::vector<uint32_t> found(blocks * steps.size() * post_most_depth);
  uint64_t different = 0;
  for (uint64_t number = 0; number < wqes.size() / 64; ++number) {
    const uint8_t* wqe = wqes.data() + number * 64;
    uint64_t remote = 0;
    std::memcpy(&remote, wqe + 16, 8);
    const uint64_t away = __builtin_bswap64(remote) - mlx5_remote;
    const auto block = static_cast<uint32_t>(away >> 40);
    const auto i = static_cast<uint32_t>(away >> 32 & 0xff);
    const uint64_t index = (away & 0xffffffff) >> 12;
    if (block >= blocks || index >= steps.size() || i >= steps[index].count) {
      ++different;
      continue;
    }
    // A shorter request leaves the rest of its slot to who was there before.
    alignas(16) uint8_t own[64];
    if (number >= shape.depth) std::memcpy(own, wqe - uint64_t{shape.depth} * 64, 64);
    else std::memset(own, 0, 64);
    const bool signalled = shape.way == post_way::lock || i + 1 == steps[index].count;
    ep::mlx5_step_build{memory->mlx5, steps[index], block}(i, ep::mlx5_writer{reinterpret_cast<ep::vector16*>(own), memory->mlx5.qps[1].qpn, number, signalled});
    different += std::memcmp(own, wqe, 64) != 0 ? 1 : 0;
    ++found[(block * steps.size() + index) * post_most_depth + i];
  }
  EP_CHECK_EQ(different, 0u);
  for (uint32_t block = 0; block < blocks; ++block) {
    for (size_t index = 0; index < steps.size(); ++index) {
      for (uint32_t i = 0; i < steps[index].count; ++i) EP_CHECK_EQ(found[(block * steps.size() + index) * post_most_depth + i], 1u);
    }
  }
}

// The same of the facade over EFA: all blocks carry out the same list, in which every step has a place of its own.
void blocks_put_together(const post_shape& shape, uint32_t blocks) {
  constexpr uint64_t apart = 16;
  ep::random_source random(shape.seed * 1021 + 6);
  std::vector<ep_gin_step> steps;
  for (uint64_t i = 0; i < sizeof memory->efa.source / apart; ++i) {
    ep_gin_step step{};
    step.op = i % 4 == 1 ? EP_GIN_PUT_VALUE : i % 4 == 3 ? EP_GIN_GET : EP_GIN_PUT;
    step.peer = 1;
    step.to = step.from = i * apart;
    step.bytes = step.op == EP_GIN_PUT_VALUE ? 8 : 1 + random.below(apart);
    step.value = random.next();
    step.signal = static_cast<uint32_t>(random.below(2));
    step.add = step.op == EP_GIN_GET ? 0 : static_cast<uint32_t>(random.below(2));
    step.counter = static_cast<uint32_t>(random.below(2));
    step.flags = (random.below(3) != 0 ? EP_GIN_AGGREGATE : 0u) | (step.op == EP_GIN_PUT && random.below(3) == 0 ? EP_GIN_COUNTED : 0u);
    steps.push_back(step);
  }
  const auto puts = static_cast<uint32_t>(steps.size());
  steps.push_back({EP_GIN_FLUSH, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  const post_outcome seen = post(shape, as_bytes(steps), puts + 1, [&](const post_arguments& given) { return on_gpu(given, shape.way, false, blocks); });
  EP_CHECK(seen.ok);
  const ep::kernel_environment environment;
  ep::fast_context ctx{environment, 0, 1, nullptr};
  efa_rig& rig = memory->efa;
  std::vector<uint32_t> found(puts);
  uint64_t different = 0;
  for (uint32_t q = 0; q < efa_rig_qps; ++q) {
    const ep_efa_qp& qp = rig.qps[q];
    EP_CHECK_EQ(seen.wqes[q].size(), qp.taken * qp.wqe_bytes);
    for (uint64_t number = 0; number < seen.wqes[q].size() / qp.wqe_bytes; ++number) {
      uint64_t words[EP_EFA_WIDE_WQE_BYTES / 8] = {};
      uint64_t own[EP_EFA_WIDE_WQE_BYTES / 8] = {};
      std::memcpy(words, seen.wqes[q].data() + number * qp.wqe_bytes, qp.wqe_bytes);
      const uint64_t index = (words[5] - rig.remotes[1].address) / apart;
      if (index >= puts) {
        ++different;
        continue;
      }
      const ep_gin_step& step = steps[index];
      ep::efa_put put;
      put.act(ep::gin_signal_add{step.signal, step.add});
      if ((step.flags & EP_GIN_COUNTED) != 0) put.act(ep::gin_counter_inc{step.counter});
      EP_CHECK(put.at(ctx, rig.device, {nullptr, 2}, 1, rig.part, step.to, rig.part, step.from, step.bytes, nullptr));
      const ep::efa_writer<ep::fast_context> writer{ctx, address_of(own), number, qp.wqe_bytes, (number & qp.depth) != 0 ? 1u : 0u, shape.wide_ids};
      if (step.op == EP_GIN_PUT_VALUE) {
        ep::efa_write_value(rig.device, qp, writer, put, step.value);
      } else if (step.op == EP_GIN_GET) {
        writer.read(ep::efa_target_of(rig.device, qp, 0, 1), put.remote, put.local, static_cast<uint32_t>(step.bytes));
      } else {
        ep::efa_write_piece(rig.device, qp, writer, put, put.slot, 0, static_cast<uint32_t>(step.bytes));
      }
      different += put.qp != q || std::memcmp(own, words, sizeof own) != 0 ? 1 : 0;
      ++found[index];
    }
  }
  EP_CHECK_EQ(different, 0u);
  for (const uint32_t times : found) EP_CHECK_EQ(times, blocks);
}

void all_posts(uint64_t seed) {
  for (uint32_t at = 0; at < post_ways; ++at) {
    post_shape shape;
    shape.way = static_cast<post_way>(at);
    shape.seed = seed;
    shape.depth = 16u << seed % 3;
    shape.collapsed = seed % 2 == 0;
    shape.max_message = seed % 3 == 0 ? 1024 : 64;
    shape.max_batch = seed % 4 == 0 ? 4 : 16;
    const bool pr = shape.way == post_way::pr || shape.way == post_way::pr_lanes;
    shape.inline_write = !pr && seed % 2 == 1;
    shape.wide_ids = !pr && seed % 4 >= 2;
    if (pr) {
      shape.max_message = 1024; // it cuts nothing
      // HAZARD: it waits for room before it rings for what was aggregated, so that a batch that was left and the next one have to fit the ring at once.
      shape.max_batch = std::min(shape.max_batch, shape.depth / 2);
    }
    const bool endpoint = (shape.way >= post_way::put_in_turn && is_mlx5(shape.way)) || shape.way == post_way::efa_endpoint;
    const bool lanes = shape.way == post_way::lanes_device || shape.way == post_way::lanes_block || shape.way == post_way::pr_lanes;
    const bool lone = !is_mlx5(shape.way) && !lanes && !endpoint;
    for (const uint32_t count : {1u, 32u}) {
      if ((count == 1 && lanes) || (count != 1 && lone)) continue;
      shape.lanes = count;
      for (uint32_t sharing = 0; sharing < (endpoint ? 3u : 1u); ++sharing) {
        shape.sharing = sharing;
        everyone(shape);
      }
    }
    if (stream == nullptr) continue;
    if (shape.way == post_way::in_turn_device || shape.way == post_way::ringer_device || shape.way == post_way::lock) {
      for (const uint32_t count : {1u, 32u}) {
        shape.lanes = count;
        blocks_together(shape, 2 + static_cast<uint32_t>(seed % 6));
      }
    }
    if (shape.way == post_way::gin_device) blocks_put_together(shape, 2 + static_cast<uint32_t>(seed % 6));
  }
}

} // namespace

int main(int count, char** words) {
  // HAZARD: before the first call of CUDA. A kernel that is launched for the first time would be loaded then, behind the receiver that waits for it.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const auto seeds = static_cast<uint64_t>(count > 1 ? std::atoi(words[1]) : 12);
  const bool there = gpu_is_there() && arena::start(size_t{4} << 30);
  if (there) stream = gpu_stream();
  memory = new post_memory;
  for (uint64_t seed = 0; seed < seeds; ++seed) all_posts(seed);
  if (!there) {
    std::fprintf(stderr, "no GPU, or no pinned memory: only the host's runs were compared\n");
    return ep::check::finish() == 0 ? 2 : 1;
  }
  void* other = gpu_stream();
  for (uint64_t seed = 0; seed < 2 * seeds; ++seed) {
    for (const traffic_way way : {traffic_way::gin, traffic_way::gin_lanes, traffic_way::endpoint, traffic_way::pr, traffic_way::pr_lanes}) traffic(way, seed, stream, other);
    values(seed, stream);
  }
  return ep::check::finish();
}
