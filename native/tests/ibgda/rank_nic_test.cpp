// A rank's NIC as a transport uses it: requests of the host, memories and sources that come and go. Two ranks of this thread, each with a software NIC.
#include "core/ibgda/rank_nic.hpp"

#include <sched.h>

#include <cstring>
#include <thread>
#include <utility>

#include "../check.hpp"
#include "ep/abi/dispatch.h"
#include "nic/mlx5/soft_device.hpp"

namespace {

using ep::ibgda::host_request;
using ep::ibgda::rank_nic;
using ep::ibgda::request_state;

template <class Value> Value must(ep::result<Value> got) {
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

constexpr uint64_t part_bytes = 8192;
constexpr uint64_t slots = 4;

struct side {
  std::shared_ptr<ep::rank_context> context;
  ep::nic::soft_device* device = nullptr;
  std::shared_ptr<rank_nic> nic;
  std::shared_ptr<ep::symmetric_memory> memory;
};

struct pair {
  side ranks[2];

  explicit pair(uint32_t depth = 64, bool collapsed = true, bool adds_as_processors = true) {
    std::vector<ep_segment_handle> handles;
    for (int32_t rank = 0; rank < 2; ++rank) {
      ranks[rank].context = must(ep::rank_context::create(rank, 2, 2));
      handles.push_back(ranks[rank].context->handle());
    }
    std::vector<std::vector<uint8_t>> connections;
    for (side& one : ranks) {
      must(one.context->connect(handles));
      auto driver = std::make_unique<ep::nic::soft_driver>(ep::nic::soft_options{});
      ep::ibgda::open_port port = must(ep::ibgda::device_open(*driver, {}));
      one.device = dynamic_cast<ep::nic::soft_device*>(port.device.get());
      ep::ibgda::emulator_hooks hooks;
      hooks.adds_as_processors = adds_as_processors;
      hooks.doorbell_wake = reinterpret_cast<uint64_t>(one.device->doorbell_wake());
      hooks.region_wake = [device = one.device](const ep::dl::mlx5_mr& mr, const ep_wake_word* wake) { return device->region_wake(mr, wake); };
      ep::ibgda::queue_options options;
      options.depth = depth;
      options.collapsed = collapsed;
      one.nic = must(rank_nic::create(one.context, std::move(driver), std::move(port), options, std::move(hooks)));
      connections.push_back(one.nic->queues().connection());
    }
    std::vector<ep_ibgda_remote> remotes;
    for (side& one : ranks) {
      must(one.nic->queues().connect(connections));
      one.memory = must(ep::symmetric_memory::create(one.context, part_bytes, slots));
      remotes.push_back(must(one.nic->add_memory(*one.memory)));
    }
    for (side& one : ranks) must(one.nic->route(*one.memory, remotes));
  }
  ~pair() {
    for (side& one : ranks) {
      if (one.nic) one.nic->stop();
    }
    for (side& one : ranks) one.context->leave(true);
  }

  // From rank 0 to rank 1.
  host_request request() const {
    host_request made;
    made.peer = 1;
    const ep_ibgda_remote& there = *ranks[0].nic->remote(*ranks[0].memory, 1);
    made.remote = {there.data, there.data_rkey};
    made.slot = {there.signals, there.signals_rkey};
    return made;
  }
  host_request write(uint64_t from, uint64_t to, uint64_t bytes) const {
    host_request made = request();
    made.what = host_request::kind::write;
    made.local = reinterpret_cast<uint64_t>(ranks[0].memory->own_data()) + from;
    made.remote.address += to;
    made.bytes = bytes;
    return made;
  }
  uint64_t signal(uint64_t slot) const { return std::atomic_ref<uint64_t>(ranks[1].memory->own_signals()[slot]).load(); }
};

request_state ended(rank_nic& nic, uint64_t number) {
  const int64_t deadline = ep::clock_now_ns() + 30'000'000'000;
  for (;;) {
    const request_state state = nic.look(1, number);
    if (state != request_state::pending || ep::clock_now_ns() > deadline) return state;
    sched_yield();
  }
}

void test_each_request() {
  pair p;
  rank_nic& nic = *p.ranks[0].nic;
  uint8_t* here = p.ranks[0].memory->own_data();
  uint8_t* there = p.ranks[1].memory->own_data();
  for (uint64_t i = 0; i < 1000; ++i) here[i] = static_cast<uint8_t>(i * 7);

  host_request write = p.write(3, 4001, 997);
  write.signal = ep::signal_op::add;
  write.slot.address += 8;
  write.value = 5;
  EP_CHECK(ended(nic, must(nic.post(write))) == request_state::done);
  EP_CHECK_EQ(std::memcmp(here + 3, there + 4001, 997), 0);
  EP_CHECK_EQ(p.signal(1), 5u);

  host_request word = p.request();
  word.what = host_request::kind::word;
  word.bytes = 4;
  word.remote.address += 16;
  word.word = 0x1234567890ull;
  word.signal = ep::signal_op::set;
  word.value = ~uint64_t{0};
  EP_CHECK(ended(nic, must(nic.post(word))) == request_state::done);
  uint64_t found = 0;
  std::memcpy(&found, there + 16, 8);
  EP_CHECK_EQ(found, 0x34567890u);
  EP_CHECK_EQ(p.signal(0), ~uint64_t{0});

  host_request read = p.write(5000, 4001, 500);
  read.what = host_request::kind::read;
  EP_CHECK(ended(nic, must(nic.post(read))) == request_state::done);
  EP_CHECK_EQ(std::memcmp(here + 5000, there + 4001, 500), 0);

  // Nothing to do: ends with what was before it.
  EP_CHECK(nic.look(1, must(nic.post(p.write(0, 0, 0)))) == request_state::done);
  EP_CHECK_EQ(nic.accepted(1), 4u);
  EP_CHECK(p.ranks[0].device->violations().empty());
}

// Far more than the ring holds: nobody waits in post(), all arrive in order, and what a request holds goes with its end.
void test_full_ring(bool collapsed) {
  pair p(4, collapsed);
  rank_nic& nic = *p.ranks[0].nic;
  auto* here = reinterpret_cast<uint64_t*>(p.ranks[0].memory->own_data());
  for (uint64_t i = 0; i < 512; ++i) here[i] = i;
  std::weak_ptr<int> held;
  uint64_t last = 0;
  constexpr uint64_t rounds = 2000;
  for (uint64_t i = 0; i < rounds; ++i) {
    host_request one = p.write(i % 512 * 8, 4096, 64);
    one.bytes = 8 + i % 5 * 8; // inline, and not
    one.signal = ep::signal_op::add;
    one.value = 1;
    auto keep = std::make_shared<int>(0);
    one.keep = keep;
    held = keep;
    last = must(nic.post(one));
  }
  EP_CHECK_EQ(last, rounds);
  EP_CHECK(ended(nic, last) == request_state::done);
  EP_CHECK(held.expired());
  EP_CHECK_EQ(p.signal(0), rounds);
  uint64_t found = 0;
  std::memcpy(&found, p.ranks[1].memory->own_data() + 4096, 8);
  EP_CHECK_EQ(found, (rounds - 1) % 512);
  EP_CHECK(p.ranks[0].device->violations().empty());
}

void test_refusal(bool collapsed) {
  pair p(64, collapsed);
  rank_nic& nic = *p.ranks[0].nic;
  const uint64_t good = must(nic.post(p.write(0, 0, 100)));
  EP_CHECK(ended(nic, good) == request_state::done);
  p.ranks[1].nic->remove_memory(*p.ranks[1].memory);
  const uint64_t bad = must(nic.post(p.write(0, 64, 100)));
  EP_CHECK(ended(nic, bad) == request_state::failed);
  EP_CHECK(nic.look(1, good) == request_state::done);
  const ep::ibgda::pair_failure why = nic.failure_of(1);
  EP_CHECK_EQ(why.syndrome, static_cast<uint32_t>(EP_MLX5_SYNDROME_REMOTE_ACCESS));
  EP_CHECK_EQ(why.index, 1u);
  EP_CHECK_EQ(why.remote_address, p.request().remote.address + 64);
  EP_CHECK_EQ(why.rkey, p.request().remote.rkey);
  const auto after = nic.post(p.write(0, 0, 8));
  EP_CHECK(!after.ok());
  EP_CHECK_EQ(after.why().status, static_cast<uint32_t>(EP_STATUS_SYSTEM));
  // To itself it has another queue pair.
  host_request self = p.write(0, 0, 100);
  self.peer = 0;
  const ep_ibgda_remote& own = *nic.remote(*p.ranks[0].memory, 0);
  self.remote = {own.data + 4096, own.data_rkey};
  EP_CHECK(nic.post(self).ok());
}

void test_unregistered_source() {
  pair p;
  host_request one = p.write(0, 0, 100);
  std::vector<uint8_t> bytes(100);
  one.local = reinterpret_cast<uint64_t>(bytes.data());
  const auto refused = p.ranks[0].nic->post(one);
  EP_CHECK(!refused.ok());
  EP_CHECK_EQ(refused.why().status, static_cast<uint32_t>(EP_STATUS_INVALID));
}

// A source that went away makes room for another at its place; one that lives keeps it.
void test_sources() {
  pair p;
  rank_nic& nic = *p.ranks[0].nic;
  alignas(4096) static uint8_t bytes[8192];
  const auto address = reinterpret_cast<uint64_t>(bytes);
  auto first = std::make_shared<int>(1);
  EP_CHECK(nic.prepare_source(address, 4096, first).ok());
  EP_CHECK(nic.prepare_source(address + 100, 50, first).ok());
  auto second = std::make_shared<int>(2);
  EP_CHECK(!nic.prepare_source(address, 8192, second).ok());
  first.reset();
  EP_CHECK(nic.prepare_source(address, 8192, second).ok());
  host_request one = p.write(0, 0, 100);
  one.local = address + 5000;
  bytes[5000] = 77;
  EP_CHECK(ended(nic, must(nic.post(one))) == request_state::done);
  EP_CHECK_EQ(p.ranks[1].memory->own_data()[0], 77);
  // One's own part needs no preparing.
  EP_CHECK(nic.prepare_source(reinterpret_cast<uint64_t>(p.ranks[0].memory->own_data()), part_bytes, second).ok());
}

// HAZARD that it guards: a request holds its memory, which holds the route, which holds the NIC, which holds the request.
void test_stop_with_requests_under_way() {
  pair p(4);
  std::weak_ptr<rank_nic> nic = p.ranks[0].nic;
  EP_CHECK(p.ranks[0].device->set_faults("hold").ok());
  uint64_t last = 0;
  for (int i = 0; i < 20; ++i) {
    host_request one = p.write(0, 0, 100);
    one.keep = p.ranks[0].memory;
    last = must(p.ranks[0].nic->post(one));
  }
  EP_CHECK(p.ranks[0].nic->look(1, last) == request_state::pending);
  p.ranks[0].nic->stop();
  EP_CHECK(p.ranks[0].nic->look(1, last) == request_state::failed);
  const auto late = p.ranks[0].nic->post(p.write(0, 0, 100));
  EP_CHECK(!late.ok());
  EP_CHECK_EQ(late.why().status, static_cast<uint32_t>(EP_STATUS_CLOSED));
  p.ranks[0].memory.reset();
  p.ranks[0].nic.reset();
  EP_CHECK(nic.expired());
}

// A request that is held may not have begun yet, and is held when it does.
request_state ended_unheld(const side& of, uint64_t number, int64_t within_ns = 30'000'000'000) {
  const int64_t until = ep::clock_now_ns() + within_ns;
  request_state state = request_state::pending;
  while (state == request_state::pending && ep::clock_now_ns() < until) {
    of.device->release_held();
    state = of.nic->look(1, number);
    sched_yield();
  }
  return state;
}

// A rank dies, and its NIC has yet to carry out what it took over: a write and an addition. Where the way was ended they come to nothing, also where the other side of it is asked twice.
void test_end_of_a_way(bool ends) {
  pair p;
  EP_CHECK(p.ranks[0].device->set_faults("hold count=1").ok());
  p.ranks[0].memory->own_data()[0] = 42;
  host_request late = p.write(0, 7, 1);
  late.signal = ep::signal_op::add;
  late.value = 3;
  const uint64_t number = must(p.ranks[0].nic->post(late));
  p.ranks[0].context->leave(false);
  for (int i = 0; ends && i < 2; ++i) EP_CHECK(p.ranks[1].memory->end_way(0));
  EP_CHECK((ended_unheld(p.ranks[0], number, ends ? 50'000'000 : 30'000'000'000) == request_state::done) != ends);
  EP_CHECK_EQ(p.ranks[1].memory->own_data()[7], ends ? 0 : 42);
  EP_CHECK_EQ(p.signal(0), ends ? 0u : 3u);
  EP_CHECK(!p.ranks[1].memory->end_way(2));
}

uint64_t found_of(const ep::ibgda::pair_failure& why) { return uint64_t{why.syndrome} << EP_NIC_FOUND_SYNDROME | uint64_t{why.qpn} << EP_NIC_FOUND_QPN; }

// Whose fault it is that a peer is not reached: a port that is down is one's own, and so is a request that the NIC refuses, also where a collapsed queue has kept only that later ones were flushed.
void test_own_fault() {
  const pair p;
  const auto silent = uint64_t{EP_MLX5_SYNDROME_RETRY_EXCEEDED} << EP_NIC_FOUND_SYNDROME;
  EP_CHECK(!p.ranks[0].memory->own_fault(0));
  EP_CHECK(!p.ranks[0].memory->own_fault(silent));
  p.ranks[0].device->set_link(false);
  EP_CHECK(p.ranks[0].memory->own_fault(0));
  EP_CHECK(p.ranks[0].memory->own_fault(silent));
  EP_CHECK(!p.ranks[1].memory->own_fault(silent));
  p.ranks[0].device->set_link(true);
  EP_CHECK(!p.ranks[0].memory->own_fault(silent));

  // The peer's: its memory has gone. One's own: the source has, which lies in the same memory.
  for (const int32_t gone : {1, 0}) {
    pair q;
    const side& here = q.ranks[0];
    EP_CHECK(here.device->set_faults("hold count=1").ok());
    uint64_t last = 0;
    for (int i = 0; i < 8; ++i) last = must(here.nic->post(q.write(0, 0, 100)));
    q.ranks[gone].nic->remove_memory(*q.ranks[gone].memory);
    EP_CHECK(ended_unheld(here, last) == request_state::failed);
    EP_CHECK_EQ(here.nic->own_fault(found_of(here.nic->failure_of(1))), gone == 0);
  }
}

void test_lookers_on_several_threads() {
  pair p(8);
  rank_nic& nic = *p.ranks[0].nic;
  constexpr uint64_t rounds = 500;
  std::vector<std::thread> lookers;
  for (int i = 0; i < 2; ++i) lookers.emplace_back([&] { EP_CHECK(ended(nic, rounds) == request_state::done || nic.accepted(1) < rounds); });
  uint64_t last = 0;
  for (uint64_t i = 0; i < rounds; ++i) {
    host_request one = p.write(0, 0, 64);
    one.signal = ep::signal_op::add;
    one.value = 1;
    last = must(nic.post(one));
  }
  EP_CHECK(ended(nic, last) == request_state::done);
  for (std::thread& one : lookers) one.join();
  EP_CHECK_EQ(p.signal(0), rounds);
}

// Memories that other contexts of the ranks allocated, over which the NICs have theirs.
struct over_pair : pair {
  std::shared_ptr<ep::rank_context> contexts[2];
  std::shared_ptr<ep::symmetric_memory> bases[2];

  explicit over_pair(bool adds_as_processors) : pair(64, true, adds_as_processors) {
    std::vector<ep_segment_handle> handles;
    for (int32_t rank = 0; rank < 2; ++rank) {
      contexts[rank] = must(ep::rank_context::create(rank, 2, 2));
      handles.push_back(contexts[rank]->handle());
    }
    std::vector<ep_segment_handle> parts;
    for (int32_t rank = 0; rank < 2; ++rank) {
      must(contexts[rank]->connect(handles));
      bases[rank] = must(ep::symmetric_memory::create(contexts[rank], part_bytes, slots));
      parts.push_back(bases[rank]->handle());
    }
    std::vector<ep_ibgda_remote> remotes;
    for (int32_t rank = 0; rank < 2; ++rank) {
      must(bases[rank]->connect(parts));
      side& one = ranks[rank];
      one.nic->remove_memory(*one.memory);
      one.memory = must(ep::symmetric_memory::over(bases[rank], {}));
      remotes.push_back(must(one.nic->add_memory(*one.memory)));
    }
    for (side& one : ranks) must(one.nic->route(*one.memory, remotes));
  }
  ~over_pair() {
    for (const auto& context : contexts) context->leave(true);
  }

  // As whoever waits there finds it.
  uint64_t word(uint64_t slot) const {
    contexts[1]->progress().run();
    return signal(slot);
  }
  host_request signalling(host_request request, ep::signal_op op, uint64_t slot, uint64_t value) const {
    request.signal = op;
    request.value = value;
    request.slot = rank_nic::signal_place(*ranks[0].memory, *ranks[0].nic->remote(*ranks[0].memory, 1), slot, op);
    return request;
  }
  bool carried_out(const host_request& request) const { return ended(*ranks[0].nic, must(ranks[0].nic->post(request))) == request_state::done; }
};

// Requests land there, beside what processors store, and wake who waits on those.
void test_over_another(bool adds_as_processors) {
  over_pair p(adds_as_processors);
  p.bases[0]->own_data()[5] = 42;
  ep_wake_word* waiter = p.contexts[1]->wake();
  ep_wake_word* bystander = p.ranks[1].context->wake();
  uint32_t before = ep::wake_prepare(waiter);
  const uint32_t untouched = ep::wake_prepare(bystander);
  const auto woken = [&] { return std::exchange(before, std::atomic_ref<uint32_t>(waiter->epoch).load()) != before; };
  EP_CHECK(p.carried_out(p.signalling(p.write(5, 100, 1), ep::signal_op::add, 1, 5)));
  EP_CHECK_EQ(p.bases[1]->own_data()[100], 42);
  EP_CHECK_EQ(p.word(1), 5u);
  EP_CHECK(woken());
  EP_CHECK(p.carried_out(p.signalling(p.request(), ep::signal_op::add, 1, 1)));
  EP_CHECK(woken());
  EP_CHECK_EQ(std::atomic_ref<uint32_t>(bystander->epoch).load(), untouched);
  ep::wake_cancel(waiter);
  ep::wake_cancel(bystander);

  // A word that others set before holds what is set, and grows by what is added after.
  p.bases[0]->signal_update(1, 3, ep::signal_op::set, 1000);
  EP_CHECK(p.carried_out(p.signalling(p.request(), ep::signal_op::set, 3, 7)));
  EP_CHECK_EQ(p.word(3), 7u);
  EP_CHECK(p.carried_out(p.signalling(p.request(), ep::signal_op::add, 3, ~uint64_t{0})));
  EP_CHECK_EQ(p.word(3), 6u);

  // The NIC and a processor add to one word.
  constexpr uint64_t rounds = 2000;
  std::thread processor([&] {
    for (uint64_t i = 0; i < rounds; ++i) p.bases[0]->signal_update(1, 2, ep::signal_op::add, 1);
  });
  uint64_t last = 0;
  for (uint64_t i = 0; i < rounds; ++i) last = must(p.ranks[0].nic->post(p.signalling(p.request(), ep::signal_op::add, 2, 1)));
  EP_CHECK(ended(*p.ranks[0].nic, last) == request_state::done);
  processor.join();
  EP_CHECK_EQ(p.word(2), 2 * rounds);

  // What has come, and nobody has looked at, is there when the NIC lets the memory go; whoever looks later adds nothing twice.
  EP_CHECK(p.carried_out(p.signalling(p.request(), ep::signal_op::add, 0, 9)));
  p.ranks[1].nic->remove_memory(*p.ranks[1].memory);
  EP_CHECK_EQ(p.signal(0), 9u);
  EP_CHECK_EQ(p.word(0), 9u);
}

// Additions of a NIC which are none to a processor, while one adds to the same slot; how many of both were lost.
uint64_t lost_additions(bool adds_as_processors) {
  over_pair p(adds_as_processors);
  EP_CHECK(p.ranks[0].device->set_faults("torn opcode=atomic ns=200000").ok());
  uint64_t added = 0;
  for (int round = 0; round < 20; ++round) {
    const uint64_t number = must(p.ranks[0].nic->post(p.signalling(p.request(), ep::signal_op::add, 2, 1)));
    ++added;
    while (p.ranks[0].nic->look(1, number) == request_state::pending) {
      p.bases[0]->signal_update(1, 2, ep::signal_op::add, 1);
      ++added;
      (void)p.word(2);
    }
  }
  return added - p.word(2);
}

void test_torn_additions() {
  // A NIC that adds to the word itself. Whether an addition comes between its two halves is the machine's business: with 20 of them, once in a while in vain.
  uint64_t lost = 0;
  for (int tries = 0; tries < 50 && lost == 0; ++tries) lost = lost_additions(true);
  EP_CHECK(lost > 0);
  EP_CHECK_EQ(lost_additions(false), 0u);
}

} // namespace

int main() {
  test_over_another(true);
  test_over_another(false);
  test_torn_additions();
  test_each_request();
  test_full_ring(true);
  test_full_ring(false);
  test_refusal(true);
  test_refusal(false);
  test_unregistered_source();
  test_sources();
  test_stop_with_requests_under_way();
  test_end_of_a_way(false);
  test_end_of_a_way(true);
  test_own_fault();
  test_lookers_on_several_threads();
  return ep::check::finish();
}
