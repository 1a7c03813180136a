// The `verbs` backing. Its data path needs a real RDMA device: tests/verbs-guest boots a kernel with two soft-RoCE devices and runs this program there.
// Arguments: the names of two devices that reach each other. Without, what needs none is tested, and the rest is said not to be.
#include "nic/verbs/proxy.hpp"

#include <cerrno>
#include <functional>

#include "nic/mlx5/soft_device.hpp"
#include "two_ranks.hpp"

namespace {

using namespace ep::ibgda;
using namespace ep::test;

constexpr uint8_t short_timeout = 14; // 67 ms a try

std::array<device_wish, 2> wishes(const char* first, const char* second) {
  std::array<device_wish, 2> both;
  both[0].filter = first;
  both[1].filter = second;
  return both;
}

void says_what_is_missing() {
  auto absent = ep::nic::verbs_proxy_driver("libep-no-such-library.so.1");
  EP_CHECK(!absent.ok() && absent.why().sys_errno == ELIBACC);
  auto other = ep::nic::verbs_proxy_driver("libm.so.6");
  EP_CHECK(!other.ok() && other.why().sys_errno == ELIBBAD && says(other.why().message, "ibv_create_qp@IBVERBS_1.1"));
}

void moves_bytes(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  for (const bool collapsed : {true, false}) {
    const two_ranks world(driver, wishes(first, second), collapsed, short_timeout);
    move_bytes_and_signals(world, 12);
  }
}

// As with the software NIC: one queue pair breaks, and says why; the others go on.
void breaks_one_queue_pair(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  const two_ranks world(driver, wishes(first, second), false, short_timeout);
  ep_kernel_status status{};
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey ^ 0xff00, &status));
  const ep_ibgda_qp& broken = world.qp(0, 2);
  EP_CHECK_EQ(broken.broken, uint64_t{EP_IBGDA_BROKEN});
  EP_CHECK_EQ(broken.syndrome, 0x13u); // remote access
  EP_CHECK_EQ(world.signal(1), uint64_t{0});
  EP_CHECK_EQ(world.queues[0]->state(2).value(), uint32_t{EP_MLX5_QP_STATE_ERR});
  status = {};
  EP_CHECK(world.put(0, 1, 3, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.signal(1), uint64_t{1});
}

void cuts_a_peer_off(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  const two_ranks world(driver, wishes(first, second), false, short_timeout);
  EP_CHECK(world.queues[0]->cut(1).ok());
  ep_kernel_status status{};
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(0, 2).syndrome, 0x05u); // flushed
  status = {};
  EP_CHECK(!world.put(1, 0, 0, world.remote[0].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(1, 0).syndrome, 0x15u); // retries exceeded
}

void meets_again(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  for (const bool collapsed : {true, false}) {
    const two_ranks world(driver, wishes(first, second), collapsed, short_timeout);
    move_bytes_and_signals(world, 3);
    break_and_meet_again(world);
  }
}

void revokes_keys(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  const two_ranks world(driver, wishes(first, second), false, short_timeout);
  ep_kernel_status status{};
  EP_CHECK(world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK(world.queues[1]->release_memory(world.remote[1]).ok());
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(0, 2).syndrome, 0x13u);
  EP_CHECK_EQ(world.signal(1), uint64_t{1});
}

// ---- good and bad requests, and what becomes of them

struct scene {
  const two_ranks& world;
  ep::dl::mlx5_mr read_only; // of rank 1: the same 64 bytes for all, no rights but to read
  uint64_t read_only_at;
  uint64_t remote_data() const { return reinterpret_cast<uint64_t>(world.data(1)); }
  uint64_t remote_word() const { return reinterpret_cast<uint64_t>(&world.signal(1)); }
  uint32_t rkey() const { return world.remote[1].mr.rkey; }
  ep::mlx5_place local() const { return {reinterpret_cast<uint64_t>(world.data(0)), world.remote[0].mr.lkey}; }
  ep::mlx5_place old() const { return {world.qp(0, 2).response, world.qp(0, 2).response_lkey}; }
};

struct scripted_request {
  const char* name;
  uint32_t syndrome; // 0: it succeeds
  uint32_t over_roce; // by plain verbs and the kernel's soft-RoCE, which looks at some things before it sends, and has another word for them
  std::function<void(const scene&, const ep::mlx5_writer&)> build;
};

const std::vector<scripted_request>& script() {
  using ep::mlx5_writer;
  constexpr uint32_t ok = 0, local_operation = 0x02, protection = 0x04, invalid = 0x12, access = 0x13;
  static const std::vector<scripted_request> requests{
      {"write", ok, ok, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data(), s.rkey()}, s.local(), 4096); }},
      {"write of one byte at an odd place", ok, ok, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data() + 4095, s.rkey()}, s.local(), 1); }},
      {"write of nothing", ok, ok, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data(), s.rkey()}, s.local(), 0); }},
      {"inline write", ok, ok, [](const scene& s, const mlx5_writer& w) { w.write_inline({s.remote_data() + 3, s.rkey()}, "abcdefghijklmnopqrstuvwxyz!", 28); }},
      {"read", ok, ok, [](const scene& s, const mlx5_writer& w) { w.read({s.remote_data(), s.rkey()}, s.local(), 4096); }},
      {"fetch-add", ok, ok, [](const scene& s, const mlx5_writer& w) { w.fetch_add8({s.remote_word(), s.rkey()}, 0x100000001, s.old()); }},
      {"compare-and-swap that swaps", ok, ok, [](const scene& s, const mlx5_writer& w) { w.compare_swap8({s.remote_word(), s.rkey()}, 5, 77, s.old()); }},
      {"compare-and-swap that does not", ok, ok, [](const scene& s, const mlx5_writer& w) { w.compare_swap8({s.remote_word(), s.rkey()}, 6, 77, s.old()); }},
      {"write with an unknown key", access, access, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data(), s.rkey() ^ 0xff00}, s.local(), 64); }},
      {"write past the end", access, access, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data() + 4096, s.rkey()}, s.local(), 65); }},
      {"write before the begin", access, access, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data() - 1, s.rkey()}, s.local(), 64); }},
      {"read with an unknown key", access, access, [](const scene& s, const mlx5_writer& w) { w.read({s.remote_data(), s.rkey() ^ 0xff00}, s.local(), 64); }},
      {"fetch-add with an unknown key", access, access, [](const scene& s, const mlx5_writer& w) { w.fetch_add8({s.remote_word(), s.rkey() ^ 0xff00}, 1, s.old()); }},
      {"fetch-add past the end", access, access, [](const scene& s, const mlx5_writer& w) { w.fetch_add8({s.remote_word() + 64, s.rkey()}, 1, s.old()); }},
      {"write without the right", access, access, [](const scene& s, const mlx5_writer& w) { w.write({s.read_only_at, s.read_only.rkey}, s.local(), 64); }},
      {"fetch-add without the right", access, access, [](const scene& s, const mlx5_writer& w) { w.fetch_add8({s.read_only_at, s.read_only.rkey}, 1, s.old()); }},
      {"read with nothing but the right to", ok, ok, [](const scene& s, const mlx5_writer& w) { w.read({s.read_only_at, s.read_only.rkey}, s.local(), 64); }},
      {"fetch-add on no word", invalid, local_operation, [](const scene& s, const mlx5_writer& w) { w.fetch_add8({s.remote_word() + 4, s.rkey()}, 1, s.old()); }},
      {"write from an unknown key", protection, local_operation, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data(), s.rkey()}, {s.local().address, s.local().key ^ 0xff00}, 64); }},
      {"write from past the end", protection, protection, [](const scene& s, const mlx5_writer& w) { w.write({s.remote_data(), s.rkey()}, {s.local().address + 4100, s.local().key}, 4096); }},
      {"fetch-add of 4 bytes", ok, local_operation, [](const scene& s, const mlx5_writer& w) { w.fetch_add4({s.remote_word(), s.rkey()}, 1, s.old()); }},
  };
  return requests;
}

// What is left of a request: how it ended, and all memory that it could have touched.
struct trace_left {
  uint32_t syndrome = 0;
  std::vector<uint8_t> bytes;
};

trace_left outcome_of(ep::dl::mlx5_driver& driver, const std::array<device_wish, 2>& wished, const scripted_request& request) {
  const two_ranks world(driver, wished, false, short_timeout);
  alignas(4096) static std::array<uint8_t, 4096> read_only;
  read_only.fill(0x5a);
  const auto registered = must(world.queues[1]->register_memory({reinterpret_cast<uint64_t>(read_only.data()), 64}, ep::dl::MLX5_ACCESS_LOCAL_WRITE | ep::dl::MLX5_ACCESS_REMOTE_READ));
  const scene here{world, registered.mr, reinterpret_cast<uint64_t>(read_only.data())};
  for (int i = 0; i < 4096; ++i) {
    world.data(0)[i] = static_cast<uint8_t>(i * 3 + 1);
    world.data(1)[i] = static_cast<uint8_t>(i * 5 + 2);
  }
  world.signal(1) = 5;
  ep_kernel_status status{};
  trace_left left;
  const bool done = world.post(0, 2, 1, [&](uint64_t, const ep::mlx5_writer& writer) { request.build(here, writer); }, &status);
  left.syndrome = done ? 0 : world.qp(0, 2).syndrome;
  EP_CHECK_EQ(done, world.qp(0, 2).broken == EP_IBGDA_SOUND);
  for (const int rank : {0, 1}) left.bytes.insert(left.bytes.end(), world.data(rank), world.data(rank) + 4096 + 64);
  left.bytes.insert(left.bytes.end(), read_only.begin(), read_only.begin() + 64);
  const auto* old = reinterpret_cast<const uint8_t*>(world.qp(0, 2).response);
  left.bytes.insert(left.bytes.end(), old, old + 8);
  return left;
}

// The software NIC alone, or, with devices, what theirs makes of it: byte for byte the same memory, and the same syndrome.
void agrees_on_requests(ep::dl::mlx5_driver* device, const std::array<device_wish, 2>& wished) {
  for (const scripted_request& request : script()) {
    ep::nic::soft_driver soft({});
    const trace_left expected = outcome_of(soft, {}, request);
    if (expected.syndrome != request.syndrome) std::fprintf(stderr, "  software NIC: %s\n", request.name);
    EP_CHECK_EQ(expected.syndrome, request.syndrome);
    if (device == nullptr) continue;
    const trace_left found = outcome_of(*device, wished, request);
    if (found.syndrome != request.over_roce) std::fprintf(stderr, "  device: %s\n", request.name);
    EP_CHECK_EQ(found.syndrome, request.over_roce);
    const bool same = found.bytes == expected.bytes;
    if (!same && request.syndrome == request.over_roce) std::fprintf(stderr, "  other memory: %s\n", request.name);
    EP_CHECK(same || request.syndrome != request.over_roce);
  }
}

} // namespace

int main(int count, char** arguments) {
  says_what_is_missing();
  if (count == 3) {
    auto driver = must(ep::nic::verbs_proxy_driver());
    agrees_on_requests(driver.get(), wishes(arguments[1], arguments[2]));
    for (const auto& test : {moves_bytes, breaks_one_queue_pair, cuts_a_peer_off, meets_again, revokes_keys}) test(*driver, arguments[1], arguments[2]);
  } else {
    agrees_on_requests(nullptr, {});
    std::printf("NOT run over a device: none was named\n");
  }
  return ep::check::finish();
}
