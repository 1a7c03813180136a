// The GIN facade over EFA: waits that are given up or whose time is up, and requests that fail. The numbers are those of the list of tests in docs/efa-contract.md.
#include "efa_gin_cases.hpp"

using namespace ep;
using namespace ep::test;

namespace {

// A wait that is given up ends on every lane of its scope, with the same answer.
void abort_one(efa_world& world, std::atomic<uint32_t>& cancel, bool in_flush) {
  cancel.store(0);
  world.at(0).status = {};
  uint32_t failed = 0;
  const simt_result outcome = world.run(shape(1, 8, 4), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) {
      if (ctx.lane() == 0) {
        for (int i = 0; i < 300; ++i) ctx.point();
        cancel.store(1);
      }
      return true;
    }
    const auto gin = our_way::gin(world, 0);
    const block_coop<efa_context> coop{ctx};
    gin.signal(ctx, coop, world.team(), 1, gin_signal_inc{0}, {}, &world.at(0).status);
    const bool ok = in_flush ? gin.flush(ctx, coop, &world.at(0).status) : gin.wait_signal(ctx, coop, 0, 1, &world.at(0).status);
    failed += ok ? 0 : 1;
    return true;
  });
  EP_CHECK(outcome.ok);
  EP_CHECK_EQ(failed, 8u);
  EP_CHECK_EQ(world.at(0).status.status, static_cast<uint32_t>(EP_STATUS_ABORTED));
}

void t17_abort(bool in_flush) {
  efa_world world({});
  world.held = true;
  std::atomic<uint32_t> cancel{0};
  world.at(0).environment.waits.cancel = &cancel;
  abort_one(world, cancel, in_flush);
  EP_CHECK_EQ(world.at(0).device.broken, 0u);
  // Nothing is broken: the next wait waits, and can be given up as well.
  abort_one(world, cancel, false);
}

// Each wait ends by its deadline on every lane of its scope, and says what was awaited.
void t17_deadlines() {
  enum class awaited { completion, signal, counter, room };
  struct wait {
    awaited what;
    uint32_t stage;
  };
  for (const wait one : {wait{awaited::completion, EP_STAGE_COMPLETION}, {awaited::signal, EP_STAGE_ARRIVAL}, {awaited::counter, EP_STAGE_COMPLETION}, {awaited::room, EP_STAGE_ROOM}}) {
    efa_world_options wanted;
    wanted.watched = false;
    efa_world world(wanted);
    kernel_environment& environment = world.at(0).environment;
    environment.waits.deadline_ns = deadline_after(20);
    uint32_t failed = 0;
    ep_kernel_status* status = &world.at(0).status;
    // By itself: nobody steps the NICs, and only a launch that has no other beside it has a clock.
    const simt_result outcome = simt_run(simt_options{1, 8, 4, 1, 0.5}, environment, [&](simt_context& ctx) {
      const auto gin = our_way::gin(world, 0);
      const block_coop<simt_context> coop{ctx};
      const auto put = [&] {
        const ep_efa_memory& part = world.part(0);
        return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 8, gin_no_action{}, gin_counter_inc{0}, {}, status);
      };
      bool ok = put();
      switch (one.what) {
        case awaited::completion: ok = ok && gin.flush(ctx, coop, status); break;
        case awaited::signal: ok = ok && gin.wait_signal(ctx, coop, 0, 1, status); break;
        case awaited::counter: ok = ok && gin.wait_counter(ctx, coop, 0, 1, status); break;
        case awaited::room:
          for (uint32_t i = 0; i < world.options.depth && ok; ++i) ok = put();
          break;
      }
      failed += ok ? 0 : 1;
      return ok;
    });
    EP_CHECK(outcome.outcome == simt_outcome::finished && !outcome.ok);
    EP_CHECK_EQ(failed, 8u);
    EP_CHECK_EQ(status->status, static_cast<uint32_t>(EP_STATUS_TIMEOUT));
    EP_CHECK_EQ(status->stage, one.stage);
  }
}

// Every status that a completion can carry becomes an error that says whose and where, and no wait goes on after it.
void t18_statuses(uint64_t seed) {
  for (const uint32_t efa : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 14u, 15u, 18u}) {
    efa_world world(seeded_world(seed));
    expect(world.at(0).nic->set_faults("fail status=" + std::to_string(efa) + " skip=1 count=1"));
    const bool ok = by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
      const ep_efa_memory& part = world.part(0);
      for (uint64_t i = 0; i < 3; ++i) gin.put(ctx, coop, world.team(), 1, part, i * 64, part, 2048, 64, gin_signal_inc{0}, gin_no_action{}, {}, nullptr);
      return true;
    });
    const ep_kernel_status& status = world.at(0).status;
    EP_CHECK(!ok);
    EP_CHECK_EQ(status.status, static_cast<uint32_t>(efa == 13 || efa == 15 ? EP_STATUS_PEER_LOST : EP_STATUS_SYSTEM));
    EP_CHECK_EQ(status.stage, EP_STAGE_NIC);
    EP_CHECK_EQ(status.rank, 1);
    EP_CHECK_EQ(status.found & 0xff, efa);
    EP_CHECK_EQ(status.found >> EP_NIC_FOUND_INDEX & 0xffff, 1u);
    EP_CHECK_EQ(status.expected, world.at(0).remotes[1].address + 64);
    EP_CHECK_EQ(world.at(0).device.broken, 1u);
    EP_CHECK_EQ(world.counted(0, 0).written_failed, 1u);
    // What comes after is refused at once, on the same record.
    world.at(0).status = {};
    EP_CHECK(!by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
      return gin.put_value(ctx, coop, world.team(), 1, world.part(0), 0, uint8_t{1}, gin_no_action{}, {}, &world.at(0).status);
    }));
    EP_CHECK_EQ(world.at(0).status.found & 0xff, efa);
  }
}

// A wait for a counter sees that its own request has failed.
void t18_counter_wait(uint64_t seed) {
  efa_world world(seeded_world(seed));
  world.at(0).remotes[1].rkey ^= 0x100;
  EP_CHECK(!by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    const ep_efa_memory& part = world.part(0);
    gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 64, gin_no_action{}, gin_counter_inc{0}, {}, nullptr);
    return gin.wait_counter(ctx, coop, 0, 1, &world.at(0).status);
  }));
  EP_CHECK_EQ(world.at(0).status.stage, EP_STAGE_NIC);
  EP_CHECK_EQ(world.at(0).status.found & 0xff, static_cast<uint64_t>(EP_EFA_STATUS_REMOTE_BAD_ADDRESS));
}

} // namespace

int main() {
  t17_abort(true);
  t17_abort(false);
  t17_deadlines();
  const uint64_t samples = seeds_of(100);
  for (uint64_t seed = 0; seed < samples; ++seed) {
    if (seed % 20 == 0) t18_statuses(seed);
    t18_counter_wait(seed);
  }
  return ep::check::finish();
}
