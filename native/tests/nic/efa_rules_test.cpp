// What the software EFA refuses: every rule of the format by slot and field, every status by a way that leads there.
#include <atomic>
#include <ctime>
#include <functional>
#include <thread>

#include "efa_rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

struct outcome {
  uint8_t status = 255;
  bool known = false; // a violation was reported
  efa::violation wrong;
};

// Posts one good request, then what `spoil` makes of another one, and says what became of that.
outcome of_spoiled(const std::function<void(std::vector<uint8_t>&)>& spoil, const efa::soft_options& options = stepped(), bool wide = false) {
  efa_pair world(1, {.inline_write = wide}, options);
  const uint64_t value = 0x1234;
  world.a.post(world.write(0, 0, 8));
  EP_CHECK(world.steps.run_all());
  std::vector<uint8_t> bytes = wide ? world.a.inline_wqe(world.write(0, 64, 8), &value) : world.a.wqe(world.write(0, 64, 8));
  spoil(bytes);
  world.a.put(bytes);
  world.a.bell();
  EP_CHECK(world.steps.run_all());
  outcome seen;
  const auto done = world.a.poll_all();
  EP_CHECK_EQ(done.size(), size_t{2});
  seen.status = done.back().status;
  const auto all = world.a_node.device->violations();
  if (!all.empty()) {
    seen.known = true;
    seen.wrong = all.front();
    EP_CHECK_EQ(seen.wrong.qpn, world.a.endpoint.qpn);
    EP_CHECK_EQ(seen.wrong.slot, 1u);
    EP_CHECK_EQ(seen.wrong.number, uint64_t{1});
    EP_CHECK(efa::violation_text(seen.wrong).find("slot 1 (WQE 1") != std::string::npos);
  }
  // Counted where it belongs: a failure never ticks the success.
  EP_CHECK_EQ(efa_queue::count_of(world.a.written), seen.status == 0 ? uint64_t{2} : uint64_t{1});
  EP_CHECK_EQ(efa_queue::count_of(world.a.failed[0]), seen.status == 0 ? uint64_t{0} : uint64_t{1});
  if (seen.status != 0) EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{1});
  return seen;
}

void put16(std::vector<uint8_t>& bytes, size_t at, uint16_t value) { std::memcpy(bytes.data() + at, &value, 2); }
void put32(std::vector<uint8_t>& bytes, size_t at, uint32_t value) { std::memcpy(bytes.data() + at, &value, 4); }

struct rule {
  const char* field;
  uint8_t status;      // when lints are errors
  bool lint;           // carried out when they are warnings
  std::function<void(std::vector<uint8_t>&)> spoil;
};

void every_field() {
  const auto byte = [](size_t at, uint8_t flip) { return [at, flip](std::vector<uint8_t>& wqe) { wqe[at] ^= flip; }; };
  const rule rules[] = {
      {"meta.meta_desc", 2, false, byte(2, 0x80)},
      {"meta.phase", 2, false, byte(3, 1)},
      {"meta.first", 2, true, byte(3, 4)},
      {"meta.last", 2, true, byte(3, 8)},
      {"meta.comp_req", 2, true, byte(3, 0x10)},
      {"meta.ctrl1 bit 6", 2, true, byte(2, 0x40)},
      {"meta.ctrl2 bits 7:5 and 1", 2, true, byte(3, 0x20)},
      {"meta.ctrl2 bits 7:5 and 1", 2, true, byte(3, 2)},
      {"meta.ctrl3 bits 7:2", 2, true, byte(14, 4)},
      {"meta.reserved0", 2, true, byte(15, 1)},
      {"meta.reserved1", 2, true, byte(25, 1)},
      {"meta.req_id_ex", 2, true, byte(26, 1)},
      {"meta.imm", 2, true, byte(8, 1)},
      {"local.lkey bits 31:24", 2, true, byte(55, 1)},
      {"meta.opcode", 3, false, byte(2, 1)}, // 2 becomes 3
      {"meta.inline", 3, false, byte(2, 0x20)},
      {"meta.length", 6, false, byte(6, 2)},
      {"local.length", 6, false, byte(48, 1)},
      {"entry", 2, true, [](std::vector<uint8_t>& wqe) { std::fill(wqe.begin() + 40, wqe.begin() + 48, efa::wqe_scrub); }},
      {"entry", 2, false, [](std::vector<uint8_t>& wqe) { std::fill(wqe.begin(), wqe.end(), efa::wqe_scrub); }},
  };
  efa::soft_options lenient = stepped();
  lenient.engine.reserved = efa::lint::warn;
  for (const rule& one : rules) {
    const outcome strict = of_spoiled(one.spoil);
    EP_CHECK_EQ(strict.status, one.status);
    EP_CHECK(strict.known);
    if (strict.known) EP_CHECK_EQ(std::string(strict.wrong.field), std::string(one.field));
    // A word of the remote address that is not stored is one that nobody can answer for: a warning, then whatever it leads to.
    if (!one.lint || std::string(one.field) == "entry") continue;
    const outcome warned = of_spoiled(one.spoil, lenient);
    EP_CHECK_EQ(warned.status, 0);
    EP_CHECK(warned.known && std::string(warned.wrong.field) == one.field);
  }
  // Wide entries: a length that the other one contradicts, too many inline bytes, a second half that was not written.
  const auto short_remote = of_spoiled([](std::vector<uint8_t>& wqe) { put32(wqe, 32, 4); }, stepped(), true);
  EP_CHECK_EQ(short_remote.status, 6);
  const auto too_long = of_spoiled([](std::vector<uint8_t>& wqe) { put16(wqe, 6, 81), put32(wqe, 32, 81); }, stepped(), true);
  EP_CHECK_EQ(too_long.status, 6);
  EP_CHECK(too_long.known && std::string(too_long.wrong.field) == "meta.length");
  const auto half = of_spoiled([](std::vector<uint8_t>& wqe) { std::fill(wqe.begin() + 64, wqe.end(), efa::wqe_scrub); }, stepped(), true);
  EP_CHECK(half.known && std::string(half.wrong.field) == "entry");
  EP_CHECK_EQ(of_spoiled([](std::vector<uint8_t>&) {}, stepped(), true).status, 0);
  // Hints are no violation.
  const auto hinted = of_spoiled([](std::vector<uint8_t>& wqe) { wqe[14] = EP_EFA_HINT_BURST_PPS_SENSITIVE; });
  EP_CHECK(hinted.status == 0 && !hinted.known);
}

// T18: each status, and that the queue pair goes on afterwards where it may.
void every_status() {
  struct way {
    uint8_t status;
    std::function<void(efa_pair&, std::vector<uint8_t>&)> spoil;
  };
  const way ways[] = {
      {EP_EFA_STATUS_LOCAL_QP_INTERNAL, [](efa_pair&, auto& wqe) { wqe[3] ^= 1; }},
      {EP_EFA_STATUS_LOCAL_UNSUPPORTED_OP, [](efa_pair&, auto& wqe) { wqe[2] = 0x87; }},
      {EP_EFA_STATUS_LOCAL_INVALID_AH, [](efa_pair&, auto& wqe) { put16(wqe, 12, 999); }},
      {EP_EFA_STATUS_LOCAL_INVALID_LKEY, [](efa_pair&, auto& wqe) { wqe[53] ^= 7; }},
      {EP_EFA_STATUS_LOCAL_INVALID_LKEY, [](efa_pair& world, auto& wqe) { // a range that ends outside
         const uint64_t beyond = world.a_node.address(world.a_node.bytes - 4);
         std::memcpy(wqe.data() + 56, &beyond, 8);
       }},
      {EP_EFA_STATUS_LOCAL_BAD_LENGTH, [](efa_pair&, auto& wqe) { put32(wqe, 32, 4096), put32(wqe, 48, 4096); }}, // above max_message
      {EP_EFA_STATUS_REMOTE_BAD_ADDRESS, [](efa_pair&, auto& wqe) { wqe[36] ^= 1; }},
      {EP_EFA_STATUS_REMOTE_BAD_ADDRESS, [](efa_pair& world, auto& wqe) {
         const uint64_t beyond = world.b_node.address(world.b_node.bytes - 4);
         std::memcpy(wqe.data() + 40, &beyond, 8);
       }},
      {EP_EFA_STATUS_REMOTE_BAD_ADDRESS, [](efa_pair& world, auto& wqe) { put32(wqe, 36, world.b_node.mr.lkey); }}, // an lkey for an rkey
      {EP_EFA_STATUS_REMOTE_ABORT, [](efa_pair& world, auto&) { must(world.a_node.device->set_faults("fail status=8")); }},
      {EP_EFA_STATUS_REMOTE_BAD_DEST_QPN, [](efa_pair&, auto& wqe) { wqe[4] ^= 0x40; }},
      {EP_EFA_STATUS_REMOTE_BAD_DEST_QPN, [](efa_pair&, auto& wqe) { wqe[17] ^= 0x40; }}, // qkey
      {EP_EFA_STATUS_REMOTE_RNR, [](efa_pair&, auto& wqe) { wqe[2] |= EP_EFA_CTRL1_IMM; }},
      {EP_EFA_STATUS_REMOTE_RNR, [](efa_pair&, auto& wqe) { wqe[2] = EP_EFA_CTRL1_SEND; }},
      {EP_EFA_STATUS_REMOTE_BAD_LENGTH, [](efa_pair& world, auto&) { must(world.a_node.device->set_faults("fail status=11 skip=0 count=1")); }},
      {EP_EFA_STATUS_REMOTE_BAD_STATUS, [](efa_pair& world, auto&) { must(world.a_node.device->set_faults("fail status=12")); }},
      {EP_EFA_STATUS_UNKNOWN_PEER, [](efa_pair& world, auto&) {
         must(world.b_node.device->remove_address(world.to_a));
         world.b.peers.clear();
       }},
      {EP_EFA_STATUS_UNREACHABLE, [](efa_pair& world, auto&) { world.a_node.device->set_link(false); }},
      {EP_EFA_STATUS_FEATURE_MISMATCH, [](efa_pair& world, auto&) { must(world.a_node.device->set_faults("fail status=18")); }},
  };
  efa::soft_options options = stepped();
  options.engine.max_message = 1024;
  for (const way& one : ways) {
    efa_pair world(5, {}, options);
    std::memset(world.a_node.data(), 0x77, 64);
    std::vector<uint8_t> bytes = world.a.wqe(world.write(0, 64, 8));
    one.spoil(world, bytes);
    world.a.put(bytes);
    world.a.bell();
    EP_CHECK(world.steps.run_all());
    auto done = world.a.poll_all();
    EP_CHECK_EQ(done.size(), size_t{1});
    if (!done.empty()) EP_CHECK_EQ(done[0].status, one.status);
    EP_CHECK_EQ(efa_queue::count_of(world.a.failed[0]), uint64_t{1});
    EP_CHECK_EQ(efa_queue::count_of(world.a.written), uint64_t{0});
    EP_CHECK_EQ(world.b_node.word(64), uint64_t{0});
    // Other endpoints, and this one if it broke no rule, go on.
    must(world.a_node.device->set_faults(""));
    world.a_node.device->set_link(true);
    if (one.status == EP_EFA_STATUS_UNKNOWN_PEER) world.b.knows(world.a.endpoint.address);
    world.a.post(world.write(0, 128, 8));
    EP_CHECK(world.steps.run_all());
    done = world.a.poll_all();
    EP_CHECK_EQ(done.size(), size_t{1});
    const bool broken = one.status == EP_EFA_STATUS_LOCAL_QP_INTERNAL;
    if (!done.empty()) EP_CHECK_EQ(done[0].status, broken ? EP_EFA_STATUS_FLUSHED : EP_EFA_STATUS_OK);
    EP_CHECK_EQ(world.b_node.word(128) != 0, !broken);
    dl::efa_event event;
    EP_CHECK_EQ(must(world.a_node.device->poll_async(event)), broken);
  }
}

// A peer that is gone: given up after a while, and only its requests.
void peer_gone() {
  efa_pair world(2);
  efa_node third(stepped(9));
  efa_queue c(third);
  const dl::efa_peer to_c = world.a.knows(c.endpoint.address);
  c.knows(world.a.endpoint.address);
  world.steps.add(*third.device);
  world.steps.remove(*world.b_node.device);
  {
    efa_queue other(world.b_node);
    other.knows(world.a.endpoint.address);
    world.b.destroy();
    world.a.post(world.write(0, 0, 8));
    EP_CHECK(world.steps.run_all());
    EP_CHECK_EQ(world.a.poll_all().at(0).status, EP_EFA_STATUS_REMOTE_BAD_DEST_QPN); // the endpoint is gone, its device is not
  }
  must(world.b_node.device->dereg_mr(world.b_node.mr));
  world.b_node.mr = {};
  must(world.b_node.device->close());
  world.a.post(world.write(0, 0, 8));
  efa_request also = world.write(0, 0, 8);
  also.to = to_c;
  also.remote = third.address();
  also.rkey = third.mr.rkey;
  world.a.post(also);
  const int64_t before = world.steps.now_ns();
  EP_CHECK(world.steps.run_all());
  EP_CHECK(world.steps.now_ns() - before >= 20'000'000);
  const auto done = world.a.poll_all();
  EP_CHECK_EQ(done.size(), size_t{2});
  for (const efa_completion& one : done) EP_CHECK_EQ(one.status, one.id == 1 ? EP_EFA_STATUS_UNRESPONSIVE : EP_EFA_STATUS_OK);
  world.steps.remove(*third.device);
}

// Memory that was taken back is not touched any more, wherever the request stands.
void keys_die() {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    efa_pair world(seed);
    std::memset(world.a_node.data(), 0x55, 256);
    world.a.post(world.write(0, 0, 256));
    for (uint64_t i = 0; i < seed && world.steps.step(); ++i) {
    }
    must(world.b_node.device->dereg_mr(world.b_node.mr));
    world.b_node.mr = {};
    std::vector<uint8_t> then(world.b_node.data(), world.b_node.data(256));
    EP_CHECK(world.steps.run_all());
    EP_CHECK(std::memcmp(then.data(), world.b_node.data(), 256) == 0);
    const auto done = world.a.poll_all();
    EP_CHECK_EQ(done.size(), size_t{1});
    const bool whole = world.b_node.word(0) != 0 && efa_queue::count_of(world.b.arrived) == 1;
    EP_CHECK_EQ(done.at(0).status, whole ? EP_EFA_STATUS_OK : EP_EFA_STATUS_REMOTE_BAD_ADDRESS);
  }
}

// A sender that died inside of an access keeps nobody out; one that was stopped there keeps only its own place.
void visitors_that_never_leave() {
  efa_pair world(11);
  const auto handle = must(nic::directory_find(world.b_node.device->port_number()));
  const auto port = must(efa::port_view::open(handle));
  efa::port_qp& place = port.qp((world.b.endpoint.qpn - efa::port_first_qpn) % efa::port_max_qps);
  EP_CHECK_EQ(place.qpn, world.b.endpoint.qpn);
  const uint64_t dead = efa::active_of({nic::directory_ports - 1, 0x1234}, 0);
  // One's own number, of a device that had it before.
  const uint64_t former = efa::active_of({world.a_node.device->port_number(), ~must(nic::directory_find(world.a_node.device->port_number())).nonce}, 0);
  const uint64_t living = efa::active_of({world.b_node.device->port_number(), handle.nonce}, 0);
  for (uint64_t& active : place.active) active = &active == place.active ? former : dead;
  world.a.post(world.write(0, 0, 64));
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{1});
  // One of them among the living is found wherever it is.
  for (uint32_t gone = 0; gone < efa::port_insiders; ++gone) {
    for (uint64_t& active : place.active) active = living;
    place.active[gone] = dead;
    world.a.post(world.write(0, 0, 64));
    EP_CHECK(world.steps.run_all(100'000));
    EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{2} + gone);
  }
  for (uint64_t& active : place.active) active = living;
  world.a.post(world.write(0, 0, 64));
  EP_CHECK(!world.steps.run_all(20'000)); // all places are taken by somebody who lives
  for (uint64_t& active : place.active) active = 0;
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(world.a.poll_all().size(), size_t{2} + efa::port_insiders);
}

// All places of a queue pair are taken while a sender lets its own one go, whose write has landed and completed: the arrival is counted all the same.
void arrivals_outlive_their_sender() {
  efa_pair world(12);
  const auto handle = must(nic::directory_find(world.b_node.device->port_number()));
  const auto port = must(efa::port_view::open(handle));
  efa::port_qp& place = port.qp((world.b.endpoint.qpn - efa::port_first_qpn) % efa::port_max_qps);
  must(world.a_node.device->set_faults("hold stage=tick"));
  world.a.post(world.write(0, 0, 64));
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(world.a.poll_all().size(), size_t{1});
  EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{0});
  for (uint64_t& active : place.active) {
    std::atomic_ref<uint64_t>(active).store(efa::active_of({world.b_node.device->port_number(), handle.nonce}, 0));
  }
  std::thread others([&] {
    timespec nap{0, 50'000'000};
    nanosleep(&nap, nullptr);
    for (uint64_t& active : place.active) std::atomic_ref<uint64_t>(active).store(0);
  });
  world.a.destroy();
  EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{1});
  others.join();
}

// A sender that stops inside of a counter, between counting and showing it, keeps no other from counting there; what it counted shows with the next one.
void stopped_inside_a_counter() {
  efa_pair world(13);
  const auto port = must(efa::port_view::open(must(nic::directory_find(world.b_node.device->port_number()))));
  efa::port_qp& place = port.qp((world.b.endpoint.qpn - efa::port_first_qpn) % efa::port_max_qps);
  std::atomic_ref<uint64_t>(port.counter(place.counter - 1).value).fetch_add(1); // so far it came
  EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{0});
  world.a.post(world.write(0, 0, 64));
  EP_CHECK(world.steps.run_all());
  EP_CHECK_EQ(efa_queue::count_of(world.b.arrived), uint64_t{2});
}

// Others count, and show it, at any one point where somebody shows a count, or at several: it never goes back, and ends at all of them. What was stored there besides is overwritten.
void counts_never_go_back() {
  for (uint32_t points = 0; points < 64; ++points) {
    for (const uint64_t first : {uint64_t{0}, uint64_t{EP_EFA_COUNTER_MASK} - 1, uint64_t{1} << 40}) {
      uint64_t value = first + 1;
      uint64_t memory = first & EP_EFA_COUNTER_MASK;
      uint64_t last = 0; // beyond `first`
      uint32_t point = 0;
      const auto look = [&] {
        const uint64_t now = (memory - first) & EP_EFA_COUNTER_MASK;
        EP_CHECK(now >= last && now <= value - first);
        last = now;
      };
      efa::count_show(value, memory, [&] {
        look();
        if ((points >> point++ & 1) != 0) efa::count_show(++value, memory, [] {});
        look();
      });
      look();
      EP_CHECK_EQ(memory, value & EP_EFA_COUNTER_MASK);
    }
  }
  uint64_t value = 7;
  for (const uint64_t stored : {uint64_t{0}, uint64_t{6}, uint64_t{8}, ~uint64_t{0}}) {
    uint64_t memory = stored;
    efa::count_show(value, memory, [] {});
    EP_CHECK_EQ(memory, uint64_t{7});
  }
}

// Two count at the same time: what memory shows never goes back, it has one's own count when one is done, and in the end it is all of them.
void counting_together() {
  constexpr uint64_t rounds = 100'000;
  efa_node node(stepped());
  efa_queue queue(node);
  const auto handle = must(nic::directory_find(node.device->port_number()));
  const uint32_t index = must(efa::port_view::open(handle)).qp((queue.endpoint.qpn - efa::port_first_qpn) % efa::port_max_qps).counter - 1;
  std::atomic<uint64_t> back{0};
  std::atomic<int> ready{0};
  const auto sender = [&] {
    efa::shm_peer peer(must(efa::port_view::open(handle)));
    uint64_t seen = 0;
    for (++ready; ready.load() < 2;) cpu_relax();
    for (uint64_t round = 0; round < rounds; ++round) {
      const uint64_t before = efa_queue::count_of(queue.arrived);
      peer.count(index);
      const uint64_t after = efa_queue::count_of(queue.arrived);
      back += before < seen || after <= before;
      seen = after;
    }
  };
  std::thread other(sender);
  sender();
  other.join();
  EP_CHECK_EQ(back.load(), uint64_t{0});
  EP_CHECK_EQ(efa_queue::count_of(queue.arrived), 2 * rounds);
}

void refusals() {
  efa_node node(stepped());
  auto& device = *node.device;
  const auto code = [](const auto& got) { return got.ok() ? 0 : got.why().sys_errno; };
  const auto refused = [&](uint32_t depth, bool wide) {
    dl::efa_endpoint_spec spec;
    spec.depth = depth;
    spec.inline_write = wide;
    return code(device.create_endpoint(spec)) == EINVAL;
  };
  EP_CHECK(refused(12, false));
  EP_CHECK(refused(8192, false));
  EP_CHECK(refused(4096, true));
  EP_CHECK_EQ(code(device.reg_mr({node.address(), 0}, dl::EFA_ACCESS_REMOTE_WRITE)), EINVAL);
  EP_CHECK_EQ(code(device.reg_mr({64, 64}, dl::EFA_ACCESS_REMOTE_WRITE)), EFAULT);
  EP_CHECK_EQ(code(device.reg_mr({node.address(), 8, 3}, 0)), EOPNOTSUPP);
  EP_CHECK_EQ(code(device.close()), EBUSY);
  EP_CHECK_EQ(code(device.destroy_endpoint({})), EINVAL);
  {
    efa_queue queue(node);
    EP_CHECK_EQ(code(device.destroy_cq(queue.cq)), EBUSY);
    EP_CHECK_EQ(code(device.close_counter(queue.counters[0])), EBUSY);
    EP_CHECK_EQ(code(device.insert_address(queue.endpoint, dl::efa_address{})), EINVAL);
    dl::efa_address nobody = queue.endpoint.address;
    nobody.bytes[15] ^= 0x5a;
    EP_CHECK_EQ(code(device.insert_address(queue.endpoint, nobody)), EHOSTUNREACH);
  }
  efa::soft_options small = stepped();
  small.engine.max_counters = 1;
  efa_node few(small);
  const dl::efa_counter_spec spec{{reinterpret_cast<uint64_t>(few.take_count()), 8}, {reinterpret_cast<uint64_t>(few.take_count()), 8}};
  const auto first = must(few.device->open_counter(spec));
  EP_CHECK_EQ(code(few.device->open_counter(spec)), ENOMEM);
  must(few.device->close_counter(first));
  EP_CHECK_EQ(few.device->set_faults("hold\n").ok(), false);
  EP_CHECK(few.device->set_faults("# nothing\n\ndelay stage=cqe ns=5 qpn=0x100").ok());
  EP_CHECK(few.device->set_faults("hold stage=line").why().message.find("line 1") != std::string::npos);
  EP_CHECK(!few.device->set_faults("cut bytes=12").ok());
}

} // namespace

int main() {
  every_field();
  every_status();
  peer_gone();
  keys_die();
  visitors_that_never_leave();
  arrivals_outlive_their_sender();
  stopped_inside_a_counter();
  counts_never_go_back();
  counting_together();
  refusals();
  return check::finish();
}
