// The key hand-offs under a model checker (relacy), because every CPU that the other tests run on is an x86, which hides most of what can go wrong.
//
// Checked as shipped, through the seam (seam.hpp): waiting.cpp, team.cpp, attention_dispatch.h, endpoint.h, mlx5_post.h, efa_post.h, copy.h, order.h, the fast executor's
// context.
// Modelled, because their words are members of std:: types that the seam does not reach: the stream's `depth` (case stream_depth).
// Each case runs as it is, where no execution may fail, and with one thing broken, where the checker must find an execution that fails.
//
// Not proved here: the engine and its ring, mutexes and condition variables of the product, anything about GPUs. Executions are sampled by a
// random scheduler, or enumerated up to a number of switches; a pass says that so many executions were right.
#include <cstdio>
#include <sstream>

#include "device/fast.hpp"
#include "ep/device/attention_dispatch.h"
#include "ep/device/efa_post.h"
#include "ep/device/mlx5_post.h"
#include "rank.hpp"
#include "team.hpp"

#include "words.hpp" // the last: relacy has macros

namespace {

using litmus::access;
using litmus::check;
using litmus::world;

// How the case that runs now is broken; 0: not at all. Read by constructors that the checker calls.
int broken = 0;

// Two ranks with two counters and three words of payload each, reached as kernels reach them.
class two_ranks : public world {
 public:
  two_ranks() {
    for (int rank = 0; rank < 2; ++rank) {
      for (uint64_t& word : signals[rank]) declare_word(&word);
      declare_word(&wakes[rank].epoch);
      declare_word(&wakes[rank].waiters);
      views[rank] = {reinterpret_cast<uint64_t>(data[rank]), reinterpret_cast<uint64_t>(signals[rank]), reinterpret_cast<uint64_t>(&wakes[rank]), 0};
      handles[rank].rank = rank;
      handles[rank].world_size = 2;
      handles[rank].peers = reinterpret_cast<uint64_t>(views);
    }
    for (uint64_t& word : data[1]) declare_bytes(&word);
  }

  ep::kernel_environment environment(int rank) {
    ep::kernel_environment made;
    made.waits.wake = &wakes[rank];
    made.waits.self = rank;
    made.waits.policy = {0, 0, 1'000'000}; // no spinning: every wait goes through the eventcount
    return made;
  }
  ep::load_store_endpoint endpoint(int rank) const { return {handles[rank]}; }

  uint64_t signals[2][2] = {};
  uint64_t data[2][3] = {};
  ep_wake_word wakes[2] = {};
  ep_peer_view views[2] = {};
  ep_memory_handle handles[2] = {};
};

constexpr uint64_t arrival_slot = 0;
constexpr uint64_t credit_slot = 1;

// A dispatch from rank 0 to rank 1: `chunks` of one row of eight bytes. A counter is given by the slot of rank 0, or of the destination.
struct one_dispatch {
  one_dispatch(const ep_memory_handle& memory, uint64_t chunks, uint64_t salt, bool non_temporal) {
    for (uint64_t i = 0; i < chunks; ++i) rows[i] = salt + i;
    entry = {0, 0, chunks, 1, 0};
    part.src = reinterpret_cast<uint64_t>(rows);
    part.src_stride_bytes = part.row_bytes = sizeof(uint64_t);
    part.entries = reinterpret_cast<uint64_t>(&entry);
    part.entry_count = part.chunk_rows = 1;
    part.chunk_count = static_cast<uint32_t>(chunks);
    args.memory = memory;
    args.parts = reinterpret_cast<uint64_t>(&part);
    args.part_count = memory.rank == 0 ? 1 : 0;
    args.flags = non_temporal ? EP_DISPATCH_NON_TEMPORAL : 0;
    args.arrival_slot = arrival_slot;
    args.credit_slot = credit_slot - 1; // rank 1's is one further
    args.arrivals = reinterpret_cast<uint64_t>(arrivals);
    args.credits = reinterpret_cast<uint64_t>(credits);
    args.status = reinterpret_cast<uint64_t>(&status);
  }
  one_dispatch(const one_dispatch&) = delete;

  bool run(const ep::kernel_environment& environment, uint32_t block = 0, uint32_t blocks = 1) {
    ep::fast_context context{environment, block, blocks, nullptr};
    return ep::attention_dispatch(context, ep::load_store_endpoint{args.memory}, args);
  }

  uint64_t rows[3] = {};
  uint64_t arrivals[2] = {};
  uint64_t credits[2] = {};
  ep_dispatch_entry entry{};
  ep_dispatch_part part{};
  ep_kernel_status status{};
  ep_dispatch_args args{};
};

// Bytes, then their signal; the receiver acquires it. Broken 1: the signal releases nothing. 2: the waiter acquires nothing.
struct signal_after_data : rl::test_suite<signal_after_data, 2> {
  two_ranks world_;
  signal_after_data() {
    const void* word = &world_.signals[1][arrival_slot];
    if (broken == 1) world_.broken = {{access::update, word}};
    if (broken == 2) world_.broken = {{access::load, word}};
  }
  void thread(unsigned index) {
    one_dispatch call(world_.handles[index], 1, 40, false);
    if (index == 1) call.arrivals[0] = 1;
    check(call.run(world_.environment(static_cast<int>(index))), "a dispatch failed");
    if (index == 1) check(world_.read_bytes(&world_.data[1][0]) == 40, "the row is another one");
  }
};

// The same with stores past the caches, which only the copy's own fence orders. Thread 2 carries them out. Broken 1: no fence.
struct signal_after_late_stores : rl::test_suite<signal_after_late_stores, 3> {
  two_ranks world_;
  signal_after_late_stores() { world_.lose_copy_fence = broken == 1; }
  void thread(unsigned index) {
    if (index == 2) return world_.drain(1);
    one_dispatch call(world_.handles[index], 1, 50, true);
    if (index == 1) call.arrivals[0] = 1;
    check(call.run(world_.environment(static_cast<int>(index))), "a dispatch failed");
    if (index == 1) check(world_.read_bytes(&world_.data[1][0]) == 50, "the row is another one");
  }
};

// Three chunks by two blocks, one counter. Broken 1: the receiver waits for one less than the plan says. 2: relaxed signals.
struct counted_completion : rl::test_suite<counted_completion, 3> {
  two_ranks world_;
  counted_completion() {
    if (broken == 2) world_.broken = {{access::update, &world_.signals[1][arrival_slot]}};
  }
  void thread(unsigned index) {
    const int rank = index == 2 ? 1 : 0;
    one_dispatch call(world_.handles[rank], 3, 60, false);
    if (rank == 1) call.arrivals[0] = broken == 1 ? 2 : 3;
    check(call.run(world_.environment(rank), rank == 0 ? index : 0, rank == 0 ? 2 : 1), "a dispatch failed");
    for (uint64_t i = 0; rank == 1 && i < 3; ++i) check(world_.read_bytes(&world_.data[1][i]) == 60 + i, "a row is another one");
  }
};

// Two calls into one lease: the second overwrites what the receiver may still read, unless it has given its credit (endpoint.signal of JS is the same
// sequentially consistent add, symmetric_memory::signal_word). Broken 1: the sender does not ask. 2: the credit releases nothing. 3: its wait acquires nothing.
struct credit_hand_back : rl::test_suite<credit_hand_back, 2> {
  two_ranks world_;
  credit_hand_back() {
    const void* word = &world_.signals[0][credit_slot];
    if (broken == 2) world_.broken = {{access::update, word}};
    if (broken == 3) world_.broken = {{access::load, word}};
  }
  void thread(unsigned index) {
    const int rank = static_cast<int>(index);
    const ep::kernel_environment environment = world_.environment(rank);
    for (uint64_t use = 0; use < 2; ++use) {
      one_dispatch call(world_.handles[rank], 1, 70 + use, false);
      if (rank == 0) call.credits[1] = broken == 1 ? 0 : use;
      if (rank == 1) call.arrivals[0] = use + 1;
      check(call.run(environment), "a dispatch failed");
      if (rank == 0) continue;
      check(world_.read_bytes(&world_.data[1][0]) == 70 + use, "the row is another call's");
      ep::fast_context context{environment, 0, 1, nullptr};
      const ep::thread_coop<ep::fast_context> coop{context};
      world_.endpoint(1).signal(context, coop, 0, credit_slot, 1, nullptr);
    }
  }
};

// One word, one sleeper: no wake-up is lost, or it would sleep for ever. Broken 1: it does not look again between announcing itself and sleeping. 2: the
// signal is relaxed. 3: without the waiter's fence, and the order of its next load, its look may be older than its announcement. 4: the signaller's look for sleepers is relaxed.
struct eventcount : rl::test_suite<eventcount, 2> {
  two_ranks world_;
  eventcount() {
    if (broken == 2) world_.broken = {{access::update, &world_.signals[1][0]}};
    if (broken == 3) world_.broken = {{access::fence, nullptr}, {access::load, &world_.wakes[1].epoch}};
    if (broken == 4) world_.broken = {{access::load, &world_.wakes[1].waiters}};
  }
  void thread(unsigned index) {
    const ep::kernel_environment environment = world_.environment(static_cast<int>(index));
    if (index == 0) {
      ep::fast_context context{environment, 0, 1, nullptr};
      const ep::thread_coop<ep::fast_context> coop{context};
      world_.endpoint(0).signal(context, coop, 1, 0, 1, nullptr);
      return;
    }
    if (broken != 1) {
      check(ep::wait_word(environment.waits, &world_.signals[1][0], ep::comparison::ge, 1, 0).status == EP_STATUS_OK, "the wait failed");
      return;
    }
    const std::atomic_ref<uint64_t> word(world_.signals[1][0]);
    while (word.load(std::memory_order_acquire) == 0) ep::wake_commit(&world_.wakes[1], ep::wake_prepare(&world_.wakes[1]), 1'000'000);
  }
};

// What outlives an execution: ranks and a team's segment are made once, and only their words are the checker's.
struct real_ranks {
  std::shared_ptr<ep::rank_context> contexts[2];
  std::shared_ptr<ep::segment> shared;

  bool make() {
    std::vector<ep_segment_handle> handles;
    for (int rank = 0; rank < 2; ++rank) {
      auto made = ep::rank_context::create(rank, 2, 2);
      if (!made.ok()) return false;
      contexts[rank] = made.value();
      handles.push_back(contexts[rank]->handle());
    }
    for (auto& context : contexts) {
      if (!context->connect(handles).ok()) return false;
    }
    auto segment = ep::team::segment_create(2);
    if (!segment.ok()) return false;
    shared = segment.value();
    return true;
  }
};
real_ranks ranks;

// Two barriers in a row. Before each a member writes its own variable, after it it reads the other's. Waits as team_wrap's watch does (napi/bind_rank.cpp): until
// barrier_passed(), asleep on the rank's own eventcount. Broken 1: arrivals release nothing. 2: a member does not wait.
struct team_barrier : rl::test_suite<team_barrier, 2> {
  world world_;
  std::shared_ptr<ep::team> teams[2];
  uint64_t cells[2][2] = {};
  team_barrier() {
    auto* control = reinterpret_cast<ep_team_control*>(ranks.shared->data());
    auto* entered = reinterpret_cast<uint64_t*>(ranks.shared->data() + sizeof(ep_team_control));
    for (const void* word : {static_cast<const void*>(&control->arrived), static_cast<const void*>(&control->released), static_cast<const void*>(entered),
                             static_cast<const void*>(entered + 1)}) {
      world_.declare_word(word);
    }
    for (int rank = 0; rank < 2; ++rank) {
      ep_wake_word* wake = ranks.contexts[rank]->wake();
      const auto* seen = reinterpret_cast<const ep_wake_word*>(ranks.contexts[rank]->views()[static_cast<size_t>(rank)].wake);
      if (wake != seen) std::abort(); // ranks of one process share one mapping: a word has one address
      world_.declare_word(&wake->epoch);
      world_.declare_word(&wake->waiters);
      for (uint64_t& cell : cells[rank]) world_.declare_bytes(&cell);
      teams[rank] = ep::team::join(ranks.contexts[rank], ranks.shared, {0, 1}).value();
    }
    if (broken == 1) world_.broken = {{access::update, &control->arrived}};
  }
  void thread(unsigned index) {
    ep::team& own = *teams[index];
    ep_wake_word* wake = own.context().wake();
    for (uint64_t round = 0; round < 2; ++round) {
      (*world_.bytes_at(&cells[index][round]))($) = 90 + round;
      const uint64_t target = own.barrier_enter();
      while (broken != 2 && own.barrier_passed() < target) {
        const uint32_t epoch = ep::wake_prepare(wake);
        if (own.barrier_passed() >= target) {
          ep::wake_cancel(wake);
        } else {
          ep::wake_commit(wake, epoch, 1'000'000);
        }
      }
      own.barrier_leave();
      check(world_.read_bytes(&cells[1 - index][round]) == 90 + round, "the other member had not written");
    }
  }
};

// Two posters of two WQEs each on a ring of two, and a NIC that reads a WQE only after the doorbell record that told of it. A WQE is one variable of the
// checker: a NIC that reads it too early, or a poster that writes it over one that is not read, is a data race. The register's fences are below the seam: what
// must order here are releases. Broken 1: the record's store releases nothing. 2: nor does `ready`, or a mark, so whoever rings for both tells of what it has not seen.
// 3: nor does the count of completions. 4: it is not acquired. 5: the CQE is not acquired. Only by_ringer, 6: the ringer's word orders nothing, and a doorbell may be
// lost. 7: marks are not acquired.
template <class Post> struct posted_wqes : rl::test_suite<posted_wqes<Post>, 3> {
  static constexpr uint64_t depth = 2;
  world world_;
  alignas(64) uint64_t sq[depth * 8] = {};
  alignas(64) uint64_t cq[8] = {};
  alignas(64) uint64_t bf[64] = {};
  alignas(8) uint32_t dbr[2] = {};
  uint64_t marks = 0;
  ep_ibgda_qp qp{};
  posted_wqes() {
    qp.sq = reinterpret_cast<uint64_t>(sq);
    qp.cq = reinterpret_cast<uint64_t>(cq);
    qp.bf = reinterpret_cast<uint64_t>(bf);
    qp.dbr = reinterpret_cast<uint64_t>(dbr);
    qp.marks = reinterpret_cast<uint64_t>(&marks);
    qp.depth = depth;
    qp.cq_depth = 1;
    qp.flags = EP_IBGDA_CQ_COLLAPSED;
    for (const uint64_t* word : {&qp.taken, &qp.ready, &qp.ringer, &marks, &qp.done, &qp.broken, &qp.lock, &bf[0], &bf[32]}) world_.declare_word(word);
    world_.declare_word(&dbr[1]);
    world_.declare_word(&cq[7], UINT64_MAX);
    for (uint64_t slot = 0; slot < depth; ++slot) world_.declare_bytes(&sq[slot * 8]);
    switch (broken) {
      case 1: world_.broken = {{access::store, &dbr[1]}}; break;
      case 2: world_.broken = {{access::store, &qp.ready}, {access::update, &marks}}; break;
      case 3: world_.broken = {{access::update, &qp.done}}; break;
      case 4: world_.broken = {{access::load, &qp.done}}; break;
      case 5: world_.broken = {{access::load, &cq[7]}}; break;
      case 6: world_.broken = {{access::update, &qp.ringer}}; break;
      case 7: world_.broken = {{access::load, &marks}}; break;
      default: break;
    }
  }

  void thread(unsigned index) {
    if (index == 2) return nic();
    ep::kernel_environment environment;
    ep::fast_context context{environment, 0, 1, nullptr};
    const auto build = [&](uint32_t, const ep::mlx5_writer& writer) { (*world_.bytes_at(writer.wqe))($) = writer.number + 100; };
    for (int i = 0; i < 2; ++i) {
      const uint64_t first = Post::template post<EP_IBGDA_SHARE_DEVICE>(context, ep::lone_poster<ep::fast_context>{context}, qp, 1, build, nullptr);
      check(first != ep::mlx5_refused, "a post failed");
    }
  }

  void nic() {
    uint64_t seen = 0;
    for (uint64_t consumer = 0; consumer < 4;) {
      const uint64_t doorbell = std::atomic_ref(bf[0]).load(std::memory_order_acquire);
      if (doorbell == seen) {
        litmus::wait_a_turn(litmus::where::current());
        continue;
      }
      seen = doorbell;
      const uint64_t posted = __builtin_bswap32(std::atomic_ref(dbr[1]).load(std::memory_order_acquire));
      check(posted >= consumer && posted - consumer <= depth, "the ring was overrun");
      for (; consumer < posted; ++consumer) {
        check(world_.read_bytes(&sq[consumer % depth * 8]) == consumer + 100, "the WQE is another one");
        std::atomic_ref(cq[7]).store(static_cast<uint64_t>(__builtin_bswap16(static_cast<uint16_t>(consumer))) << 32, std::memory_order_release);
      }
    }
  }
};

// Two posters of a WQE each to an EFA, by marks: one's doorbell must come, the other one leaves its own to others, and is gone. Where the first finds that the number before its own is not
// written, it leaves its doorbell to the other one and says so; the NIC waits for it. Broken 1: marks order nothing, neither made nor looked at. 2: the doorbell releases nothing. Only where
// both must ring, 3: the ringer's word orders nothing.
template <bool Both> struct left_doorbell : rl::test_suite<left_doorbell<Both>, 3> {
  static constexpr uint64_t depth = 4;
  static constexpr uint32_t way = EP_EFA_SHARE_DEVICE | ep::by_marks;
  world world_;
  alignas(64) uint64_t sq[depth * 8] = {};
  ep_efa_request requests[depth] = {};
  uint64_t marks = 0;
  uint64_t awaited = 0; // 1 and the number of the first one's WQE
  uint32_t doorbell = 0;
  ep_efa_qp qp{};
  left_doorbell() {
    qp.sq = reinterpret_cast<uint64_t>(sq);
    qp.doorbell = reinterpret_cast<uint64_t>(&doorbell);
    qp.requests = reinterpret_cast<uint64_t>(requests);
    qp.marks = reinterpret_cast<uint64_t>(&marks);
    qp.depth = depth;
    qp.wqe_bytes = 64;
    qp.max_batch = depth;
    for (const uint64_t* word : {&qp.taken, &qp.rung, &qp.ringer, &qp.left, &qp.prefix, &qp.broken, &marks, &awaited}) world_.declare_word(word);
    world_.declare_word(&doorbell);
    for (uint64_t slot = 0; slot < depth; ++slot) world_.declare_bytes(&sq[slot * 8]);
    switch (broken) {
      case 1: world_.broken = {{access::update, &marks}}; break;
      case 2: world_.broken = {{access::store, &doorbell}}; break;
      case 3: world_.broken = {{access::update, &qp.ringer}}; break;
      default: break;
    }
  }

  void thread(unsigned index) {
    if (index == 2) return nic();
    ep::kernel_environment environment;
    ep::fast_context context{environment, 0, 1, nullptr};
    ep::efa_taken taken{};
    check(ep::efa_take<way>(context, qp, 1, -1, &taken, nullptr), "no number");
    if (index == 0) std::atomic_ref(awaited).store(taken.end, std::memory_order_relaxed);
    ep::efa_write(context, qp, taken.first, [&](const ep::efa_writer<ep::fast_context>& writer) {
      (*world_.bytes_at(reinterpret_cast<void*>(writer.wqe)))($) = writer.number + 100;
      return ep_efa_request{};
    });
    ep::register_fence(context);
    check(ep::efa_publish<way>(context, qp, taken, {-1, !Both && index == 1}, nullptr), "a post failed");
  }

  void nic() {
    uint64_t end = 0;
    for (uint64_t needed = 0; needed == 0 || end < needed;) {
      const uint64_t told = std::atomic_ref(doorbell).load(std::memory_order_acquire);
      needed = std::atomic_ref(awaited).load(std::memory_order_relaxed);
      check(told >= end, "the doorbell went back");
      for (; end < told; ++end) check(world_.read_bytes(&sq[end % depth * 8]) == end + 100, "the WQE is another one");
      if (needed == 0 || end < needed) litmus::wait_a_turn(litmus::where::current());
    }
  }
};

// Model of host_stream (core/stream.cpp): launch() counts `depth_` up, run() counts it down (acq_rel) after the task, depth() acquires. A thread that sees 0 may
// touch what the task touched: JS then sends on its own thread (stream_wrap::dispatch). The queue itself is behind a mutex and not modelled.
// Broken 1: counting down releases nothing. 2: depth() acquires nothing.
struct stream_depth : rl::test_suite<stream_depth, 2> {
  rl::atomic<uint64_t> depth;
  rl::atomic<uint64_t> queued; // the mutex and the condition variable
  rl::var<uint64_t> touched;
  void before() {
    depth.store(0, rl::mo_relaxed, $);
    queued.store(0, rl::mo_relaxed, $);
    touched($) = 0;
  }
  void thread(unsigned index) {
    rl::linear_backoff wait;
    if (index == 0) {
      depth.fetch_add(1, rl::mo_acq_rel, $);
      queued.store(1, rl::mo_release, $);
      while (depth.load(broken == 2 ? rl::mo_relaxed : rl::mo_acquire, $) != 0) wait.yield($);
      check(touched($) == 7, "the task's store is not there");
      touched($) = 8;
    } else {
      while (queued.load(rl::mo_acquire, $) == 0) wait.yield($);
      touched($) = 7;
      depth.fetch_sub(1, broken == 1 ? rl::mo_relaxed : rl::mo_acq_rel, $);
    }
  }
};

int failures = 0;

template <class Case> void run(const char* name, int breaks, const std::vector<rl::test_result_e>& expected, unsigned switches = 2) {
  for (int variant = 0; variant <= breaks; ++variant) {
    broken = variant;
    bool found = false;
    std::string report;
    rl::test_result_e result = rl::test_result_success;
    uint64_t executions = 0;
    for (const bool bounded : {false, true}) {
      std::ostringstream output;
      rl::test_params params;
      params.output_stream = params.progress_stream = &output;
      params.search_type = bounded ? rl::fair_context_bound_scheduler_type : rl::random_scheduler_type;
      params.context_bound = switches;
      params.iteration_count = bounded ? 100'000 : 20'000;
      rl::simulate<Case>(params);
      world::forget();
      executions += params.stop_iteration;
      if (params.test_result == rl::test_result_success) continue;
      found = true;
      result = params.test_result;
      report = output.str();
      break;
    }
    const bool right = variant == 0 ? !found : found && std::find(expected.begin(), expected.end(), result) != expected.end();
    std::printf("%s %s, %s: %llu executions, %s\n", right ? "ok" : "FAILED", name, variant == 0 ? "as it is" : ("broken " + std::to_string(variant)).c_str(),
                static_cast<unsigned long long>(executions), found ? rl::test_result_str(result) : "all right");
    if (right) continue;
    ++failures;
    std::printf("%s\n", report.c_str());
  }
}

} // namespace

int main() {
  if (!ranks.make()) {
    std::printf("FAILED to make two ranks and a team\n");
    return 1;
  }
  const std::vector<rl::test_result_e> unordered = {rl::test_result_data_race, rl::test_result_user_assert_failed, rl::test_result_unitialized_access};
  const std::vector<rl::test_result_e> asleep = {rl::test_result_deadlock};
  // A signal that is not ordered may also be one that wakes nobody.
  run<signal_after_data>("signal after data", 2, {rl::test_result_data_race, rl::test_result_deadlock});
  run<signal_after_late_stores>("signal after stores past the caches", 1, unordered);
  run<counted_completion>("counted completion", 2, unordered);
  run<credit_hand_back>("credit hand-back", 3, unordered);
  run<eventcount>("eventcount", 4, asleep);
  run<team_barrier>("team barrier", 2, unordered);
  const std::vector<rl::test_result_e> unread = {rl::test_result_data_race, rl::test_result_user_assert_failed, rl::test_result_livelock, rl::test_result_deadlock};
  run<posted_wqes<ep::post_in_turn>>("WQEs posted in turn", 5, unread, 1); // with two switches all of 11 million executions are right, in 3 minutes
  run<posted_wqes<ep::post_by_ringer>>("WQEs posted by a ringer", 7, unread, 1);
  run<left_doorbell<false>>("a doorbell left to another poster", 2, unread, 1);
  run<left_doorbell<true>>("two doorbells", 3, unread, 1);
  run<stream_depth>("stream depth", 2, unordered);
  for (auto& context : ranks.contexts) context->leave(true);
  return failures == 0 ? 0 : 1;
}
