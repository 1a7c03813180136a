// What a post costs, as counts that no machine's speed changes: locked operations, doorbells, fences and shared words touched for each batch. A change here is a
// change of the post path, to be made on purpose.
//
// HAZARD: here std::atomic_ref counts. All that is compiled so is instantiated with this file's own context: a function template that ep_core or another test
// instantiates, too, would have two bodies under one name.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../check.hpp"
#include "counting_ref.hpp"
#include "ep/abi/ibgda.h"

namespace {

struct counts {
  uint64_t locked = 0; // read-modify-writes
  uint64_t loads = 0;
  uint64_t stores = 0;
  uint64_t doorbells = 0; // stores to the register
  uint64_t records = 0;   // stores to the doorbell record
  bool operator==(const counts&) const = default;
};

counts seen;
const void* bf_begin = nullptr;
const void* record = nullptr;

struct counter {
  static void load() { ++seen.loads; }
  static void store(const void* at) {
    const bool in_bf = at >= bf_begin && at < static_cast<const uint8_t*>(bf_begin) + 512;
    ++(in_bf ? seen.doorbells : at == record ? seen.records : seen.stores);
  }
  static void update() { ++seen.locked; }
};

} // namespace

namespace std {
template <class T> using ep_counting_ref = ::counting_ref<T, ::counter>;
}
#define atomic_ref ep_counting_ref
#include "ep/device/mlx5_post.h"
#undef atomic_ref

namespace {

struct context {
  void point() const {}
  template <class Look> bool wait_for(const Look&, uint64_t, int32_t, uint32_t, ep_kernel_status*) const { return false; }
  void fail(ep_kernel_status*, uint32_t, int32_t, uint32_t, uint64_t, uint64_t) const {}
  void wake(uint64_t) const {}
};

struct counted_queue {
  counted_queue() {
    std::memset(cqe, 0xff, sizeof cqe);
    qp.sq = reinterpret_cast<uint64_t>(sq);
    qp.dbr = reinterpret_cast<uint64_t>(dbr);
    qp.bf = reinterpret_cast<uint64_t>(bf);
    qp.cq = reinterpret_cast<uint64_t>(cqe);
    qp.marks = reinterpret_cast<uint64_t>(&marks);
    qp.qpn = 1;
    qp.depth = 16;
    qp.cq_depth = 1;
    qp.flags = EP_IBGDA_CQ_COLLAPSED;
    bf_begin = bf;
    record = &dbr[1];
  }
  alignas(64) uint8_t sq[16 * 64];
  alignas(64) uint64_t cqe[8];
  alignas(64) uint64_t bf[64] = {};
  alignas(8) uint32_t dbr[2] = {};
  uint64_t marks = 0;
  ep_ibgda_qp qp{};
};

// Of the second batch, which fits the ring, or of the third, for which there is room that nobody has looked for yet.
template <class Post, uint32_t Sharing> counts of_batch(uint32_t batch, bool must_poll) {
  counted_queue own;
  context ctx;
  const auto post = [&](uint32_t count) {
    seen = {};
    const auto build = [](uint32_t, const ep::mlx5_writer& writer) { writer.write({1, 1}, {2, 2}, 64); };
    EP_CHECK((Post::template post<Sharing>(ctx, ep::lone_poster<context>{ctx}, own.qp, count, build, nullptr)) != ep::mlx5_refused);
    const uint64_t done = static_cast<uint64_t>(__builtin_bswap16(static_cast<uint16_t>(own.qp.taken - 1))) << 32;
    own.cqe[7] = done;
    return seen;
  };
  if (must_poll) post(16);
  if (!must_poll) post(1);
  return post(batch);
}

void expect(const counts& found, const counts& wanted, const char* what) {
  EP_CHECK(found == wanted);
  if (found == wanted) return;
  std::printf("%s: %llu locked, %llu loads, %llu stores, %llu doorbells, %llu records\n", what, static_cast<unsigned long long>(found.locked),
              static_cast<unsigned long long>(found.loads), static_cast<unsigned long long>(found.stores), static_cast<unsigned long long>(found.doorbells),
              static_cast<unsigned long long>(found.records));
}

// As on a GPU.
struct spinning_context : context {
  static constexpr bool never_sleeps = true;
};

// Where nobody sleeps, who finds somebody polling does not look at the CQ; who may sleep looks himself, and a poster that shares with nobody.
template <uint32_t Sharing, class Ctx> void polls(bool looks_beside_another) {
  counted_queue own;
  Ctx ctx;
  own.cqe[7] = static_cast<uint64_t>(__builtin_bswap16(2)) << 32; // WQE 2, of three that were taken
  own.qp.taken = 3;
  own.qp.poller = 1;
  EP_CHECK_EQ((ep::mlx5_poll<Sharing>(ctx, own.qp)), looks_beside_another ? 3u : 0u);
  own.qp.poller = 0;
  EP_CHECK_EQ((ep::mlx5_poll<Sharing>(ctx, own.qp)), 3u);
  EP_CHECK_EQ(own.qp.done, 3u);
  EP_CHECK_EQ(own.qp.poller, 0u);
}

constexpr uint32_t device = EP_IBGDA_SHARE_DEVICE;
constexpr uint32_t block = EP_IBGDA_SHARE_BLOCK;
constexpr uint32_t thread = EP_IBGDA_SHARE_THREAD;

} // namespace

int main() {
  for (const uint32_t batch : {1u, 4u, 8u}) {
    // However long a batch is, it costs the same: that is what it is for.
    const counts in_turn{.locked = 1, .loads = 3, .stores = 1, .doorbells = 1, .records = 1};
    expect(of_batch<ep::post_in_turn, device>(batch, false), in_turn, "in turn, device");
    expect(of_batch<ep::post_in_turn, block>(batch, false), in_turn, "in turn, block");
    expect(of_batch<ep::post_in_turn, thread>(batch, false), {.locked = 0, .loads = 4, .stores = 2, .doorbells = 1, .records = 1}, "in turn, thread");
    expect(of_batch<ep::post_by_ringer, device>(batch, false), {.locked = 4, .loads = 4, .stores = 0, .doorbells = 1, .records = 1}, "ringer, device");
    expect(of_batch<ep::post_by_ringer, thread>(batch, false), {.locked = 0, .loads = 4, .stores = 2, .doorbells = 1, .records = 1}, "ringer, thread");
    // Room that a look at the CQ finds: four loads and one compare-exchange more.
    expect(of_batch<ep::post_in_turn, device>(batch, true), {.locked = 2, .loads = 7, .stores = 1, .doorbells = 1, .records = 1}, "in turn, device, poll");
    expect(of_batch<ep::post_in_turn, thread>(batch, true), {.locked = 0, .loads = 8, .stores = 3, .doorbells = 1, .records = 1}, "in turn, thread, poll");
    // The lock's: everything for each WQE.
    expect(of_batch<ep::post_under_lock, device>(batch, false), {.locked = batch, .loads = 3 * batch, .stores = 3 * batch, .doorbells = batch, .records = batch}, "lock");
  }
  polls<device, spinning_context>(false);
  polls<block, spinning_context>(false);
  polls<thread, spinning_context>(true);
  polls<device, context>(true);
  return ep::check::finish();
}
