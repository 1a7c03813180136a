// Rings, doorbells, phases, completions and counts of the software EFA, over their wraps; stores that are watched, and fences.
#include "efa_rig.hpp"

#include "core/device/fast.hpp"
#include "ep/device/registers.h"
#include "nic/efa/watched.hpp"

using namespace ep;
using namespace ep::test;

namespace {

// T3: phases of WQEs and completions over three and more rounds.
void phases() {
  for (const uint32_t depth : {4u, 16u, 4096u}) {
    const uint64_t posts = uint64_t{depth} * 3 + depth / 2 + 1;
    for (const uint32_t entry_bytes : {8u, 16u, 32u}) {
      if (depth == 4096 && entry_bytes != 16) continue;
      efa_queue_options shape;
      shape.depth = depth;
      shape.cq_depth = depth; // rounds of both
      shape.entry_bytes = entry_bytes;
      efa::soft_options options = stepped();
      options.engine.trace_events = 0;
      efa_pair world(depth, shape, options);
      uint64_t done = 0;
      for (uint64_t i = 0; i < posts; ++i) {
        world.a.put(world.a.wqe(world.write(0, 0, 8)));
        if ((i + 1) % 4 != 0 && i + 1 != posts) continue;
        world.a.bell();
        EP_CHECK(world.steps.run_all());
        for (const efa_completion& one : world.a.poll_all()) {
          EP_CHECK_EQ(one.status, EP_EFA_STATUS_OK);
          ++done;
        }
      }
      EP_CHECK_EQ(done, posts);
      EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), posts);
      EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{0});
    }
  }
  // A WQE of the round before is none of this round.
  efa_pair world(1, {.depth = 4});
  for (int i = 0; i < 4; ++i) world.a.post(world.write(0, 0, 8));
  EP_CHECK(world.steps.run_all());
  std::vector<uint8_t> stale = world.a.wqe(world.write(0, 0, 8));
  stale[3] ^= 1;
  world.a.put(stale);
  world.a.bell();
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(world.a.poll_all().back().status, EP_EFA_STATUS_LOCAL_QP_INTERNAL);
}

// Whoever rings for a slot that it did not write finds out, in every round.
void not_written() {
  for (const uint32_t before : {0u, 3u, 9u}) {
    efa_pair world(before + 1, {.depth = 4});
    for (uint32_t i = 0; i < before; ++i) {
      world.a.post(world.write(0, 0, 8));
      EP_CHECK(world.steps.run_all());
    }
    ++world.a.tail;
    world.a.bell();
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(world.a.poll_all().back().status, EP_EFA_STATUS_LOCAL_QP_INTERNAL);
    EP_CHECK_EQ(std::string(world.a_node.device->violations().at(0).field), "entry");
  }
}

// 16 bits of the count in a doorbell, or 32, over the wrap of either; and no more WQEs than there is room for.
void doorbells() {
  for (const bool narrow : {false, true}) {
    efa::soft_options options = stepped();
    options.engine.trace_events = 0;
    options.engine.payload_apart = false;
    efa_pair world(2, {.depth = 256, .cq_depth = 256}, options);
    for (uint32_t i = 0; i < 65536 / 256 + 2; ++i) {
      for (int k = 0; k < 256; ++k) world.a.put(world.a.wqe(world.write(0, 0, 0)));
      world.a.ring_to(narrow ? static_cast<uint16_t>(world.a.tail) : static_cast<uint32_t>(world.a.tail));
      while (world.a_node.device->poll(1)) {
      }
      EP_CHECK_EQ(world.a.poll_all().size(), size_t{256});
    }
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{0});
  }
  efa_pair world(3, {.depth = 8});
  for (int i = 0; i < 9; ++i) world.a.put(world.a.wqe(world.write(0, 0, 0)));
  world.a.bell();
  EP_CHECK(world.steps.run_all());
  const auto all = world.a_node.device->violations();
  EP_CHECK(!all.empty() && std::string(all[0].field) == "doorbell" && all[0].found == 9 && all[0].expected == 8);
  efa_pair upper(3);
  upper.a.put(upper.a.wqe(upper.write(0, 0, 0)));
  upper.a.ring_to(0x70001);
  EP_CHECK(upper.steps.run_all());
  EP_CHECK_EQ(upper.a_node.device->violations().at(0).found, uint64_t{0x70001});
  EP_CHECK_EQ(upper.a.poll_all().at(0).status, EP_EFA_STATUS_OK); // the low half is what counts
}

// T8: 31 bits, and what anybody else stores there is gone with the next tick (T9).
void counts() {
  efa_pair world(4);
  must(world.a_node.device->counter_set(world.a.counters[0], 0x7ffffffe));
  must(world.b_node.device->counter_set(world.b.counters[1], 0x7fffffff));
  EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{0x7ffffffe});
  const uint64_t written[] = {0x7fffffff, 0, 1};
  for (uint64_t i = 0; i < 3; ++i) {
    world.a.post(world.write(0, 0, 8));
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), written[i]);
    EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), i);
  }
  efa::store_release(*world.b.arrived, uint64_t{0});
  world.a.post(world.write(0, 0, 8));
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{3});
  efa::soft_options late = stepped();
  late.engine.first_count = 100;
  efa_pair other(4, {}, late);
  other.a.post(other.write(0, 0, 8));
  EP_CHECK(other.steps.run_all());
  EP_CHECK_EQ(efa_queue::count_of(other.b.arrived), uint64_t{101});
}

// T27's ground: completions of a queue that nobody polls.
void overrun() {
  for (const bool polled : {false, true}) {
    efa_pair world(5, {.depth = 16, .cq_depth = 4});
    if (!polled) must(world.a_node.device->cq_polled(world.a.cq, nullptr));
    size_t done = 0;
    for (int i = 0; i < 6; ++i) {
      world.a.post(world.write(0, 0, 8));
      EP_CHECK(world.steps.run_all());
      if (polled) done += world.a.poll_all().size();
    }
    dl::efa_event event;
    const bool told = must(world.a_node.device->poll_async(event));
    EP_CHECK_EQ(told, !polled);
    if (polled) {
      EP_CHECK_EQ(done, size_t{6});
      continue;
    }
    EP_CHECK(event.kind == dl::efa_event_kind::cq_error);
    EP_CHECK_EQ(std::string(world.a_node.device->violations().at(0).field), "completion queue");
    // The write itself has landed and is counted; the queue pair takes no more.
    EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{5});
  }
}

// Ids of 64 bits come back whole.
void wide_ids() {
  efa::soft_options options = stepped();
  options.engine.wide_ids = true;
  efa_pair world(6, {}, options);
  std::vector<uint8_t> bytes = world.a.wqe(world.write(0, 0, 8));
  for (int i = 0; i < 6; ++i) bytes[26 + i] = static_cast<uint8_t>(0x11 * (i + 1));
  world.a.put(bytes);
  world.a.bell();
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(world.a.poll_all().at(0).id, uint64_t{0x6655443322110000});
}

// ---- stores that are watched

efa::soft_options watching(uint64_t seed) {
  efa::soft_options options = stepped(seed);
  options.engine.watch_stores = true;
  return options;
}

struct no_wait {
  void point() const {}
};

// Posts as kernels do, by the hooks of a context.
template <class Ctx> void store_wqe(Ctx& ctx, efa_queue& queue, uint64_t number, const std::vector<uint8_t>& bytes) {
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    register_store(ctx, reinterpret_cast<uint64_t>(queue.slot(number)) + at, word);
  }
}
template <class Ctx> void store_bell(Ctx& ctx, efa_queue& queue, uint32_t value) { register_store(ctx, queue.endpoint.sq.doorbell, value); }

struct combining_outcome {
  uint64_t violations = 0;
  uint64_t landed = 0;
};

// Two WQEs by `writers` lanes, a doorbell by the first. `fences`: each writer's own, before the doorbell.
combining_outcome combined(uint64_t seed, bool each_fences, bool leader_fences, const char* faults = "") {
  efa_pair world(seed, {}, watching(seed));
  must(world.a_node.device->set_faults(faults));
  auto first = efa::watched(no_wait{}, world.steps, 1);
  auto second = efa::watched(no_wait{}, world.steps, 2);
  std::memset(world.a_node.data(), 0x42, 16);
  const auto one = world.a.wqe(world.write(0, 0, 8));
  ++world.a.tail;
  const auto two = world.a.wqe(world.write(8, 8, 8));
  ++world.a.tail;
  store_wqe(first, world.a, 0, one);
  store_wqe(second, world.a, 1, two);
  if (each_fences) register_fence(second);
  if (leader_fences) register_fence(first);
  store_bell(first, world.a, 2);
  EP_CHECK(world.steps.run_all());
  combining_outcome seen;
  seen.violations = world.a_node.device->counts().violations;
  seen.landed = efa_queue::count_of(world.b.arrived);
  if (seen.violations == 0) EP_CHECK_EQ(seen.landed, uint64_t{2});
  return seen;
}

// T28: a writer's own fence is what brings its WQE out; the leader's, or none, does not.
void fences() {
  uint64_t none = 0, only_leader = 0, all = 0, dropped = 0, leader_dropped = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    none += combined(seed, false, false).violations != 0;
    only_leader += combined(seed, false, true).violations != 0;
    all += combined(seed, true, true).violations != 0;
    dropped += combined(seed, true, true, "drop-fence writer=2").violations != 0;
    leader_dropped += combined(seed, true, true, "drop-fence writer=1 count=1").violations != 0;
  }
  EP_CHECK_EQ(all, uint64_t{0});
  EP_CHECK(none > 20);
  EP_CHECK(only_leader > 10);
  EP_CHECK(dropped > 10);
  EP_CHECK(leader_dropped > 10);
}

// What a device that looks into memory cannot see: more than max_batch, repeats, steps back, writes to what is not fetched yet.
void exact_doorbells() {
  {
    efa_pair world(1, {.depth = 64}, watching(1));
    auto ctx = efa::watched(no_wait{}, world.steps, 1);
    const auto post = [&](uint32_t count) {
      for (uint32_t i = 0; i < count; ++i) {
        store_wqe(ctx, world.a, world.a.tail, world.a.wqe(world.write(0, 0, 8)));
        ++world.a.tail;
      }
      register_fence(ctx);
      store_bell(ctx, world.a, static_cast<uint32_t>(world.a.tail));
      register_fence(ctx);
    };
    post(world.a.endpoint.sq.max_batch);
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{0});
    store_bell(ctx, world.a, static_cast<uint32_t>(world.a.tail));
    register_fence(ctx);
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{1});
    store_bell(ctx, world.a, static_cast<uint32_t>(world.a.tail) - 3);
    register_fence(ctx);
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{2});
    // A slot that was rung and is not fetched.
    store_wqe(ctx, world.a, world.a.tail - 2, world.a.wqe(world.write(0, 0, 8)));
    register_fence(ctx);
    const auto all = world.a_node.device->violations();
    EP_CHECK(all.size() >= 3 && std::string(all[2].field) == "entry" && all[2].slot == 14 && all[2].writer == 1);
    EP_CHECK(world.steps.run_all());
    post(world.a.endpoint.sq.max_batch + 1);
    EP_CHECK_EQ(world.a_node.device->violations().back().found, uint64_t{17});
    EP_CHECK_EQ(world.a_node.device->violations().back().expected, uint64_t{16});
  }
  // Doorbells leave in the order of one poster, whatever else happens; WQEs torn by lines that leave early are still whole in the end.
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    efa_pair world(seed, {.depth = 8, .inline_write = true}, watching(seed));
    auto ctx = efa::watched(no_wait{}, world.steps, 7);
    for (uint64_t i = 0; i < 20; ++i) {
      const uint64_t value = 0x4400 + i;
      const auto bytes = world.a.inline_wqe(world.write(0, i * 8, 8), &value);
      for (size_t at = 0; at < bytes.size(); at += 8) {
        uint64_t word;
        std::memcpy(&word, bytes.data() + at, 8);
        ctx.register_store64(reinterpret_cast<uint64_t>(world.a.slot(i)) + at, word);
        if (seed % 2 == 0) world.steps.step();
      }
      register_fence(ctx);
      store_bell(ctx, world.a, static_cast<uint32_t>(++world.a.tail));
      if (i % 3 == 2) {
        EP_CHECK(world.steps.run_all());
        world.a.poll_all();
      }
    }
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{0});
    for (uint64_t i = 0; i < 20; ++i) EP_CHECK_EQ(world.b_node.word(i * 8), 0x4400 + i);
  }
}

// ---- faults

void scripted() {
  { // T7's ground: a stalled device, then it goes on
    efa_pair world(1);
    must(world.a_node.device->set_faults("hold stage=fetch skip=1 count=1"));
    world.a.post(world.write(0, 0, 8));
    world.a.post(world.write(0, 8, 8));
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{1});
    world.a_node.device->release_held();
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{2});
  }
  { // T30's ground: a payload that is read late
    efa_pair world(2);
    must(world.a_node.device->set_faults("hold stage=payload count=1"));
    std::memset(world.a_node.data(), 1, 8);
    world.a.post(world.write(0, 0, 8));
    EP_CHECK(world.steps.run_all());
    std::memset(world.a_node.data(), 2, 8);
    world.a_node.device->release_held();
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(world.b_node.word(0), uint64_t{0x0202020202020202});
  }
  { // a count that lags its completion, by the clock
    efa_pair world(3);
    must(world.a_node.device->set_faults("delay stage=count ns=5000\ncut bytes=8"));
    world.a.post(world.write(0, 0, 64));
    bool lagged = false;
    efa_completion one;
    while (world.steps.step()) {
      if (world.a.poll(one)) lagged = efa_queue::count_of(world.a.written) == 0;
    }
    EP_CHECK(lagged && world.steps.now_ns() > 5000);
    uint64_t pieces = 0;
    for (const auto& event : world.a_node.device->trace()) pieces += event.kind == efa::trace_kind::event && event.what == efa::stage::land ? 1 : 0;
    EP_CHECK_EQ(pieces, uint64_t{8});
  }
  { // doorbells lost and repeated
    efa_pair world(4);
    must(world.a_node.device->set_faults("lose-doorbell count=1\nrepeat-doorbell"));
    world.a.post(world.write(0, 0, 8));
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{0});
    world.a.post(world.write(0, 8, 8));
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{2});
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{0});
  }
}

} // namespace

int main() {
  phases();
  not_written();
  doorbells();
  counts();
  overrun();
  wide_ids();
  fences();
  exact_doorbells();
  scripted();
  return check::finish();
}
