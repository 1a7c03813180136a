/* Posts of a list of steps, by whatever context: the host and a GPU run the same. */
#ifndef EP_TEST_POST_SCRIPT_H
#define EP_TEST_POST_SCRIPT_H

#include "ep/device/coop.h"
#include "ep/device/efa_endpoint.h"
#include "ep/device/efa_gin.h"
#include "ep/device/efa_pr_gin.h"
#include "ep/device/gin_program.h"
#include "ep/device/ibgda_endpoint.h"
#include "post_rigs.hpp"

EP_MACHINE_BEGIN

/* Notes doorbells, and asks the NIC for completions instead of waiting until some come: so that what a run leaves behind depends on its steps alone. One lane at a time. */
template <class Base> struct asking_context : Base {
  test::post_log& log;

  EP_HD asking_context(const Base& base, test::post_log& to) : Base(base), log(to) {}

  EP_HD void point() {
    Base::point();
    if (this->lane() == 0) look();
  }
  EP_HD void register_store32(uint64_t address, uint32_t value) {
    note(address, value);
    register_store(static_cast<Base&>(*this), address, value);
  }

  /* HAZARD: a context's point() comes before a store, so the last one is seen by one more look. */
  EP_HD_SHARED void look() {
    no_point here;
    for (uint32_t i = 0; i < log.watched; ++i) {
      auto& watch = log.watch[i];
      const uint64_t value = watch.bytes == 8 ? load_relaxed(here, reinterpret_cast<const uint64_t*>(watch.address))
                                              : detail::half_ref(*reinterpret_cast<uint32_t*>(watch.address)).load(detail::relaxed);
      if (value == watch.last) continue;
      watch.last = value;
      note(watch.address, value);
    }
  }
  EP_HD_SHARED void note(uint64_t address, uint64_t value) {
    no_point here;
    const uint64_t at = load_relaxed(here, &log.rings);
    if (at < test::post_most_rings) {
      log.ring[at].address = address;
      log.ring[at].value = value;
    }
    store_relaxed(here, &log.rings, at + 1);
  }

  template <class Look> EP_HD_SHARED bool wait_for(const Look& wanted, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) {
    uint64_t found = 0;
    for (uint32_t asked = 0; asked < 4; ++asked) {
      if (wanted(&found)) return true;
      if (!ask()) break;
    }
    if (wanted(&found)) return true;
    Base::fail(status, EP_STATUS_TIMEOUT, rank, stage, expected, found);
    return false;
  }

 private:
  EP_HD bool ask() {
#if defined(__CUDACC__)
    no_point here;
    const uint64_t turn = load_relaxed(here, &log.asked) + 1;
    store_release(here, &log.asked, turn);
    return Base::wait(&log.answered, turn, -1, 0, nullptr);
#else
    test::post_serve(log);
    return true;
#endif
  }
};

/* Of messages that are looked at where they land. */
EP_HD uint8_t traffic_byte_of(uint64_t message, uint64_t at) { return static_cast<uint8_t>(message * 31 + at * 7 + 1); }

/* WQE i of a step's post. Blocks write to places of their own, which say whose WQE it is. */
struct mlx5_step_build {
  test::mlx5_rig& rig;
  const test::mlx5_step& step;
  uint32_t block;

  EP_HD void operator()(uint32_t i, const mlx5_writer& writer) const {
    const ep_ibgda_qp& qp = rig.qps[1];
    const uint64_t away = static_cast<uint64_t>(block) << 40 | static_cast<uint64_t>(i) << 32;
    const mlx5_place to{test::mlx5_remote + step.to + away, test::mlx5_remote_key};
    const uint64_t source = reinterpret_cast<uint64_t>(rig.source) + step.from + i * 8;
    const mlx5_place from{source, test::mlx5_local_key};
    const mlx5_place old{qp.response, qp.response_lkey};
    const auto bytes = static_cast<uint32_t>(step.bytes);
    const uint64_t value = step.value + i;
    test::mlx5_op op = step.op;
    if (op == test::mlx5_op::mixed) op = static_cast<test::mlx5_op>(i % test::mlx5_writers);
    switch (op) {
      case test::mlx5_op::write: return writer.write(to, from, bytes);
      case test::mlx5_op::write_nothing: return writer.write(to, {0, 0}, 0);
      case test::mlx5_op::write_immediate: return writer.write_immediate(to, from, bytes, static_cast<uint32_t>(value));
      case test::mlx5_op::read: return writer.read(to, from, bytes);
      case test::mlx5_op::write_inline: return writer.write_inline(to, reinterpret_cast<const void*>(source), 1 + (bytes + i) % EP_IBGDA_MAX_INLINE);
      case test::mlx5_op::nop: return writer.nop();
      case test::mlx5_op::fetch_add4: return writer.fetch_add4(to, static_cast<uint32_t>(value), old);
      case test::mlx5_op::fetch_add8: return writer.fetch_add8(to, value, old);
      case test::mlx5_op::compare_swap8: return writer.compare_swap8(to, value, ~value, old);
      case test::mlx5_op::long_inline:
        if (i + 1 == step.count) return writer.nop();
        return writer.write_long_inline(i, {test::mlx5_remote + step.to, test::mlx5_remote_key}, rig.source + step.from, bytes);
      default:
        if (i == mlx5_masked_swap_blocks) return writer.nop();
        return writer.masked_swap8(i, {test::mlx5_remote + step.to, test::mlx5_remote_key}, step.value, step.value << 3, ~step.value, step.value >> 5, old);
    }
  }
};

template <class Post, uint32_t Sharing, class Ctx, class Group> EP_HD_SHARED bool mlx5_posts(Ctx& ctx, const Group& group, test::mlx5_rig& rig, const test::mlx5_step* steps, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const mlx5_step_build build{rig, steps[i], ctx.block()};
    if (Post::template post<Sharing>(ctx, group, rig.qps[1], steps[i].count, build, &rig.status) == mlx5_refused) return false;
  }
  return true;
}
template <class Post, uint32_t Sharing, class Ctx> EP_HD bool mlx5_posts_by(Ctx& ctx, const test::post_arguments& given) {
  const auto* steps = static_cast<const test::mlx5_step*>(given.steps);
  if (given.lanes == 1) return mlx5_posts<Post, Sharing>(ctx, lone_poster<Ctx>{ctx}, *given.mlx5, steps, given.count);
  return mlx5_posts<Post, Sharing>(ctx, warp_poster<Ctx>{ctx}, *given.mlx5, steps, given.count);
}

template <class Endpoint, class Ctx, class Coop> EP_HD_SHARED bool mlx5_puts(Ctx& ctx, const Coop& coop, const Endpoint& endpoint, test::mlx5_rig& rig, const test::mlx5_step* steps, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const test::mlx5_step& step = steps[i];
    bool ok;
    if (step.op == test::mlx5_op::signal) {
      ok = endpoint.signal(ctx, coop, step.peer, step.slot, step.value, &rig.status);
    } else {
      const uint8_t* source = step.op == test::mlx5_op::put_loose ? rig.loose : rig.source + step.from;
      ok = endpoint.put_rows(ctx, coop, 1, step.to, source, step.stride, step.bytes, step.rows, false, step.slot, step.value, &rig.status);
    }
    if (!ok) return false;
  }
  return true;
}
template <class Post, class Ctx> EP_HD bool mlx5_puts_by(Ctx& ctx, const test::post_arguments& given) {
  const auto* steps = static_cast<const test::mlx5_step*>(given.steps);
  const ibgda_endpoint_of<Post> endpoint{given.mlx5->memory, 0};
  if (given.lanes == 1) return mlx5_puts(ctx, thread_coop<Ctx>{ctx}, endpoint, *given.mlx5, steps, given.count);
  return mlx5_puts(ctx, warp_coop<Ctx>{ctx}, endpoint, *given.mlx5, steps, given.count);
}

/* Of what a step's lanes put: `value` has a bit for each lane that puts. */
struct lane_put {
  bool wanted;
  uint32_t signal;
  uint32_t add;
  uint64_t offset;
  template <class Ctx> EP_HD static lane_put of(Ctx& ctx, const ep_gin_step& step) {
    const uint32_t lane = ctx.lane();
    return {(step.value >> lane & 1) != 0, (lane + step.signal) % 2, step.add != 0 && lane % 3 != 0 ? 1u : 0u, lane * 64};
  }
};

template <uint32_t Sharing, class Ctx> EP_HD bool gin_lanes(Ctx& ctx, const test::post_arguments& given) {
  test::efa_rig& rig = *given.efa;
  const auto* steps = static_cast<const ep_gin_step*>(given.steps);
  const efa_gin<Sharing> gin{rig.device};
  bool ok = true;
  for (uint32_t i = 0; i < given.count && ok; ++i) {
    const ep_gin_step& step = steps[i];
    const lane_put own = lane_put::of(ctx, step);
    gin_options options;
    options.aggregate = (step.flags & EP_GIN_AGGREGATE) != 0;
    const gin_signal_add remote{own.signal, own.add};
    if (step.op == EP_GIN_FLUSH) {
      ok = ctx.lane() != 0 || gin.flush(ctx, thread_coop<Ctx>{ctx}, &rig.status);
    } else if ((step.flags & EP_GIN_COUNTED) != 0) {
      ok = gin.put_lanes(ctx, own.wanted, {nullptr, 2}, 1, rig.part, step.to + own.offset, rig.part, step.from + own.offset, step.bytes, remote, gin_counter_inc{(ctx.lane() + step.counter) % 2}, options, &rig.status);
    } else {
      ok = gin.put_lanes(ctx, own.wanted, {nullptr, 2}, 1, rig.part, step.to + own.offset, rig.part, step.from + own.offset, step.bytes, remote, gin_no_action{}, options, &rig.status);
    }
    ok = ctx.ballot(!ok) == 0;
  }
  return ok;
}

/* HAZARD: the pull request's signals and counters keep an account each, though one queue pair serves signal s and counter s: so only signal 0 and counter 0 are named, which here have queue pairs of their own. */
template <class Ctx> EP_HD bool pr_steps(Ctx& ctx, const test::post_arguments& given) {
  test::efa_rig& rig = *given.efa;
  const auto* steps = static_cast<const ep_gin_step*>(given.steps);
  const efa_pr_gin gin{rig.pr};
  const thread_coop<Ctx> coop{ctx};
  const ep_efa_pr_mr& part = rig.pr_part.head;
  bool ok = true;
  for (uint32_t i = 0; i < given.count && ok; ++i) {
    const ep_gin_step& step = steps[i];
    efa_pr_options options;
    options.aggregate = (step.flags & EP_GIN_AGGREGATE) != 0;
    const gin_team team{nullptr, 2};
    switch (step.op) {
      case EP_GIN_PUT:
        if ((step.flags & EP_GIN_COUNTED) != 0) {
          ok = gin.put(ctx, coop, team, 1, part, step.to, part, step.from, step.bytes, gin_no_action{}, gin_counter_inc{0}, options, &rig.status);
        } else if (step.add != 0) {
          ok = gin.put(ctx, coop, team, 1, part, step.to, part, step.from, step.bytes, gin_signal_inc{0}, gin_no_action{}, options, &rig.status);
        } else {
          ok = gin.put(ctx, coop, team, 1, part, step.to, part, step.from, step.bytes, gin_no_action{}, gin_no_action{}, options, &rig.status);
        }
        break;
      case EP_GIN_PUT_VALUE:
        if (step.bytes == 8) {
          ok = gin.put_value(ctx, coop, team, 1, part, step.to, step.value, gin_no_action{}, options, &rig.status);
        } else {
          ok = gin.put_value(ctx, coop, team, 1, part, step.to, static_cast<uint16_t>(step.value), gin_signal_inc{0}, options, &rig.status);
        }
        break;
      case EP_GIN_SIGNAL: ok = gin.signal(ctx, coop, team, 1, gin_signal_inc{0}, options, &rig.status); break;
      default: ok = gin.flush(ctx, coop, &rig.status);
    }
  }
  return ok;
}

template <class Ctx> EP_HD bool pr_lanes(Ctx& ctx, const test::post_arguments& given) {
  test::efa_rig& rig = *given.efa;
  const auto* steps = static_cast<const ep_gin_step*>(given.steps);
  const efa_pr_gin gin{rig.pr};
  const ep_efa_pr_mr& part = rig.pr_part.head;
  bool ok = true;
  for (uint32_t i = 0; i < given.count && ok; ++i) {
    const ep_gin_step& step = steps[i];
    const lane_put own = lane_put::of(ctx, step);
    efa_pr_options options;
    options.aggregate = (step.flags & EP_GIN_AGGREGATE) != 0;
    if (step.op == EP_GIN_FLUSH) {
      ok = ctx.lane() != 0 || gin.flush(ctx, thread_coop<Ctx>{ctx}, &rig.status);
    } else {
      ok = gin.put_lanes(ctx, own.wanted, {nullptr, 2}, 1, part, step.to + own.offset, part, step.from + own.offset, step.bytes, gin_no_action{}, gin_no_action{}, options, &rig.status);
    }
    ok = ctx.ballot(!ok) == 0;
  }
  return ok;
}

template <class Endpoint, class Ctx, class Coop> EP_HD_SHARED bool efa_puts(Ctx& ctx, const Coop& coop, const Endpoint& endpoint, test::efa_rig& rig, const ep_gin_step* steps, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const ep_gin_step& step = steps[i];
    const uint64_t slot = step.signal < 2 ? step.signal : EP_NO_SLOT;
    const bool ok = step.op == EP_GIN_SIGNAL ? endpoint.signal(ctx, coop, 1, slot, step.add, &rig.status)
                                             : endpoint.put_rows(ctx, coop, 1, step.to, rig.source + step.from, step.found, step.bytes, step.value, false, slot, step.add, &rig.status);
    if (!ok) return false;
  }
  return true;
}

/* `Way` of efa_endpoint_of and efa_gin: by_marks is what a GPU does whatever it is told. */
template <uint32_t Way, class Ctx> EP_HD bool efa_puts_by(Ctx& ctx, const test::post_arguments& given) {
  const auto* steps = static_cast<const ep_gin_step*>(given.steps);
  const efa_endpoint_of<Way> endpoint{given.efa->memory, 0};
  if (given.lanes == 1) return efa_puts(ctx, thread_coop<Ctx>{ctx}, endpoint, *given.efa, steps, given.count);
  return efa_puts(ctx, warp_coop<Ctx>{ctx}, endpoint, *given.efa, steps, given.count);
}

/* The facade, a function for each call: a list of all of them in one kernel would take nvcc minutes. */
template <class Gin> struct gin_apart {
  const Gin& gin;
  ep_efa_device& device;
  template <class Ctx, class... Given> EP_HD_SHARED bool put(Ctx& ctx, const Given&... given) const { return gin.put(ctx, given...); }
  template <class Ctx, class... Given> EP_HD_SHARED bool put_value(Ctx& ctx, const Given&... given) const { return gin.put_value(ctx, given...); }
  template <class Ctx, class... Given> EP_HD_SHARED bool get(Ctx& ctx, const Given&... given) const { return gin.get(ctx, given...); }
  template <class Ctx, class... Given> EP_HD_SHARED bool signal(Ctx& ctx, const Given&... given) const { return gin.signal(ctx, given...); }
  template <class Ctx, class Coop> EP_HD_SHARED bool flush(Ctx& ctx, const Coop& coop, ep_kernel_status* status) const { return gin.flush(ctx, coop, status); }
  template <class Ctx, class... Given> EP_HD_SHARED bool wait_signal(Ctx& ctx, const Given&... given) const { return gin.wait_signal(ctx, given...); }
  template <class Ctx, class... Given> EP_HD_SHARED bool wait_counter(Ctx& ctx, const Given&... given) const { return gin.wait_counter(ctx, given...); }
  template <class Ctx, class... Given> EP_HD bool reset_signal(Ctx& ctx, const Given&... given) const { return gin.reset_signal(ctx, given...); }
  template <class Ctx, class... Given> EP_HD bool reset_counter(Ctx& ctx, const Given&... given) const { return gin.reset_counter(ctx, given...); }
  template <class Ctx, class... Given> EP_HD uint64_t read_signal(Ctx& ctx, const Given&... given) const { return gin.read_signal(ctx, given...); }
  template <class Ctx, class... Given> EP_HD uint64_t read_counter(Ctx& ctx, const Given&... given) const { return gin.read_counter(ctx, given...); }
  template <class Ctx, class... Given> EP_HD efa_count_pointer signal_pointer(Ctx& ctx, const Given&... given) const { return gin.signal_pointer(ctx, given...); }
  template <class Ctx, class... Given> EP_HD efa_count_pointer counter_pointer(Ctx& ctx, const Given&... given) const { return gin.counter_pointer(ctx, given...); }
};

template <uint32_t Sharing, class Ctx> EP_HD bool gin_steps(Ctx& ctx, const test::post_arguments& given) {
  auto* steps = static_cast<ep_gin_step*>(const_cast<void*>(given.steps));
  const efa_gin<Sharing> gin{given.efa->device};
  return gin_program(ctx, thread_coop<Ctx>{ctx}, gin_apart<efa_gin<Sharing>>{gin, given.efa->device}, given.efa->part, steps, given.count, &given.efa->status);
}

template <test::post_way By, uint32_t Way, class Ctx> EP_HD bool post_run(Ctx& ctx, const test::post_arguments& given) {
  using test::post_way;
  constexpr uint32_t device = EP_IBGDA_SHARE_DEVICE;
  constexpr uint32_t block = EP_IBGDA_SHARE_BLOCK;
  constexpr uint32_t thread = EP_IBGDA_SHARE_THREAD;
  if constexpr (By == post_way::in_turn_device) return mlx5_posts_by<post_in_turn, device>(ctx, given);
  if constexpr (By == post_way::in_turn_block) return mlx5_posts_by<post_in_turn, block>(ctx, given);
  if constexpr (By == post_way::in_turn_thread) return mlx5_posts_by<post_in_turn, thread>(ctx, given);
  if constexpr (By == post_way::ringer_device) return mlx5_posts_by<post_by_ringer, device>(ctx, given);
  if constexpr (By == post_way::ringer_block) return mlx5_posts_by<post_by_ringer, block>(ctx, given);
  if constexpr (By == post_way::ringer_thread) return mlx5_posts_by<post_by_ringer, thread>(ctx, given);
  if constexpr (By == post_way::lock) return mlx5_posts_by<post_under_lock, device>(ctx, given);
  if constexpr (By == post_way::put_in_turn) return mlx5_puts_by<post_in_turn>(ctx, given);
  if constexpr (By == post_way::put_ringer) return mlx5_puts_by<post_by_ringer>(ctx, given);
  if constexpr (By == post_way::put_lock) return mlx5_puts_by<post_under_lock>(ctx, given);
  if constexpr (By == post_way::gin_device) return gin_steps<device | Way>(ctx, given);
  if constexpr (By == post_way::gin_block) return gin_steps<block | Way>(ctx, given);
  if constexpr (By == post_way::gin_thread) return gin_steps<thread | Way>(ctx, given);
  if constexpr (By == post_way::lanes_device) return gin_lanes<device | Way>(ctx, given);
  if constexpr (By == post_way::lanes_block) return gin_lanes<block | Way>(ctx, given);
  if constexpr (By == post_way::efa_endpoint) return efa_puts_by<Way>(ctx, given);
  if constexpr (By == post_way::pr) return pr_steps(ctx, given);
  if constexpr (By == post_way::pr_lanes) return pr_lanes(ctx, given);
}

EP_MACHINE_END

#endif
