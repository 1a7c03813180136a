// mlx5 NICs that a network joins (loopback): every request by its answer, the responder's rules, faults, and peers that die, stop or were never there.
//
// EP_FUZZ_RUNS=N mutated requests (default: a second's worth), EP_FUZZ_SEED=N.
#include <csignal>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "environment.hpp"
#include "nic/mlx5/wire.hpp"
#include "nic/rig.hpp"
#include "until.hpp"

using namespace ep;
using namespace ep::test;

namespace {

soft_options on_loopback(uint64_t seed = 1, int64_t max_ack_timeout_ns = soft_options().engine.max_ack_timeout_ns) {
  soft_options options;
  options.engine.seed = seed;
  options.engine.max_ack_timeout_ns = max_ack_timeout_ns;
  options.network = nic::net::hub_options{"127.0.0.1", 0, 0};
  return options;
}

nic::net::link_keys keys(uint8_t out, uint8_t in) {
  nic::net::link_keys made;
  made.out.fill(out);
  made.in.fill(in);
  return made;
}

// As transports have it: what a slow machine does with a megabyte is no silence.
constexpr uint32_t patient_timeout = 18; // 1.07 s

queue_options patient() {
  queue_options options;
  options.ack_timeout = patient_timeout;
  return options;
}

struct net_pair {
  explicit net_pair(const queue_options& options = patient(), uint64_t bytes = 1 << 16, int64_t max_ack_timeout_ns = soft_options().engine.max_ack_timeout_ns)
      : a_node(on_loopback(1, max_ack_timeout_ns), bytes), b_node(on_loopback(2), bytes), a(a_node, options), b(b_node, options) {
    EP_CHECK(a_node.device->hub()->know(b_node.device->hub()->gid(), keys(1, 2)) > nic::directory_ports);
    EP_CHECK(b_node.device->hub()->know(a_node.device->hub()->gid(), keys(2, 1)) > nic::directory_ports);
    a.connect(b_node.device->hub()->gid(), b.qpn);
    b.connect(a_node.device->hub()->gid(), a.qpn);
  }
  data_at local(uint64_t offset, uint32_t bytes) const { return {a_node.address(offset), a_node.mr.lkey, bytes}; }
  uint64_t remote(uint64_t offset) const { return b_node.address(offset); }
  uint32_t rkey() const { return b_node.mr.rkey; }
  bool done(uint16_t index) const {
    return until([&] { return a.completed().opcode != EP_MLX5_CQE_INVALID && static_cast<int16_t>(a.completed().counter - index) >= 0; });
  }
  // What the request ends with: 0, or the syndrome of its error.
  uint8_t ends(const wqe_bytes& wqe) {
    const uint16_t index = a.post(wqe);
    wake_notify(a_node.device->doorbell_wake());
    if (!done(index)) return 0xff;
    return a.completed().opcode == EP_MLX5_CQE_REQ ? 0 : a.syndrome();
  }
  node a_node, b_node;
  queue a, b;
};

void every_request() {
  net_pair pair;
  for (uint64_t i = 0; i < 4096; ++i) pair.a_node.data()[i] = static_cast<uint8_t>(i * 7);
  EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(8192), pair.rkey(), {pair.local(0, 1000), pair.local(2000, 1001)})), 0);
  EP_CHECK(std::memcmp(pair.b_node.data() + 8192, pair.a_node.data(), 1000) == 0 && std::memcmp(pair.b_node.data() + 9192, pair.a_node.data() + 2000, 1001) == 0);
  EP_CHECK_EQ(pair.b_node.data()[8192 + 2001], 0);
  EP_CHECK_EQ(pair.ends(inline_wqe(pair.a, pair.remote(64), pair.rkey(), "inline!", 8)), 0);
  EP_CHECK(std::memcmp(pair.b_node.data() + 64, "inline!", 8) == 0);
  EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(8192), pair.rkey(), {pair.local(20'000, 700), pair.local(24'000, 300)})), 0);
  EP_CHECK(std::memcmp(pair.a_node.data() + 20'000, pair.a_node.data(), 700) == 0 && std::memcmp(pair.a_node.data() + 24'000, pair.a_node.data() + 700, 300) == 0);
  for (uint64_t i = 0; i < 3; ++i) {
    EP_CHECK_EQ(pair.ends(add8_wqe(pair.a, pair.remote(128), pair.rkey(), pair.local(30'000, 8), 5)), 0);
    EP_CHECK_EQ(pair.a_node.word(30'000).load(), i * 5);
  }
  EP_CHECK_EQ(pair.b_node.word(128).load(), uint64_t{15});
  EP_CHECK_EQ(pair.ends(add4_wqe(pair.a, pair.remote(136), pair.rkey(), pair.local(30'008, 4), 9)), 0);
  EP_CHECK_EQ(pair.b_node.word(136).load(), uint64_t{9});
  EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, 0, 0, {})), 0);
  EP_CHECK(pair.a_node.device->violations().empty() && pair.b_node.device->violations().empty());
}

// Longer than a part, both ways, with a sum that no wrong order has.
void long_messages() {
  constexpr uint32_t bytes = 3 * nic::net::part_bytes + 12'345;
  net_pair pair(patient(), uint64_t{2} * bytes);
  random_source random(5);
  for (uint32_t i = 0; i < bytes; ++i) pair.a_node.data()[i] = static_cast<uint8_t>(random.next());
  EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, bytes)})), 0);
  EP_CHECK(std::memcmp(pair.b_node.data(), pair.a_node.data(), bytes) == 0);
  EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(0), pair.rkey(), {pair.local(bytes, bytes)})), 0);
  EP_CHECK(std::memcmp(pair.a_node.data() + bytes, pair.a_node.data(), bytes) == 0);
}

// Data, then its count on the same queue pair, for many rounds: whoever sees the count sees the data.
void signals_follow_data() {
  net_pair pair;
  for (uint64_t i = 1; i <= 300; ++i) {
    std::memset(pair.a_node.data() + 4096, static_cast<int>(i), 1000);
    pair.a.put(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(4096), pair.rkey(), {pair.local(4096, 1000)}, 0));
    const uint16_t last = pair.a.put(add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1));
    pair.a.ring();
    wake_notify(pair.a_node.device->doorbell_wake());
    if (!until([&] { return pair.b_node.word(0).load(std::memory_order_acquire) == i; })) return EP_CHECK_EQ(i, uint64_t{0});
    if (pair.b_node.data()[4096] != static_cast<uint8_t>(i) || pair.b_node.data()[5095] != static_cast<uint8_t>(i)) return EP_CHECK_EQ(i, uint64_t{1});
    if (!pair.done(last)) return EP_CHECK_EQ(i, uint64_t{2});
  }
}

// Each on a queue pair of its own, since an error ends it.
void the_responder_refuses() {
  const auto with = [](queue_options options, const auto& wqe) {
    options.ack_timeout = patient_timeout;
    net_pair pair(options);
    return pair.ends(wqe(pair));
  };
  const auto write = [](uint64_t offset, uint32_t key_change) {
    return [=](net_pair& pair) { return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(offset), pair.rkey() ^ key_change, {pair.local(0, 64)}); };
  };
  EP_CHECK_EQ(with({}, write(0, 0x1)), EP_MLX5_SYNDROME_REMOTE_ACCESS);
  EP_CHECK_EQ(with({}, write((1 << 16) - 63, 0)), EP_MLX5_SYNDROME_REMOTE_ACCESS);
  EP_CHECK_EQ(with({.rwe = false}, write(0, 0)), EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST);
  EP_CHECK_EQ(with({.rae = false}, [](net_pair& pair) { return add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1); }), EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST);
  queue_options no_receive;
  no_receive.rnr_retry = 1;
  no_receive.has_rq = true;
  EP_CHECK_EQ(with(no_receive, [](net_pair& pair) { return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE_IMM, pair.remote(0), pair.rkey(), {pair.local(0, 8)}); }),
              EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED);
}

void immediates() {
  queue_options options = patient();
  options.has_rq = true;
  options.log_rq = 4;
  net_pair pair(options);
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(pair.b.dbr)).store(be32(3), std::memory_order_release);
  for (uint32_t i = 0; i < 3; ++i) {
    EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE_IMM, pair.remote(0), pair.rkey(), {pair.local(0, 8)}, EP_MLX5_CQ_UPDATE, 0x1000 + i)), 0);
    EP_CHECK(until([&] { return pair.b.completed().opcode == EP_MLX5_CQE_RESP_WR_IMM && pair.b.completed().counter == i; }));
  }
}

// dereg_mr() under traffic from the network: once it has returned, not a byte changes any more.
void keys_are_dead_when_dereg_returns() {
  for (int i = 0; i < 5; ++i) {
    net_pair pair;
    const auto mr = must(pair.b_node.device->reg_mr(pair.b_node.pd, {pair.remote(0), 32768}, node::all_rights));
    std::memset(pair.a_node.data(), 0x11, 32768);
    std::memset(pair.a_node.data() + 32768, 0x22, 32768);
    std::atomic<bool> stop{false};
    std::thread poster([&] {
      for (uint64_t n = 1; !stop.load(); ++n) {
        if (static_cast<uint16_t>(pair.a.tail - 32) < 0x8000 && !pair.done(static_cast<uint16_t>(pair.a.tail - 32))) return;
        pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), mr.rkey, {pair.local(n % 2 * 32768, 32768)}));
        if (pair.a.completed().opcode == EP_MLX5_CQE_REQ_ERR) return;
      }
    });
    EP_CHECK(until([&] { return pair.a.completed().opcode == EP_MLX5_CQE_REQ; }));
    must(pair.b_node.device->dereg_mr(mr));
    const std::vector<uint8_t> then(pair.b_node.data(), pair.b_node.data() + 32768);
    EP_CHECK(until([&] { return pair.a.completed().opcode == EP_MLX5_CQE_REQ_ERR; }));
    stop = true;
    poster.join();
    EP_CHECK(std::memcmp(then.data(), pair.b_node.data(), then.size()) == 0);
    dl::mlx5_event event;
    EP_CHECK(must(pair.a_node.device->poll_async(event)) && event.syndrome == EP_MLX5_SYNDROME_REMOTE_ACCESS);
  }
}

void faults() {
  { // an answer that is lost: the atomic is not carried out again
    net_pair pair;
    must(pair.a_node.device->set_faults("drop-ack opcode=atomic count=2"));
    EP_CHECK_EQ(pair.ends(add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 7)), 0);
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{7});
    EP_CHECK_EQ(pair.a_node.word(0).load(), uint64_t{0});
    EP_CHECK_EQ(pair.a_node.device->counts().retries, uint64_t{2});
  }
  { // dropped until the queue pair has no try left
    net_pair pair;
    must(pair.a_node.device->set_faults("drop"));
    EP_CHECK_EQ(pair.ends(inline_wqe(pair.a, pair.remote(0), pair.rkey(), "12345678", 8)), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
    EP_CHECK_EQ(pair.b_node.word(0).load(), uint64_t{0});
  }
  { // in pieces, late, and reordered between queue pairs
    net_pair pair;
    must(pair.a_node.device->set_faults("partial pieces=5\ndelay ns=3000000\nreorder"));
    for (uint64_t i = 0; i < 4096; ++i) pair.a_node.data()[i] = static_cast<uint8_t>(i * 3);
    EP_CHECK_EQ(pair.ends(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 4096)})), 0);
    EP_CHECK(std::memcmp(pair.b_node.data(), pair.a_node.data(), 4096) == 0);
  }
  { // the peer's link is down: nobody answers; up again in time, and nothing was lost
    net_pair pair(queue_options{});
    pair.b_node.device->set_link(false);
    EP_CHECK_EQ(pair.ends(inline_wqe(pair.a, pair.remote(0), pair.rkey(), "12345678", 8)), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
    net_pair other(patient(), 1 << 16, 300'000'000); // as often as it tries, 2.4 s
    other.a_node.device->set_link(false);
    std::thread later([&] {
      const timespec nap{0, 50'000'000};
      nanosleep(&nap, nullptr);
      other.a_node.device->set_link(true);
    });
    EP_CHECK_EQ(other.ends(inline_wqe(other.a, other.remote(0), other.rkey(), "12345678", 8)), 0);
    later.join();
    EP_CHECK_EQ(other.a_node.device->counts().requests, uint64_t{1});
  }
}

// Streams that end in the middle of it, at one moment and another: of what was asked ahead some was carried out, and its answers are lost. All of it counts once, in order.
void lost_answers_count_once() {
  constexpr uint64_t batch = 32, places = 1024;
  queue_options options = patient();
  options.log_outstanding = 4;
  net_pair pair(options);
  nic::net::hub& hub = *pair.a_node.device->hub();
  const uint32_t peer = hub.number_of(pair.b_node.device->hub()->gid());
  uint64_t adds = 0;
  for (uint64_t round = 0; pair.a_node.device->counts().retries < 20; ++round) {
    uint16_t last = 0;
    for (uint64_t i = 0; i < batch; ++i) last = pair.a.put(add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(places + 8 * i, 8), 1));
    pair.a.ring();
    wake_notify(pair.a_node.device->doorbell_wake());
    const int64_t moment_ns = clock_now_ns() + static_cast<int64_t>(round % 32) * 10'000;
    while (clock_now_ns() < moment_ns) std::this_thread::yield();
    hub.give_up(peer);
    if (!pair.done(last) || pair.a.completed().opcode != EP_MLX5_CQE_REQ) return EP_CHECK_EQ(round, uint64_t{0});
    for (uint64_t i = 0; i < batch; ++i, ++adds) {
      if (pair.a_node.word(places + 8 * i).load() != adds) return EP_CHECK_EQ(pair.a_node.word(places + 8 * i).load(), adds);
    }
    if (round > 100'000) return EP_CHECK_EQ(round, uint64_t{0}); // no stream ended in the middle of anything
  }
  EP_CHECK_EQ(pair.b_node.word(0).load(), adds);
}

// A read whose target goes away while it is under way: its answer writes nowhere.
void late_answers_write_nowhere() {
  net_pair pair(queue_options{}); // its tries are counted
  const auto target = must(segment::create(4096));
  const auto mr = must(pair.a_node.device->reg_mr(pair.a_node.pd, {reinterpret_cast<uint64_t>(target->data()), 4096}, node::all_rights));
  std::memset(target->data(), 0x55, 4096);
  // The responder cannot come in, so the answer waits: it is inside of the queue pair already, for all it knows.
  auto port = must(nic::port_view::open(must(nic::directory_find(pair.b_node.device->port_number()))));
  uint64_t& key = reinterpret_cast<uint64_t&>(port.qp(pair.b.qpn - nic::port_first_qpn).active);
  nic::store_ordered(key, nic::active_mark | uint64_t{pair.b_node.device->port_number()} << 32 | 1);
  const uint16_t index =
      pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(0), pair.rkey(), {{reinterpret_cast<uint64_t>(target->data()), mr.lkey, 4096}}));
  EP_CHECK(until([&] { return pair.a_node.device->counts().retries >= 1; }));
  must(pair.a_node.device->dereg_mr(mr));
  nic::store_ordered(key, uint64_t{0});
  EP_CHECK(pair.done(index));
  EP_CHECK(pair.a.completed().opcode == EP_MLX5_CQE_REQ_ERR);
  EP_CHECK_EQ(target->data()[0], 0x55);
}

int dial(const nic::gid_bytes& gid) {
  nic::net::place at;
  EP_CHECK(nic::net::place_of(gid, at));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(at.port);
  std::memcpy(&address.sin_addr, at.address.data(), 4);
  EP_CHECK_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return fd;
}

// Whoever dials and talks nonsense, or nothing, is sent away; the NIC goes on.
void strangers() {
  net_pair pair;
  std::vector<int> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(dial(pair.b_node.device->hub()->gid())); // more than are let in at a time
  random_source random(3);
  for (int i = 0; i < 20; ++i) {
    const int fd = dial(pair.b_node.device->hub()->gid());
    uint8_t bytes[512];
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
    (void)send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
    (void)!recv(fd, bytes, sizeof bytes, 0); // until it is sent away
    close(fd);
  }
  EP_CHECK_EQ(pair.b_node.device->hub()->counts().requests, uint64_t{0});
  for (const int fd : silent) close(fd);
  EP_CHECK_EQ(pair.ends(inline_wqe(pair.a, pair.remote(0), pair.rkey(), "12345678", 8)), 0);
  // One with other keys does not get as far as a request.
  node other(on_loopback());
  queue c(other, {});
  EP_CHECK(other.device->hub()->know(pair.b_node.device->hub()->gid(), keys(1, 2)) != 0);
  c.connect(pair.b_node.device->hub()->gid(), pair.b.qpn);
  c.post(inline_wqe(c, pair.remote(0), pair.rkey(), "abcdefgh", 8));
  EP_CHECK(until([&] { return c.completed().opcode == EP_MLX5_CQE_REQ_ERR; }));
  EP_CHECK_EQ(c.syndrome(), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
  EP_CHECK(std::memcmp(pair.b_node.data(), "12345678", 8) == 0);
}

void addresses() {
  for (const char* wrong : {"0.0.0.0", "", "localhost", "::1", "300.1.1.1"}) {
    soft_options options = on_loopback();
    options.network->address = wrong;
    auto opened = soft_device::open("nic", options);
    EP_CHECK(!opened.ok() && opened.why().status == EP_STATUS_INVALID);
  }
  soft_options elsewhere = on_loopback();
  elsewhere.network->address = "192.0.2.1"; // of no host
  auto opened = soft_device::open("nic", elsewhere);
  EP_CHECK(!opened.ok() && opened.why().sys_errno == EADDRNOTAVAIL);
  EP_CHECK(opened.why().message.find("192.0.2.1") != std::string::npos);
}

// Who is not told of is nobody; oneself is reached through memory.
void numbers() {
  node one(on_loopback());
  queue a(one, {});
  queue b(one, {});
  nic::gid_bytes nobody = one.device->hub()->gid();
  nobody[9] ^= 1;
  answer_bytes out{};
  must(one.device->obj_modify(a.qp_object, init_command(a), out));
  EP_CHECK(!one.device->obj_modify(a.qp_object, receive_command(a, one.device->port_number(), b.qpn, false, &nobody), out).ok());
  a.to_reset();
  a.connect(one.device->hub()->gid(), b.qpn);
  b.connect(one.device->hub()->gid(), a.qpn);
  a.post(inline_wqe(a, one.address(64), one.mr.rkey, "12345678", 8));
  EP_CHECK(until([&] { return a.completed().opcode == EP_MLX5_CQE_REQ; }));
  EP_CHECK_EQ(one.device->hub()->counts().requests, uint64_t{0});
}

// Any bytes as a request of a NIC that is known: refused, answered, never followed out of what is registered.
void mutated_requests(uint64_t seed, uint64_t runs) {
  net_pair pair;
  node& to = pair.b_node;
  constexpr uint64_t begins = 16384, bytes = 32768;
  must(to.device->dereg_mr(to.mr));
  const auto mr = must(to.device->reg_mr(to.pd, {to.address(begins), bytes}, node::all_rights));
  std::memset(to.data(), 0x5a, 1 << 16);
  const auto port = must(nic::port_view::open(must(nic::directory_find(to.device->port_number()))));
  const nic::port_qp& qp = port.qp(pair.b.qpn - nic::port_first_qpn);
  const auto answer = nic::answerer_of(port);
  const uint32_t sender = to.device->hub()->number_of(pair.a_node.device->hub()->gid());
  random_source random(seed);
  uint64_t sound = 0, done = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    const auto operation = static_cast<uint8_t>(random.below(4));
    const bool atomic = operation >= static_cast<uint8_t>(nic::wire_operation::add);
    const uint64_t length = atomic ? 4 + random.below(2) * 4 : random.below(4096);
    const uint64_t begin = atomic ? 0 : random.below(length + 1);
    const uint64_t end = atomic ? length : begin + random.below(length - begin + 1);
    // The head of wire_net.cpp.
    std::vector<uint8_t> request(96 + (operation == static_cast<uint8_t>(nic::wire_operation::write) ? end - begin : 0));
    request[0] = operation;
    request[1] = random.below(4) == 0 ? 0 : 4; // last
    request[2] = static_cast<uint8_t>(atomic ? length : 0);
    const uint32_t numbers[] = {pair.a.qpn, pair.b.qpn, nic::load_acquire(qp.expected_psn), 1, 0, mr.rkey, 0};
    const uint64_t wide[] = {to.address(begins + random.below(bytes - 4096) / 8 * 8), length, begin, end, random.next(), random.next(), random.next(), random.next()};
    std::memcpy(request.data() + 4, numbers, sizeof numbers);
    std::memcpy(request.data() + 32, wide, sizeof wide);
    for (uint64_t i = random.below(3); i > 0; --i) request[random.below(64)] ^= static_cast<uint8_t>(1u << random.below(8));
    if (random.below(8) == 0) request.resize(random.below(request.size() + 64));
    std::vector<uint8_t> reply;
    if (!answer(sender, request, reply)) continue;
    ++sound;
    EP_CHECK(reply.size() >= 16 && reply.size() <= nic::net::max_payload);
    done += reply[0] == static_cast<uint8_t>(nic::wire_answer::ack) ? 1 : 0;
  }
  EP_CHECK(sound > runs / 4 && sound < runs && done > runs / 8 && done < sound);
  for (uint64_t at = 0; at < 1 << 16; ++at) {
    if ((at < begins || at >= begins + bytes) && to.data()[at] != 0x5a) return EP_CHECK_EQ(at, uint64_t{0});
  }
}

// Idle NICs that know each other send nothing and do not wake.
void idle_is_cheap() {
  net_pair pair;
  EP_CHECK_EQ(pair.ends(inline_wqe(pair.a, pair.remote(0), pair.rkey(), "12345678", 8)), 0);
  const timespec nap{0, 300'000'000};
  nanosleep(&nap, nullptr);
  const auto before = pair.a_node.device->hub()->counts();
  nanosleep(&nap, nullptr);
  const auto after = pair.a_node.device->hub()->counts();
  EP_CHECK_EQ(after.bytes_out, before.bytes_out);
  EP_CHECK(after.wakes - before.wakes <= 2);
}

// A peer in a process of its own.
struct far_nic {
  struct introduction {
    nic::gid_bytes gid;
    uint32_t qpn, rkey;
    uint64_t address;
  };
  pid_t pid = -1;
  int to = -1, from = -1;
  introduction facts{};

  explicit far_nic(const queue_options& options) {
    int down[2];
    int up[2];
    EP_CHECK(pipe(down) == 0 && pipe(up) == 0);
    pid = fork(); // no thread of this process lives now
    if (pid != 0) {
      close(down[0]);
      close(up[1]);
      to = down[1];
      from = up[0];
      EP_CHECK_EQ(read(from, &facts, sizeof facts), static_cast<ssize_t>(sizeof facts));
      return;
    }
    close(down[1]);
    close(up[0]);
    {
      node here(on_loopback());
      queue b(here, options);
      const introduction mine{here.device->hub()->gid(), b.qpn, here.mr.rkey, here.address()};
      bool ok = write(up[1], &mine, sizeof mine) == static_cast<ssize_t>(sizeof mine);
      introduction theirs{};
      ok = ok && read(down[0], &theirs, sizeof theirs) == static_cast<ssize_t>(sizeof theirs);
      (void)here.device->hub()->know(theirs.gid, keys(2, 1));
      b.connect(theirs.gid, theirs.qpn);
      char word = 1;
      ok = ok && write(up[1], &word, 1) == 1 && read(down[0], &word, 1) >= 0;
    }
    _exit(0);
  }
  void meet(node& here, queue& a) {
    EP_CHECK(here.device->hub()->know(facts.gid, keys(1, 2)) != 0);
    const introduction mine{here.device->hub()->gid(), a.qpn, 0, 0};
    EP_CHECK_EQ(write(to, &mine, sizeof mine), static_cast<ssize_t>(sizeof mine));
    a.connect(facts.gid, facts.qpn);
    char ready = 0;
    EP_CHECK_EQ(read(from, &ready, 1), ssize_t{1});
  }
  void signal(int what) const {
    kill(pid, what);
    int status = 0;
    if (what == SIGSTOP) EP_CHECK_EQ(waitpid(pid, &status, WUNTRACED), pid);
  }
  ~far_nic() {
    close(to);
    close(from);
    kill(pid, SIGKILL);
    int status = 0;
    EP_CHECK_EQ(waitpid(pid, &status, 0), pid);
  }
};

// While the peer is stopped nothing is answered, so what has gone out is what goes ahead: as many as a window has, as many reads and atomics as the queue pair allows, as many
// bytes as a megabyte, no fence.
void requests_go_ahead() {
  queue_options options = patient();
  options.log_outstanding = 4;
  far_nic far(options);
  node here(on_loopback(), 4 << 20);
  queue a(here, options);
  far.meet(here, a);
  const auto local = [&](uint64_t offset, uint32_t bytes) { return data_at{here.address(offset), here.mr.lkey, bytes}; };
  const auto done = [&](uint16_t index) { return until([&] { return a.completed().opcode != EP_MLX5_CQE_INVALID && static_cast<int16_t>(a.completed().counter - index) >= 0; }); };
  const auto add = [&](uint64_t i) { return a.put(add8_wqe(a, far.facts.address, far.facts.rkey, local(1024 + 8 * i, 8), 1)); };
  const auto write = [&](uint64_t i, uint8_t flags = EP_MLX5_CQ_UPDATE) {
    here.word(2048 + 8 * i) = i + 1;
    return a.put(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, far.facts.address + 64 + 8 * i, far.facts.rkey, {local(2048 + 8 * i, 8)}, flags));
  };
  const auto ring = [&] {
    a.ring();
    wake_notify(here.device->doorbell_wake());
  };
  add(0);
  ring();
  EP_CHECK(done(0)); // the stream is open
  const auto ahead = [&](uint64_t expected, const auto& post) {
    far.signal(SIGSTOP);
    const uint64_t before = here.device->hub()->counts().requests;
    const uint16_t last = post();
    ring();
    EP_CHECK(until([&] { return here.device->hub()->counts().requests - before >= expected; }));
    const timespec nap{0, 30'000'000};
    nanosleep(&nap, nullptr);
    EP_CHECK_EQ(here.device->hub()->counts().requests - before, expected);
    far.signal(SIGCONT);
    EP_CHECK(done(last));
    EP_CHECK_EQ(a.completed().opcode, EP_MLX5_CQE_REQ);
  };
  ahead(32, [&] {
    for (uint64_t i = 0; i < 39; ++i) write(i);
    return write(39);
  });
  ahead(16, [&] {
    for (uint64_t i = 1; i < 24; ++i) add(i);
    return add(24);
  });
  ahead(3, [&] {
    for (uint64_t i = 0; i < 3; ++i) write(i);
    return write(3, EP_MLX5_CQ_UPDATE | 2 << 5);
  });
  ahead(17, [&] { // 1 020 000 bytes
    uint16_t last = 0;
    for (uint64_t i = 0; i < 20; ++i) last = a.put(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, far.facts.address + 4096, far.facts.rkey, {local(1 << 16, 60'000)}));
    return last;
  });
  const uint16_t last = a.put(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_READ, far.facts.address, far.facts.rkey, {local(1 << 20, 64 + 8 * 40)}));
  ring();
  EP_CHECK(done(last));
  EP_CHECK_EQ(here.word(1 << 20).load(), uint64_t{25});
  for (uint64_t i = 0; i < 40; ++i) EP_CHECK_EQ(here.word((1 << 20) + 64 + 8 * i).load(), i + 1);
  for (uint64_t i = 0; i < 25; ++i) EP_CHECK_EQ(here.word(1024 + 8 * i).load(), i);
}

// One that was killed refuses; one that is silent is given up after the tries that the queue pair has, and not before. What was given up does not land later.
void peers_that_end() {
  queue_options options;
  options.ack_timeout = 17; // 537 ms
  options.retry_count = 2;
  for (const int how : {SIGKILL, SIGSTOP}) {
    far_nic far(options);
    node here(on_loopback());
    queue a(here, options);
    far.meet(here, a);
    here.word(0) = 1;
    const auto add = [&] { return a.post(add8_wqe(a, far.facts.address, far.facts.rkey, {here.address(8), here.mr.lkey, 8}, 1)); };
    const auto done = [&](uint16_t index) { return until([&] { return a.completed().opcode != EP_MLX5_CQE_INVALID && static_cast<int16_t>(a.completed().counter - index) >= 0; }); };
    EP_CHECK(done(add()));
    EP_CHECK_EQ(a.completed().opcode, EP_MLX5_CQE_REQ);
    far.signal(how);
    const int64_t begun_ns = clock_now_ns();
    EP_CHECK(done(add()));
    EP_CHECK_EQ(a.completed().opcode, EP_MLX5_CQE_REQ_ERR);
    EP_CHECK_EQ(a.syndrome(), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
    const int64_t took_ns = clock_now_ns() - begun_ns;
    EP_CHECK(took_ns < 20'000'000'000);
    if (how == SIGSTOP) {
      EP_CHECK(took_ns > 3 * (int64_t{4096} << options.ack_timeout) * 9 / 10);
      far.signal(SIGCONT);
    }
  }
}

} // namespace

int main() {
  // First: they fork.
  peers_that_end();
  requests_go_ahead();
  every_request();
  long_messages();
  signals_follow_data();
  the_responder_refuses();
  immediates();
  keys_are_dead_when_dereg_returns();
  faults();
  lost_answers_count_once();
  late_answers_write_nowhere();
  strangers();
  addresses();
  numbers();
  mutated_requests(number_of("EP_FUZZ_SEED", 1), number_of("EP_FUZZ_RUNS", 20'000));
  idle_is_cheap();
  EP_CHECK_EQ(segment_count(), uint64_t{0});
  return ep::check::finish();
}
