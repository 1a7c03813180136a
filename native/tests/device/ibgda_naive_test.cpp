// Ways to post that are known to be wrong. Each differs from ours in one step, and the scheduler must find it out; ours pass under the same seeds. If one of
// these stops failing, the executor or the test's NIC has lost its teeth.
#include "../check.hpp"
#include "ibgda_case.hpp"

using namespace ep::test;
using ep::mlx5_refused;

namespace {

using words = ep::poster_words<EP_IBGDA_SHARE_DEVICE>;

// A post whose steps can be replaced.
template <class Steps> struct naive_sender {
  static constexpr bool whole = true;
  static size_t signal_queue(uint32_t sender, size_t queues) { return sender % queues; }
  template <class Ctx, class Group, class Build>
  static bool send(Ctx& ctx, const Group& group, std::vector<ep_ibgda_qp*>& queues, uint32_t sender, uint32_t writes, const Build& build) {
    ep_ibgda_qp& qp = *queues[sender % queues.size()];
    const uint32_t count = writes + 1;
    uint64_t first = mlx5_refused;
    if (group.lane() == 0) first = Steps::take(ctx, qp, count);
    first = group.from_first(first);
    if (first == mlx5_refused) return false;
    if (Steps::rings_first && group.lane() == 0) {
      ep::mlx5_wait_turn<EP_IBGDA_SHARE_DEVICE>(ctx, qp, first, nullptr);
      ep::mlx5_ring(ctx, qp, first + count);
    }
    ep::mlx5_build(ctx, group, qp, first, count, build);
    if (group.lane() == 0) Steps::publish(ctx, qp, first, count);
    return true;
  }
};

struct right_steps {
  static constexpr bool rings_first = false;
  template <class Ctx> static uint64_t take(Ctx& ctx, ep_ibgda_qp& qp, uint32_t count) { return ep::mlx5_take<EP_IBGDA_SHARE_DEVICE>(ctx, qp, count, nullptr); }
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) {
    if (!ep::mlx5_wait_turn<EP_IBGDA_SHARE_DEVICE>(ctx, qp, first, nullptr)) return;
    ep::mlx5_ring(ctx, qp, first + count);
    words::store(ctx, &qp.ready, first + count);
  }
};

// Rings, then writes.
struct ring_first : right_steps {
  static constexpr bool rings_first = true;
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) { words::store(ctx, &qp.ready, first + count); }
};

// Rings as soon as its own WQEs are written: those before it may not be.
struct out_of_turn : right_steps {
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) {
    ep::mlx5_ring(ctx, qp, first + count);
    words::add(ctx, &qp.ready, count);
  }
};

// Never asks for room.
struct no_room : right_steps {
  template <class Ctx> static uint64_t take(Ctx& ctx, ep_ibgda_qp& qp, uint32_t count) { return words::add(ctx, &qp.taken, count); }
};

// Asks for room, then takes numbers.
struct room_first : right_steps {
  template <class Ctx> static uint64_t take(Ctx& ctx, ep_ibgda_qp& qp, uint32_t count) {
    const uint64_t next = words::load(ctx, &qp.taken);
    if (next + count > qp.depth && !ep::mlx5_wait_done<EP_IBGDA_SHARE_DEVICE>(ctx, qp, next + count - qp.depth, EP_STAGE_ROOM, nullptr)) return mlx5_refused;
    return words::add(ctx, &qp.taken, count);
  }
};

// Loads the CQE before what is known to be done.
struct cqe_first : right_steps {
  template <class Ctx> static uint64_t take(Ctx& ctx, ep_ibgda_qp& qp, uint32_t count) {
    const uint64_t first = words::add(ctx, &qp.taken, count);
    while (first + count > qp.depth) {
      const ep::mlx5_cqe_tail tail = ep::mlx5_cqe_load(ctx, qp.cq);
      const uint64_t done = words::load(ctx, &qp.done);
      const uint64_t now = ep::mlx5_number(done, static_cast<uint16_t>(tail.counter() + 1));
      words::raise(ctx, &qp.done, now);
      if (now >= first + count - qp.depth) break;
      if (!ctx.wait_for(ep::mlx5_done_look{qp, first + count - qp.depth}, 0, 1, EP_STAGE_ROOM, nullptr)) return mlx5_refused;
    }
    return first;
  }
};

constexpr uint32_t device = EP_IBGDA_SHARE_DEVICE;

// The ringer rings once: false, somebody else is. It looks again where `again` says so of what it rang for and what is marked then.
template <class Ctx, class Again> void rings(Ctx& ctx, ep_ibgda_qp& qp, const Again& again) {
  for (;;) {
    const uint64_t held = words::set(ctx, &qp.ringer, 1);
    if ((held & 1) != 0) return;
    const uint64_t end = ep::mlx5_marks(qp).first_unmarked<device>(ctx, held / 2);
    if (end != held / 2) ep::mlx5_ring(ctx, qp, end);
    words::exchange(ctx, &qp.ringer, end * 2);
    if (!again(end)) return;
  }
}

// Leaves as ringer without looking again.
struct leaves_at_once : right_steps {
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) {
    ep::mlx5_marks(qp).mark<device>(ctx, first, count);
    rings(ctx, qp, [](uint64_t) { return false; });
  }
};

// Leaves to the next one also what he waits for room behind.
struct leaves_to_the_next : right_steps {
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) {
    ep::mlx5_marks(qp).mark<device>(ctx, first, count);
    rings(ctx, qp, [&](uint64_t end) {
      const uint64_t marked = ep::mlx5_marks(qp).first_unmarked<device>(ctx, end);
      return marked != end && words::load(ctx, &qp.taken) == marked;
    });
  }
};

// Marks the first number first: somebody may ring for a part.
struct marks_upwards : right_steps {
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) ep::mlx5_marks(qp).mark<device>(ctx, first + i, 1);
    ep::mlx5_ring_marked<device>(ctx, qp);
  }
};

// Marks before it writes.
struct marks_first : right_steps {
  template <class Ctx> static uint64_t take(Ctx& ctx, ep_ibgda_qp& qp, uint32_t count) {
    const uint64_t first = right_steps::take(ctx, qp, count);
    if (first != mlx5_refused) ep::mlx5_marks(qp).mark<device>(ctx, first, count);
    return first;
  }
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t, uint32_t) { ep::mlx5_ring_marked<device>(ctx, qp); }
};

// Sets marks where it should change them: from the second round on all look written, or none.
struct sets_marks : right_steps {
  template <class Ctx> static void publish(Ctx& ctx, ep_ibgda_qp& qp, uint64_t first, uint32_t count) {
    for (uint32_t i = count; i-- > 0;) words::set(ctx, ep::mlx5_marks(qp).word_of(first + i), uint64_t{1} << (first + i) % qp.depth % 64);
    ep::mlx5_ring_marked<device>(ctx, qp);
  }
};

// The signal takes another queue pair than its data.
struct signal_elsewhere {
  static constexpr bool whole = false;
  static size_t signal_queue(uint32_t sender, size_t queues) { return (sender + 1) % queues; }
  template <class Ctx, class Group, class Build>
  static bool send(Ctx& ctx, const Group& group, std::vector<ep_ibgda_qp*>& queues, uint32_t sender, uint32_t writes, const Build& build) {
    const auto signal = [&](uint32_t, const ep::mlx5_writer& writer) { build(writes, writer); };
    using post = ep::post_in_turn;
    return post::post<EP_IBGDA_SHARE_DEVICE>(ctx, group, *queues[sender % queues.size()], writes, build, nullptr) != mlx5_refused &&
           post::post<EP_IBGDA_SHARE_DEVICE>(ctx, group, *queues[(sender + 1) % queues.size()], 1, signal, nullptr) != mlx5_refused;
  }
};

const uint64_t samples = seeds_of(100);

template <class Sender> bool fails(const mailbox_options& wanted, uint64_t seed) { return !mailboxes<Sender>(wanted, seed).run().clean(); }

template <class Sender> void expect_right(const mailbox_options& wanted) {
  uint64_t count = 0;
  for (uint64_t seed = 0; seed < samples; ++seed) count += fails<Sender>(wanted, seed) ? 1 : 0;
  EP_CHECK_EQ(count, 0u);
}

template <class Sender> void expect_caught(const char* name, const mailbox_options& wanted) {
  EP_CHECK(found_out(name, samples, 20, [&](uint64_t seed) { return fails<Sender>(wanted, seed); }));
  expect_right<right_sender<ep::post_in_turn, EP_IBGDA_SHARE_DEVICE>>(wanted);
  expect_right<right_sender<ep::post_by_ringer, EP_IBGDA_SHARE_DEVICE>>(wanted);
}

} // namespace

int main() {
  mailbox_options roomy;
  roomy.depth = 128;
  mailbox_options tight;
  tight.depth = 4;
  mailbox_options crowded = tight;
  crowded.warps = 4;
  crowded.writes = 1;
  mailbox_options once = roomy; // nobody comes later, who would ring for those before
  once.warps = 4;
  once.rounds = 1;
  mailbox_options pairs = roomy;
  pairs.queues = 2;
  expect_right<naive_sender<right_steps>>(roomy);
  expect_right<naive_sender<right_steps>>(tight);
  expect_caught<signal_elsewhere>("signal on another queue pair than its data", pairs);
  expect_caught<naive_sender<ring_first>>("ringing before the WQE is written", roomy);
  expect_caught<naive_sender<out_of_turn>>("publishing out of turn", roomy);
  expect_caught<naive_sender<no_room>>("no room check", tight);
  expect_caught<naive_sender<room_first>>("room check before the reservation", tight);
  expect_caught<naive_sender<cqe_first>>("CQE loaded before the count of completions", tight);
  expect_caught<naive_sender<leaves_at_once>>("ringer that leaves without another look", once);
  expect_caught<naive_sender<leaves_to_the_next>>("ringer that leaves what the next one needs room behind", crowded);
  expect_caught<naive_sender<marks_upwards>>("marks that begin with the first of a post", crowded);
  expect_caught<naive_sender<marks_first>>("marking before the WQE is written", roomy);
  expect_caught<naive_sender<sets_marks>>("marks that are the same in all rounds", tight);
  return ep::check::finish();
}
