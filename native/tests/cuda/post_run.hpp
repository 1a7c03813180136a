// One run of some posts, by the host or by a kernel, and what it leaves.
#pragma once

#include <utility>

#include "../../core/device/fast.hpp"
#include "post_nic.hpp"

namespace ep::test {

struct post_outcome {
  bool ok = false;
  std::vector<uint8_t> wqes[efa_rig_qps];
  std::vector<std::pair<uint64_t, uint64_t>> rings;
  std::vector<uint8_t> rig;
  std::vector<uint8_t> steps;
};

// `run` of the arguments; a NIC serves before, while, and after.
template <class Run> post_outcome post(const post_shape& shape, const std::vector<uint8_t>& steps, uint32_t count, const Run& run) {
  std::memset(static_cast<void*>(memory), 0, sizeof *memory);
  std::memcpy(memory->steps, steps.data(), steps.size());
  post_log& log = memory->log;
  if (is_mlx5(shape.way)) set_up(memory->mlx5, log, shape);
  else set_up(memory->efa, shape);
  server nic;
  nic.shape = shape;
  serving = &nic;
  post_outcome seen;
  seen.ok = run(post_arguments{&memory->mlx5, &memory->efa, memory->steps, count, shape.lanes, &log});
  nic.serve();
  for (uint32_t i = 0; i < efa_rig_qps; ++i) seen.wqes[i] = std::move(nic.wqes[i]);
  EP_CHECK(log.rings <= post_most_rings);
  for (uint64_t i = 0; i < std::min<uint64_t>(log.rings, post_most_rings); ++i) seen.rings.emplace_back(log.ring[i].address, log.ring[i].value);
  const auto* rig = is_mlx5(shape.way) ? reinterpret_cast<const uint8_t*>(&memory->mlx5) : reinterpret_cast<const uint8_t*>(&memory->efa);
  seen.rig.assign(rig, rig + (is_mlx5(shape.way) ? sizeof(mlx5_rig) : sizeof(efa_rig)));
  const auto* after = reinterpret_cast<const uint8_t*>(memory->steps);
  seen.steps.assign(after, after + steps.size());
  return seen;
}

struct host_machine {
  bool (*fast)(const post_arguments&);
  bool (*simt)(const post_arguments&, uint64_t seed);
};
template <post_way Way, uint32_t Marks> bool on_fast(const post_arguments& given) {
  const ep::kernel_environment environment;
  const ep::fast_context base{environment, 0, 1, nullptr};
  ep::asking_context<ep::fast_context> ctx(base, *given.log);
  const bool ok = ep::post_run<Way, Marks>(ctx, given);
  ctx.look();
  return ok;
}
template <post_way Way, uint32_t Marks> bool on_simt(const post_arguments& given, uint64_t seed) {
  const ep::kernel_environment environment;
  ep::simt_schedule schedule = seeded(seed);
  schedule.point_limit = 20'000'000;
  ep::simt_launch launch = shape(1, given.lanes, given.lanes);
  launch.environment = &environment;
  launch.kernel = [&](ep::simt_context& base) {
    ep::asking_context<ep::simt_context> ctx(base, *given.log);
    const bool ok = ep::post_run<Way, Marks>(ctx, given);
    if (base.lane() == 0) ctx.look();
    return ok;
  };
  const ep::simt_result result = ep::simt_run_together(schedule, {launch});
  if (!result.ok) std::fprintf(stderr, "%s\n", result.report.c_str());
  return result.ok;
}
template <uint32_t Marks, post_way Way> constexpr host_machine machine_by() {
  constexpr uint32_t marks = is_mlx5(Way) ? 0 : Marks;
  return {on_fast<Way, marks>, on_simt<Way, marks>};
}
template <uint32_t Marks, size_t... Way> host_machine machine_of(post_way way, std::index_sequence<Way...>) {
  static constexpr host_machine all[] = {machine_by<Marks, static_cast<post_way>(Way)>()...};
  return all[static_cast<size_t>(way)];
}
// `marks`: of EFA, the way of a GPU.
inline host_machine machine_of(post_way way, bool marks) {
  return marks ? machine_of<ep::by_marks>(way, std::make_index_sequence<post_ways>()) : machine_of<0>(way, std::make_index_sequence<post_ways>());
}

inline void* stream = nullptr; // null: there is no GPU

// `asks`: the NIC serves when it is asked, otherwise all the time.
inline bool on_gpu(const post_arguments& given, post_way way, bool asks, uint32_t blocks = 1) {
  EP_CHECK_EQ(blocks == 1 ? gpu_post(stream, way, asks, given) : gpu_post_together(stream, way, blocks, given), 0);
  post_log& log = *given.log;
  int error = 0;
  while (!gpu_over(stream, &error)) {
    const uint64_t asked = std::atomic_ref<uint64_t>(log.asked).load(std::memory_order_acquire);
    if (asks && asked == log.answered) continue;
    serving->serve();
    if (asks) std::atomic_ref<uint64_t>(log.answered).store(asked, std::memory_order_release);
  }
  EP_CHECK_EQ(error, 0);
  const bool ok = log.ok == 1;
  log.ok = 0;
  return ok;
}

template <class Bytes> bool same_bytes(const char* what, const Bytes& left, const Bytes& right, uint64_t line) {
  if (left == right) return true;
  size_t at = 0;
  while (at < left.size() && at < right.size() && left[at] == right[at]) ++at;
  std::fprintf(stderr, "  %s: %zu and %zu bytes, the first that differs is byte %llu of %llu", what, left.size(), right.size(), static_cast<unsigned long long>(at % line), static_cast<unsigned long long>(at / line));
  if (at < left.size() && at < right.size()) std::fprintf(stderr, ": %02x and %02x", left[at], right[at]);
  std::fprintf(stderr, "\n");
  return false;
}

enum class compared { wqes, everything };

inline void compare(const char* who, const post_shape& shape, const post_outcome& left, const post_outcome& right, compared how) {
  bool same = left.ok && right.ok;
  if (!same) std::fprintf(stderr, "  %d and %d ended well\n", left.ok, right.ok);
  const uint64_t bytes = !is_mlx5(shape.way) && shape.inline_write ? EP_EFA_WIDE_WQE_BYTES : 64;
  for (uint32_t i = 0; i < efa_rig_qps; ++i) same = same_bytes("WQEs", left.wqes[i], right.wqes[i], bytes) && same;
  if (how == compared::everything && left.rings != right.rings) {
    size_t at = 0;
    while (at < left.rings.size() && at < right.rings.size() && left.rings[at] == right.rings[at]) ++at;
    std::fprintf(stderr, "  %zu and %zu doorbells, number %zu differs\n", left.rings.size(), right.rings.size(), at);
    same = false;
  }
  if (how == compared::everything) {
    same = same_bytes("memory", left.rig, right.rig, 64) && same;
    same = same_bytes("steps", left.steps, right.steps, 64) && same;
  }
  EP_CHECK(same);
  if (!same) std::fprintf(stderr, "%s: %s\n", who, shape.text().c_str());
}

} // namespace ep::test
