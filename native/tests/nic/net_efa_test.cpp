// Software EFAs that a network joins (loopback): writes, reads, counts exactly once, the responder's rules, peers that end.
//
// EP_FUZZ_RUNS=N mutated requests (default: a second's worth), EP_FUZZ_SEED=N.
#include <csignal>
#include <thread>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "environment.hpp"
#include "nic/efa_rig.hpp"
#include "until.hpp"

using namespace ep;
using namespace ep::test;

namespace {

// For as long as a slow machine may take for anything but silence.
constexpr int64_t patient_ns = 5'000'000'000;
constexpr int64_t impatient_ns = 1'500'000'000;

efa::soft_options on_loopback(uint64_t seed = 1, int64_t silent_ns = patient_ns) {
  efa::soft_options options;
  options.engine.seed = seed;
  options.engine.silent_ns = silent_ns;
  options.network = nic::net::hub_options{"127.0.0.1", 0, 0};
  return options;
}

nic::net::link_keys keys(uint8_t out, uint8_t in) {
  nic::net::link_keys made;
  made.out.fill(out);
  made.in.fill(in);
  return made;
}

struct net_pair {
  explicit net_pair(uint64_t bytes = 1 << 16, const efa_queue_options& queues = {}) : a_node(on_loopback(1), bytes), b_node(on_loopback(2), bytes), a(a_node, queues), b(b_node, queues) {
    EP_CHECK(a_node.device->hub()->know(b_node.device->hub()->gid(), keys(1, 2)) > nic::directory_ports);
    EP_CHECK(b_node.device->hub()->know(a_node.device->hub()->gid(), keys(2, 1)) > nic::directory_ports);
    to_b = a.knows(b.endpoint.address);
    to_a = b.knows(a.endpoint.address);
  }
  efa_request write(uint64_t local, uint64_t remote, uint32_t bytes) const {
    return {EP_EFA_OPCODE_RDMA_WRITE, to_b, b_node.address(remote), b_node.mr.rkey, a_node.address(local), a_node.mr.lkey, bytes};
  }
  efa_request read(uint64_t local, uint64_t remote, uint32_t bytes) const {
    efa_request what = write(local, remote, bytes);
    what.opcode = EP_EFA_OPCODE_RDMA_READ;
    return what;
  }
  efa_completion ends(const efa_request& what) {
    a.post(what);
    wake_notify(a_node.device->doorbell_wake());
    efa_completion one{0, 0xff, 0, 0};
    EP_CHECK(until([&] { return a.poll(one); }));
    return one;
  }
  efa_node a_node, b_node;
  efa_queue a, b;
  dl::efa_peer to_b, to_a;
};

void writes_and_reads() {
  constexpr uint32_t bytes = 300'001; // many fragments
  net_pair pair(1 << 20);
  for (uint32_t i = 0; i < bytes; ++i) pair.a_node.data()[i] = static_cast<uint8_t>(i * 13 + i / 256);
  EP_CHECK_EQ(pair.ends(pair.write(0, 8, bytes)).status, EP_EFA_STATUS_OK);
  EP_CHECK(until([&] { return efa_queue::count_of(pair.b.arrived) == 1; }));
  EP_CHECK(std::memcmp(pair.a_node.data(), pair.b_node.data(8), bytes) == 0);
  EP_CHECK_EQ(pair.ends(pair.read(500'000, 8, bytes)).status, EP_EFA_STATUS_OK);
  EP_CHECK(std::memcmp(pair.a_node.data(), pair.a_node.data(500'000), bytes) == 0);
  EP_CHECK(until([&] { return efa_queue::count_of(pair.a.written) == 1 && efa_queue::count_of(pair.a.read) == 1; }));
  EP_CHECK_EQ(efa_queue::count_of(pair.b.arrived), uint64_t{1}); // a read is no arrival
  EP_CHECK(pair.a_node.device->violations().empty() && pair.b_node.device->violations().empty());
}

// Each write is one arrival, and not before its last byte.
void counts() {
  net_pair pair;
  for (uint64_t round = 1; round <= 100; ++round) {
    std::memset(pair.a_node.data(), static_cast<int>(round), 9000);
    pair.a.put(pair.a.wqe(pair.write(0, 0, 9000)));
    pair.a.bell();
    wake_notify(pair.a_node.device->doorbell_wake());
    if (!until([&] { return efa_queue::count_of(pair.b.arrived) == round; })) return EP_CHECK_EQ(round, uint64_t{0});
    if (pair.b_node.data()[0] != static_cast<uint8_t>(round) || pair.b_node.data()[8999] != static_cast<uint8_t>(round)) return EP_CHECK_EQ(round, uint64_t{1});
    efa_completion one{};
    if (!until([&] { return pair.a.poll(one); }) || one.status != EP_EFA_STATUS_OK) return EP_CHECK_EQ(round, uint64_t{2});
  }
  EP_CHECK_EQ(efa_queue::count_of(pair.b.arrived), uint64_t{100});
}

void the_responder_refuses() {
  net_pair pair;
  efa_request what = pair.write(0, 0, 64);
  what.rkey ^= 1;
  EP_CHECK_EQ(pair.ends(what).status, EP_EFA_STATUS_REMOTE_BAD_ADDRESS);
  what = pair.write(0, (1 << 16) - 63, 64);
  EP_CHECK_EQ(pair.ends(what).status, EP_EFA_STATUS_REMOTE_BAD_ADDRESS);
  what = pair.write(0, 0, 64);
  what.to.qkey ^= 1;
  EP_CHECK_EQ(pair.ends(what).status, EP_EFA_STATUS_REMOTE_BAD_DEST_QPN);
  EP_CHECK(pair.b_node.word(0) == 0);
  must(pair.b_node.device->remove_address(pair.to_a));
  pair.b.peers.clear();
  EP_CHECK_EQ(pair.ends(pair.write(0, 0, 64)).status, EP_EFA_STATUS_UNKNOWN_PEER);
  EP_CHECK_EQ(efa_queue::count_of(pair.b.arrived), uint64_t{0});
}

// The responder by itself: what is asked twice under one serial counts once, and nonsense is told apart from refusals.
void ticks_count_once() {
  efa_node node(stepped());
  efa_queue queue(node);
  const auto port = must(efa::port_view::open(must(nic::directory_find(node.device->port_number()))));
  constexpr uint32_t sender = nic::directory_ports + 1;
  port.header().known[sender / 64] |= uint64_t{1} << sender % 64;
  const auto answer = efa::answerer_of(port);
  uint32_t qkey = 0;
  std::memcpy(&qkey, queue.endpoint.address.bytes.data() + 20, sizeof qkey);
  const auto ask = [&](uint32_t kind, uint64_t first, uint64_t second, std::vector<uint8_t> more = {}) {
    std::vector<uint8_t> bytes(48);
    const uint32_t heads[] = {kind, queue.endpoint.qpn, qkey, 0};
    std::memcpy(bytes.data(), heads, sizeof heads);
    std::memcpy(bytes.data() + 16, &first, 8);
    std::memcpy(bytes.data() + 24, &second, 8);
    bytes.insert(bytes.end(), more.begin(), more.end());
    std::vector<uint8_t> reply;
    return answer(sender, bytes, reply);
  };
  const auto arrived = [&] { return efa_queue::count_of(queue.arrived); };
  EP_CHECK(ask(3, 5, 3) && arrived() == 1);
  EP_CHECK(ask(3, 5, 3) && arrived() == 1);
  EP_CHECK(ask(3, 4, 3) && arrived() == 2);
  EP_CHECK(ask(3, 6, 5) && arrived() == 3);
  EP_CHECK(ask(3, 5, 5) && arrived() == 3);
  EP_CHECK(!ask(3, 4, 5)); // promised never to be asked for again
  EP_CHECK(!ask(0, 0, 0) && !ask(5, 0, 0) && !ask(3, 9, 5, {1}) && !ask(1, 0, 0, {1}));
  EP_CHECK_EQ(arrived(), uint64_t{3});
}

// Any bytes as a request: refused, answered, never followed out of what is registered.
void mutated_requests(uint64_t seed, uint64_t runs) {
  efa_node node(stepped());
  efa_queue queue(node);
  const auto port = must(efa::port_view::open(must(nic::directory_find(node.device->port_number()))));
  constexpr uint32_t sender = nic::directory_ports + 1;
  port.header().known[sender / 64] |= uint64_t{1} << sender % 64;
  const auto answer = efa::answerer_of(port);
  random_source random(seed);
  uint64_t sound = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    uint32_t qkey = 0;
    std::memcpy(&qkey, queue.endpoint.address.bytes.data() + 20, sizeof qkey);
    const auto kind = static_cast<uint32_t>(1 + random.below(4));
    const uint64_t length = 1 + random.below(4096);
    const uint64_t begin = random.below(length);
    const uint64_t bytes = random.below(length - begin + 1);
    std::vector<uint8_t> request(48 + (kind == 1 ? bytes : 0));
    const uint32_t heads[] = {kind, queue.endpoint.qpn, qkey, node.mr.rkey};
    const uint64_t wide[] = {node.address(random.below(1 << 15)), length, begin, bytes};
    std::memcpy(request.data(), heads, sizeof heads);
    std::memcpy(request.data() + 16, wide, sizeof wide);
    for (uint64_t i = random.below(3); i > 0; --i) request[random.below(48)] ^= static_cast<uint8_t>(1u << random.below(8));
    if (random.below(8) == 0) request.resize(random.below(request.size() + 64));
    std::vector<uint8_t> reply;
    sound += answer(sender, request, reply) ? 1 : 0;
    EP_CHECK(reply.size() <= nic::net::max_payload);
  }
  EP_CHECK(sound > runs / 4 && sound < runs);
}

struct far_efa {
  struct introduction {
    dl::efa_address address;
    uint32_t rkey;
    uint64_t memory;
  };
  pid_t pid = -1;
  int to = -1, from = -1;
  introduction facts{};

  far_efa() {
    int down[2];
    int up[2];
    EP_CHECK(pipe(down) == 0 && pipe(up) == 0);
    pid = fork(); // no thread of this process lives now
    if (pid != 0) {
      close(down[0]);
      close(up[1]);
      to = down[1];
      from = up[0];
      EP_CHECK_EQ(::read(from, &facts, sizeof facts), static_cast<ssize_t>(sizeof facts));
      return;
    }
    close(down[1]);
    close(up[0]);
    {
      efa_node here(on_loopback());
      efa_queue b(here);
      const introduction mine{b.endpoint.address, here.mr.rkey, here.address()};
      bool ok = ::write(up[1], &mine, sizeof mine) == static_cast<ssize_t>(sizeof mine);
      introduction theirs{};
      ok = ok && ::read(down[0], &theirs, sizeof theirs) == static_cast<ssize_t>(sizeof theirs);
      (void)here.device->hub()->know(gid_in(theirs.address), keys(2, 1));
      (void)b.knows(theirs.address);
      char word = 1;
      ok = ok && ::write(up[1], &word, 1) == 1 && ::read(down[0], &word, 1) >= 0;
    }
    _exit(0);
  }
  static nic::gid_bytes gid_in(const dl::efa_address& address) {
    nic::gid_bytes gid;
    std::memcpy(gid.data(), address.bytes.data(), gid.size());
    return gid;
  }
  dl::efa_peer meet(efa_node& here, efa_queue& a) {
    EP_CHECK(here.device->hub()->know(gid_in(facts.address), keys(1, 2)) != 0);
    const introduction mine{a.endpoint.address, 0, 0};
    EP_CHECK_EQ(::write(to, &mine, sizeof mine), static_cast<ssize_t>(sizeof mine));
    char ready = 0;
    EP_CHECK_EQ(::read(from, &ready, 1), ssize_t{1});
    return a.knows(facts.address);
  }
  ~far_efa() {
    close(to);
    close(from);
    kill(pid, SIGKILL);
    int status = 0;
    EP_CHECK_EQ(waitpid(pid, &status, 0), pid);
  }
};

void peers_that_end() {
  for (const int how : {SIGKILL, SIGSTOP}) {
    far_efa far;
    efa_node here(on_loopback(1, impatient_ns));
    efa_queue a(here);
    const dl::efa_peer peer = far.meet(here, a);
    const auto write = [&] {
      a.post({EP_EFA_OPCODE_RDMA_WRITE, peer, far.facts.memory, far.facts.rkey, here.address(), here.mr.lkey, 20'000});
      efa_completion one{0, 0xff, 0, 0};
      EP_CHECK(until([&] { return a.poll(one); }));
      return one.status;
    };
    EP_CHECK_EQ(write(), EP_EFA_STATUS_OK);
    kill(far.pid, how);
    int status = 0;
    if (how == SIGSTOP) EP_CHECK_EQ(waitpid(far.pid, &status, WUNTRACED), far.pid);
    const int64_t begun_ns = clock_now_ns();
    EP_CHECK_EQ(write(), EP_EFA_STATUS_UNRESPONSIVE);
    const int64_t took_ns = clock_now_ns() - begun_ns;
    EP_CHECK(took_ns >= impatient_ns * 9 / 10 && took_ns < 20'000'000'000);
    EP_CHECK(until([&] { return efa_queue::count_of(a.failed[0]) == 1; }));
    if (how == SIGSTOP) kill(far.pid, SIGCONT);
  }
}

// A stream that is cut while counts are under way: each arrives once, whatever had been answered by then.
void cut_streams_count_once() {
  net_pair pair(1 << 16, {.depth = 64, .cq_depth = 1024});
  const uint32_t number = pair.a_node.device->hub()->number_of(pair.b_node.device->hub()->gid());
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> over{0};
  // Not before something has come of the last stream: a machine that takes longer than a nap to open one would never get any further.
  std::thread cutter([&] {
    for (uint64_t seen = 0; !stop.load();) {
      const timespec nap{0, 3'000'000};
      nanosleep(&nap, nullptr);
      if (over.load() == seen) continue;
      seen = over.load();
      pair.a_node.device->hub()->give_up(number);
    }
  });
  const auto streams = [&] { return pair.a_node.device->hub()->counts().streams; };
  const int64_t deadline_ns = clock_now_ns() + patience_ns;
  uint64_t writes = 0;
  bool good = true;
  // On, until some streams have been cut under traffic.
  while (good && (over < writes || (streams() < 6 && clock_now_ns() < deadline_ns))) {
    for (; streams() < 6 && writes - over < 48; ++writes) pair.a.post(pair.write(0, 0, 4096));
    efa_completion one{};
    good = until([&] { return pair.a.poll(one); }) && one.status == EP_EFA_STATUS_OK;
    ++over;
  }
  EP_CHECK(good);
  EP_CHECK(until([&] { return efa_queue::count_of(pair.b.arrived) >= writes; }));
  stop = true;
  cutter.join();
  const timespec nap{0, 20'000'000};
  nanosleep(&nap, nullptr);
  EP_CHECK_EQ(efa_queue::count_of(pair.b.arrived), writes);
  EP_CHECK(streams() >= 6);
}

} // namespace

int main() {
  peers_that_end(); // first: it forks
  writes_and_reads();
  counts();
  the_responder_refuses();
  ticks_count_once();
  mutated_requests(number_of("EP_FUZZ_SEED", 11), number_of("EP_FUZZ_RUNS", 20'000));
  cut_streams_count_once();
  EP_CHECK_EQ(segment_count(), uint64_t{0});
  return ep::check::finish();
}
