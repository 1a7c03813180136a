// The post path of mlx5 queue pairs: bytes of WQEs, what each request does, sharing, full rings, wraps, and queue pairs that break.
#include "../check.hpp"
#include "ibgda_case.hpp"

using namespace ep::test;
using ep::mlx5_refused;

namespace {

constexpr uint32_t device = EP_IBGDA_SHARE_DEVICE;

// Golden WQEs as dwords in the order of their bytes.
void golden() {
  const auto bytes_of = [](uint64_t number, auto&& write) {
    ep::vector16 wqe[4];
    std::memset(wqe, 0, sizeof wqe);
    write(ep::mlx5_writer{wqe, 0x1234, number, true});
    std::string text;
    for (size_t i = 0; i < 16; ++i) {
      char word[16];
      std::snprintf(word, sizeof word, "%s%08x", i == 0 ? "" : " ", load_be32(reinterpret_cast<const uint8_t*>(wqe) + 4 * i));
      text += word;
    }
    return text;
  };
  const std::string rest = " 00000000 00000000 00000000 00000000";
  EP_CHECK_EQ(bytes_of(5, [](const ep::mlx5_writer& w) { w.write({0x7f0011223344, 0xabcd}, {0x7f00aabb0010, 0x5678}, 7184); }),
              "00000508 00123403 00000008 00000000 00007f00 11223344 0000abcd 00000000 00001c10 00005678 00007f00 aabb0010" + rest);
  EP_CHECK_EQ(bytes_of(6, [](const ep::mlx5_writer& w) { w.fetch_add4({0x7f0011220004, 0xabcd}, static_cast<uint32_t>(-8), {0x7f00aabb0004, 0x5678}); }),
              "08000615 00123404 00000008 00000000 00007f00 11220004 0000abcd 00000000 fffffff8 00000000 00000000 00000000 00000004 00005678 00007f00 aabb0004");
  EP_CHECK_EQ(bytes_of(7, [](const ep::mlx5_writer& w) { w.fetch_add8({0x7f0011220008, 0xabcd}, 1, {0x7f00aabb0008, 0x5678}); }),
              "09000715 00123404 00000008 00000000 00007f00 11220008 0000abcd 00000000 00000000 00000001 00000000 00000000 00000008 00005678 00007f00 aabb0008");
  EP_CHECK_EQ(bytes_of(0x10008, [](const ep::mlx5_writer& w) { w.compare_swap8({0x7f0011220008, 0xabcd}, 3, 4, {0x7f00aabb0008, 0x5678}); }),
              "00000811 00123404 00000008 00000000 00007f00 11220008 0000abcd 00000000 00000000 00000004 00000000 00000003 00000008 00005678 00007f00 aabb0008");
  EP_CHECK_EQ(bytes_of(0xffff, [](const ep::mlx5_writer& w) { w.write({16, 1}, {32, 2}, 1u << 30); }),
              "00ffff08 00123403 00000008 00000000 00000000 00000010 00000001 00000000 40000000 00000002 00000000 00000020" + rest);
  EP_CHECK_EQ(bytes_of(0, [](const ep::mlx5_writer& w) { w.write({16, 1}, {32, 2}, 0); }),
              "00000008 00123402 00000008 00000000 00000000 00000010 00000001 00000000 00000000 00000000 00000000 00000000" + rest);
  EP_CHECK_EQ(bytes_of(1, [](const ep::mlx5_writer& w) { w.write_immediate({16, 1}, {32, 2}, 9, 0x01020304); }),
              "00000109 00123403 00000008 01020304 00000000 00000010 00000001 00000000 00000009 00000002 00000000 00000020" + rest);
  EP_CHECK_EQ(bytes_of(2, [](const ep::mlx5_writer& w) { w.read({16, 1}, {32, 2}, 9); }),
              "00000210 00123403 00000008 00000000 00000000 00000010 00000001 00000000 00000009 00000002 00000000 00000020" + rest);
  const auto blocks_of = [&](uint64_t number, uint32_t count, auto&& write) {
    std::string text;
    for (uint32_t block = 0; block < count; ++block) {
      text += (block == 0 ? "" : " ") + bytes_of(number, [&](ep::mlx5_writer w) {
        w.signalled = false;
        write(block, w);
      });
    }
    return text;
  };
  // As the codec of packages/ibgda writes it (golden.ts).
  EP_CHECK_EQ(blocks_of(8, 2, [](uint32_t block, const ep::mlx5_writer& w) { w.masked_swap8(block, {0x7f0011220008, 0xabcd}, 3, 0xff00, 4, 0xff, {0x7f00aabb0008, 0x5678}); }),
              "09000814 00123405 00000000 00000000 00007f00 11220008 0000abcd 00000000 00000000 00000004 00000000 00000003 00000000 000000ff 00000000 0000ff00 "
              "00000008 00005678 00007f00 aabb0008" + rest + rest + rest);
  EP_CHECK_EQ(bytes_of(9, [](const ep::mlx5_writer& w) { w.nop(); }), "00000900 00123401 00000008 00000000" + rest + rest + rest);
  EP_CHECK_EQ(blocks_of(10, 2, [](uint32_t block, const ep::mlx5_writer& w) { w.write_long_inline(block, {16, 1}, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN", 38); }),
              "00000a08 00123405 00000000 00000000 00000000 00000010 00000001 00000000 80000026 61626364 65666768 696a6b6c 6d6e6f70 71727374 75767778 797a4142 "
              "43444546 4748494a 4b4c0000 00000000" + rest + rest + rest);
  EP_CHECK_EQ(ep::mlx5_inline_blocks(29), 2u);
  EP_CHECK_EQ(ep::mlx5_inline_blocks(92), 2u);
  EP_CHECK_EQ(ep::mlx5_inline_blocks(93), 3u);
  EP_CHECK_EQ(ep::mlx5_inline_blocks(EP_IBGDA_MAX_LONG_INLINE), 4u);
  const char text[] = "abcdefghijklmnopqrstuvwxyzAB";
  EP_CHECK_EQ(bytes_of(3, [&](const ep::mlx5_writer& w) { w.write_inline({16, 1}, text, 5); }),
              "00000308 00123403 00000008 00000000 00000000 00000010 00000001 00000000 80000005 61626364 65000000 00000000" + rest);
  EP_CHECK_EQ(bytes_of(4, [&](const ep::mlx5_writer& w) { w.write_inline({16, 1}, text, EP_IBGDA_MAX_INLINE); }),
              "00000408 00123404 00000008 00000000 00000000 00000010 00000001 00000000 8000001c 61626364 65666768 696a6b6c 6d6e6f70 71727374 75767778 797a4142");
}

// One lane, one queue pair, and a NIC beside it.
struct pair_of {
  explicit pair_of(const queue_options& wanted) : queue(nic.add(wanted)), qp(queue.qp) {}

  template <class Kernel> ep::simt_result run(uint64_t seed, Kernel&& kernel, bool with_nic = true, uint32_t lanes = 1, uint32_t blocks = 1) {
    std::vector<ep::simt_launch> launches(with_nic ? 2 : 1);
    launches[0] = shape(blocks, lanes, 1);
    launches[0].name = "poster";
    launches[0].kernel = ep::simt_kernel(kernel);
    launches[0].environment = &environment;
    if (with_nic) {
      launches[1] = shape(1, 1, 1);
      launches[1].name = "nic";
      launches[1].serves = true;
      launches[1].environment = &serving;
      launches[1].kernel = [this](ep::simt_context& ctx) {
        nic.serve(ctx, queue);
        return true;
      };
    }
    ep::simt_schedule schedule = seeded(seed);
    schedule.point_limit = 200'000'000;
    ep::simt_result result = ep::simt_run_together(schedule, launches);
    for (const std::string& violation : nic.violations) EP_CHECK_EQ(violation, "");
    return result;
  }

  test_nic nic;
  test_queue& queue;
  ep_ibgda_qp& qp;
  ep::kernel_environment environment;
  ep::kernel_environment serving;
};

template <class Build> bool post_one(ep::simt_context& ctx, ep_ibgda_qp& qp, const Build& build, ep_kernel_status* status) {
  const auto one = [&](uint32_t, const ep::mlx5_writer& writer) { build(writer); };
  const uint64_t first = ep::post_in_turn::post<device>(ctx, ep::lone_poster<ep::simt_context>{ctx}, qp, 1, one, status);
  return first != mlx5_refused && ep::mlx5_wait_done<device>(ctx, qp, first + 1, EP_STAGE_COMPLETION, status);
}

void requests() {
  pair_of pair({8, true, 0x1234, 1});
  alignas(8) uint8_t source[64];
  alignas(8) uint8_t target[64] = {};
  uint64_t word = 100;
  uint64_t old = 0;
  for (size_t i = 0; i < sizeof source; ++i) source[i] = static_cast<uint8_t>(i + 1);
  pair.nic.allow(1, source, sizeof source);
  pair.nic.allow(2, target, sizeof target);
  pair.nic.allow(3, &word, 8);
  pair.nic.allow(4, &old, 8);
  const auto at = [](void* address, uint32_t key) { return ep::mlx5_place{reinterpret_cast<uint64_t>(address), key}; };
  ep_kernel_status status{};
  const auto result = pair.run(1, [&](ep::simt_context& ctx) {
    const auto post = [&](auto&& build) { EP_CHECK(post_one(ctx, pair.qp, build, &status)); };
    post([&](const ep::mlx5_writer& w) { w.write(at(target, 2), at(source, 1), 33); });
    EP_CHECK(std::memcmp(source, target, 33) == 0 && target[33] == 0);
    post([&](const ep::mlx5_writer& w) { w.write_inline(at(target + 40, 2), source + 7, 13); });
    EP_CHECK(std::memcmp(source + 7, target + 40, 13) == 0 && target[53] == 0);
    post([&](const ep::mlx5_writer& w) { w.write_immediate(at(target + 60, 2), at(source, 1), 4, 9); });
    EP_CHECK(std::memcmp(source, target + 60, 4) == 0);
    post([&](const ep::mlx5_writer& w) { w.write(at(target, 2), at(nullptr, 0), 0); });
    post([&](const ep::mlx5_writer& w) { w.read(at(target + 60, 2), at(source + 20, 1), 4); });
    EP_CHECK(std::memcmp(source, source + 20, 4) == 0);
    post([&](const ep::mlx5_writer& w) { w.fetch_add8(at(&word, 3), 5, at(&old, 4)); });
    EP_CHECK_EQ(word, 105u);
    EP_CHECK_EQ(old, 100u);
    post([&](const ep::mlx5_writer& w) { w.fetch_add4(at(&word, 3), static_cast<uint32_t>(-6), at(&old, 4)); });
    EP_CHECK_EQ(word, 99u);
    EP_CHECK_EQ(__builtin_bswap32(static_cast<uint32_t>(old)), 105u);
    post([&](const ep::mlx5_writer& w) { w.compare_swap8(at(&word, 3), 98, 1, at(&old, 4)); });
    EP_CHECK_EQ(word, 99u);
    EP_CHECK_EQ(old, 99u);
    post([&](const ep::mlx5_writer& w) { w.compare_swap8(at(&word, 3), 99, 1, at(&old, 4)); });
    EP_CHECK_EQ(word, 1u);
  });
  EP_CHECK(result.ok);
  EP_CHECK_EQ(status.status, 0u);
  EP_CHECK_EQ(pair.queue.wqes, 9u);
  EP_CHECK_EQ(pair.queue.doorbells, 9u);
}

// Messages of several senders, their signals counted, every way to post and to share, both kinds of completion queue.
template <class Post, uint32_t Sharing> void mailboxes_arrive(uint64_t seed, const mailbox_options& wanted) {
  mailboxes<right_sender<Post, Sharing>> boxes(wanted, seed);
  const mailbox_outcome seen = boxes.run();
  const uint64_t wqes = static_cast<uint64_t>(wanted.blocks) * wanted.warps * wanted.rounds * (wanted.writes + 1);
  EP_CHECK_EQ(seen.result.report, "");
  EP_CHECK(seen.clean());
  EP_CHECK_EQ(seen.posted, wqes);
  EP_CHECK_EQ(seen.rung, wqes);
  for (const ep_ibgda_qp* qp : boxes.queues) {
    if constexpr (std::is_same_v<Post, ep::post_by_ringer> && Sharing != EP_IBGDA_SHARE_THREAD) {
      EP_CHECK_EQ(qp->ringer, qp->taken * 2);
    } else {
      EP_CHECK_EQ(qp->taken, qp->ready);
    }
    EP_CHECK_EQ(qp->broken, static_cast<uint64_t>(EP_IBGDA_SOUND));
  }
}

template <class Post> void all_sharing(uint64_t seed) {
  mailbox_options wanted;
  wanted.collapsed = seed % 2 == 0;
  wanted.depth = 4u << seed % 3;
  wanted.writes = 1 + static_cast<uint32_t>(seed % 3);
  wanted.warp_lanes = 1u << seed / 2 % 3;
  wanted.queues = 1 + static_cast<uint32_t>(seed / 5 % 3);
  mailboxes_arrive<Post, EP_IBGDA_SHARE_DEVICE>(seed, wanted);
  // A queue pair for each block: sender s = block * warps + warp takes queue s % queues.
  wanted.blocks = 1;
  wanted.warps = 3;
  wanted.queues = 1;
  mailboxes_arrive<Post, EP_IBGDA_SHARE_BLOCK>(seed, wanted);
  wanted.blocks = 3;
  wanted.warps = 1;
  wanted.queues = 3;
  mailboxes_arrive<Post, EP_IBGDA_SHARE_BLOCK>(seed, wanted);
  mailboxes_arrive<Post, EP_IBGDA_SHARE_THREAD>(seed, wanted);
}

template <class Post> void on_threads(bool collapsed) {
  mailbox_options wanted;
  wanted.blocks = 2;
  wanted.warps = 1;
  wanted.depth = 8;
  wanted.collapsed = collapsed;
  wanted.rounds = 2000 / static_cast<uint32_t>(seed_share);
  mailboxes<right_sender<Post, device>> boxes(wanted, 1);
  const mailbox_outcome seen = boxes.run_threads();
  EP_CHECK(seen.clean());
  EP_CHECK_EQ(seen.posted, 2u * wanted.rounds * 3u);
  for (const std::string& violation : seen.violations) EP_CHECK_EQ(violation, "");
}

// Doorbells that posts of one lane need: one each, whatever their length; the lock path's: one for each WQE.
void doorbells() {
  mailbox_options wanted;
  wanted.blocks = wanted.warps = 1;
  wanted.writes = 3;
  EP_CHECK_EQ((mailboxes<right_sender<ep::post_in_turn, device>>(wanted, 1).run().doorbells), wanted.rounds);
  // The test's NIC may miss a doorbell that follows another at once, so at most; with switches at every point it sees them all.
  wanted.switches = 1;
  uint64_t most = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) most = std::max(most, mailboxes<right_sender<ep::post_under_lock, device>>(wanted, seed).run().doorbells);
  EP_CHECK(most > wanted.rounds * 3u);
  EP_CHECK(most <= wanted.rounds * 4u);
}

// 10^5 turns of a ring of 2, which is three passes of the 16-bit index; one WQE and full rings, one and three posters.
template <class Post> void wraps(bool collapsed, uint32_t lanes) {
  pair_of pair({2, collapsed, 7, 1});
  uint64_t word = 0;
  pair.nic.allow(1, &word, 8);
  const uint64_t each = 200'000 / seed_share / lanes;
  const auto result = pair.run(3, [&](ep::simt_context& ctx) {
    for (uint64_t i = 0; i < each;) {
      const uint32_t count = i % 3 == 0 && each - i >= 2 ? 2 : 1;
      const auto build = [&](uint32_t, const ep::mlx5_writer& w) {
        w.fetch_add8({reinterpret_cast<uint64_t>(&word), 1}, 1, {pair.qp.response, test_queue::response_lkey});
      };
      if (Post::template post<device>(ctx, ep::lone_poster<ep::simt_context>{ctx}, pair.qp, count, build, nullptr) == mlx5_refused) return false;
      i += count;
    }
    return ep::mlx5_wait_done<device>(ctx, pair.qp, Post::posted(ctx, pair.qp), EP_STAGE_COMPLETION, nullptr);
  }, true, lanes);
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(word, each * lanes);
  EP_CHECK_EQ(pair.qp.done, each * lanes);
  EP_CHECK(seed_share != 1 || pair.qp.done / pair.qp.depth >= 99'999);
}

template <class Post, class Build> bool posts(ep::simt_context& ctx, ep_ibgda_qp& qp, uint32_t count, const Build& build, ep_kernel_status* status) {
  return Post::template post<device>(ctx, ep::lone_poster<ep::simt_context>{ctx}, qp, count, build, status) != mlx5_refused;
}

// Nobody executes: as many WQEs as the ring holds are accepted, the next poster waits, and the report says for what.
template <class Post> void full_ring() {
  pair_of pair({4, true, 7, 1});
  uint32_t accepted = 0;
  const auto zero = [](uint32_t, const ep::mlx5_writer& w) { w.write({0, 0}, {0, 0}, 0); };
  const auto result = pair.run(1, [&](ep::simt_context& ctx) {
    for (; posts<Post>(ctx, pair.qp, 1, zero, nullptr); ++accepted) {}
  }, false);
  EP_CHECK(result.outcome == ep::simt_outcome::deadlock);
  EP_CHECK_EQ(accepted, 4u);
  EP_CHECK(result.report.find("waits (stage room, from rank 1): expected 1, found 0") != std::string::npos);
}

// A poster whose wait for room is cancelled breaks the queue pair, so that those behind it do not wait for its turn for ever.
template <class Post> void gives_up() {
  pair_of pair({4, true, 7, 1});
  std::atomic<uint32_t> cancel{0};
  pair.environment.waits.cancel = &cancel;
  ep_kernel_status status[3] = {};
  const auto zero = [](uint32_t, const ep::mlx5_writer& w) { w.write({0, 0}, {0, 0}, 0); };
  const auto result = pair.run(1, [&](ep::simt_context& ctx) {
    while (posts<Post>(ctx, pair.qp, 1, zero, &status[ctx.lane()])) {
      if (pair.qp.taken >= 4) cancel.store(1);
    }
    return true;
  }, false, 3);
  EP_CHECK(result.ok);
  EP_CHECK_EQ(pair.qp.broken, static_cast<uint64_t>(EP_IBGDA_BROKEN));
  EP_CHECK_EQ(pair.qp.syndrome, 0u);
  uint32_t aborted = 0;
  for (const ep_kernel_status& one : status) {
    EP_CHECK(one.status == EP_STATUS_ABORTED || (one.status == EP_STATUS_CLOSED && one.stage == EP_STAGE_NIC));
    if (one.status == EP_STATUS_ABORTED) ++aborted;
  }
  EP_CHECK(aborted > 0);
}

// A context whose waits for room are given up, once somebody else is ready to publish behind it.
struct giving_up {
  ep::simt_context& ctx;
  uint64_t& given_up;
  const uint64_t& built;
  void point() { ctx.point(); }
  template <class Look> bool wait_for(const Look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) {
    if (stage != EP_STAGE_ROOM) return ctx.wait_for(look, expected, rank, stage, status);
    ep::store_release(ctx, &given_up, 1);
    ctx.wait(&built, 1, rank, stage, nullptr);
    return false;
  }
  void fail(ep_kernel_status*, uint32_t, int32_t, uint32_t, uint64_t, uint64_t) {}
  void wake(uint64_t) {}
};

// Whoever has room, and waits for the turn of a poster that has given up, ends, too.
void gives_up_before_another() {
  pair_of pair({2, true, 7, 1});
  uint64_t given_up = 0;
  uint64_t built = 0;
  ep_kernel_status status{};
  const auto zero = [](uint32_t, const ep::mlx5_writer& w) { w.write({0, 0}, {0, 0}, 0); };
  const auto result = pair.run(1, [&](ep::simt_context& ctx) {
    if (ctx.lane() == 0) {
      if (!posts<ep::post_in_turn>(ctx, pair.qp, 2, zero, nullptr)) return false;
      giving_up weak{ctx, given_up, built};
      return ep::post_in_turn::post<device>(weak, ep::lone_poster<giving_up>{weak}, pair.qp, 1, zero, nullptr) == mlx5_refused;
    }
    if (ctx.lane() == 1) {
      if (!ctx.wait(&given_up, 1, 0, 0, nullptr)) return false;
      const auto build = [&](uint32_t i, const ep::mlx5_writer& w) {
        zero(i, w);
        ep::store_release(ctx, &built, 1);
      };
      return !posts<ep::post_in_turn>(ctx, pair.qp, 1, build, &status);
    }
    // The NIC, which completes both once the first has given up.
    if (!ctx.wait(&given_up, 1, 0, 0, nullptr)) return false;
    reinterpret_cast<uint64_t*>(pair.qp.cq)[7] = uint64_t{0x0100} << 32;
    return true;
  }, false, 3);
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_CLOSED));
  EP_CHECK_EQ(status.stage, EP_STAGE_NIC);
}

// A request that fails: every poster ends, and says which WQE it was.
template <class Post> void breaks(bool collapsed, uint32_t syndrome, uint64_t seed) {
  pair_of pair({4, collapsed, 0x4321, 1});
  uint64_t word = 0;
  pair.nic.allow(1, &word, 8);
  const uint32_t bad = 6;
  if (syndrome == EP_MLX5_SYNDROME_RETRY_EXCEEDED) pair.queue.silent_from = bad;
  ep_kernel_status status[4] = {};
  const uint64_t far = reinterpret_cast<uint64_t>(&word);
  const auto result = pair.run(seed, [&](ep::simt_context& ctx) {
    const auto build = [&](uint32_t, const ep::mlx5_writer& w) {
      const bool wrong = w.number == bad;
      const uint32_t rkey = wrong && syndrome == EP_MLX5_SYNDROME_REMOTE_ACCESS ? 2 : 1;
      const uint32_t lkey = wrong && syndrome == EP_MLX5_SYNDROME_LOCAL_PROTECTION ? 0x78 : test_queue::response_lkey;
      w.fetch_add8({wrong && syndrome == EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST ? far + 4 : far, rkey}, 1, {pair.qp.response, lkey});
    };
    while (posts<Post>(ctx, pair.qp, 1, build, &status[ctx.lane()])) {}
    return true;
  }, true, 4);
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(word, bad);
  EP_CHECK_EQ(pair.qp.broken, static_cast<uint64_t>(EP_IBGDA_BROKEN));
  // Flushed WQEs may have overwritten the first error in a collapsed queue.
  const bool overwritten = collapsed && pair.qp.syndrome == EP_MLX5_SYNDROME_FLUSHED;
  EP_CHECK(overwritten || pair.qp.syndrome == syndrome);
  if (overwritten) return;
  EP_CHECK_EQ(pair.qp.wqe, bad);
  EP_CHECK_EQ(pair.qp.remote_address, syndrome == EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST ? far + 4 : far);
  EP_CHECK_EQ(pair.qp.opcode, static_cast<uint32_t>(EP_MLX5_OPCODE_ATOMIC_MASKED_FA));
  EP_CHECK_EQ(pair.qp.vendor_syndrome, 0x88u);
  const bool silent = syndrome == EP_MLX5_SYNDROME_RETRY_EXCEEDED;
  for (const ep_kernel_status& one : status) {
    EP_CHECK_EQ(one.status, static_cast<uint32_t>(silent ? EP_STATUS_PEER_LOST : EP_STATUS_SYSTEM));
    EP_CHECK_EQ(one.stage, EP_STAGE_NIC);
    EP_CHECK_EQ(one.rank, 1);
    EP_CHECK_EQ(one.expected, pair.qp.remote_address);
    EP_CHECK_EQ(one.found, syndrome | 0x88u << EP_NIC_FOUND_VENDOR | bad << EP_NIC_FOUND_INDEX | uint64_t{0x4321} << EP_NIC_FOUND_QPN);
  }
}

} // namespace

int main() {
  golden();
  requests();
  for (uint64_t seed = 0; seed < 120 / seed_share; ++seed) {
    all_sharing<ep::post_in_turn>(seed);
    all_sharing<ep::post_by_ringer>(seed);
    mailbox_options locked;
    locked.collapsed = seed % 2 == 0;
    locked.depth = 4u << seed % 3;
    mailboxes_arrive<ep::post_under_lock, EP_IBGDA_SHARE_DEVICE>(seed, locked);
  }
  for (const bool collapsed : {true, false}) {
    on_threads<ep::post_in_turn>(collapsed);
    on_threads<ep::post_by_ringer>(collapsed);
    on_threads<ep::post_under_lock>(collapsed);
    wraps<ep::post_in_turn>(collapsed, 1);
    wraps<ep::post_in_turn>(collapsed, 3);
    wraps<ep::post_by_ringer>(collapsed, 1);
    wraps<ep::post_by_ringer>(collapsed, 3);
    for (const uint32_t syndrome : {EP_MLX5_SYNDROME_REMOTE_ACCESS, EP_MLX5_SYNDROME_LOCAL_PROTECTION, EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
                                    EP_MLX5_SYNDROME_RETRY_EXCEEDED}) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        breaks<ep::post_in_turn>(collapsed, syndrome, seed);
        breaks<ep::post_by_ringer>(collapsed, syndrome, seed);
      }
    }
  }
  doorbells();
  full_ring<ep::post_in_turn>();
  full_ring<ep::post_by_ringer>();
  gives_up<ep::post_in_turn>();
  gives_up<ep::post_by_ringer>();
  gives_up_before_another();
  return ep::check::finish();
}
