// The hostile engine: what it promises holds under every seed, and what it does not promise is really broken by it.
#include "hostile/engine.hpp"

#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "check.hpp"
#include "ep/device/endpoint.h"
#include "launch.hpp"

namespace {

using namespace ep;

// Remembers how each operation ended.
class recording_sink final : public completion_sink {
 public:
  void complete(uint64_t operation_id, const outcome& end) override {
    const std::lock_guard lock(mutex_);
    ended_[operation_id] = end.status;
  }
  uint32_t wait(uint64_t operation_id) {
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        const auto found = ended_.find(operation_id);
        if (found != ended_.end()) return found->second;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, uint32_t> ended_;
};

// Two ranks of this process, made and left by the calling thread, with a memory each.
struct pair_world {
  std::shared_ptr<rank_context> contexts[2];
  std::shared_ptr<symmetric_memory> memories[2];

  pair_world(uint64_t bytes, uint64_t slots) {
    std::vector<ep_segment_handle> controls;
    std::vector<ep_segment_handle> parts;
    for (int32_t rank = 0; rank < 2; ++rank) {
      auto context = rank_context::create(rank, 2, 2);
      contexts[rank] = context.value();
      controls.push_back(contexts[rank]->handle());
    }
    for (auto& context : contexts) EP_CHECK(context->connect(controls).ok());
    for (int rank = 0; rank < 2; ++rank) {
      auto memory = symmetric_memory::create(contexts[rank], bytes, slots);
      memories[rank] = memory.value();
      parts.push_back(memories[rank]->handle());
    }
    for (auto& memory : memories) EP_CHECK(memory->connect(parts).ok());
  }
  ~pair_world() {
    for (auto& context : contexts) context->leave(true);
  }
  uint64_t signal(uint64_t slot) const { return std::atomic_ref<uint64_t>(*memories[1]->signal(1, slot)).load(std::memory_order_acquire); }
};

std::unique_ptr<hostile_engine> engine_of(std::shared_ptr<rank_context> context, completion_sink& sink, const hostile_options& options) {
  return std::move(hostile_engine::create(std::move(context), sink, options).value());
}

template <class Kernel> void run_blocks(uint32_t blocks, const kernel_environment& environment, Kernel&& kernel) {
  EP_CHECK(fast_run(blocks, environment, kernel).ok());
}

hostile_request put_of(const pair_world& world, uint64_t from, uint64_t to, uint64_t bytes, uint64_t slot, uint64_t operation) {
  hostile_request request;
  request.operation_id = operation;
  request.memory = world.memories[0];
  request.keep = world.memories[0];
  request.peer = 1;
  request.src = reinterpret_cast<uint64_t>(world.memories[0]->data(0) + from);
  request.src_stride = bytes;
  request.row_bytes = bytes;
  request.rows = 1;
  request.dst_offset = to;
  request.slot = slot;
  request.add = 1;
  return request;
}

void signal_follows_its_own_bytes(uint64_t seed) {
  constexpr uint64_t puts = 64;
  constexpr uint64_t bytes = 700;
  pair_world world(2 * puts * bytes, puts + 1);
  recording_sink sink;
  const auto engine = engine_of(world.contexts[0], sink, {seed, 300'000, 6, 16});
  for (uint64_t i = 0; i < puts * bytes; ++i) world.memories[0]->data(0)[i] = static_cast<uint8_t>(i * 7 + seed);
  for (uint64_t i = 0; i < puts; ++i) engine->post(put_of(world, i * bytes, (puts + i) * bytes, bytes, i, i + 1));
  uint64_t pending = puts;
  std::vector<bool> seen(puts);
  while (pending != 0) {
    for (uint64_t i = 0; i < puts; ++i) {
      if (seen[i] || world.signal(i) == 0) continue;
      EP_CHECK(std::memcmp(world.memories[1]->data(1) + (puts + i) * bytes, world.memories[0]->data(0) + i * bytes, bytes) == 0);
      seen[i] = true;
      --pending;
    }
  }
  for (uint64_t i = 0; i < puts; ++i) EP_CHECK_EQ(sink.wait(i + 1), uint32_t{EP_STATUS_OK});
  const hostile_counts counts = engine->counts();
  EP_CHECK_EQ(counts.landed, puts);
  EP_CHECK(counts.pieces > puts);
  EP_CHECK(counts.overtakes > puts / 4); // an engine that delivers in order would be no test of anything
}

void flush_releases_what_is_held_back() {
  pair_world world(4096, 4);
  recording_sink sink;
  const auto engine = engine_of(world.contexts[0], sink, {5, 3'600'000'000'000, 6, 16});
  for (uint64_t i = 0; i < 20; ++i) engine->post(put_of(world, 0, 2048, 100, 0, i + 1));
  EP_CHECK(world.signal(0) < 20);
  engine->flush(100, std::make_shared<cancel_flag>(), 1, no_deadline);
  EP_CHECK_EQ(sink.wait(100), uint32_t{EP_STATUS_OK});
  EP_CHECK_EQ(world.signal(0), uint64_t{20});
  // Another peer's flush releases nothing, and ends at its own time or by its cancel flag.
  engine->post(put_of(world, 0, 2048, 100, 1, 50));
  engine->flush(101, std::make_shared<cancel_flag>(), 0, no_deadline);
  EP_CHECK_EQ(sink.wait(101), uint32_t{EP_STATUS_OK});
  EP_CHECK_EQ(world.signal(1), uint64_t{0});
}

void stopping_ends_everything() {
  pair_world world(4096, 4);
  recording_sink sink;
  {
    const auto engine = engine_of(world.contexts[0], sink, {6, 3'600'000'000'000, 6, 16});
    for (uint64_t i = 0; i < 8; ++i) engine->post(put_of(world, 0, 2048, 100, 0, i + 1));
  }
  uint64_t landed = 0;
  for (uint64_t i = 0; i < 8; ++i) landed += sink.wait(i + 1) == EP_STATUS_OK ? 1 : 0;
  EP_CHECK_EQ(landed, world.signal(0)); // each says truly whether it has landed
}

// Kernels: more blocks than the ring has entries, strided rows, and a request that a correct kernel would not post.
void kernels_post_through_the_ring(uint64_t seed) {
  constexpr uint64_t rows = 5;
  constexpr uint64_t row_bytes = 24;
  constexpr uint64_t stride = 40;
  constexpr uint32_t blocks = 4;
  constexpr uint64_t rounds = 32;
  pair_world world(1 << 16, 2);
  recording_sink sink;
  const auto engine = engine_of(world.contexts[0], sink, {seed, 100'000, 4, 4});
  engine->attach(*world.memories[0]);
  const ep_memory_handle handle = world.memories[0]->device_handle();
  EP_CHECK_EQ(handle.header.kind, EP_MEMORY_PROXY);
  EP_CHECK_EQ(reinterpret_cast<const ep_peer_view*>(handle.peers)[1].data, uint64_t{0});
  uint8_t* source = world.memories[0]->data(0);
  for (uint64_t i = 0; i < stride * rows * blocks * rounds && i < (1 << 16); ++i) source[i] = static_cast<uint8_t>(i * 13 + 1);
  const kernel_environment environment{world.contexts[0]->waits(nullptr, no_deadline)};
  ep_kernel_status status{};
  run_blocks(blocks, environment, [&](fast_context& context) {
    const proxy_endpoint endpoint{handle};
    const block_coop<fast_context> coop{context};
    bool ok = true;
    for (uint64_t round = 0; round < rounds; ++round) {
      const uint64_t at = round * blocks + context.block();
      ok = ok && endpoint.put_rows(context, coop, 1, at * rows * row_bytes, source + at * rows * stride, stride, row_bytes, rows, false, 0, 1, &status);
    }
    return ok;
  });
  EP_CHECK_EQ(status.status, uint32_t{EP_STATUS_OK});
  const uint64_t posted = blocks * rounds;
  const wait_result done = wait_word(environment.waits, &reinterpret_cast<ep_proxy_ring*>(handle.proxy)->completed, comparison::ge, posted, any_rank);
  EP_CHECK_EQ(done.status, uint32_t{EP_STATUS_OK});
  EP_CHECK_EQ(world.signal(0), posted);
  bool same = true;
  for (uint64_t row = 0; row < posted * rows; ++row) {
    same = same && std::memcmp(world.memories[1]->data(1) + row * row_bytes, source + row * stride, row_bytes) == 0;
  }
  EP_CHECK(same);
  EP_CHECK_EQ(engine->violation(), std::string());

  run_blocks(1, environment, [&](fast_context& context) {
    const proxy_endpoint endpoint{handle};
    const block_coop<fast_context> coop{context};
    return endpoint.put_rows(context, coop, 1, (1 << 16) - 8, source, 16, 16, 1, false, 0, 1, &status);
  });
  wait_word(environment.waits, &reinterpret_cast<ep_proxy_ring*>(handle.proxy)->completed, comparison::ge, posted + 1, any_rank);
  EP_CHECK(engine->violation().find("ends beyond the memory") != std::string::npos);
  EP_CHECK_EQ(world.signal(0), posted);
}

// A source may be overwritten once `completed` has passed its request: a bare count of what has landed would pass too early.
void completed_is_a_prefix(uint64_t seed) {
  constexpr uint64_t requests = 64;
  constexpr uint64_t bytes = 200;
  pair_world world(requests * bytes, 1);
  recording_sink sink;
  const auto engine = engine_of(world.contexts[0], sink, {seed, 200'000, 4, requests});
  engine->attach(*world.memories[0]);
  const ep_memory_handle handle = world.memories[0]->device_handle();
  uint8_t* source = world.memories[0]->data(0);
  for (uint64_t i = 0; i < requests * bytes; ++i) source[i] = static_cast<uint8_t>(i * 11 + 3);
  const std::vector<uint8_t> original(source, source + requests * bytes);
  const kernel_environment environment{world.contexts[0]->waits(nullptr, no_deadline)};
  ep_kernel_status status{};
  run_blocks(1, environment, [&](fast_context& context) {
    const proxy_endpoint endpoint{handle};
    const block_coop<fast_context> coop{context};
    for (uint64_t i = 0; i < requests; ++i) {
      endpoint.put_rows(context, coop, 1, i * bytes, source + i * bytes, bytes, bytes, 1, false, 0, 1, &status);
    }
    return true;
  });
  for (uint64_t i = 0; i < requests; ++i) {
    wait_word(environment.waits, &reinterpret_cast<ep_proxy_ring*>(handle.proxy)->completed, comparison::ge, i + 1, any_rank);
    std::memset(source + i * bytes, 0, bytes);
  }
  EP_CHECK_EQ(world.signal(0), requests);
  EP_CHECK(std::memcmp(world.memories[1]->data(1), original.data(), original.size()) == 0);
}

// A kernel whose wait for room is cut off must not leave a hole in the ring behind which everything waits for ever.
void a_producer_that_gives_up_leaves_no_hole() {
  pair_world world(4096, 2);
  recording_sink sink;
  const auto engine = engine_of(world.contexts[0], sink, {9, 0, 1, 2});
  engine->attach(*world.memories[0]);
  const ep_memory_handle handle = world.memories[0]->device_handle();
  std::atomic<uint32_t> cancelled{1};
  const kernel_environment cut_off{world.contexts[0]->waits(&cancelled, no_deadline)};
  ep_kernel_status status{};
  uint64_t sent = 0;
  run_blocks(1, cut_off, [&](fast_context& context) {
    const proxy_endpoint endpoint{handle};
    const block_coop<fast_context> coop{context};
    for (int i = 0; i < 2000; ++i) sent += endpoint.signal(context, coop, 1, 0, 1, &status) ? 1 : 0;
    return true;
  });
  engine->flush(1, std::make_shared<cancel_flag>(), 1, no_deadline);
  EP_CHECK_EQ(sink.wait(1), uint32_t{EP_STATUS_OK});
  EP_CHECK_EQ(world.signal(0), sent);
  EP_CHECK_EQ(std::atomic_ref<uint64_t>(reinterpret_cast<ep_proxy_ring*>(handle.proxy)->completed).load(), sent);
}

// Nobody takes requests any more: the wait for room ends by deadline or cancellation. That a peer died meanwhile has nothing to do with it.
void a_full_queue_is_this_ranks_own() {
  pair_world world(4096, 2);
  ep_proxy_request entries[2]{};
  ep_proxy_ring ring{};
  ring.entries = reinterpret_cast<uint64_t>(entries);
  ring.capacity = 2;
  world.memories[0]->use_proxy(std::shared_ptr<ep_proxy_ring>(&ring, [](ep_proxy_ring*) {}));
  world.contexts[1]->leave(false);
  EP_CHECK_EQ(world.contexts[0]->life(1), unsigned{EP_LIFE_DEAD});
  const ep_memory_handle handle = world.memories[0]->device_handle();
  const auto signals = [&](int count, const std::atomic<uint32_t>& cancel, double timeout_ms) {
    ep_kernel_status status{};
    const kernel_environment environment{world.contexts[0]->waits(&cancel, deadline_after(timeout_ms))};
    run_blocks(1, environment, [&](fast_context& context) {
      const proxy_endpoint endpoint{handle};
      bool ok = true;
      for (int i = 0; i < count; ++i) ok = ok && endpoint.signal(context, block_coop<fast_context>{context}, 1, 0, 1, &status);
      return ok;
    });
    return status;
  };
  std::atomic<uint32_t> cancel{0};
  EP_CHECK_EQ(signals(2, cancel, -1).status, uint32_t{EP_STATUS_OK});
  const ep_kernel_status late = signals(1, cancel, 20);
  EP_CHECK_EQ(late.status, uint32_t{EP_STATUS_TIMEOUT});
  EP_CHECK_EQ(late.stage, EP_STAGE_ROOM);
  EP_CHECK_EQ(late.rank, 0);
  cancel = 1;
  EP_CHECK_EQ(signals(1, cancel, -1).status, uint32_t{EP_STATUS_ABORTED});
  EP_CHECK_EQ(ring.tail, uint64_t{2}); // whoever gave up took no number
}

// An engine that has stopped accepts nothing: kernels hear of it, also those that wait for room, and no number is taken. What was accepted and is lost shows in
// `completed`.
void a_stopped_engine_refuses() {
  pair_world world(4096, 2);
  recording_sink sink;
  hostile_options options;
  options.seed = 3;
  options.max_delay_ns = 50'000'000'000; // nothing lands by itself
  options.ring_capacity = 2;
  auto engine = engine_of(world.contexts[0], sink, options);
  engine->attach(*world.memories[0]);
  const ep_memory_handle handle = world.memories[0]->device_handle();
  const auto& ring = *reinterpret_cast<const ep_proxy_ring*>(handle.proxy);
  const kernel_environment environment{world.contexts[0]->waits(nullptr, no_deadline)};
  const auto signals = [&](ep_kernel_status& status) {
    uint64_t accepted = 0;
    run_blocks(1, environment, [&](fast_context& context) {
      while (accepted < 1'000'000 && proxy_endpoint{handle}.signal(context, block_coop<fast_context>{context}, 1, 0, 1, &status)) ++accepted;
    });
    return accepted;
  };
  ep_kernel_status running{};
  uint64_t accepted = 0;
  std::thread kernel([&] { accepted = signals(running); });
  while (std::atomic_ref<uint64_t>(const_cast<uint64_t&>(ring.tail)).load(std::memory_order_acquire) == 0) std::this_thread::yield();
  engine.reset();
  kernel.join();
  EP_CHECK_EQ(running.status, uint32_t{EP_STATUS_CLOSED});
  EP_CHECK_EQ(running.stage, EP_STAGE_ROOM);
  EP_CHECK(accepted >= 1);
  EP_CHECK_EQ(ring.tail, accepted | EP_PROXY_STOPPED);
  EP_CHECK_EQ(ring.completed, EP_PROXY_LOST);
  EP_CHECK_EQ(world.signal(0), uint64_t{0});
  ep_kernel_status late{};
  EP_CHECK_EQ(signals(late), uint64_t{0});
  EP_CHECK_EQ(late.status, uint32_t{EP_STATUS_CLOSED});
  EP_CHECK_EQ(ring.tail, accepted | EP_PROXY_STOPPED);
}

} // namespace

int main() {
  for (uint64_t seed = 1; seed <= 20; ++seed) signal_follows_its_own_bytes(seed);
  flush_releases_what_is_held_back();
  stopping_ends_everything();
  for (uint64_t seed = 1; seed <= 10; ++seed) kernels_post_through_the_ring(seed);
  for (uint64_t seed = 1; seed <= 5; ++seed) completed_is_a_prefix(seed);
  a_producer_that_gives_up_leaves_no_hole();
  a_full_queue_is_this_ranks_own();
  a_stopped_engine_refuses();
  return ep::check::finish();
}
