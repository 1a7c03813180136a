// Software EFAs with threads of their own, in one process and in several: traffic, control calls beside it, death and standstill of a peer.
#include <atomic>
#include <csignal>
#include <thread>

#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nic/efa_rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

constexpr int64_t patience_ns = 60'000'000'000; // only a hang reaches it

template <class Ready> bool until(Ready&& ready) {
  const int64_t deadline = clock_now_ns() + patience_ns;
  while (!ready()) {
    if (clock_now_ns() >= deadline) return false;
    sched_yield();
  }
  return true;
}

efa::soft_options threaded(uint64_t seed) {
  efa::soft_options options;
  options.engine.seed = seed;
  options.engine.payload_apart = false;
  return options;
}

// Bytes and signal in one request: whoever sees the tick sees the bytes, whole. Several senders to one endpoint, whose arrivals are one count.
void ticks_follow_data() {
  constexpr uint64_t senders = 3;
  constexpr uint64_t rounds = 300;
  constexpr uint64_t bytes = 10'000; // several fragments, in any order
  efa_node target_node(threaded(1), senders * 16384);
  efa_queue target(target_node);
  std::vector<std::unique_ptr<efa_node>> nodes;
  std::vector<std::unique_ptr<efa_queue>> queues;
  std::vector<std::unique_ptr<efa_queue>> own; // an endpoint of the target for each sender
  for (uint64_t i = 0; i < senders; ++i) {
    nodes.push_back(std::make_unique<efa_node>(threaded(10 + i), 16384));
    queues.push_back(std::make_unique<efa_queue>(*nodes[i]));
    own.push_back(std::make_unique<efa_queue>(target_node));
    queues[i]->knows(target.endpoint.address);
    queues[i]->knows(own[i]->endpoint.address);
    target.knows(queues[i]->endpoint.address);
  }
  std::atomic<uint64_t> wrong{0};
  const auto run = [&](uint64_t i) {
    efa_node& from = *nodes[i];
    efa_queue& queue = *queues[i];
    efa_request what{EP_EFA_OPCODE_RDMA_WRITE, queue.peers[1], target_node.address(i * 16384), target_node.mr.rkey, from.address(), from.mr.lkey, bytes};
    efa_request empty{EP_EFA_OPCODE_RDMA_WRITE, queue.peers[0], target_node.address(i * 16384), target_node.mr.rkey, from.address(), from.mr.lkey, 0};
    for (uint64_t round = 1; round <= rounds; ++round) {
      std::memset(from.data(), static_cast<int>(round), bytes);
      queue.put(queue.wqe(what));
      queue.put(queue.wqe(empty));
      queue.bell();
      if (round % 2 == 0) wake_notify(from.device->doorbell_wake());
      if (!until([&] { return efa_queue::count_of(own[i]->arrived) == round; })) return void(++wrong);
      const uint8_t* there = target_node.data(i * 16384);
      for (uint64_t at = 0; at < bytes; ++at) {
        if (there[at] != static_cast<uint8_t>(round)) return void(++wrong);
      }
      uint64_t done = 0;
      if (!until([&] {
            for (efa_completion one; queue.poll(one); ++done) wrong += one.status != EP_EFA_STATUS_OK;
            return done == 2;
          })) {
        return void(++wrong);
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < senders; ++i) threads.emplace_back(run, i);
  for (std::thread& one : threads) one.join();
  EP_CHECK_EQ(wrong.load(), uint64_t{0});
  EP_CHECK(until([&] { return efa_queue::count_of(target.arrived) == senders * rounds; }));
  for (auto& queue : queues) EP_CHECK(until([&] { return efa_queue::count_of(queue->written) == 2 * rounds; }));
}

// Endpoints, keys and counters come and go while others are written to: whatever is taken away is not touched after the call that took it.
void control_calls_beside_traffic() {
  efa_pair world(7, {}, threaded(7));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> posted{0};
  std::thread traffic([&] {
    while (!stop.load()) {
      world.a.post(world.write(0, 0, 4096));
      ++posted;
      efa_completion one;
      if (!until([&] { return world.a.poll(one); })) break;
      EP_CHECK_EQ(one.status, EP_EFA_STATUS_OK);
    }
  });
  for (int i = 0; i < 100; ++i) {
    std::vector<uint64_t> page(1024);
    const auto mr = must(world.b_node.device->reg_mr({reinterpret_cast<uint64_t>(page.data()), 8192}, efa_node::all_rights));
    efa_node guest(threaded(100));
    {
      efa_queue from(guest), to(guest);
      from.knows(world.b.endpoint.address);
      world.b.knows(from.endpoint.address);
      efa_request what{EP_EFA_OPCODE_RDMA_WRITE, from.peers[0], reinterpret_cast<uint64_t>(page.data()), mr.rkey, guest.address(), guest.mr.lkey, 8192};
      std::memset(guest.data(), 0xff, 8192);
      from.post(what);
      if (i % 2 == 0) wake_notify(guest.device->doorbell_wake());
      if (i % 3 == 0) sched_yield();
      must(world.b_node.device->dereg_mr(mr));
      const std::vector<uint64_t> then = page;
      efa_completion one{};
      EP_CHECK(until([&] { return from.poll(one); }));
      EP_CHECK(one.status == EP_EFA_STATUS_OK || one.status == EP_EFA_STATUS_REMOTE_BAD_ADDRESS);
      EP_CHECK(then == page);
    }
  }
  stop = true;
  traffic.join();
  EP_CHECK(until([&] { return efa_queue::count_of(world.a.written) == posted.load(); }));
}

// Thousands of fragments, read apart from landing: whole in the end, and in no more time than their number takes.
void long_messages() {
  constexpr uint32_t bytes = 32 << 20;
  efa::soft_options options = threaded(6);
  options.engine.payload_apart = true;
  options.engine.fragment_bytes = 1024;
  efa_node from(options, bytes), to(options, bytes);
  efa_queue a(from), b(to);
  a.knows(b.endpoint.address);
  b.knows(a.endpoint.address);
  for (uint32_t at = 0; at < bytes; at += 4) {
    const uint32_t word = at * 2654435761u;
    std::memcpy(from.data(at), &word, 4);
  }
  a.post({EP_EFA_OPCODE_RDMA_WRITE, a.peers[0], to.address(), to.mr.rkey, from.address(), from.mr.lkey, bytes});
  EP_CHECK(until([&] { return efa_queue::count_of(b.arrived) == 1; }));
  EP_CHECK(std::memcmp(from.data(), to.data(), bytes) == 0);
}

// The thread sleeps after a while; a doorbell that nobody announces is still seen.
void a_sleeping_device_sees_doorbells() {
  efa_pair world(8, {}, threaded(8));
  for (uint64_t i = 1; i <= 5; ++i) {
    timespec nap{0, 20'000'000};
    nanosleep(&nap, nullptr);
    world.a.post(world.write(0, 0, 8));
    EP_CHECK(until([&] { return efa_queue::count_of(world.b.arrived) == i; }));
  }
}

// Whoever sleeps on a wake word is woken by bytes, by a tick and by a completion.
void wakes() {
  efa_pair world(9, {}, threaded(9));
  auto words = must(segment::create(4096));
  auto* wake = reinterpret_cast<ep_wake_word*>(words->data());
  must(world.b_node.device->region_wake(world.b_node.mr, &wake[0]));
  must(world.b_node.device->counter_wake(world.b.counters[1], &wake[1]));
  must(world.a_node.device->cq_wake(world.a.cq, &wake[2]));
  uint32_t epochs[3];
  for (int i = 0; i < 3; ++i) epochs[i] = wake_prepare(&wake[i]);
  world.a.post(world.write(0, 0, 8));
  for (int i = 0; i < 3; ++i) EP_CHECK(until([&] { return std::atomic_ref<uint32_t>(wake[i].epoch).load() != epochs[i]; }));
  for (int i = 0; i < 3; ++i) wake_cancel(&wake[i]);
  ep_wake_word outside{};
  EP_CHECK(!world.b_node.device->region_wake(world.b_node.mr, &outside).ok());
}

// What the parent must know of the child's device.
struct introduction {
  dl::efa_address endpoint;
  uint32_t rkey, private_rkey;
  uint64_t address, private_address;
};

struct child_device {
  pid_t pid = -1;
  int to_child = -1;
  int from_child = -1;
  introduction facts{};

  child_device() {
    int down[2];
    int up[2];
    EP_CHECK(pipe(down) == 0 && pipe(up) == 0);
    pid = fork(); // no thread of this process lives now
    if (pid != 0) {
      close(down[0]);
      close(up[1]);
      to_child = down[1];
      from_child = up[0];
      EP_CHECK_EQ(::read(from_child, &facts, sizeof facts), static_cast<ssize_t>(sizeof facts));
      return;
    }
    close(down[1]);
    close(up[0]);
    {
      efa_node here(threaded(3));
      efa_queue b(here);
      std::vector<uint8_t> outside(4096); // in no segment
      const auto mr = must(here.device->reg_mr({reinterpret_cast<uint64_t>(outside.data()), 4096}, efa_node::all_rights));
      introduction mine{b.endpoint.address, here.mr.rkey, mr.rkey, here.address(), reinterpret_cast<uint64_t>(outside.data())};
      bool ok = ::write(up[1], &mine, sizeof mine) == static_cast<ssize_t>(sizeof mine);
      dl::efa_address theirs;
      ok = ok && ::read(down[0], &theirs, sizeof theirs) == static_cast<ssize_t>(sizeof theirs);
      if (ok) b.knows(theirs);
      char word = 1;
      ok = ok && ::write(up[1], &word, 1) == 1 && ::read(down[0], &word, 1) >= 0; // until the parent closes its end
      // What arrived here is for the parent to compare.
      const uint64_t ticks = efa_queue::count_of(b.arrived);
      ok = ok && ::write(up[1], &ticks, sizeof ticks) == static_cast<ssize_t>(sizeof ticks);
      must(here.device->dereg_mr(mr));
    }
    _exit(0);
  }
  void meet(efa_queue& a) {
    EP_CHECK_EQ(::write(to_child, &a.endpoint.address, sizeof a.endpoint.address), static_cast<ssize_t>(sizeof a.endpoint.address));
    a.knows(facts.endpoint);
    char ready = 0;
    EP_CHECK_EQ(::read(from_child, &ready, 1), ssize_t{1});
  }
  uint64_t end(int signal) {
    if (signal != 0) kill(pid, signal);
    close(to_child);
    uint64_t ticks = 0;
    if (::read(from_child, &ticks, sizeof ticks) != static_cast<ssize_t>(sizeof ticks)) ticks = UINT64_MAX;
    close(from_child);
    int status = 0;
    EP_CHECK_EQ(waitpid(pid, &status, 0), pid);
    return ticks;
  }
};

uint8_t finish(efa_queue& a, const efa_request& what) {
  a.post(what);
  efa_completion one{};
  EP_CHECK(until([&] { return a.poll(one); }));
  return one.status;
}

void processes() {
  { // a stopped process is written to; a killed one answers nothing
    child_device child;
    efa_node here(threaded(1));
    efa_queue a(here);
    child.meet(a);
    efa_request what{EP_EFA_OPCODE_RDMA_WRITE, a.peers[0], child.facts.address + 8, child.facts.rkey, here.address(), here.mr.lkey, 8};
    *reinterpret_cast<uint64_t*>(here.data()) = 0x1234567;
    EP_CHECK_EQ(finish(a, what), EP_EFA_STATUS_OK);
    kill(child.pid, SIGSTOP);
    int status = 0;
    EP_CHECK_EQ(waitpid(child.pid, &status, WUNTRACED), child.pid);
    efa_request back = what;
    back.opcode = EP_EFA_OPCODE_RDMA_READ;
    back.local = here.address(16);
    EP_CHECK_EQ(finish(a, back), EP_EFA_STATUS_OK);
    EP_CHECK_EQ(here.word(16), uint64_t{0x1234567});
    // What is written now is there while it still stands still.
    *reinterpret_cast<uint64_t*>(here.data()) = 0x7654321;
    EP_CHECK_EQ(finish(a, what), EP_EFA_STATUS_OK);
    EP_CHECK_EQ(finish(a, back), EP_EFA_STATUS_OK);
    EP_CHECK_EQ(here.word(16), uint64_t{0x7654321});
    child.end(SIGKILL);
    EP_CHECK_EQ(finish(a, what), EP_EFA_STATUS_UNRESPONSIVE);
    // A counter may tick after the completion.
    EP_CHECK(until([&] { return efa_queue::count_of(a.written) >= 2 && efa_queue::count_of(a.failed[0]) >= 1; }));
    EP_CHECK_EQ(efa_queue::count_of(a.written), uint64_t{2});
    EP_CHECK_EQ(efa_queue::count_of(a.failed[0]), uint64_t{1});
  }
  { // ticks cross processes; memory in no segment is out of reach for another one
    child_device child;
    efa_node here(threaded(2));
    efa_queue a(here);
    child.meet(a);
    efa_request what{EP_EFA_OPCODE_RDMA_WRITE, a.peers[0], child.facts.address, child.facts.rkey, here.address(), here.mr.lkey, 64};
    for (int i = 0; i < 5; ++i) EP_CHECK_EQ(finish(a, what), EP_EFA_STATUS_OK);
    what.remote = child.facts.private_address;
    what.rkey = child.facts.private_rkey;
    EP_CHECK_EQ(finish(a, what), EP_EFA_STATUS_REMOTE_ABORT);
    // The answer may come before the tick; an endpoint that goes takes none along.
    a.destroy();
    EP_CHECK_EQ(child.end(0), uint64_t{5});
  }
}

// A process that is stopped wherever it stands while it does nothing but count arrivals keeps nobody else from counting them.
void stopped_while_counting() {
  efa_node node(stepped());
  efa_queue queue(node);
  const auto handle = must(nic::directory_find(node.device->port_number()));
  const uint32_t index = must(efa::port_view::open(handle)).qp((queue.endpoint.qpn - efa::port_first_qpn) % efa::port_max_qps).counter - 1;
  const pid_t child = fork(); // no thread of this process lives now
  if (child == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    efa::shm_peer peer(must(efa::port_view::open(handle)));
    for (;;) peer.count(index);
  }
  efa::shm_peer peer(must(efa::port_view::open(handle)));
  EP_CHECK(until([&] { return efa_queue::count_of(queue.arrived) != 0; }));
  for (int i = 0; i < 50; ++i) {
    EP_CHECK_EQ(kill(child, SIGSTOP), 0);
    int status = 0;
    EP_CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
    const uint64_t before = efa_queue::count_of(queue.arrived);
    peer.count(index);
    const uint64_t after = efa_queue::count_of(queue.arrived);
    EP_CHECK(after == before + 1 || after == before + 2); // with the one that the child has counted and not shown
    EP_CHECK_EQ(kill(child, SIGCONT), 0);
    EP_CHECK(until([&] { return efa_queue::count_of(queue.arrived) > after; }));
  }
  EP_CHECK_EQ(kill(child, SIGKILL), 0);
  EP_CHECK_EQ(waitpid(child, nullptr, 0), child);
}

} // namespace

int main() {
  processes(); // first: they fork
  stopped_while_counting();
  ticks_follow_data();
  control_calls_beside_traffic();
  long_messages();
  a_sleeping_device_sees_doorbells();
  wakes();
  EP_CHECK_EQ(segment_count(), uint64_t{0});
  return check::finish();
}
