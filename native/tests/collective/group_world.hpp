// A world of ranks as threads, each with its process group: what the tests of calls and of messages stand on.
#pragma once

#include <barrier>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "collective/group.hpp"
#include "ends.hpp"

namespace ep::group_world {

struct memory {
  std::vector<uint8_t> ordinary;
  uint8_t* data = nullptr;
  uint32_t segment = group_no_segment;
  uint64_t offset = 0;
  call_block block(uint64_t at, uint64_t bytes) const { return {data + at, bytes, segment, offset + at}; }
};

struct world;
constexpr uint64_t arena_bytes = 12u << 20;

struct member {
  world& in;
  int32_t rank;
  std::shared_ptr<collective_group> group;
  ends sink;
  uint64_t next_id = 1;
  uint64_t sequence = 0;
  uint64_t used = 0; // of the group memory of this rank

  memory make(uint64_t bytes, bool of_group) {
    memory made;
    if (of_group) {
      made.segment = 0;
      made.offset = used;
      made.data = group->allocation(0)->data() + used;
      used += (bytes + 63) / 64 * 64;
      EP_CHECK(used <= arena_bytes);
    } else {
      made.ordinary.resize(bytes + 1);
      made.data = made.ordinary.data();
    }
    return made;
  }

  std::unique_ptr<queued_call> call(op_kind kind, element_type dtype, uint64_t bytes, int32_t root = -1, reduce_op op = reduce_op::sum) {
    auto queued = std::make_unique<queued_call>();
    queued->call.sequence = ++sequence;
    queued->call.kind = kind;
    queued->call.dtype = dtype;
    queued->call.op = op;
    queued->call.root = root;
    queued->call.bytes = bytes;
    queued->timeout_ms = 20'000;
    queued->borrowed = true;
    return queued;
  }

  // Inline if it can be, else through the thread.
  outcome run(std::unique_ptr<queued_call> queued, bool attempt = true) {
    std::vector<call_block> targets = queued->call.outputs;
    if (attempt && group->try_now(*queued)) return {};
    const uint64_t id = next_id++;
    queued->operation_id = id;
    group->submit(std::move(queued));
    const outcome end = sink.wait(id);
    if (end.status == EP_STATUS_OK) EP_CHECK(group->collect(id, targets));
    return end;
  }
};

struct world {
  explicit world(int32_t size) : size(size), meet(size), handles(static_cast<size_t>(size)) {}
  int32_t size;
  std::barrier<> meet;
  std::vector<ep_segment_handle> handles;
};

inline void run_ranks(int32_t size, const std::function<void(member&)>& body) {
  world in(size);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      member self{in, rank, nullptr, {}};
      auto made = collective_group::create(self.sink, {.rank = rank, .size = size, .capacity = size, .nonce = 77, .ranks_on_host = size});
      EP_CHECK(made.ok());
      self.group = made.value();
      EP_CHECK(self.group->allocate(arena_bytes).ok());
      in.handles[static_cast<size_t>(rank)] = self.group->handle();
      in.meet.arrive_and_wait();
      for (int32_t peer = 0; peer < size; ++peer) {
        if (peer != rank) EP_CHECK(self.group->attach(peer, in.handles[static_cast<size_t>(peer)]).ok());
      }
      in.meet.arrive_and_wait();
      body(self);
      self.group->close(true);
    });
  }
  for (auto& thread : threads) thread.join();
}

// What rank r gives in element i of its block for rank j.
inline int32_t given(int32_t r, int32_t j, uint64_t i, uint64_t salt) { return static_cast<int32_t>((static_cast<uint64_t>(r) * 131 + static_cast<uint64_t>(j) * 17 + i * 7 + salt) % 1009); }

} // namespace ep::group_world
