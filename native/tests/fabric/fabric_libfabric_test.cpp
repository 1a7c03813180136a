// The engine over libfabric itself, where it is installed: providers that work on any machine, on the loopback interface only. Two ranks in one process, then as two processes of
// which one is killed.
#include <csignal>
#include <optional>
#include <cstring>
#include <ctime>

#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fabric_ranks.hpp"
#include "skip.hpp"

namespace {

using namespace ep;
using namespace ep::test;
using fabric::request_state;

constexpr uint64_t memory_bytes = 1'200'000;
const std::string verbs = "verbs;ofi_rxm";
std::string own_address = "127.0.0.1";

dl::fabric_query query_of(const std::string& provider) {
  dl::fabric_query query;
  query.provider = provider;
  if (provider != "shm") query.address = own_address;
  return query;
}

void test_one_process(const std::string& provider) {
  fabric_ranks ranks(2, memory_bytes, 16, {}, [&](int32_t) { return must(dl::open_fabric(query_of(provider))); });
  check_requests(ranks);
  check_kernels(ranks, 50);
}

// `net` of 1.17 claims what it has no calls for: the rest of it works all the same.
void test_atomics(const std::string& provider) {
  const dl::fabric_offer offer = must(dl::probe_fabric(query_of(provider)));
  std::printf("%s: atomics: %s\n", provider.c_str(), offer.no_atomics.empty() ? "yes" : offer.no_atomics.c_str());
  fabric_ranks ranks(3, memory_bytes, 16, {}, [&](int32_t) { return must(dl::open_fabric(query_of(provider))); });
  EP_CHECK_EQ(ranks.side(0).engine->offer().no_atomics, offer.no_atomics);
  if (offer.no_atomics.empty()) return check_atomics(ranks);
  EP_CHECK(offer.no_atomics.find(provider) != std::string::npos);
  const auto refused = ranks.side(1).engine->post(*ranks.side(1).memory, atomic_on(ranks, 1, 0, 64, 0, 1));
  EP_CHECK(!refused.ok() && refused.why().message.find(offer.no_atomics) != std::string::npos);
  EP_CHECK(ranks.ended(1, 0, ranks.post(1, fabric_ranks::with_signal(ranks.bytes_to(1, 0, 0, 64, 1000), 0, 1))) == request_state::done);
}

// Nothing to do: the threads sleep, also where ranks tell each other that they live. Milliseconds of CPU in a second of a rank.
void test_idle(const std::string& provider) {
  constexpr int32_t world = 4;
  fabric::engine_options options;
  options.heartbeat_ns = 100'000'000;
  fabric_ranks ranks(world, 4096, 4, options, [&](int32_t) { return must(dl::open_fabric(query_of(provider))); });
  for (int32_t from = 0; from < world; ++from) {
    for (int32_t to = 0; to < world; ++to) EP_CHECK(ranks.ended(from, to, ranks.post(from, fabric_ranks::with_signal(ranks.bytes_to(from, to, 0, 0, 1000), 0, 1))) == request_state::done);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const uint64_t messages = ranks.side(0).engine->counts().messages;
  const auto sleeps = [] {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    return used.ru_nvcsw;
  };
  // `shm` gives no descriptor to sleep on. A sanitizer makes dear what is done in little.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int dear = 5;
#else
  constexpr int dear = 1;
#endif
  // Where `verbs` is tried, in a guest, every instruction is emulated.
  const double allowed = dear * (provider == "tcp;ofi_rxm" ? 20 : provider == "net" ? 30 : 100);
  // The least of some seconds: what else the machine does makes waking up dearer, never cheaper.
  double spent = 0;
  long naps = 0;
  for (int second = 0; second < 5 && (second == 0 || spent >= allowed); ++second) {
    const long slept = sleeps();
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    spent = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC * 1000 / world;
    naps = (sleeps() - slept) / world;
  }
  std::printf("%s: an idle rank of %d took %.1f ms of CPU in a second, and went to sleep %ld times\n", provider.c_str(), world, spent, naps);
  // No look every millisecond. What a machine is loaded with cannot make it more.
  if (provider == "tcp;ofi_rxm") EP_CHECK(naps < 500);
  EP_CHECK(ranks.side(0).engine->counts().messages >= messages + 3 * 5);
  EP_CHECK(spent < allowed);
  // And they wake up.
  const uint64_t number = ranks.post(2, fabric_ranks::with_signal(ranks.bytes_to(2, 3, 0, 0, 1000), 1, 1));
  EP_CHECK(ranks.ended(2, 3, number) == request_state::done);
}

int cores() {
  cpu_set_t given;
  CPU_ZERO(&given);
  return sched_getaffinity(0, sizeof given, &given) == 0 ? CPU_COUNT(&given) : 1;
}

// Two ranks that wait for each other in turn. Threads that went to sleep, as the kernel counts them, for each put.
void test_turns(const std::string& provider) {
  constexpr int rounds = 4000;
  fabric_ranks ranks(2, 4096, 4, {}, [&](int32_t) { return must(dl::open_fabric(query_of(provider))); });
  const auto play = [&](int32_t rank, int count, uint64_t before) {
    fabric_side& one = ranks.side(rank);
    for (int i = 0; i < count; ++i) {
      const uint64_t expected = before + static_cast<uint64_t>(i) + 1;
      if (rank == 0) ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, 0, 64, 8), 0, 1));
      const wait_result end = wait_word(one.context->waits(nullptr, deadline_after(20'000)), &one.memory->own_signals()[0], comparison::ge, expected, 1 - rank);
      EP_CHECK(end.status == EP_STATUS_OK);
      if (rank == 1) ranks.post(1, fabric_ranks::with_signal(ranks.bytes_to(1, 0, 0, 64, 8), 0, 1));
    }
  };
  const auto both = [&](int count, uint64_t before) {
    std::thread other([&] { play(1, count, before); });
    play(0, count, before);
    other.join();
  };
  both(100, 0);
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_SELF, &before);
  const fabric::engine_counts then = ranks.side(0).engine->counts();
  const int64_t begin = clock_now_ns();
  both(rounds, 100);
  const int64_t spent = clock_now_ns() - begin;
  getrusage(RUSAGE_SELF, &after);
  const fabric::engine_counts now = ranks.side(0).engine->counts();
  const double puts = 2.0 * rounds;
  const double messages = static_cast<double>(now.messages - then.messages) / rounds;
  std::printf("%s: %.2f messages, %.2f sleeps of a thread and %.1f us for each put of 8 bytes, %llu of %llu carried out by who waited\n", provider.c_str(), messages,
              static_cast<double>(after.ru_nvcsw - before.ru_nvcsw) / puts, static_cast<double>(spent) / 1000 / puts, static_cast<unsigned long long>(now.carried - then.carried), static_cast<unsigned long long>(now.applied - then.applied));
  // A machine that is loaded has waiters sleep, and then the thread does it; so it does where it shares one core with them.
  uint64_t carried = now.carried;
  for (uint64_t again = 1; carried == then.carried && cores() > 1 && again < 10; ++again) {
    both(100, 100 + rounds + (again - 1) * 100);
    carried = ranks.side(0).engine->counts().carried;
  }
  EP_CHECK(carried > then.carried || cores() == 1);
  // The answer says that the put was carried out; the engine's thread, where it did that, has said so before there is one.
  EP_CHECK(messages < (10 * (now.carried - then.carried) > 9 * (now.applied - then.applied) ? 1.5 : 2.5));
}

void send_bytes(int socket, const std::vector<uint8_t>& bytes) { EP_CHECK_EQ(send(socket, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size())); }

std::vector<uint8_t> receive_bytes(int socket) {
  std::vector<uint8_t> bytes(1024);
  const ssize_t got = recv(socket, bytes.data(), bytes.size(), 0);
  EP_CHECK(got > 0);
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

std::vector<std::vector<uint8_t>> swap_bytes(int socket, int32_t rank, const std::vector<uint8_t>& own) {
  send_bytes(socket, own);
  std::vector<std::vector<uint8_t>> both(2);
  both[static_cast<size_t>(rank)] = own;
  both[static_cast<size_t>(1 - rank)] = receive_bytes(socket);
  return both;
}

fabric_side join(const std::string& provider, int32_t rank, int socket, bool witness) {
  fabric_side one;
  one.context = must(rank_context::create(rank, 2, 2));
  one.context->connect_apart();
  fabric::engine_options options;
  options.heartbeat_ns = 50'000'000;
  options.silence_ns = witness ? 60'000'000'000 : 2'000'000'000;
  one.engine = std::make_unique<fabric::engine>(one.context, must(dl::open_fabric(query_of(provider))), options);
  if (witness) {
    const ep_segment_handle& own = one.context->handle();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&own);
    const auto both = swap_bytes(socket, rank, {bytes, bytes + sizeof own});
    std::vector<ep_segment_handle> handles(2);
    for (size_t i = 0; i < 2; ++i) std::memcpy(&handles[i], both[i].data(), sizeof own);
    EP_CHECK_EQ(one.engine->witness(handles), 1);
    EP_CHECK_EQ(swap_bytes(socket, rank, {1}).size(), 2u); // neither ends before the other has looked
  }
  must(one.engine->connect(swap_bytes(socket, rank, must(one.engine->address())), keys_of(rank, 2)));
  one.memory = must(symmetric_memory::create(one.context, memory_bytes, 16));
  must(one.engine->route(*one.memory, swap_bytes(socket, rank, must(one.engine->add_memory(one.memory)))));
  return one;
}

fabric::request put_to(const fabric_side& from, int32_t peer, uint64_t offset, uint64_t bytes) {
  fabric::request made;
  made.peer = peer;
  made.local = reinterpret_cast<uint64_t>(from.memory->own_data());
  made.stride = made.row_bytes = bytes;
  made.rows = 1;
  made.offset = offset;
  made.keep = from.memory;
  return fabric_ranks::with_signal(made, 0, 1);
}

// The rank that will be killed: puts for as long as it lives.
[[noreturn]] void be_victim(const std::string& provider, int socket, bool witness) {
  const fabric_side own = join(provider, 1, socket, witness);
  for (uint64_t i = 0; i < memory_bytes; ++i) own.memory->own_data()[i] = pattern(i, 4);
  for (;;) {
    const uint64_t number = must(own.engine->post(*own.memory, put_to(own, 0, 0, 300'000)));
    while (own.engine->look(0, number) == request_state::pending) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// A rank that outlives another one: 0 when all that it waits for ends, and says who was lost. It puts few bytes to the other one again and again until then, if it `streams`: HAZARD: providers may not survive what is
// posted when a connection has ended and they have not said so.
[[noreturn]] void be_survivor(const std::string& provider, int socket, bool witness, bool streams, pid_t victim) {
  fabric_side own = join(provider, 0, socket, witness);
  const uint64_t* signal = own.memory->own_signals();
  const wait_result some = wait_word(own.context->waits(nullptr, deadline_after(20'000)), signal, comparison::ge, 5, 1);
  EP_CHECK_EQ(some.status, uint32_t{EP_STATUS_OK});
  for (uint64_t i = 0; i < 300'000; i += 997) EP_CHECK_EQ(own.memory->own_data()[i], pattern(i, 4));
  uint64_t last = 0;
  const auto stream = [&](uint64_t puts) {
    for (uint64_t i = 0; streams && i < puts; ++i) {
      auto posted = own.engine->post(*own.memory, put_to(own, 1, 0, 8));
      if (!posted.ok()) return;
      last = posted.value();
      // Slowly, so that the mailbox has slots left when the connection ends.
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  };
  stream(50);
  EP_CHECK(soon([&] { return own.engine->look(1, last) == request_state::done; }));
  EP_CHECK_EQ(own.context->life(1), uint32_t{EP_LIFE_ALIVE});
  kill(victim, SIGKILL);
  const auto killed = std::chrono::steady_clock::now();
  stream(UINT64_MAX);
  const wait_result end = wait_word(own.context->waits(nullptr, deadline_after(20'000)), signal, comparison::ge, UINT64_MAX, 1);
  EP_CHECK_EQ(end.status, uint32_t{EP_STATUS_PEER_LOST});
  EP_CHECK_EQ(end.rank, 1);
  EP_CHECK(std::chrono::steady_clock::now() - killed < std::chrono::seconds(5));
  EP_CHECK_EQ(own.context->life(1), uint32_t{EP_LIFE_DEAD});
  EP_CHECK(own.engine->failure_of(1).text.find(witness ? "rank 1: its process" : "rank 1: ") == 0);
  EP_CHECK(!own.engine->post(*own.memory, put_to(own, 1, 0, 8)).ok());
  own.engine->stop(true);
  own.context->leave(true);
  _exit(check::finish());
}

// Whether the survivor saw the end of the victim; nothing where it did not end itself.
std::optional<bool> outlives_killed_peer(const std::string& provider, bool witness, bool streams) {
  int sockets[2];
  EP_CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const pid_t victim = fork();
  if (victim == 0) be_victim(provider, sockets[1], witness);
  const pid_t survivor = fork();
  if (survivor == 0) be_survivor(provider, sockets[0], witness, streams, victim);
  int status = 0;
  pid_t ended = 0;
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60); ended == 0 && std::chrono::steady_clock::now() < until;) {
    ended = waitpid(survivor, &status, WNOHANG);
    if (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (ended == 0) {
    std::fprintf(stderr, "%s: the survivor of a killed peer did not end within 60 s\n", provider.c_str());
    kill(survivor, SIGKILL);
    EP_CHECK_EQ(waitpid(survivor, nullptr, 0), survivor);
  }
  kill(victim, SIGKILL);
  EP_CHECK_EQ(waitpid(victim, nullptr, 0), victim);
  close(sockets[0]);
  close(sockets[1]);
  // The provider shm keeps files by the pid of their maker, which could not take them away.
  for (const pid_t maker : {victim, survivor}) {
    for (const char* end : {":0:0", ":0:0_rxm"}) unlink(("/dev/shm/" + std::to_string(maker) + end).c_str());
  }
  if (ended == 0) return std::nullopt;
  return ended == survivor && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// By its silence; or, where it is of this host and `witness`ed, at once.
// HAZARD: before this process has opened any provider: their threads and locks do not survive a fork.
// HAZARD: who puts over `shm` locks the peer's queue, a spin lock in that peer's memory; killed while it holds that, it leaves it locked, and the peer's thread never comes
// back from the provider (docs/known-defects.md). There, who does not end may be tried again; who ends must have seen what it sees elsewhere. Under TSan 2 of 12 runs met it, one of them three times.
void test_killed_peer(const std::string& provider, bool witness, bool streams) {
#if defined(__SANITIZE_THREAD__)
  if (provider == "shm") {
    std::printf("shm: a killed peer is not tried under TSan\n");
    return;
  }
#endif
  const int tries = provider == "shm" ? 3 : 1;
  std::optional<bool> outlived;
  for (int i = 0; i < tries && !outlived.has_value(); ++i) outlived = outlives_killed_peer(provider, witness, streams);
  EP_CHECK(outlived.value_or(false));
}

// Somebody who has found the address of a rank: sends what a rank would send but for its tag, with and without data for the queue, and writes with keys that it does not have.
void test_stranger(const std::string& provider) {
  fabric_ranks ranks(2, memory_bytes, 16, {}, [&](int32_t) { return must(dl::open_fabric(query_of(provider))); });
  check_requests(ranks);
  fabric_side& target = ranks.side(1);
  const uint64_t signals = ranks.signal(1, 0);
  const std::vector<uint8_t> address = must(target.engine->address());
  auto stranger = must(dl::open_fabric(query_of(provider)));
  uint64_t to = must(stranger->insert(address));
  std::vector<uint8_t> scratch(4096, 0xee);
  fabric::wire_message message{};
  message.magic = fabric::wire_magic;
  message.kind = fabric::message_kind::request;
  message.op = static_cast<uint8_t>(signal_op::add);
  message.payload_bytes = 8;
  message.source = 0;
  message.sequence = 12;
  message.memory = target.memory->device_handle().memory_id;
  message.value = 1000;
  std::vector<std::unique_ptr<dl::fabric_context>> contexts;
  std::vector<dl::fabric_event> events;
  const auto post = [&](auto&& call) {
    contexts.push_back(std::make_unique<dl::fabric_context>());
    for (int left = 2000; left > 0; --left) {
      const int code = call(contexts.back().get());
      stranger->poll(events);
      if (code == 0) return true;
      if (code != EAGAIN) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return false;
  };
  const uint64_t before = target.engine->counts().refused;
  for (int i = 0; i < 300; ++i) {
    message.tag = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15;
    EP_CHECK(post([&](dl::fabric_context* context) { return stranger->send(to, &message, fabric::head_bytes + 8, context); }));
  }
  EP_CHECK(soon([&] {
    stranger->poll(events);
    return target.engine->counts().refused == before + 300;
  }));
  // Guesses of a key, also for no bytes at all, which say that a piece of rank 0 has come. Some providers cut the connection for a wrong one: each has its own.
  const std::vector<uint8_t> kept(target.memory->own_data(), target.memory->own_data() + 64);
  const uint64_t base = reinterpret_cast<uint64_t>(target.memory->own_data());
#if defined(__SANITIZE_THREAD__) // two seconds each
  constexpr uint64_t guesses = 2;
#else
  constexpr uint64_t guesses = 8;
#endif
  // HAZARD: a write of no bytes needs no key where a NIC carries it out (InfiniBand), so that a stranger who knows the address and the numbers of ranks can end links there: docs/known-defects.md.
  const size_t least = provider == verbs ? 8 : 0;
  for (uint64_t guess = 0; guess < guesses; ++guess) {
    for (size_t bytes = least; bytes <= 8; bytes += 8) {
      for (const uint64_t at : {base, uint64_t{0}}) {
        stranger = must(dl::open_fabric(query_of(provider)));
        to = must(stranger->insert(address));
        (void)post([&](dl::fabric_context* context) { return stranger->write(to, scratch.data(), bytes, nullptr, fabric::piece_data(0, 12), at, guess, context); });
        for (int i = 0; i < 10; ++i) {
          stranger->poll(events);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    }
  }
  EP_CHECK(std::memcmp(target.memory->own_data(), kept.data(), kept.size()) == 0);
  EP_CHECK_EQ(ranks.signal(1, 0), signals);
  EP_CHECK_EQ(target.engine->violation(), std::string());
  // Rank 0 still reaches it: a piece that was counted for a request of its would now be one too many.
  const uint8_t* own = target.memory->own_data();
  for (uint64_t i = 0; i < 4; ++i) {
    const uint64_t number = ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, i * 70'016, 700'000, 5000), 2, 1));
    EP_CHECK(ranks.ended(0, 1, number) == request_state::done);
    EP_CHECK(std::memcmp(own + 700'000, ranks.side(0).memory->own_data() + i * 70'016, 5000) == 0);
  }
  EP_CHECK_EQ(ranks.signal(1, 2), 4u);
}

void test_what_is_missing() {
  dl::fabric_query query;
  query.library = "libfabric.so.no";
  const auto absent = dl::probe_fabric(query);
  EP_CHECK(!absent.ok());
  EP_CHECK_EQ(absent.why().sys_errno, ELIBACC);
  query = {};
  query.provider = "no such provider";
  const auto unknown = dl::open_fabric(query);
  EP_CHECK(!unknown.ok());
  EP_CHECK_EQ(unknown.why().sys_errno, ENODATA);
  EP_CHECK(unknown.why().message.find("no such provider: not offered") != std::string::npos);
  query.provider = "tcp;ofi_rxm";
  query.address = "192.0.2.1"; // of nobody
  EP_CHECK(!dl::open_fabric(query).ok());
}

} // namespace

// One provider, which native/CMakeLists.txt names, for each CTest; `verbs`, which needs a device, in a guest (e2e/verbs-guest), whose names of devices follow.
int main(int count, char** arguments) {
  const std::string named = count > 1 ? arguments[1] : "";
  const std::string provider = named == "tcp" ? "tcp;ofi_rxm" : named == "verbs" ? verbs : named;
  if (count < (provider == verbs ? 3 : 2) || (provider != "tcp;ofi_rxm" && provider != "net" && provider != "shm" && provider != verbs)) {
    std::fprintf(stderr, "usage: fabric_libfabric_test tcp|net|shm|verbs ADDRESS\n");
    return 2;
  }
  if (provider == verbs) own_address = arguments[2];
  // In a child: see test_killed_peer.
  const pid_t probing = fork();
  if (probing == 0) {
    const auto offered = dl::probe_fabric(query_of(provider));
    _exit(offered.ok() ? 0 : check::skip(offered.why().message + " (Debian: libfabric1, 1.17 or newer)"));
  }
  int status = 0;
  EP_CHECK_EQ(waitpid(probing, &status, 0), probing);
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) return WEXITSTATUS(status);
  EP_CHECK(WIFEXITED(status));
  for (const bool witness : {false, true}) test_killed_peer(provider, witness, false);
  for (int i = 0; i < 3 && provider != "shm"; ++i) test_killed_peer(provider, false, true);
  test_one_process(provider);
  test_atomics(provider);
  test_idle(provider);
  test_turns(provider);
  check_raw_link([&](int32_t) { return must(dl::open_fabric(query_of(provider))); });
  test_stranger(provider);
  test_what_is_missing();
  return ep::check::finish();
}

// Providers keep some of what they allocate for connections until the process ends, which is theirs to mend.
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so"; }

#if defined(__SANITIZE_THREAD__)
// `shm` hands over by its own atomics, of which TSan sees nothing, and copies by memcpy, which it sees.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "race:libfabric.so"; }
#endif
