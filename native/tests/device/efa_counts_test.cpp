// What a put of EFA's GIN facade costs, as counts that no machine's speed changes: locked operations, words stored to the ring, doorbells and fences. A change here is a change of the
// post path, to be made on purpose. And T23: that the fence which the scopes of a call ask for is made.
//
// HAZARD: here std::atomic_ref counts. All that is compiled so is instantiated with this file's own context, and nothing of ep_core is linked that instantiates the rest: an inline
// function would have two bodies under one name.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>

#include "../check.hpp"
#include "counting_ref.hpp"
#include "ep/abi/efa_gda.h"

namespace {

struct counts {
  uint64_t locked = 0; // read-modify-writes
  uint64_t words = 0;  // of 8 bytes, to the ring
  uint64_t doorbells = 0;
  uint64_t register_fences = 0;
  uint64_t system_fences = 0;
  bool operator==(const counts&) const = default;
};

counts seen;

struct counter {
  static void load() {}
  static void store(const void*) {}
  static void update() { ++seen.locked; }
};

} // namespace

namespace std {
template <class T> using ep_counting_ref = ::counting_ref<T, ::counter>;
}
#define atomic_ref ep_counting_ref
#include "ep/device/efa_gin.h"
#include "ep/device/efa_pr_gin.h"
#undef atomic_ref

namespace {

using namespace ep;

constexpr uint32_t depth = 64;

struct context {
  uint32_t lane() const { return 0; }
  uint32_t lanes() const { return 1; }
  uint32_t warp_lanes() const { return 1; }
  void point() const {}
  void sync_warp() const {}
  template <class T> T shuffle(T value, uint32_t) const { return value; }
  uint32_t ballot(bool value) const { return value ? 1 : 0; }
  // Nothing happens meanwhile: it is so, or never will be.
  template <class Look> bool wait_for(const Look& look, uint64_t, int32_t, uint32_t, ep_kernel_status*) const {
    uint64_t found = 0;
    return look(&found);
  }
  void fail(ep_kernel_status*, uint32_t, int32_t, uint32_t, uint64_t, uint64_t) const {}
  void wake(uint64_t) const {}
  void register_store64(uint64_t address, uint64_t value) const {
    ++seen.words;
    *reinterpret_cast<uint64_t*>(address) = value;
  }
  void register_store32(uint64_t address, uint32_t value) const {
    ++seen.doorbells;
    *reinterpret_cast<uint32_t*>(address) = value;
  }
  void register_fence() const { ++seen.register_fences; }
  void system_fence() const { ++seen.system_fences; }
};

// As on a GPU.
struct spinning_context : context {
  static constexpr bool never_sleeps = true;
};

template <class T> uint64_t address_of(const T* at) { return reinterpret_cast<uint64_t>(at); }

// A context of one queue pair that nobody executes, in both protocols' structs.
struct rig {
  explicit rig(uint32_t wqe_bytes = 64) {
    qp.sq = address_of(sq);
    qp.doorbell = address_of(&doorbell);
    qp.cq = address_of(cq.get());
    qp.written = address_of(&written);
    qp.finished = address_of(finished);
    qp.marks = address_of(marks);
    qp.targets = address_of(targets);
    qp.values = wqe_bytes == 64 ? address_of(values) : 0;
    qp.depth = qp.cq_depth = depth;
    qp.wqe_bytes = wqe_bytes;
    qp.max_batch = 16;
    qp.cq_entry_bytes = 16;
    qp.requests = address_of(requests);
    device.world_size = 2;
    device.qps = address_of(&qp);
    device.qp_count = 1;
    device.max_message = 1 << 20;
    device.scratch_remotes = address_of(remotes);
    memory.remotes = address_of(remotes);
    memory.byte_length = 4096;
    pr_qp.sq.wq.queue_mask = depth - 1;
    pr_qp.sq.wq.queue_size_shift = 6;
    pr_qp.sq.wq.max_batch = 16;
    pr_qp.sq.wq.buf = qp.sq;
    pr_qp.sq.wq.db = qp.doorbell;
    pr.data.qp = address_of(&pr_qp);
    pr.data.address_handles = pr.data.remote_qpns = address_of(shorts);
    pr.data.qkey = address_of(keys);
    pr.data.local_cntr_value = qp.written;
    pr.data.sq_size = depth;
    pr.data.putvalue_slice_base = address_of(values);
    pr.putvalue_slot_size = 8;
  }
  // The NIC has done all that it was told of, in order.
  void complete() {
    for (; written < doorbell; ++written) cq[written % depth * 2] = (written & 0xffff) | (0x22u | ((written & depth) == 0 ? 1u : 0u)) << 24;
  }
  alignas(64) uint64_t sq[depth * 16] = {};
  std::unique_ptr<uint64_t[]> cq = std::make_unique<uint64_t[]>(depth * 2); // by itself, so that a sanitizer sees who looks beyond its end
  uint64_t finished[1] = {};
  uint64_t marks[1] = {};
  uint64_t values[depth] = {};
  uint64_t written = 0;
  uint32_t doorbell = 0;
  ep_efa_request requests[depth] = {};
  ep_efa_target targets[2] = {};
  ep_efa_remote remotes[2] = {};
  uint16_t shorts[2] = {};
  uint32_t keys[2] = {};
  struct {
    ep_efa_pr_mr head;
    ep_efa_pr_mr_peer peers[2];
  } pr_part{};
  ep_efa_qp qp{};
  ep_efa_device device{};
  ep_efa_memory memory{};
  ep_efa_pr_device pr{};
  ep_efa_pr_qp pr_qp{};
};

context ctx;
const thread_coop<context> coop{ctx};
const gin_team team{nullptr, 2};

template <uint32_t Sharing> struct ours {
  static bool put(rig& own, bool aggregate) {
    gin_options options;
    options.aggregate = aggregate;
    return efa_gin<Sharing>{own.device}.put(ctx, coop, team, 1, own.memory, 0, own.memory, 0, 64, gin_no_action{}, gin_no_action{}, options, nullptr);
  }
};
struct theirs {
  static bool put(rig& own, bool aggregate) {
    efa_pr_options options;
    options.aggregate = aggregate;
    return efa_pr_gin{own.pr}.put(ctx, coop, team, 1, own.pr_part.head, 0, own.pr_part.head, 0, 64, gin_no_action{}, gin_no_action{}, options, nullptr);
  }
};

// Of `run` puts, all but the last aggregated, behind others that have completed; `full`: the ring is, so that completions have to be taken out for each.
template <class Way> counts of_run(uint32_t run, bool full = false) {
  rig own;
  for (uint32_t i = 0; i < (full ? depth : 5u); ++i) EP_CHECK(Way::put(own, false));
  own.complete();
  seen = {};
  for (uint32_t i = 0; i < run; ++i) EP_CHECK(Way::put(own, i + 1 < run));
  const counts found = seen;
  EP_CHECK_EQ(own.doorbell, (full ? depth : 5u) + run);
  return found;
}

void expect(const char* what, const counts& found, const counts& wanted) {
  EP_CHECK(found == wanted);
  if (found == wanted) return;
  std::printf("%s: %llu locked, %llu words, %llu doorbells, %llu register fences, %llu system fences\n", what, static_cast<unsigned long long>(found.locked),
              static_cast<unsigned long long>(found.words), static_cast<unsigned long long>(found.doorbells), static_cast<unsigned long long>(found.register_fences),
              static_cast<unsigned long long>(found.system_fences));
}

void posts() {
  for (const uint32_t run : {1u, 2u, 8u, 16u}) {
    const uint64_t words = 8 * run;
    // A number for each, and the ringer's flag once, where others were left unrung; each releases its own WQE, and the doorbell is fenced before and after.
    const counts shared{.locked = run + (run > 1 ? 1 : 0), .words = words, .doorbells = 1, .register_fences = run + 1, .system_fences = 0};
    expect("device", of_run<ours<EP_EFA_SHARE_DEVICE>>(run), shared);
    expect("block", of_run<ours<EP_EFA_SHARE_BLOCK>>(run), shared);
    const counts alone{.locked = 0, .words = words, .doorbells = 1, .register_fences = run + 1, .system_fences = 0};
    expect("thread", of_run<ours<EP_EFA_SHARE_THREAD>>(run), alone);
    // Completions are taken out once, by whoever holds the flag of the poller, however many there are.
    counts polling = shared;
    polling.locked += 2;
    expect("device, full ring", of_run<ours<EP_EFA_SHARE_DEVICE>>(run, true), polling);
    expect("thread, full ring", of_run<ours<EP_EFA_SHARE_THREAD>>(run, true), alone);
    // The lock is taken and given back for each, with a fence that all wait for.
    expect("lock", of_run<theirs>(run), {.locked = 2 * run, .words = words, .doorbells = 1, .register_fences = 2, .system_fences = run});
  }
  // More than a batch: the doorbell rings by itself.
  expect("device, two batches", of_run<ours<EP_EFA_SHARE_DEVICE>>(32), {.locked = 34, .words = 256, .doorbells = 2, .register_fences = 34, .system_fences = 0});
}

// Out of turn who has posted takes completions out once half of the ring is not known to have completed: nobody comes to the end of the room first.
void polls_ahead() {
  rig own;
  for (uint32_t i = 0; i <= depth / 2; ++i) {
    EP_CHECK_EQ(own.qp.prefix, 0u);
    EP_CHECK(ours<EP_EFA_SHARE_DEVICE | by_marks>::put(own, false));
    if (i + 1 < depth / 2) own.complete();
  }
  EP_CHECK_EQ(own.qp.prefix, depth / 2 - 1);
}

// Where nobody sleeps, who finds somebody polling neither tries to nor looks at the CQ; several completions are looked at together, and found up to the first that is not there, wherever the ring ends.
void one_polls_at_a_time() {
  for (uint32_t before = 0; before < 2 * depth; before += 7) {
    for (uint32_t there = 0; there <= depth; there += 5) {
      rig own;
      for (uint32_t i = 0; i < before + there; ++i) {
        if (i == before) {
          own.complete();
          EP_CHECK_EQ((efa_poll<EP_EFA_SHARE_DEVICE>(ctx, own.qp)), before);
        }
        EP_CHECK(ours<EP_EFA_SHARE_DEVICE>::put(own, false));
        if (i < before) own.complete();
      }
      own.complete();
      const uint64_t known = own.qp.prefix;
      spinning_context spinning;
      seen = {};
      own.qp.poller = 1;
      EP_CHECK_EQ((efa_poll<EP_EFA_SHARE_DEVICE>(spinning, own.qp)), known);
      EP_CHECK_EQ(seen.locked, 0u);
      own.qp.poller = 0;
      EP_CHECK_EQ((efa_poll<EP_EFA_SHARE_DEVICE>(spinning, own.qp)), before + there);
      EP_CHECK_EQ(own.qp.polled, before + there);
      EP_CHECK_EQ(seen.locked, 2u);
    }
  }
}

// Values, and requests without bytes.
void other_calls() {
  const auto of = [](uint32_t wqe_bytes, const auto& call) {
    rig own(wqe_bytes);
    seen = {};
    EP_CHECK(call(efa_gin<>{own.device}, own.memory));
    return seen;
  };
  const counts one{.locked = 1, .words = 8, .doorbells = 1, .register_fences = 2, .system_fences = 0};
  counts wide = one;
  wide.words = 16;
  const auto value = [](const efa_gin<>& gin, const ep_efa_memory& memory) { return gin.put_value(ctx, coop, team, 1, memory, 0, uint64_t{7}, gin_no_action{}, {}, nullptr); };
  expect("value from a slot", of(64, value), one);
  expect("value inline", of(128, value), wide);
  expect("signal", of(64, [](const efa_gin<>& gin, const ep_efa_memory&) { return gin.signal(ctx, coop, team, 1, gin_no_action{}, {}, nullptr); }), one);
  expect("get", of(64, [](const efa_gin<>& gin, const ep_efa_memory& memory) { return gin.get(ctx, coop, team, 1, memory, 0, memory, 64, 8, {}, nullptr); }), one);
}

// T23: exactly where a wider scope is required than was given, once for each call, before its WQE.
void t23_fence_is_made() {
  constexpr gin_scope scopes[] = {gin_scope::system, gin_scope::device, gin_scope::block, gin_scope::thread};
  for (const gin_scope given : scopes) {
    for (const gin_scope required : scopes) {
      const uint64_t wanted = required == gin_scope::system && given != gin_scope::system ? 1 : 0;
      gin_options options;
      options.given = given;
      options.required = required;
      efa_pr_options pr_options;
      pr_options.given = given;
      pr_options.required = required;
      rig own;
      const efa_gin<> gin{own.device};
      const ep_efa_memory& memory = own.memory;
      const auto fences = [](const auto& call) {
        seen = {};
        EP_CHECK(call());
        return seen.system_fences;
      };
      EP_CHECK_EQ(fences([&] { return gin.put(ctx, coop, team, 1, memory, 0, memory, 0, 64, gin_no_action{}, gin_no_action{}, options, nullptr); }), wanted);
      EP_CHECK_EQ(fences([&] { return gin.put_value(ctx, coop, team, 1, memory, 0, uint32_t{7}, gin_no_action{}, options, nullptr); }), wanted);
      EP_CHECK_EQ(fences([&] { return gin.signal(ctx, coop, team, 1, gin_no_action{}, options, nullptr); }), wanted);
      EP_CHECK_EQ(fences([&] { return gin.put_lanes(ctx, true, team, 1, memory, 0, memory, 0, 8, gin_no_action{}, gin_no_action{}, options, nullptr); }), wanted);
      EP_CHECK_EQ(fences([&] { return gin.put_lanes(ctx, false, team, 1, memory, 0, memory, 0, 8, gin_no_action{}, gin_no_action{}, options, nullptr); }), 0u);
      // What is read says nothing of what this lane has written.
      EP_CHECK_EQ(fences([&] { return gin.get(ctx, coop, team, 1, memory, 0, memory, 64, 8, options, nullptr); }), 0u);
      // Besides the one of its lock.
      const ep_efa_pr_mr& part = own.pr_part.head;
      rig other;
      const efa_pr_gin pr{other.pr};
      EP_CHECK_EQ(fences([&] { return pr.put(ctx, coop, team, 1, part, 0, part, 0, 64, gin_no_action{}, gin_no_action{}, pr_options, nullptr); }), wanted + 1);
      EP_CHECK_EQ(fences([&] { return pr.put_value(ctx, coop, team, 1, part, 0, uint32_t{7}, gin_no_action{}, pr_options, nullptr); }), wanted + 1);
    }
  }
}

} // namespace

int main() {
  posts();
  polls_ahead();
  one_polls_at_a_time();
  other_calls();
  t23_fence_is_made();
  return ep::check::finish();
}
