// Senders that share queue pairs, a NIC, and a receiver that looks at every message: what right ways to post survive and wrong ones do not.
#pragma once

#include <cstring>
#include <vector>

#include "../../core/device/fast.hpp"
#include "../../core/simt/simt.hpp"
#include "ep/device/mlx5_post.h"
#include "ibgda_nic.hpp"
#include "world.hpp"

namespace ep::test {

struct mailbox_options {
  uint32_t blocks = 2;
  uint32_t warps = 2;      // senders of a block
  uint32_t warp_lanes = 2;
  uint32_t queues = 1;     // sender s posts to queue s % queues
  uint32_t depth = 8;
  bool collapsed = true;
  uint32_t writes = 2;     // of a message, before its signal
  uint32_t rounds = 6;     // messages of a sender
  double switches = 0;     // 0: by the seed
};

struct mailbox_outcome {
  simt_result result;
  std::vector<std::string> violations;
  uint32_t corrupt = 0; // messages that were not what was sent, when their signal was visible
  uint64_t doorbells = 0;
  uint64_t posted = 0; // by the counters of the queue pairs
  uint64_t rung = 0;   // executed by the NIC

  bool clean() const { return result.ok && violations.empty() && corrupt == 0; }
};

// `Sender` offers `whole`, that there are no doorbells within a message, and send(ctx, group, queues, sender, writes, build, status): WQEs 0 to writes - 1 are the message, WQE `writes` is its signal.
template <class Sender> class mailboxes {
 public:
  static constexpr uint32_t window = 3;    // messages of a sender under way
  static constexpr uint32_t write_bytes = 40;
  static constexpr uint32_t key = 0xabc;

  mailboxes(const mailbox_options& wanted, uint64_t wanted_seed) : options(wanted), seed(wanted_seed), senders(wanted.blocks * wanted.warps) {
    for (uint32_t i = 0; i < wanted.queues; ++i) queues.push_back(&nic.add({wanted.depth, wanted.collapsed, 0x100 + i, 1}).qp);
    if constexpr (Sender::whole) {
      for (uint32_t i = 0; i < wanted.queues; ++i) nic.queue(i).post_size = wanted.writes + 1;
    }
    source.resize(bytes());
    target.resize(bytes());
    signals.resize(senders);
    credits.resize(senders);
    nic.allow(key, source.data(), source.size());
    nic.allow(key + 1, target.data(), target.size());
    nic.allow(key + 2, signals.data(), signals.size() * 8);
  }

  mailbox_outcome run() {
    simt_schedule schedule = seeded(seed);
    if (options.switches != 0) schedule.switch_probability = options.switches;
    schedule.point_limit = 20'000'000;
    kernel_environment environment;
    std::vector<simt_launch> launches(3);
    simt_launch& send = launches[0];
    send = shape(options.blocks, options.warps * options.warp_lanes, options.warp_lanes);
    send.name = "senders";
    send.kernel = [this](simt_context& ctx) { return send_all(ctx, warp_poster<simt_context>{ctx}, ctx.block() * options.warps + ctx.lane() / ctx.warp_lanes()); };
    simt_launch& receive = launches[1];
    receive = shape(1, senders, 1);
    receive.name = "receiver";
    receive.kernel = [this](simt_context& ctx) { return receive_all(ctx, ctx.lane()); };
    simt_launch& serve = launches[2];
    serve = shape(1, options.queues, 1);
    serve.name = "nic";
    serve.serves = true;
    serve.kernel = [this](simt_context& ctx) {
      nic.serve(ctx, nic.queue(ctx.lane()));
      return true;
    };
    for (simt_launch& launch : launches) launch.environment = &environment;
    return finish(simt_run_together(schedule, launches));
  }

  // The same by threads, one for each sender, the receiver and the NIC.
  mailbox_outcome run_threads() {
    std::atomic<uint32_t> stop{0};
    std::atomic<uint32_t> bad{0};
    kernel_environment environment;
    environment.waits.deadline_ns = deadline_after(60'000);
    environment.waits.policy = wait_policy{0, 50'000, 2'000'000};
    kernel_environment serving = environment;
    serving.waits.cancel = &stop;
    std::vector<std::thread> workers;
    for (uint32_t i = 0; i < senders; ++i) {
      workers.emplace_back([&, i] {
        fast_context ctx{environment, i, senders, nullptr};
        if (!send_all(ctx, lone_poster<fast_context>{ctx}, i)) bad.fetch_add(1);
      });
      workers.emplace_back([&, i] {
        fast_context ctx{environment, i, senders, nullptr};
        if (!receive_all(ctx, i)) bad.fetch_add(1);
      });
    }
    std::thread server([&] {
      fast_context ctx{serving, 0, 1, nullptr};
      nic.serve_all(ctx);
    });
    for (std::thread& worker : workers) worker.join();
    stop.store(1);
    server.join();
    simt_result result;
    result.ok = bad.load() == 0;
    return finish(result);
  }

  test_nic nic;
  std::vector<ep_ibgda_qp*> queues;

 private:
  uint64_t bytes() const { return static_cast<uint64_t>(senders) * window * options.writes * write_bytes; }
  uint64_t place(uint32_t sender, uint32_t round) const {
    return (static_cast<uint64_t>(sender) * window + round % window) * options.writes * write_bytes;
  }
  static uint8_t pattern(uint32_t sender, uint32_t round, uint64_t at) { return static_cast<uint8_t>(sender * 31 + round * 7 + at + 1); }

  template <class Ctx, class Group> bool send_all(Ctx& ctx, const Group& group, uint32_t sender) {
    const uint64_t message = static_cast<uint64_t>(options.writes) * write_bytes;
    bool ok = true;
    for (uint32_t round = 0; round < options.rounds && ok; ++round) {
      if (group.lane() == 0) {
        // A message whose place is free has landed, so its source is free, too.
        ok = round < window || ctx.wait(&credits[sender], round - window + 1, 1, EP_STAGE_CREDIT, nullptr);
        for (uint64_t i = 0; i < message; ++i) source[place(sender, round) + i] = pattern(sender, round, i);
      }
      ok = group.from_first(ok);
      if (!ok) break;
      const auto build = [&](uint32_t i, const mlx5_writer& writer) {
        if (i == options.writes) {
          return writer.fetch_add8({reinterpret_cast<uint64_t>(&signals[sender]), key + 2}, 1, {response_of(sender), test_queue::response_lkey});
        }
        const uint64_t at = place(sender, round) + static_cast<uint64_t>(i) * write_bytes;
        const mlx5_place to{reinterpret_cast<uint64_t>(target.data() + at), key + 1};
        writer.write(to, {reinterpret_cast<uint64_t>(source.data() + at), key}, write_bytes);
      };
      ok = Sender::send(ctx, group, queues, sender, options.writes, build);
    }
    return group.from_first(ok);
  }

  uint64_t response_of(uint32_t sender) const { return queues[Sender::signal_queue(sender, queues.size())]->response; }

  template <class Ctx> bool receive_all(Ctx& ctx, uint32_t sender) {
    const uint64_t message = static_cast<uint64_t>(options.writes) * write_bytes;
    for (uint32_t round = 0; round < options.rounds; ++round) {
      if (!ctx.wait(&signals[sender], round + 1, 0, EP_STAGE_ARRIVAL, nullptr)) return false;
      bool right = true;
      for (uint64_t i = 0; i < message; ++i) right = right && target[place(sender, round) + i] == pattern(sender, round, i);
      if (!right) corrupt.fetch_add(1);
      fetch_add(ctx, &credits[sender], 1);
    }
    return true;
  }

  mailbox_outcome finish(simt_result result) {
    mailbox_outcome seen;
    seen.result = std::move(result);
    seen.violations = nic.violations;
    seen.corrupt = corrupt.load();
    for (size_t i = 0; i < nic.size(); ++i) {
      seen.doorbells += nic.queue(i).doorbells;
      seen.posted += queues[i]->taken;
      seen.rung += nic.queue(i).wqes;
    }
    return seen;
  }

  mailbox_options options;
  uint64_t seed;
  uint32_t senders;
  std::vector<uint8_t> source;
  std::vector<uint8_t> target;
  std::vector<uint64_t> signals;
  std::vector<uint64_t> credits;
  std::atomic<uint32_t> corrupt{0};
};

// As the product posts.
template <class Post, uint32_t Sharing> struct right_sender {
  static constexpr bool whole = Post::whole;
  static size_t signal_queue(uint32_t sender, size_t queues) { return sender % queues; }
  template <class Ctx, class Group, class Build>
  static bool send(Ctx& ctx, const Group& group, std::vector<ep_ibgda_qp*>& queues, uint32_t sender, uint32_t writes, const Build& build) {
    return Post::template post<Sharing>(ctx, group, *queues[sender % queues.size()], writes + 1, build, nullptr) != mlx5_refused;
  }
};

} // namespace ep::test
