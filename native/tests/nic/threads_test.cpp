// NICs with threads of their own, in one process and in several: traffic, control calls beside it, death and standstill of a peer.
#include <atomic>
#include <csignal>
#include <thread>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

constexpr int64_t patience_ns = 30'000'000'000; // only a hang reaches it

template <class Ready> bool until(Ready&& ready) {
  const int64_t deadline = clock_now_ns() + patience_ns;
  while (!ready()) {
    if (clock_now_ns() >= deadline) return false;
    sched_yield();
  }
  return true;
}

bool done(const queue& a, uint16_t index) { return a.completed().opcode != EP_MLX5_CQE_INVALID && static_cast<int16_t>(a.completed().counter - index) >= 0; }

// Data, then its count on the same queue pair: whoever sees the count sees the data. Several queue pairs at once, both ways.
void signals_follow_data() {
  constexpr int lanes = 3;
  constexpr uint64_t rounds = 400;
  constexpr uint64_t bytes = 1000;
  soft_options options;
  node left(options);
  node right(options);
  const auto run = [&](node& from, node& to, queue& a, queue& b, uint64_t lane) {
    const uint64_t source = 4096 + lane * 4096;
    const uint64_t target = 32768 + lane * 4096;
    const uint64_t count = lane * 64;
    for (uint64_t i = 1; i <= rounds; ++i) {
      std::memset(from.data() + source, static_cast<int>(i), bytes);
      a.put(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, to.address(target), to.mr.rkey, {{from.address(source), from.mr.lkey, bytes}}, 0));
      const uint16_t last = a.put(add8_wqe(a, to.address(count), to.mr.rkey, {from.address(2048 + lane * 8), from.mr.lkey, 8}, 1));
      a.ring();
      if (i % 2 == 0) wake_notify(from.device->doorbell_wake());
      if (!until([&] { return to.word(count).load(std::memory_order_acquire) == i; })) return EP_CHECK_EQ(i, uint64_t{0});
      if (to.data()[target] != static_cast<uint8_t>(i) || to.data()[target + bytes - 1] != static_cast<uint8_t>(i)) return EP_CHECK_EQ(i, uint64_t{1});
      if (!until([&] { return done(a, last); })) return EP_CHECK_EQ(i, uint64_t{2});
      (void)b;
    }
    EP_CHECK_EQ(a.completed().opcode, EP_MLX5_CQE_REQ);
  };
  std::vector<std::unique_ptr<queue>> queues;
  for (int i = 0; i < lanes; ++i) {
    queues.push_back(std::make_unique<queue>(left, queue_options{}));
    queues.push_back(std::make_unique<queue>(right, queue_options{}));
    queues[i * 2]->connect(right.device->port_number(), queues[i * 2 + 1]->qpn);
    queues[i * 2 + 1]->connect(left.device->port_number(), queues[i * 2]->qpn);
  }
  std::vector<std::thread> posters;
  posters.emplace_back([&] { run(left, right, *queues[0], *queues[1], 0); });
  posters.emplace_back([&] { run(left, right, *queues[2], *queues[3], 1); });
  posters.emplace_back([&] { run(right, left, *queues[5], *queues[4], 2); });
  for (std::thread& poster : posters) poster.join();
  EP_CHECK(left.device->violations().empty() && right.device->violations().empty());
}

// dereg_mr() under traffic: once it has returned, not a byte changes any more, and the peer's request fails.
void keys_are_dead_when_dereg_returns() {
  queue_options options;
  options.retry_count = 0;
  for (int i = 0; i < 20; ++i) {
    pair_of_nics pair(81, options, soft_options{});
    const auto mr = must(pair.b_node.device->reg_mr(pair.b_node.pd, {pair.remote(0), 32768}, node::all_rights));
    std::memset(pair.a_node.data(), 0x11, 32768);
    std::memset(pair.a_node.data() + 32768, 0x22, 32768);
    std::atomic<bool> stop{false};
    std::thread poster([&] {
      for (uint64_t n = 1; !stop.load(); ++n) {
        if (static_cast<uint16_t>(pair.a.tail - 32) < 0x8000 && !until([&] { return done(pair.a, static_cast<uint16_t>(pair.a.tail - 32)); })) return;
        pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), mr.rkey, {pair.local(n % 2 * 32768, 32768)}));
        if (pair.a.completed().opcode == EP_MLX5_CQE_REQ_ERR) return;
      }
    });
    until([&] { return pair.a.completed().opcode == EP_MLX5_CQE_REQ; });
    must(pair.b_node.device->dereg_mr(mr));
    const std::vector<uint8_t> then(pair.b_node.data(), pair.b_node.data() + 32768);
    EP_CHECK(until([&] { return pair.a.completed().opcode == EP_MLX5_CQE_REQ_ERR; }));
    stop = true;
    poster.join();
    EP_CHECK(std::memcmp(then.data(), pair.b_node.data(), then.size()) == 0);
    dl::mlx5_event event;
    EP_CHECK(must(pair.a_node.device->poll_async(event)));
    EP_CHECK(event.syndrome == EP_MLX5_SYNDROME_REMOTE_ACCESS);
  }
}

// A peer's NIC that is inside of an access, held there by hand: what it uses is not taken away before it comes out, unless it died inside.
void whoever_is_inside_is_waited_for() {
  pair_of_nics pair(82);
  auto port = must(nic::port_view::open(must(nic::directory_find(pair.b_node.device->port_number()))));
  uint64_t& active = port.qp(pair.b.qpn - nic::port_first_qpn).active;
  for (const bool whole_queue : {false, true}) {
    const auto mr = must(pair.b_node.device->reg_mr(pair.b_node.pd, {pair.remote(0), 64}, node::all_rights));
    nic::store_ordered(active, nic::active_mark | uint64_t{pair.a_node.device->port_number()} << 32 | mr.rkey);
    std::atomic<bool> returned{false};
    std::thread taker([&] {
      if (whole_queue) {
        pair.b.to_reset();
      } else {
        must(pair.b_node.device->dereg_mr(mr));
      }
      returned = true;
    });
    timespec nap{0, 50'000'000};
    nanosleep(&nap, nullptr);
    EP_CHECK(!returned.load());
    // Nothing new begins meanwhile: the key is dead already, the queue pair not ready.
    nic::store_ordered(active, uint64_t{0});
    taker.join();
    if (whole_queue) must(pair.b_node.device->dereg_mr(mr));
  }
  // Whoever died inside is not waited for.
  uint32_t gone = 0;
  {
    node other(pair_of_nics::stepped());
    gone = other.device->port_number();
  }
  nic::store_ordered(active, nic::active_mark | uint64_t{gone} << 32 | 5);
  const int64_t begun = clock_now_ns();
  must(pair.b_node.device->obj_destroy(pair.b.qp_object));
  EP_CHECK(clock_now_ns() - begun < nic::let_go_ns / 2);
  must(pair.b_node.device->obj_destroy(pair.b.cq_object));
  must(pair.b_node.device->free_uar(pair.b.uar));
  must(pair.b_node.device->umem_dereg(pair.b.umem));
  pair.b.qp_object = {};
}

void control_calls_beside_traffic() {
  pair_of_nics pair(83, {}, soft_options{});
  std::atomic<bool> stop{false};
  std::thread poster([&] {
    do {
      const uint16_t index = pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 4096)}));
      if (!until([&] { return done(pair.a, index); })) return;
    } while (!stop.load());
  });
  for (int i = 0; i < 40; ++i) {
    queue more(pair.a_node, {});
    more.connect(pair.b_node.device->port_number(), 0x3f0);
    const auto mr = must(pair.a_node.device->reg_mr(pair.a_node.pd, {pair.a_node.address(), 64}, node::all_rights));
    must(pair.a_node.device->dereg_mr(mr));
    pair.b_node.device->counts();
  }
  stop = true;
  poster.join();
  EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  // What is still used is refused, and close() counts what lives.
  EP_CHECK(!pair.a_node.device->close().ok());
  EP_CHECK_EQ(pair.a_node.device->free_uar(pair.a.uar).why().sys_errno, EBUSY);
  EP_CHECK_EQ(pair.a_node.device->umem_dereg(pair.a.umem).why().sys_errno, EBUSY);
  EP_CHECK_EQ(pair.a_node.device->obj_destroy(pair.a.cq_object).why().sys_errno, EBUSY);
}

// The thread sleeps after a while; a doorbell that nobody announces is still seen.
void a_sleeping_nic_sees_doorbells() {
  pair_of_nics pair(85, {}, soft_options{});
  for (uint64_t i = 1; i <= 5; ++i) {
    timespec nap{0, 20'000'000};
    nanosleep(&nap, nullptr);
    pair.a.post(add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1));
    EP_CHECK(until([&] { return pair.b_node.word(0).load() == i; }));
  }
}

// What the parent must know of the child's NIC.
struct introduction {
  uint32_t port, qpn, rkey, private_rkey;
  uint64_t address, private_address;
};

struct child_nic {
  pid_t pid = -1;
  int to_child = -1;
  int from_child = -1;
  introduction facts{};

  child_nic() {
    int down[2];
    int up[2];
    EP_CHECK(pipe(down) == 0 && pipe(up) == 0);
    pid = fork(); // no thread of this process lives now
    if (pid != 0) {
      close(down[0]);
      close(up[1]);
      to_child = down[1];
      from_child = up[0];
      EP_CHECK_EQ(read(from_child, &facts, sizeof facts), static_cast<ssize_t>(sizeof facts));
      return;
    }
    close(down[1]);
    close(up[0]);
    {
      node here{soft_options{}};
      queue b(here, {});
      control_block outside(4096); // in no segment
      const auto mr = must(here.device->reg_mr(here.pd, {reinterpret_cast<uint64_t>(outside.data), 4096}, node::all_rights));
      introduction mine{here.device->port_number(), b.qpn, here.mr.rkey, mr.rkey, here.address(), reinterpret_cast<uint64_t>(outside.data)};
      bool ok = write(up[1], &mine, sizeof mine) == static_cast<ssize_t>(sizeof mine);
      introduction theirs{};
      ok = ok && read(down[0], &theirs, sizeof theirs) == static_cast<ssize_t>(sizeof theirs);
      if (ok) b.connect(theirs.port, theirs.qpn);
      char word = 1;
      ok = ok && write(up[1], &word, 1) == 1 && read(down[0], &word, 1) >= 0; // until the parent closes its end
    }
    _exit(0);
  }
  void meet(node& here, queue& a) {
    introduction mine{here.device->port_number(), a.qpn, 0, 0, 0, 0};
    EP_CHECK_EQ(write(to_child, &mine, sizeof mine), static_cast<ssize_t>(sizeof mine));
    a.connect(facts.port, facts.qpn);
    char ready = 0;
    EP_CHECK_EQ(read(from_child, &ready, 1), ssize_t{1});
  }
  void end(int signal) {
    if (signal != 0) kill(pid, signal);
    close(to_child);
    close(from_child);
    int status = 0;
    EP_CHECK_EQ(waitpid(pid, &status, 0), pid);
  }
};

void processes() {
  { // a stopped process is written to; a killed one answers nothing
    child_nic child;
    node here{soft_options{}};
    queue a(here, {});
    child.meet(here, a);
    here.word(0) = 0x1234567;
    const auto write = [&](uint32_t key, uint64_t address) {
      return a.post(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, address, key, {{here.address(), here.mr.lkey, 8}}));
    };
    uint16_t index = write(child.facts.rkey, child.facts.address + 8);
    EP_CHECK(until([&] { return done(a, index); }));
    kill(child.pid, SIGSTOP);
    int status = 0;
    EP_CHECK_EQ(waitpid(child.pid, &status, WUNTRACED), child.pid);
    index = a.post(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_READ, child.facts.address + 8, child.facts.rkey, {{here.address(16), here.mr.lkey, 8}}));
    EP_CHECK(until([&] { return done(a, index); }));
    EP_CHECK_EQ(here.word(16).load(), uint64_t{0x1234567});
    index = write(child.facts.rkey, child.facts.address);
    EP_CHECK(until([&] { return done(a, index); }));
    EP_CHECK_EQ(a.completed().opcode, EP_MLX5_CQE_REQ);
    child.end(SIGKILL);
    index = write(child.facts.rkey, child.facts.address);
    EP_CHECK(until([&] { return done(a, index); }));
    EP_CHECK_EQ(a.completed().opcode, EP_MLX5_CQE_REQ_ERR);
    EP_CHECK_EQ(a.syndrome(), EP_MLX5_SYNDROME_RETRY_EXCEEDED);
  }
  { // memory in no segment is out of reach for another process
    child_nic child;
    node here{soft_options{}};
    queue a(here, {});
    child.meet(here, a);
    const uint16_t index = a.post(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, child.facts.private_address, child.facts.private_rkey, {{here.address(), here.mr.lkey, 8}}));
    EP_CHECK(until([&] { return done(a, index); }));
    EP_CHECK_EQ(a.syndrome(), EP_MLX5_SYNDROME_REMOTE_ACCESS);
    child.end(0);
  }
}

} // namespace

int main() {
  processes(); // first: it forks
  signals_follow_data();
  keys_are_dead_when_dereg_returns();
  whoever_is_inside_is_waited_for();
  control_calls_beside_traffic();
  a_sleeping_nic_sees_doorbells();
  EP_CHECK_EQ(segment_count(), uint64_t{0});
  return ep::check::finish();
}
