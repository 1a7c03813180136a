// The fault switches, and what survives them. A known-wrong protocol fails here under some seed.
#include <algorithm>
#include <sstream>

#include <sched.h>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

queue_options ordinary() {
  queue_options options;
  options.collapsed = false;
  return options;
}

wqe_bytes write8(pair_of_nics& pair, uint64_t to, uint64_t from = 0) {
  return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(to), pair.rkey(), {pair.local(from, 8)});
}
wqe_bytes count8(pair_of_nics& pair, uint64_t to) { return add8_wqe(pair.a, pair.remote(to), pair.rkey(), pair.local(1024, 8), 1); }

std::vector<nic::trace_event> requests_of(const node& of) {
  std::vector<nic::trace_event> requests;
  for (const nic::trace_event& event : of.device->trace()) {
    if (event.kind == nic::trace_kind::request) requests.push_back(event);
  }
  return requests;
}

void dropped_requests_are_sent_again() {
  pair_of_nics pair(51, ordinary());
  must(pair.a_node.device->set_faults("drop opcode=8 count=3\n"));
  pair.a_node.word(0) = 77;
  pair.a.post(write8(pair, 8));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.b_node.word(8).load(), uint64_t{77});
  EP_CHECK_EQ(requests_of(pair.a_node).at(0).tries, 4);
  // 4.096 us << 14 is 67 ms, the cap 20 ms: three waits.
  EP_CHECK(pair.steps.now_ns() >= 60'000'000);
}

void dropped_for_good_is_retry_exceeded() {
  queue_options options = ordinary();
  options.retry_count = 2;
  pair_of_nics pair(52, options);
  must(pair.a_node.device->set_faults("# nothing arrives\n\ndrop"));
  pair.a.post(write8(pair, 8));
  pair.a.post(write8(pair, 16));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed(0).opcode, EP_MLX5_CQE_REQ_ERR);
  EP_CHECK_EQ(pair.a.syndrome(0), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
  EP_CHECK_EQ(pair.a.syndrome(1), EP_MLX5_SYNDROME_FLUSHED);
  EP_CHECK_EQ(requests_of(pair.a_node).at(0).tries, 3);
}

// The answer is lost, the request is not: it must not be executed twice.
void lost_answers_do_not_execute_again() {
  pair_of_nics pair(53, ordinary());
  must(pair.a_node.device->set_faults("drop-ack count=3"));
  pair.a.post(count8(pair, 0));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{1});
  EP_CHECK_EQ(pair.a_node.word(1024).load(), uint64_t{0}); // the first answer, repeated
  must(pair.a_node.device->set_faults("drop-ack count=2"));
  pair.b_node.word(0) = 9;
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(0), pair.rkey(), {pair.local(8, 8)}));
  pair.a.post(write8(pair, 64));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed(2).opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.a_node.word(8).load(), uint64_t{9});
}

void delays_keep_the_order_of_a_queue_pair() {
  pair_of_nics pair(54, ordinary());
  must(pair.a_node.device->set_faults("delay opcode=8 ns=5000000 count=1"));
  pair.a.post(write8(pair, 0));
  pair.a.post(count8(pair, 8));
  while (pair.steps.now_ns() < 5'000'000) {
    EP_CHECK_EQ(pair.b_node.word(8).load(), uint64_t{0}); // the signal waits behind its data
    EP_CHECK(pair.steps.step());
  }
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.b_node.word(8).load(), uint64_t{1});
}

void late_atomics_are_refused() {
  { // the peer's queue pair is gone: nobody answers
    pair_of_nics pair(55, ordinary());
    must(pair.a_node.device->set_faults("hold opcode=atomic count=1"));
    pair.a.post(count8(pair, 0));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_INVALID);
    pair.b.destroy();
    pair.a_node.device->release_held();
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.a.syndrome(), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{0});
  }
  { // the key is gone, and the next registration of the same bytes has another one
    pair_of_nics pair(56, ordinary());
    must(pair.a_node.device->set_faults("hold opcode=atomic count=1"));
    pair.a.post(count8(pair, 0));
    EP_CHECK(pair.steps.run());
    const uint32_t old_key = pair.rkey();
    must(pair.b_node.device->dereg_mr(pair.b_node.mr));
    pair.b_node.mr = must(pair.b_node.device->reg_mr(pair.b_node.pd, {pair.b_node.address(), 1 << 16}, node::all_rights));
    EP_CHECK_EQ(pair.rkey() >> 8, old_key >> 8);
    EP_CHECK(pair.rkey() != old_key);
    pair.a_node.device->release_held();
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.a.syndrome(), EP_MLX5_SYNDROME_REMOTE_ACCESS);
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{0});
  }
}

// Read in one turn, written in a later one: what a processor stores in between is undone. Not so where no fault says it.
void torn_atomics_undo_stores() {
  for (const bool torn : {false, true}) {
    pair_of_nics pair(58, ordinary());
    must(pair.a_node.device->set_faults(torn ? "torn opcode=atomic count=1 ns=1000000" : "delay opcode=atomic count=1 ns=1000000"));
    pair.b_node.word(0) = 10;
    pair.a.post(count8(pair, 0));
    while (pair.steps.now_ns() < 1'000'000) EP_CHECK(pair.steps.step());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{10});
    pair.b_node.word(0) = 50;
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{torn ? 11u : 51u});
    pair.a.post(count8(pair, 0));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{torn ? 12u : 52u});
    EP_CHECK(pair.a_node.device->violations().empty());
  }
}

// The peer starts again: same queue pair number, other sequence numbers. What was posted before must not land.
void a_restarted_peer_takes_nothing_old() {
  pair_of_nics pair(57, ordinary());
  must(pair.a_node.device->set_faults("hold count=1 skip=1"));
  pair.a.post(write8(pair, 0));
  pair.a_node.word(0) = 5;
  pair.a.post(write8(pair, 8));
  EP_CHECK(pair.steps.run());
  const uint32_t qpn = pair.b.qpn;
  pair.b.destroy();
  queue_options again = ordinary();
  again.receive_psn = 0x123456;
  queue reborn(pair.b_node, again);
  EP_CHECK_EQ(reborn.qpn, qpn);
  reborn.connect(pair.a_node.device->port_number(), pair.a.qpn);
  pair.a_node.device->release_held();
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed(0).opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.a.syndrome(1), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
  EP_CHECK_EQ(pair.b_node.word(8).load(), uint64_t{0});
}

void a_peer_that_is_gone_does_not_answer() {
  queue_options options = ordinary();
  soft_options devices = pair_of_nics::stepped();
  node here(devices);
  queue a(here, options);
  nic::stepper steps(3);
  steps.add(*here.device);
  uint32_t port = 0;
  uint32_t rkey = 0;
  uint64_t address = 0;
  {
    node there(devices);
    queue b(there, options);
    port = there.device->port_number();
    a.connect(port, b.qpn);
    b.connect(here.device->port_number(), a.qpn);
    rkey = there.mr.rkey;
    address = there.address();
    a.post(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, address, rkey, {{here.address(), here.mr.lkey, 8}}));
    EP_CHECK(steps.run());
    EP_CHECK_EQ(a.completed(0).opcode, EP_MLX5_CQE_REQ);
  }
  a.post(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, address, rkey, {{here.address(), here.mr.lkey, 8}}));
  EP_CHECK(steps.run());
  EP_CHECK_EQ(a.syndrome(1), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
}

void links_go_down_and_up() {
  for (const bool own : {true, false}) {
    pair_of_nics pair(58, ordinary());
    soft_device& device = own ? *pair.a_node.device : *pair.b_node.device;
    device.set_link(false);
    EP_CHECK(must(device.query_port(1)).state == dl::mlx5_port_state::down);
    dl::mlx5_event event;
    EP_CHECK(must(device.poll_async(event)) && event.kind == dl::mlx5_event_kind::port_down);
    pair.a.post(write8(pair, 0));
    for (int i = 0; i < 4; ++i) pair.steps.step(); // a retry or two
    device.set_link(true);
    EP_CHECK(must(device.poll_async(event)) && event.kind == dl::mlx5_event_kind::port_up);
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.a.completed(0).opcode, EP_MLX5_CQE_REQ); // it was back in time
    device.set_link(false);
    pair.a.post(write8(pair, 0));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.a.syndrome(1), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
  }
}

// The same by a script: at the third request, for a time or for good; what the peer asks goes unanswered as well.
void links_go_down_by_script() {
  for (const bool back : {true, false}) {
    pair_of_nics pair(61, ordinary());
    must(pair.a_node.device->set_faults(back ? "link-down skip=2 ns=1000000" : "link-down skip=2"));
    const auto up = [&] { return must(pair.a_node.device->query_port(1)).state == dl::mlx5_port_state::active; };
    for (int i = 0; i < 2; ++i) pair.a.post(write8(pair, 0));
    EP_CHECK(pair.steps.run() && up());
    pair.a.post(write8(pair, 0));
    pair.steps.run();
    dl::mlx5_event event;
    EP_CHECK(must(pair.a_node.device->poll_async(event)) && event.kind == dl::mlx5_event_kind::port_down);
    EP_CHECK(must(pair.a_node.device->poll_async(event)) && event.kind == (back ? dl::mlx5_event_kind::port_up : dl::mlx5_event_kind::qp_error));
    EP_CHECK_EQ(up(), back);
    EP_CHECK_EQ(pair.a.completed(2).opcode, back ? EP_MLX5_CQE_REQ : EP_MLX5_CQE_REQ_ERR);
    pair.b.post(rdma_wqe(pair.b, EP_MLX5_OPCODE_RDMA_WRITE, pair.a_node.address(0), pair.a_node.mr.rkey, {{pair.b_node.address(0), pair.b_node.mr.lkey, 8}}));
    pair.steps.run();
    // In the error state a's queue pair answers nobody, either.
    EP_CHECK_EQ(pair.b.completed(0).opcode, back ? EP_MLX5_CQE_REQ : EP_MLX5_CQE_REQ_ERR);
  }
}

void doorbells_get_lost_and_come_twice() {
  { // the next one catches up, from the record
    pair_of_nics pair(59, ordinary());
    must(pair.a_node.device->set_faults("lose-doorbell count=1"));
    pair.a.post(count8(pair, 0));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{0});
    pair.a.post(count8(pair, 0));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{2});
  }
  { // twice: nothing is executed twice
    pair_of_nics pair(60, ordinary());
    must(pair.a_node.device->set_faults("repeat-doorbell"));
    for (int i = 0; i < 100; ++i) {
      pair.a.post(count8(pair, 0));
      if (i % 3 == 0) EP_CHECK(pair.steps.run());
    }
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{100});
    EP_CHECK_EQ(pair.a_node.device->counts().requests, uint64_t{100});
    uint64_t rung = 0;
    for (const nic::trace_event& event : pair.a_node.device->trace()) rung += event.kind == nic::trace_kind::doorbell ? 1 : 0;
    EP_CHECK_EQ(rung, 2 * pair.a_node.device->counts().doorbells);
  }
}

// Pieces of a write show up in any order; what follows on the same queue pair never before all of them.
void partial_writes_show_and_signals_follow() {
  bool seen_hole = false;
  bool seen_part = false;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    pair_of_nics pair(seed, ordinary());
    must(pair.a_node.device->set_faults("partial pieces=6"));
    std::memset(pair.a_node.data(), 0x77, 4096);
    pair.a.put(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(4096), pair.rkey(), {pair.local(0, 1000), pair.local(2000, 1000)}));
    pair.a.put(count8(pair, 0));
    pair.a.ring();
    const uint8_t* landed = pair.b_node.data() + 4096;
    while (pair.b_node.word(0).load() == 0) {
      const auto count = std::count(landed, landed + 2000, uint8_t{0x77});
      if (count != 0 && count != 2000) {
        seen_part = true;
        seen_hole = seen_hole || std::find(landed, landed + 2000, uint8_t{0}) < landed + count;
      }
      if (!pair.steps.step()) break;
    }
    EP_CHECK_EQ(std::count(landed, landed + 2000, uint8_t{0x77}), 2000);
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{1});
  }
  EP_CHECK(seen_part);
  EP_CHECK(seen_hole);
}

// Data on one queue pair, its signal on another: right only where luck helps. `together` is the protocol that hardware guarantees.
int runs_in_which_the_signal_came_first(bool together) {
  int early = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    pair_of_nics pair(seed, ordinary());
    queue other_a(pair.a_node, ordinary());
    queue other_b(pair.b_node, ordinary());
    other_a.connect(pair.b_node.device->port_number(), other_b.qpn);
    other_b.connect(pair.a_node.device->port_number(), other_a.qpn);
    pair.a_node.word(0) = 42;
    pair.a.post(write8(pair, 8));
    if (together) {
      pair.a.post(count8(pair, 0));
    } else {
      other_a.post(add8_wqe(other_a, pair.remote(0), pair.rkey(), pair.local(1024, 8), 1));
    }
    while (pair.b_node.word(0).load() == 0) EP_CHECK(pair.steps.step());
    if (pair.b_node.word(8).load() != 42) ++early;
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(8).load(), uint64_t{42});
  }
  return early;
}

// The same for the NIC's own thread, whose order between queue pairs is a fault of its own.
void threads_reorder_between_queue_pairs() {
  soft_options devices;
  devices.engine.trace_events = 100'000;
  pair_of_nics pair(71, ordinary(), devices);
  queue other_a(pair.a_node, ordinary());
  queue other_b(pair.b_node, ordinary());
  other_a.connect(pair.b_node.device->port_number(), other_b.qpn);
  other_b.connect(pair.a_node.device->port_number(), other_a.qpn);
  must(pair.a_node.device->set_faults("reorder"));
  const int64_t deadline = clock_now_ns() + 20'000'000'000;
  bool overtaken = false;
  uint64_t posted = 0;
  while (!overtaken && clock_now_ns() < deadline) {
    ++posted;
    pair.a.post(write8(pair, 8));
    other_a.post(rdma_wqe(other_a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(16), pair.rkey(), {pair.local(0, 8)}));
    wake_notify(pair.a_node.device->doorbell_wake());
    const auto index = static_cast<uint16_t>(posted - 1);
    while ((pair.a.completed(index % 64).counter != index || other_a.completed(index % 64).counter != index) && clock_now_ns() < deadline) sched_yield();
    if (posted % 8 != 0) continue;
    const auto events = requests_of(pair.a_node);
    for (size_t i = 0; i + 1 < events.size(); i += 2) overtaken = overtaken || events[i].qpn == other_a.qpn;
  }
  EP_CHECK(overtaken);
}

void scripts_are_checked() {
  for (const char* good : {"", "\n\n", "drop", "drop qpn=0x100 opcode=atomic count=1 skip=2", "delay ns=1", "link-down", "link-down opcode=8 ns=5 count=2 skip=1", "torn", "torn opcode=atomic ns=5", "partial", "partial pieces=2\nreorder # no"}) {
    const bool ok = nic::fault_script::parse(good).ok();
    EP_CHECK_EQ(ok, std::string(good).find("# no") == std::string::npos);
  }
  for (const char* bad : {"drops", "drop qpn", "drop qpn=", "drop qpn=0x1000000", "drop ns=3", "delay", "delay ns=0", "delay ns=-1", "lose-doorbell opcode=8", "link-down pieces=2", "partial pieces=0",
                          "drop count=99999999999999999999", "drop\ndrop\nnonsense x=1"}) {
    const auto parsed = nic::fault_script::parse(bad);
    EP_CHECK(!parsed.ok());
    if (!parsed.ok()) EP_CHECK(parsed.why().message.find("line ") == 0);
  }
}

void traces_tell_what_happened() {
  pair_of_nics pair(61, ordinary());
  pair.a.put(write8(pair, 8));
  pair.a.put(count8(pair, 0));
  pair.a.ring();
  EP_CHECK(pair.steps.run());
  std::ostringstream lines;
  pair.a_node.device->write_trace_jsonl(lines);
  const std::string text = lines.str();
  EP_CHECK(text.find("\"kind\":\"command\",\"command\":\"0x500\"") != std::string::npos);
  const size_t write = text.find("\"opcode\":\"RDMA_WRITE\"");
  const size_t add = text.find("\"opcode\":\"ATOMIC_MASKED_FA\"");
  EP_CHECK(write != std::string::npos && add != std::string::npos && write < add);
  EP_CHECK(text.find("\"wqe\":\"00000008") != std::string::npos); // the bytes, for ep wqe decode
  std::ostringstream chrome;
  pair.a_node.device->write_trace_chrome(chrome);
  const std::string picture = chrome.str();
  EP_CHECK(picture.find("\"traceEvents\":[") != std::string::npos);
  EP_CHECK(picture.find("\"ph\":\"X\"") != std::string::npos);
  EP_CHECK_EQ(std::count(picture.begin(), picture.end(), '{'), std::count(picture.begin(), picture.end(), '}'));
  EP_CHECK_EQ(std::count(picture.begin(), picture.end(), '"') % 2, 0);
  // The same seed, the same run: so a finding can be run again.
  const auto run = [](uint64_t seed) {
    pair_of_nics again(seed, ordinary());
    must(again.a_node.device->set_faults("partial pieces=3\ndrop skip=1 count=2\nreorder"));
    for (int i = 0; i < 10; ++i) again.a.post(i % 2 == 0 ? write8(again, 8) : count8(again, 0));
    EP_CHECK(again.steps.run());
    std::vector<int64_t> times;
    for (const auto& event : again.a_node.device->trace()) times.push_back(event.end_ns);
    return times;
  };
  EP_CHECK(run(5) == run(5));
}

} // namespace

int main() {
  dropped_requests_are_sent_again();
  dropped_for_good_is_retry_exceeded();
  lost_answers_do_not_execute_again();
  delays_keep_the_order_of_a_queue_pair();
  late_atomics_are_refused();
  torn_atomics_undo_stores();
  a_restarted_peer_takes_nothing_old();
  a_peer_that_is_gone_does_not_answer();
  links_go_down_and_up();
  links_go_down_by_script();
  doorbells_get_lost_and_come_twice();
  partial_writes_show_and_signals_follow();
  EP_CHECK(runs_in_which_the_signal_came_first(false) > 0);
  EP_CHECK_EQ(runs_in_which_the_signal_came_first(true), 0);
  threads_reorder_between_queue_pairs();
  scripts_are_checked();
  traces_tell_what_happened();
  return ep::check::finish();
}
