// Who may spin: ranks with a core each, however they came by it.
#include "cores.hpp"

#include <array>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>

#include "check.hpp"
#include "collective/board.hpp"
#include "rank.hpp"
#include "skip.hpp"

namespace {

using namespace ep;

ep_core_set on(std::initializer_list<unsigned> cores) {
  ep_core_set set{};
  for (const unsigned core : cores) set.words[core % EP_CORES / 64] |= uint64_t{1} << (core % EP_CORES % 64);
  return set;
}

bool bind_to(int core) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(core, &mask);
  return pthread_setaffinity_np(pthread_self(), sizeof mask, &mask) == 0;
}

std::vector<int> allowed_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cores;
  if (pthread_getaffinity_np(pthread_self(), sizeof mask, &mask) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) cores.push_back(core);
  }
  return cores;
}

void counts() {
  const auto suffice = [](const ep_core_set& own, const std::vector<ep_core_set>& others, int ranks, int quota = 0) { return cores_suffice(own, others, ranks, quota); };
  // As many as there are, all on any.
  EP_CHECK(suffice(on({0, 1}), {on({0, 1})}, 2));
  EP_CHECK(!suffice(on({0, 1}), {on({0, 1}), on({0, 1})}, 3));
  // A core each; two on one; one of two on a core that the other may leave.
  EP_CHECK(suffice(on({0}), {on({1})}, 2));
  EP_CHECK(!suffice(on({0}), {on({0})}, 2));
  EP_CHECK(suffice(on({0}), {on({0, 1})}, 2));
  EP_CHECK(suffice(on({0, 1}), {on({0})}, 2));
  // Two bound to one core of four are crowded, whatever room the third has.
  EP_CHECK(!suffice(on({0}), {on({0}), on({0, 1, 2, 3})}, 3));
  // Whose cores are not known is taken to want the same ones.
  EP_CHECK(!suffice(on({0}), {on({1})}, 3));
  EP_CHECK(!suffice(on({0}), {}, 2));
  EP_CHECK(!suffice(on({0}), {ep_core_set{}}, 2));
  EP_CHECK(suffice(on({0, 1, 2}), {on({1})}, 3));
  // A quota is of all of them.
  EP_CHECK(!suffice(on({0}), {on({1})}, 2, 1));
  EP_CHECK(suffice(on({0}), {on({1})}, 2, 2));
  // Numbers that fall on one bit count as one core.
  EP_CHECK(!suffice(on({0}), {on({EP_CORES})}, 2));
  EP_CHECK(!suffice(ep_core_set{}, {on({1})}, 2));
}

// Whether rank 0 spins, of two ranks on these cores: by their boards, and by their contexts.
std::array<bool, 2> spins(int first, int second) {
  const std::array<int, 2> cores{first, second};
  std::array<ep_segment_handle, 2> groups{};
  std::array<ep_segment_handle, 2> contexts{};
  std::atomic<int> here{0};
  const auto meet = [&](int until) {
    ++here;
    while (here.load() < until) std::this_thread::yield();
  };
  std::array<bool, 2> found{};
  const auto rank_of = [&](int32_t rank) {
    const auto at = static_cast<size_t>(rank);
    EP_CHECK(bind_to(cores[at]));
    auto board = group_board::create({.rank = rank, .size = 2, .capacity = 2, .nonce = 7, .ranks_on_host = 2});
    auto context = rank_context::create(rank, 2, 2);
    EP_CHECK(board.ok() && context.ok());
    groups[at] = board.value()->handle();
    contexts[at] = context.value()->handle();
    meet(2);
    EP_CHECK(board.value()->attach(1 - rank, groups[1 - at], 1).ok());
    EP_CHECK(context.value()->connect({contexts[0], contexts[1]}).ok());
    if (rank == 0) found = {board.value()->policy().spin_ns > 0, context.value()->policy().spin_ns > 0};
    meet(4);
  };
  std::thread other(rank_of, 1);
  std::thread one(rank_of, 0);
  one.join();
  other.join();
  return found;
}

// A rank keeps its core only while all that it awaits have others.
void awaited_ranks(int core, int another) {
  std::array<std::unique_ptr<group_board>, 3> all;
  for (int32_t rank = 0; rank < 3; ++rank) all[static_cast<size_t>(rank)] = std::move(group_board::create({.rank = rank, .size = 3, .capacity = 3, .nonce = 8, .ranks_on_host = 3}).value());
  for (const auto& one : all) {
    for (const auto& other : all) {
      if (other != one) EP_CHECK(one->attach(other->rank(), other->handle(), 1).ok());
    }
  }
  const auto enter = [](group_board& board) { EP_CHECK(board.connected() && board.ready() && board.room() && board.enter(1, 0) == entry::made); };
  const auto awaits_elsewhere_on = [&](int where, group_board& board) {
    EP_CHECK(bind_to(where));
    return board.awaits_elsewhere();
  };
  enter(*all[0]);
  EP_CHECK(!awaits_elsewhere_on(core, *all[0])); // nobody has said where it is
  for (const auto& one : {all[1].get(), all[2].get()}) EP_CHECK(one->connected() && one->ready());
  awaits_elsewhere_on(another, *all[1]);
  awaits_elsewhere_on(core, *all[2]);
  EP_CHECK(!awaits_elsewhere_on(core, *all[0]));
  enter(*all[2]);
  EP_CHECK(awaits_elsewhere_on(core, *all[0]));
  EP_CHECK(awaits_elsewhere_on(core, *all[2]));
  EP_CHECK(!awaits_elsewhere_on(another, *all[0]));
  // Of one that awaits a root it counts where that is.
  all[0]->await(2);
  EP_CHECK(awaits_elsewhere_on(another, *all[0]));
}

int bound_ranks() {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < 2 || (quota_cores() > 0 && quota_cores() < 2)) return check::skip("there is one core");
  std::thread(awaited_ranks, cores[0], cores[1]).join();
  const auto apart = spins(cores[0], cores[1]);
  EP_CHECK(apart[0] && apart[1]);
  const auto together = spins(cores[0], cores[0]);
  EP_CHECK(!together[0] && !together[1]);
  return check::finish();
}

// Ranks of a host that are in no group together: what the group of all knows of them, those made from it are told.
void told_cores() {
  const std::vector<int> cores = allowed_cores();
  std::thread([&] {
    EP_CHECK(!cores.empty() && bind_to(cores.front()));
    const group_options alone{.rank = 0, .size = 1, .capacity = 1, .nonce = 9, .ranks_on_host = 2};
    auto unknown = group_board::create(alone);
    EP_CHECK(unknown.ok() && unknown.value()->policy().spin_ns == 0);
    group_options told = alone;
    ep_core_set another{};
    for (const unsigned core : {0u, 1u}) {
      if (static_cast<int>(core) != cores.front()) another = on({core});
    }
    told.cores_on_host = {another};
    auto known = group_board::create(told);
    const bool room = quota_cores() == 0 || quota_cores() >= 2;
    EP_CHECK(known.ok() && (known.value()->policy().spin_ns > 0) == room && known.value()->cores_on_host().size() == 1);
  }).join();
}

} // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "bound") == 0) return bound_ranks();
  counts();
  told_cores();
  return check::finish();
}
