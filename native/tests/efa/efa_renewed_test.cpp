// A rank of three dies, and another process comes in its place: all ranks make their endpoints, keys and counters anew, and keep their memories, words and what kernels were given. What
// the dead one's NIC still does comes to nothing. Ranks of this thread, each with a software NIC; what stays of the dead one's is held back by a fault.
#include <algorithm>
#include <cstring>
#include <utility>

#include "device/fast.hpp"
#include "ep/device/efa_endpoint.h"
#include "soft_ranks.hpp"

namespace {

using namespace ep::test;
using ep::efa::host_request;
using ep::efa::request_state;
using ep::nic::efa::soft_device;

constexpr int32_t world_size = 3;
constexpr int32_t victim = 2;
constexpr uint64_t part_bytes = 8192;
constexpr uint64_t slots = 4;

struct world {
  efa_ranks ranks;
  efa_side dead;

  explicit world(uint64_t seed)
      : ranks(world_size, {}, part_bytes, slots,
              [seed] {
                ep::nic::efa::soft_options soft;
                soft.engine.seed = seed;
                soft.engine.fragment_bytes = 16;
                return std::make_unique<ep::nic::efa::soft_driver>(soft);
              },
              hooks_of) {}
  ~world() {
    if (dead.nic) dead.nic->stop();
    if (dead.context) dead.context->leave(true);
  }

  soft_device& device(const efa_side& of) const { return dynamic_cast<soft_device&>(of.nic->endpoints().nic()); }

  // Its NIC goes on with what it had taken over.
  void die() {
    if (dead.nic) dead.nic->stop();
    if (dead.context) dead.context->leave(true);
    dead = std::exchange(ranks.sides[victim], {});
  }

  // Without `anew` the protocol is wrong: who stays keeps the endpoints, keys and counters that the dead one knew. `singly`: parts are told one by one, each twice, the newcomer's first.
  void replace(bool anew = true, bool singly = false) {
    efa_side& comer = ranks.sides[victim];
    comer.context = must(ep::rank_context::create(victim, world_size, world_size));
    (void)must(comer.context->connect({ranks.sides[0].context->handle(), ranks.sides[1].context->handle(), comer.context->handle()}));
    auto driver = std::make_unique<ep::nic::efa::soft_driver>(ep::nic::efa::soft_options{});
    auto opened = must(ep::efa::device_open(*driver, ""));
    ep::efa::emulator_hooks hooks = hooks_of(*opened);
    comer.nic = must(ep::efa::rank_nic::create(comer.context, std::move(driver), std::move(opened), {}, std::move(hooks)));
    comer.memory = must(ep::symmetric_memory::create(comer.context, part_bytes, slots));
    (void)must(comer.nic->add_memory(*comer.memory));
    for (const int32_t rank : {0, 1}) {
      if (anew) (void)must(ranks.sides[static_cast<size_t>(rank)].nic->renew());
    }
    std::vector<ep::efa::rank_address> addresses;
    std::vector<std::vector<uint8_t>> parts;
    for (const efa_side& one : ranks.sides) {
      addresses.push_back(one.nic->endpoints().address());
      parts.push_back(must(one.nic->part(*one.memory)));
    }
    for (efa_side& one : ranks.sides) {
      if (!anew && &one != &comer) {
        // Or what the newcomer sends would be of an unknown sender.
        (void)must(one.nic->endpoints().nic().insert_address(one.nic->endpoints().first(), addresses[victim].data));
        continue;
      }
      (void)must(one.nic->endpoints().connect(addresses));
      if (!singly) (void)must(one.nic->route(*one.memory, parts));
    }
    if (singly) map_singly(parts);
  }

  void map_singly(const std::vector<std::vector<uint8_t>>& parts) {
    for (efa_side& one : ranks.sides) {
      if (&one == &ranks.sides[victim]) {
        std::vector<std::vector<uint8_t>> own(world_size);
        own[victim] = parts[victim];
        (void)must(one.nic->route(*one.memory, own));
      }
      for (int32_t rank = world_size - 1; rank >= 0; --rank) {
        const auto self = static_cast<int32_t>(&one - ranks.sides.data());
        if (rank != self) EP_CHECK(!one.nic->post(*one.memory, ranks.write(self, rank, 4096, 0, 8)).ok());
        EP_CHECK(!one.nic->replace_part(*one.memory, rank, std::vector<uint8_t>(7)).ok());
        for (int i = 0; i < 2; ++i) (void)must(one.nic->replace_part(*one.memory, rank, parts[static_cast<size_t>(rank)]));
      }
      EP_CHECK(!one.nic->replace_part(*one.memory, world_size, parts[0]).ok());
    }
  }

  bool host_puts(int32_t from, int32_t to, uint64_t at, uint8_t value, uint64_t slot, uint64_t add) {
    ranks.sides[static_cast<size_t>(from)].memory->own_data()[4096 + at] = value;
    host_request put = ranks.write(from, to, 4096 + at, at, 1);
    put.signals = true;
    put.slot = slot;
    put.add = add;
    return ranks.ended(from, to, ranks.post(from, put)) == request_state::done;
  }
  // By a queue pair of kernels, through the handle that was made when the memory was allocated.
  bool kernel_puts(int32_t from, int32_t to, uint64_t at, uint8_t value, uint32_t key, const ep_memory_handle& handle) {
    const efa_side& one = ranks.sides[static_cast<size_t>(from)];
    one.memory->own_data()[4096 + at] = value;
    const ep::kernel_environment environment{one.context->waits(nullptr, ep::deadline_after(20'000))};
    ep::fast_context context{environment, 0, 1, nullptr};
    const ep::thread_coop<ep::fast_context> alone{context};
    const ep::efa_endpoint endpoint{handle, key};
    ep_kernel_status status{};
    return endpoint.put_rows(context, alone, to, at, one.memory->own_data() + 4096 + at, 1, 1, 1, false, 1 + key, 1, &status) && endpoint.quiet(context, alone, to, &status);
  }

  // Everybody to everybody: by the host, a count and a cell; by kernels. Nothing is missing, and nothing comes twice.
  void all_puts(uint8_t value, const std::vector<ep_memory_handle>& handles) {
    uint64_t before[world_size][slots];
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (uint64_t slot = 0; slot < slots; ++slot) before[rank][slot] = ranks.signal(rank, slot);
    }
    for (int32_t from = 0; from < world_size; ++from) {
      for (int32_t to = 0; to < world_size; ++to) {
        const auto made = static_cast<uint8_t>(value + from * 16 + to * 4);
        const uint64_t at = 64 * static_cast<uint64_t>(from);
        EP_CHECK(host_puts(from, to, at, made, 0, 1));
        EP_CHECK(host_puts(from, to, at + 1, made, 3, 1000));
        for (const uint32_t key : {0u, 1u}) EP_CHECK(kernel_puts(from, to, at + 2 + key, made, key, handles[static_cast<size_t>(from)]));
        for (uint64_t i = 0; i < 4; ++i) EP_CHECK_EQ(int{ranks.sides[static_cast<size_t>(to)].memory->own_data()[at + i]}, int{made});
      }
    }
    const uint64_t each[slots] = {1, 1, 1, 1000};
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (uint64_t slot = 0; slot < slots; ++slot) EP_CHECK(soon([&] { return ranks.signal(rank, slot) - before[rank][slot] == each[slot] * world_size; }));
    }
  }
  std::vector<ep_memory_handle> handles() const {
    std::vector<ep_memory_handle> all;
    for (const efa_side& one : ranks.sides) all.push_back(one.memory->device_handle());
    return all;
  }
};

// Thrice, so that a newcomer's successor comes, too. Requests that had not ended are told apart from those that had; counters and endpoints are all given back.
void test_renewed(uint64_t seed, bool singly) {
  world w(seed);
  std::vector<ep_memory_handle> handles = w.handles();
  const uint32_t left = w.ranks.sides[0].nic->endpoints().signal_slots_left();
  w.all_puts(1, handles);
  for (uint8_t round = 1; round < 4; ++round) {
    const uint64_t counted = w.ranks.signal(0, 0);
    const uint64_t told = w.ranks.signal(0, 3);
    (void)must(w.device(w.ranks.sides[0]).set_faults("hold stage=land count=1"));
    const uint64_t done = w.ranks.sides[0].nic->accepted(victim);
    const uint64_t lost = w.ranks.post(0, w.ranks.write(0, victim, 4096, 3000, 8));
    EP_CHECK(soon([&] { return w.device(w.ranks.sides[0]).counts().held == round; }));
    const uint64_t unseen = w.ranks.signal(0, 1);
    EP_CHECK(w.host_puts(1, 0, 9, 1, 1, 1)); // has landed, and nobody has looked
    w.die();
    w.replace(true, singly);
    EP_CHECK_EQ(w.ranks.signal(0, 1), unseen + 1);
    w.device(w.ranks.sides[0]).release_held();
    (void)must(w.device(w.ranks.sides[0]).set_faults(""));
    EP_CHECK(w.ranks.sides[0].nic->look(victim, done) == request_state::done);
    EP_CHECK(w.ranks.sides[0].nic->look(victim, lost) == request_state::renewed);
    EP_CHECK_EQ(w.ranks.sides[0].nic->failure_of(victim).status, uint32_t{EP_STATUS_OK});
    EP_CHECK_EQ(w.ranks.sides[0].nic->kernel_failure().status, uint32_t{EP_STATUS_OK});
    EP_CHECK_EQ(w.ranks.signal(0, 0), counted); // who stays keeps its words
    EP_CHECK_EQ(w.ranks.signal(0, 3), told);
    EP_CHECK_EQ(w.ranks.signal(victim, 0), 0u);
    EP_CHECK_EQ(w.ranks.sides[0].nic->endpoints().signal_slots_left(), left);
    handles[victim] = w.ranks.sides[victim].memory->device_handle();
    for (int i = 0; i < 2; ++i) w.all_puts(static_cast<uint8_t>(20 * round + i), handles);
    for (uint64_t i = 0; i < 8; ++i) EP_CHECK_EQ(w.ranks.sides[victim].memory->own_data()[3000 + i], 0);
  }
  EP_CHECK_EQ(violations(w.ranks), 0u);
}

// A write of the dead one, its tick, or a cell of its, comes when its successor works with the others. By the wrong protocol it lands where the successor's does, and counts.
void test_straggler(const char* left, uint64_t add, bool right) {
  world w(1);
  std::vector<ep_memory_handle> handles = w.handles();
  EP_CHECK(w.host_puts(victim, 0, 5, 11, 1, add));
  EP_CHECK(soon([&] { return w.ranks.signal(0, 1) == add; }));
  soft_device& held = w.device(w.ranks.sides[victim]);
  (void)must(held.set_faults(left));
  w.ranks.sides[victim].memory->own_data()[4096] = 42;
  host_request late = w.ranks.write(victim, 0, 4096, 7, 1);
  late.signals = true;
  late.slot = 1;
  late.add = add;
  const uint64_t number = w.ranks.post(victim, late);
  (void)soon([&] { return held.counts().held == 1 || w.ranks.sides[victim].nic->look(0, number) == request_state::failed; });
  EP_CHECK_EQ(held.counts().held, 1u);
  w.die();
  w.replace(right);
  EP_CHECK(w.host_puts(victim, 0, 6, 12, 1, 1));
  EP_CHECK(soon([&] { return w.ranks.signal(0, 1) == add + 1; }));
  const uint64_t before = w.device(w.dead).counts().requests;
  w.device(w.dead).release_held();
  const auto landed = [&] { return w.ranks.signal(0, 1) != add + 1; };
  const int64_t until = ep::clock_now_ns() + (right ? 100'000'000 : 30'000'000'000);
  while (ep::clock_now_ns() < until && !landed()) {
    (void)w.dead.nic->look(0, number); // its cells go out by that
    sched_yield();
  }
  EP_CHECK_EQ(landed(), !right);
  EP_CHECK(w.device(w.dead).counts().requests >= before);
  if (std::strstr(left, "land") != nullptr && add == 1) EP_CHECK_EQ(w.ranks.sides[0].memory->own_data()[7] == 42, !right);
  if (right) {
    handles[victim] = w.ranks.sides[victim].memory->device_handle();
    w.all_puts(50, handles);
  }
}

// Nobody comes into the second of two places: whoever posts there is told, and the others reach each other.
void test_empty_place() {
  world w(1);
  const efa_side& zero = w.ranks.sides[0];
  (void)must(zero.nic->renew());
  EP_CHECK(!zero.nic->post(*zero.memory, w.ranks.write(0, 0, 4096, 0, 8)).ok());
  (void)must(w.ranks.sides[1].nic->renew());
  std::vector<ep::efa::rank_address> addresses{zero.nic->endpoints().address(), w.ranks.sides[1].nic->endpoints().address(), {}};
  addresses[victim].rank = -1;
  const std::vector<std::vector<uint8_t>> parts{must(zero.nic->part(*zero.memory)), must(w.ranks.sides[1].nic->part(*w.ranks.sides[1].memory)), {}};
  for (const int32_t rank : {0, 1}) {
    const efa_side& one = w.ranks.sides[static_cast<size_t>(rank)];
    (void)must(one.nic->endpoints().connect(addresses));
    (void)must(one.nic->route(*one.memory, parts));
  }
  EP_CHECK(w.host_puts(0, 1, 3, 9, 0, 1));
  EP_CHECK(w.host_puts(1, 0, 3, 9, 0, 7));
  const auto refused = zero.nic->post(*zero.memory, w.ranks.write(0, victim, 4096, 0, 8));
  EP_CHECK(!refused.ok());
  EP_CHECK_EQ(refused.why().status, uint32_t{EP_STATUS_PEER_LOST});
}

} // namespace

int main() {
  for (const uint64_t seed : {1, 2, 3}) {
    for (const bool singly : {false, true}) test_renewed(seed, singly);
  }
  for (const bool right : {true, false}) {
    test_straggler("hold stage=land count=1", 1, right);
    test_straggler("hold stage=tick count=1", 1, right);
    test_straggler("hold stage=land count=1", 9, right);
  }
  test_empty_place();
  return ep::check::finish();
}
