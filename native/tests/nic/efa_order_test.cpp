// What the software EFA promises of order, and what it does not: every order that is allowed must occur, none that is not.
#include <algorithm>
#include <set>
#include <sstream>

#include "efa_rig.hpp"

using namespace ep;
using namespace ep::test;
using efa::stage;

namespace {

constexpr uint64_t seeds = 200;

// Of both directions, byte for byte.
void moves_bytes() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    efa_pair world(seed);
    for (uint32_t i = 0; i < 300; ++i) {
      world.a_node.data()[i] = static_cast<uint8_t>(i * 7 + seed);
      world.b_node.data(4096)[i] = static_cast<uint8_t>(i * 11 + seed);
    }
    const uint32_t bytes = static_cast<uint32_t>(1 + seed * 13 % 299);
    world.a.post(world.write(0, 1000 + seed, bytes));
    world.a.post(world.read(2000 + seed, 4096, bytes));
    world.a.post(world.write(0, 3000, 0));
    EP_CHECK(world.steps.run_all());
    EP_CHECK(std::memcmp(world.a_node.data(), world.b_node.data(1000 + seed), bytes) == 0);
    EP_CHECK(world.b_node.data(1000 + seed)[bytes] == 0 && world.b_node.data(1000 + seed)[-1] == 0);
    EP_CHECK(std::memcmp(world.b_node.data(4096), world.a_node.data(2000 + seed), bytes) == 0);
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{2});
    EP_CHECK_EQ(efa_queue::count_of(world.a.read), uint64_t{1});
    EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{2});
    EP_CHECK_EQ(efa_queue::count_of(world.a.arrived), uint64_t{0});
    const auto done = world.a.poll_all();
    EP_CHECK_EQ(done.size(), size_t{3});
    std::set<uint64_t> ids;
    for (const efa_completion& one : done) {
      EP_CHECK_EQ(one.status, EP_EFA_STATUS_OK);
      EP_CHECK_EQ(one.qpn, world.a.endpoint.qpn);
      EP_CHECK_EQ(one.opcode, one.id == 1 ? EP_EFA_OPCODE_RDMA_READ : EP_EFA_OPCODE_RDMA_WRITE);
      ids.insert(one.id);
    }
    EP_CHECK_EQ(ids.size(), size_t{3});
    EP_CHECK_EQ(world.a_node.device->counts().violations, uint64_t{0});
  }
}

// An oracle over the trace: what must hold of every run.
void check_trace(const std::vector<efa::trace_event>& trace) {
  struct seen {
    uint64_t landed = 0, length = 0;
    bool fetched = false, ticked = false, acked = false;
    uint32_t cqes = 0, counts = 0, ticks = 0;
  };
  std::map<std::pair<uint32_t, uint64_t>, seen> requests;
  for (const efa::trace_event& event : trace) {
    if (event.kind != efa::trace_kind::event || event.what == stage::doorbell) continue;
    seen& one = requests[{event.qpn, event.number}];
    switch (event.what) {
      case stage::land:
        EP_CHECK(!one.ticked && !one.acked);
        one.landed += event.length;
        break;
      case stage::tick:
        one.ticked = true;
        ++one.ticks;
        one.length = event.length;
        EP_CHECK_EQ(one.landed, event.length);
        break;
      case stage::ack:
        one.acked = true;
        EP_CHECK_EQ(one.landed, event.length);
        break;
      case stage::cqe:
        EP_CHECK(one.acked);
        ++one.cqes;
        break;
      case stage::count:
        EP_CHECK(one.acked);
        ++one.counts;
        break;
      default: break;
    }
  }
  for (const auto& [key, one] : requests) {
    EP_CHECK_EQ(one.ticks, 1u);
    EP_CHECK_EQ(one.cqes, 1u);
    EP_CHECK_EQ(one.counts, 1u);
  }
}

// SRD: later requests and later bytes come first for some seed; one tick for a write, after its last byte.
void unordered() {
  uint64_t overtakes = 0, torn = 0, late_payload = 0, count_first = 0, cqe_first = 0, tick_before_ack = 0, ack_before_tick = 0, ids_swapped = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    efa_pair world(seed);
    std::memset(world.a_node.data(), 0x11, 64);
    std::memset(world.a_node.data(64), 0x22, 8);
    world.a.put(world.a.wqe(world.write(0, 0, 64)));
    world.a.put(world.a.wqe(world.write(64, 128, 8)));
    world.a.bell();
    bool changed = false;
    while (world.steps.step()) {
      const uint64_t ticks = efa_queue::count_of(world.b.arrived);
      uint32_t words = 0;
      for (uint64_t at = 0; at < 64; at += 8) words += world.b_node.word(at) != 0 ? 1 : 0;
      const bool second = world.b_node.word(128) != 0;
      if (second && words == 0) ++overtakes;
      if (world.b_node.word(56) != 0 && world.b_node.word(0) == 0) ++torn;
      // Never a tick without all bytes of some write.
      EP_CHECK(ticks <= (words == 8 ? 1u : 0u) + (second ? 1u : 0u));
      if (!changed && efa_queue::count_of(world.a.written) == 0 && world.steps.now_ns() > 0 && second) {
        // The source may be read until the completion: a poster that changes it before sees that, for some order.
        std::memset(world.a_node.data(), 0x33, 64);
        changed = true;
      }
    }
    if (world.b_node.word(0) == 0x3333333333333333) ++late_payload;
    const auto trace = world.a_node.device->trace();
    // The source was changed under the first write on purpose; the trace must be right all the same.
    check_trace(trace);
    const auto place = [&](stage what, uint64_t number) {
      return std::find_if(trace.begin(), trace.end(), [&](const auto& event) { return event.kind == efa::trace_kind::event && event.what == what && event.number == number; });
    };
    (place(stage::count, 0) < place(stage::cqe, 0) ? count_first : cqe_first)++;
    (place(stage::tick, 0) < place(stage::ack, 0) ? tick_before_ack : ack_before_tick)++;
    if (world.a.poll_all().at(0).id == 1) ++ids_swapped;
    EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{2});
  }
  EP_CHECK(overtakes > 0);
  EP_CHECK(torn > 0);
  EP_CHECK(late_payload > 0);
  EP_CHECK(count_first > seeds / 10 && cqe_first > seeds / 10);
  EP_CHECK(tick_before_ack > seeds / 10 && ack_before_tick > seeds / 10);
  EP_CHECK(ids_swapped > seeds / 10);
}

// Every order of two one-fragment writes: both outcomes of every race, and never more.
void exhaustive() {
  std::set<std::string> orders;
  bool signal_first = false;
  efa::soft_options options = stepped();
  options.engine.fragment_bytes = 64;
  options.engine.payload_apart = false;
  efa::enumerator all(100'000);
  while (all.begin()) {
    efa_pair world(7, {}, options);
    std::memset(world.a_node.data(), 0x11, 72);
    world.a.put(world.a.wqe(world.write(0, 0, 64)));
    world.a.put(world.a.wqe(world.write(64, 128, 8)));
    world.a.bell();
    all.run(world.steps);
    std::string order;
    for (const auto& event : world.a_node.device->trace()) {
      if (event.kind != efa::trace_kind::event || efa::is_silent(event.what) || event.what == stage::doorbell) continue;
      order += efa::stage_name(event.what)[1]; // another letter for each
      order += static_cast<char>('0' + event.number);
      if (event.what == stage::tick && event.number == 1 && order.find("a0") == std::string::npos) signal_first = true;
    }
    EP_CHECK(orders.insert(order).second);
    check_trace(world.a_node.device->trace());
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{2});
  }
  EP_CHECK(all.complete());
  // A request: land first, then tick, cqe and count in any order: 3! = 6. Two of them, interleaved: C(8, 4) * 6 * 6.
  EP_CHECK_EQ(all.runs(), uint64_t{70 * 36});
  EP_CHECK_EQ(orders.size(), static_cast<size_t>(all.runs()));
  EP_CHECK(signal_first);
}

// The same seed, the same run.
void repeatable() {
  std::string first;
  for (int i = 0; i < 2; ++i) {
    efa_pair world(42);
    for (uint32_t at = 0; at < 8; ++at) world.a.put(world.a.wqe(world.write(at * 64, at * 64, 64)));
    world.a.bell();
    EP_CHECK(world.steps.run_all());
    std::string order;
    for (const auto& event : world.a_node.device->trace()) order += std::string(efa::stage_name(event.what)) + std::to_string(event.number) + '/' + std::to_string(event.begin) + ' ';
    if (i == 0) first = order;
    EP_CHECK_EQ(order, first);
  }
}

// Aligned words of 8 bytes are never torn, wherever a write begins.
void words_whole() {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    efa::soft_options options = stepped();
    options.engine.fragment_bytes = 8 * (1 + static_cast<uint32_t>(seed % 3));
    efa_pair world(seed, {}, options);
    const uint64_t to = 256 + seed % 8;
    std::memset(world.a_node.data(), 0xee, 64);
    world.a.post(world.write(0, to, 50));
    while (world.steps.step()) {
      for (uint64_t at = (to + 7) / 8 * 8; at + 8 <= to + 50; at += 8) EP_CHECK(world.b_node.word(at) == 0 || world.b_node.word(at) == 0xeeeeeeeeeeeeeeee);
    }
  }
}

void traces() {
  efa_pair world(3);
  world.a.post(world.write(0, 0, 24));
  EP_CHECK(world.steps.run_all());
  std::ostringstream lines, chrome;
  world.a_node.device->write_trace_jsonl(lines);
  world.a_node.device->write_trace_chrome(chrome);
  const std::string text = lines.str();
  EP_CHECK(text.find("\"kind\":\"request\",\"qpn\":" + std::to_string(world.a.endpoint.qpn) + ",\"number\":0,\"opcode\":\"RDMA_WRITE\"") != std::string::npos);
  EP_CHECK(text.find("\"wqe\":\"0000821c") != std::string::npos);
  EP_CHECK(text.find("\"kind\":\"land\"") != std::string::npos);
  EP_CHECK(chrome.str().find("\"traceEvents\":[") != std::string::npos);
}

} // namespace

int main() {
  moves_bytes();
  unordered();
  exhaustive();
  repeatable();
  words_whole();
  traces();
  return check::finish();
}
