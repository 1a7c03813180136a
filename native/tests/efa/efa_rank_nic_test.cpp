// A rank's EFA NIC as a transport uses it, over the software NIC, under several seeds; and the signal words by themselves.
#include <algorithm>
#include <cstring>
#include <thread>

#include "soft_ranks.hpp"

namespace {

using namespace ep::test;
using ep::counter_words;
using ep::efa::request_state;
using ep::signal_board;
using ep::nic::efa::soft_device;

void test_requests(bool inline_values, uint32_t depth) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    ep::nic::efa::soft_options soft;
    soft.engine.seed = seed;
    soft.engine.fragment_bytes = 8 << seed;
    ep::efa::endpoint_options options;
    options.inline_values = inline_values;
    options.depth = depth;
    const auto ranks = soft_ranks(soft, options);
    check_requests(*ranks);
    check_burst(*ranks, 1000);
    EP_CHECK_EQ(violations(*ranks), 0u);
  }
}

// A put with a value: its cell must not be told before its bytes have landed, however long they take.
void test_cell_waits_for_bytes() {
  const auto ranks = soft_ranks({}, {});
  auto& device = dynamic_cast<soft_device&>(ranks->sides[0].nic->endpoints().nic());
  (void)must(device.set_faults("hold stage=land count=1"));
  auto put = ranks->write(0, 1, 0, 4096, 64);
  ranks->sides[0].memory->own_data()[0] = 1;
  put.signals = true;
  put.add = 2;
  const uint64_t number = ranks->post(0, put);
  EP_CHECK(soon([&] { return device.counts().held == 1; }));
  for (int i = 0; i < 200; ++i) {
    EP_CHECK(ranks->sides[0].nic->look(1, number) == request_state::pending);
    EP_CHECK_EQ(ranks->signal(1, 0), 0u);
    sched_yield();
  }
  device.release_held();
  EP_CHECK(ranks->ended(0, 1, number) == request_state::done);
  EP_CHECK(soon([&] { return ranks->signal(1, 0) == 2; }));
  EP_CHECK_EQ(ranks->sides[1].memory->own_data()[4096], 1);
}

// Two totals of one cell are never under way at one time: on this fabric the older could land last, and would stay.
void test_cells_one_at_a_time() {
  const auto ranks = soft_ranks({}, {});
  auto& device = dynamic_cast<soft_device&>(ranks->sides[0].nic->endpoints().nic());
  (void)must(device.set_faults("hold stage=land count=1"));
  ep::efa::host_request five;
  five.peer = 1;
  five.signals = true;
  five.add = 5;
  const uint64_t first = ranks->post(0, five);
  ep::efa::host_request seven = five;
  seven.add = 7;
  const uint64_t second = ranks->post(0, seven);
  EP_CHECK(soon([&] { return device.counts().held == 1; }));
  for (int i = 0; i < 200; ++i) {
    EP_CHECK(ranks->sides[0].nic->look(1, second) == request_state::pending);
    EP_CHECK_EQ(ranks->signal(1, 0), 0u);
    sched_yield();
  }
  device.release_held();
  EP_CHECK(ranks->ended(0, 1, first) == request_state::done);
  EP_CHECK(ranks->ended(0, 1, second) == request_state::done);
  EP_CHECK_EQ(ranks->signal(1, 0), 12u);
}

// What a peer refuses breaks the queue pair to it, and no other.
void test_refused() {
  const auto ranks = soft_ranks({}, {});
  ranks->sides[1].nic->remove_memory(*ranks->sides[1].memory);
  EP_CHECK(ranks->ended(0, 1, ranks->post(0, ranks->write(0, 1, 0, 0, 64))) == request_state::failed);
  const ep::efa::pair_failure why = ranks->sides[0].nic->failure_of(1);
  EP_CHECK_EQ(why.efa_status, uint32_t{EP_EFA_STATUS_REMOTE_BAD_ADDRESS});
  EP_CHECK_EQ(why.peer, 1);
  EP_CHECK(ranks->ended(0, 0, ranks->post(0, ranks->write(0, 0, 0, 100, 64))) == request_state::done);
  EP_CHECK(!ranks->sides[0].nic->post(*ranks->sides[0].memory, ranks->write(0, 1, 0, 0, 64)).ok());
}

// A write to rank 1's memory is still under way when that has been given up and offered anew, on the same device and at the same address: neither its bytes nor its tick come to the
// new generation, whichever of the two was left.
void test_straggler(const char* left, bool lands) {
  const auto ranks = soft_ranks({}, {});
  const efa_side& receiver = ranks->sides[1];
  auto& device = dynamic_cast<soft_device&>(ranks->sides[0].nic->endpoints().nic());
  (void)must(device.set_faults(left));
  std::memset(ranks->sides[0].memory->own_data(), 0x5c, 64);
  auto put = ranks->write(0, 1, 0, 4096, 64);
  put.signals = true;
  put.add = 1;
  const uint64_t number = ranks->post(0, put);
  EP_CHECK(soon([&] { return device.counts().held == 1; }));
  if (lands) EP_CHECK(ranks->ended(0, 1, number) == request_state::done);
  receiver.nic->remove_memory(*receiver.memory);
  uint8_t* data = receiver.memory->own_data();
  std::memset(data, 0, receiver.memory->byte_length());
  (void)must(receiver.nic->add_memory(*receiver.memory));
  device.release_held();
  if (!lands) EP_CHECK(ranks->ended(0, 1, number) == request_state::failed);
  if (!lands) EP_CHECK_EQ(ranks->sides[0].nic->failure_of(1).efa_status, uint32_t{EP_EFA_STATUS_REMOTE_BAD_DEST_QPN});
  // A tick that is left is the last event of its request: when that is over it went wherever it goes.
  EP_CHECK(soon([&] { return device.counts().requests == 1; }));
  EP_CHECK_EQ(ranks->signal(1, 0), 0u);
  EP_CHECK(std::all_of(data, data + receiver.memory->byte_length(), [](uint8_t byte) { return byte == 0; }));
}

// Counters are checked before anything is made, and come back with their memory.
void test_capacity() {
  ep::nic::efa::soft_options soft;
  soft.engine.max_counters = 6;
  const auto ranks = soft_ranks(soft, {});
  EP_CHECK_EQ(ranks->sides[0].nic->endpoints().counters_left(), 2u);
  auto more = must(ep::symmetric_memory::create(ranks->sides[0].context, 64, 3));
  const auto refused = ranks->sides[0].nic->add_memory(*more);
  EP_CHECK(!refused.ok() && refused.why().status == EP_STATUS_BUSY);
  EP_CHECK(refused.why().message.find("efa_soft0 has 2 left") != std::string::npos);
  ranks->sides[0].nic->remove_memory(*ranks->sides[0].memory);
  EP_CHECK_EQ(ranks->sides[0].nic->endpoints().counters_left(), 6u);
  EP_CHECK(ranks->sides[0].nic->add_memory(*more).ok());
  ranks->sides[0].nic->remove_memory(*more);

  ep::efa::endpoint_options deep;
  deep.depth = 4096;
  ep::nic::efa::soft_driver driver(soft);
  const auto wide = ep::efa::rank_endpoints::create(must(ep::efa::device_open(driver, "")), deep, {}, nullptr);
  EP_CHECK(!wide.ok() && wide.why().message.find("2048 requests of 128 bytes") != std::string::npos);
  soft.engine.counters = false;
  ep::nic::efa::soft_driver old(soft);
  const auto uncounted = ep::efa::rank_endpoints::create(must(ep::efa::device_open(old, "")), {}, {}, nullptr);
  EP_CHECK(!uncounted.ok() && uncounted.why().sys_errno == EOPNOTSUPP);
  const auto nowhere = ep::efa::device_open(old, "rdmap0s0");
  EP_CHECK(!nowhere.ok() && nowhere.why().sys_errno == ENODEV && nowhere.why().message.find("efa_soft0: is not the one") != std::string::npos);
}

// T32 of the host: a word goes on beyond 2^31 arrivals, which the NIC's count does not; T8.
// Over memories that other contexts of the ranks allocated: waits there fold what arrives, into words that processors add to as well.
void test_over_another() {
  const auto ranks = soft_ranks({}, {});
  std::vector<std::shared_ptr<ep::rank_context>> contexts;
  std::vector<std::shared_ptr<ep::symmetric_memory>> bases;
  std::vector<ep_segment_handle> handles;
  for (int32_t rank = 0; rank < 2; ++rank) {
    contexts.push_back(must(ep::rank_context::create(rank, 2, 2)));
    handles.push_back(contexts.back()->handle());
  }
  std::vector<ep_segment_handle> segments;
  for (const auto& context : contexts) {
    (void)must(context->connect(handles));
    bases.push_back(must(ep::symmetric_memory::create(context, 8192, 4)));
    segments.push_back(bases.back()->handle());
  }
  std::vector<std::vector<uint8_t>> parts;
  for (size_t rank = 0; rank < 2; ++rank) {
    (void)must(bases[rank]->connect(segments));
    efa_side& one = ranks->sides[rank];
    one.nic->remove_memory(*one.memory);
    one.memory = must(ep::symmetric_memory::over(bases[rank], {}));
    parts.push_back(must(one.nic->add_memory(*one.memory)));
  }
  for (efa_side& one : ranks->sides) (void)must(one.nic->route(*one.memory, parts));

  const auto word = [&](uint64_t slot) {
    contexts[1]->progress().run();
    return std::atomic_ref<uint64_t>(bases[1]->own_signals()[slot]).load();
  };
  bases[0]->own_data()[3] = 42;
  ep_wake_word* waiter = contexts[1]->wake();
  for (const uint64_t add : {uint64_t{1}, uint64_t{1} << 40}) { // by arrival, and by cell
    const uint32_t before = ep::wake_prepare(waiter);
    const uint64_t seen = word(1);
    auto put = ranks->write(0, 1, 3, 100, 1);
    put.signals = true;
    put.slot = 1;
    put.add = add;
    EP_CHECK(ranks->ended(0, 1, ranks->post(0, put)) == request_state::done);
    EP_CHECK(soon([&] { return std::atomic_ref<uint32_t>(waiter->epoch).load() != before; }));
    ep::wake_cancel(waiter);
    EP_CHECK(soon([&] { return word(1) == seen + add; }));
    EP_CHECK_EQ(bases[1]->own_data()[100], 42);
  }

  constexpr uint64_t rounds = 1000;
  std::thread processor([&] {
    for (uint64_t i = 0; i < rounds; ++i) bases[0]->signal_update(1, 2, ep::signal_op::add, 1);
  });
  uint64_t last = 0;
  for (uint64_t i = 0; i < rounds; ++i) {
    ep::efa::host_request one;
    one.peer = 1;
    one.signals = true;
    one.slot = 2;
    one.add = 1 + i % 2;
    last = ranks->post(0, one);
    (void)word(2);
  }
  EP_CHECK(ranks->ended(0, 1, last) == request_state::done);
  processor.join();
  EP_CHECK(soon([&] { return word(2) == rounds + rounds * 3 / 2; }));
  // Nothing of the board is left behind in the list of who waits.
  ranks->sides[1].nic->remove_memory(*ranks->sides[1].memory);
  EP_CHECK_EQ(word(2), rounds + rounds * 3 / 2);
  for (const auto& context : contexts) context->leave(true);
}

void test_board() {
  uint64_t words[2] = {};
  counter_words ticks[2] = {};
  uint64_t cells[3 * 2] = {};
  signal_board board(words, ticks, cells);
  const auto tick = [&](uint64_t to) { std::atomic_ref<uint64_t>(ticks[1].completed).store(to & EP_EFA_COUNTER_MASK); };
  tick(EP_EFA_COUNTER_MASK);
  board.fold();
  EP_CHECK_EQ(words[1], uint64_t{0x7fffffff});
  tick(uint64_t{0x80000000});
  board.fold();
  EP_CHECK_EQ(words[1], uint64_t{0x80000000});
  tick(uint64_t{0x80000000} + 5);
  board.fold();
  board.fold();
  EP_CHECK_EQ(words[1], uint64_t{0x80000005});
  cells[0 * 2 + 1] = 10;
  cells[2 * 2 + 1] = ~uint64_t{0};
  board.fold();
  EP_CHECK_EQ(words[1], uint64_t{0x80000005} + 9);
  EP_CHECK_EQ(words[0], 0u);

  // Folded by several threads, each time that the NIC counts: never back, never too far.
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> told{0};
  const auto reader = [&] {
    uint64_t seen = 0;
    while (!stop) {
      board.fold();
      const uint64_t found = std::atomic_ref<uint64_t>(words[0]).load();
      if (found < seen || found > told.load()) EP_CHECK(false);
      seen = found;
    }
  };
  std::thread a(reader);
  std::thread b(reader);
  for (uint64_t i = 1; i <= 20'000; ++i) {
    told = i;
    std::atomic_ref<uint64_t>(ticks[0].completed).store(i);
  }
  stop = true;
  a.join();
  b.join();
  board.fold();
  EP_CHECK_EQ(words[0], 20'000u);
}

} // namespace

int main() {
  test_board();
  test_over_another();
  test_requests(true, 256);
  test_requests(false, 256);
  test_requests(true, 2);
  test_cell_waits_for_bytes();
  test_cells_one_at_a_time();
  test_refused();
  test_straggler("hold stage=land count=1", false);
  test_straggler("hold stage=tick count=1", true);
  test_capacity();
  return ep::check::finish();
}
