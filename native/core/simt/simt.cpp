#include "simt.hpp"

#include <algorithm>
#include <ctime>
#include <stdexcept>

#include <sched.h>

#include "machine.hpp"

namespace ep {

namespace {

thread_local simt_machine* starting = nullptr;

void lane_entry() { starting->lane_body(); }

uint64_t word_look(const uint64_t* word) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

bool lane_looks(const simt_lane& lane, uint64_t* found) {
  if (lane.word == nullptr) return lane.until.look(lane.until.self, found);
  *found = word_look(lane.word);
  return comparison_holds(lane.cmp, *found, lane.value);
}

void check_shape(const simt_launch& launch) {
  const bool warps = launch.warp_lanes >= 1 && launch.warp_lanes <= 32 && launch.lanes % launch.warp_lanes == 0;
  if (launch.blocks >= 1 && launch.lanes >= 1 && warps && launch.environment != nullptr && launch.kernel) return;
  throw std::invalid_argument("simt launch " + launch.name + ": expected blocks >= 1, lanes a multiple of warp_lanes, warp_lanes 1 to 32, found " +
                              std::to_string(launch.blocks) + " blocks, " + std::to_string(launch.lanes) + " lanes, " +
                              std::to_string(launch.warp_lanes) + " lanes in a warp");
}

simt_meeting make_meeting(uint32_t lanes) {
  simt_meeting meeting;
  meeting.scope_lanes = lanes;
  return meeting;
}

} // namespace

simt_machine::simt_machine(const simt_schedule& wanted, const simt_launch* launches, size_t count, bool is_alone)
    : schedule(wanted), alone(is_alone), state(wanted.seed) {
  const double clamped = std::clamp(wanted.switch_probability, 0.0, 1.0);
  threshold = clamped >= 1.0 ? UINT64_MAX : static_cast<uint64_t>(clamped * 18446744073709551616.0);
  for (size_t i = 0; i < count; ++i) {
    check_shape(launches[i]);
    simt_group& group = groups.emplace_back();
    group.launch = &launches[i];
    const uint32_t blocks = launches[i].blocks;
    const uint32_t block_lanes = launches[i].lanes;
    const uint32_t warp_lanes = launches[i].warp_lanes;
    group.grid = make_meeting(blocks * block_lanes);
    for (uint32_t j = 0; j < blocks * simt_named_barriers; ++j) group.blocks.push_back(make_meeting(block_lanes));
    for (uint32_t j = 0; j < blocks * (block_lanes / warp_lanes); ++j) {
      simt_meeting& warp = group.warps.emplace_back(make_meeting(warp_lanes));
      warp.deposited.resize(warp_lanes);
      warp.settled.resize(warp_lanes);
    }
    for (uint32_t block = 0; block < blocks; ++block) {
      for (uint32_t index = 0; index < block_lanes; ++index) {
        simt_lane& lane = lanes.emplace_back();
        lane.group = &group;
        lane.number = lanes.size() - 1;
        lane.context.machine = this;
        lane.context.self = &lane;
        lane.context.block_index = block;
        lane.context.block_count = blocks;
        lane.context.lane_index = index;
        lane.context.lane_count = block_lanes;
        lane.context.warp_lane_count = warp_lanes;
        group.lanes.push_back(&lane);
      }
    }
  }
  stacks = std::make_unique<fiber_stacks>(lanes.size(), wanted.stack_bytes);
  size_t index = 0;
  for (simt_lane& lane : lanes) {
    fiber_prepare(lane.stack, stacks->bottom(index++), stacks->bytes(), lane_entry);
    candidate_add(lane);
    ++runnable;
  }
}

simt_machine::~simt_machine() {
  for (simt_lane& lane : lanes) fiber_release(lane.stack);
}

// splitmix64: any seed is a good seed, and the sequence is ours for ever.
uint64_t simt_machine::random() {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

bool simt_machine::chance() { return random() < threshold; }

void simt_machine::candidate_add(simt_lane& lane) {
  lane.place = static_cast<uint32_t>(candidates.size());
  candidates.push_back(&lane);
}

void simt_machine::candidate_remove(simt_lane& lane) {
  simt_lane* last = candidates.back();
  candidates[lane.place] = last;
  last->place = lane.place;
  candidates.pop_back();
}

void simt_machine::set_ready(simt_lane& lane) {
  if (lane.state == lane_state::meeting) candidate_add(lane);
  lane.state = lane_state::ready;
  ++runnable;
}

void simt_machine::leave(simt_lane& lane) {
  fiber_switch(lane.stack, scheduler, false);
  if (stopping) throw simt_unwind{};
}

void simt_machine::resume(simt_lane& lane) {
  running = &lane;
  starting = this;
  ++result.switches;
  result.schedule = (result.schedule ^ (lane.number + 1)) * 0x100000001b3u;
  fiber_switch(scheduler, lane.stack, false);
  running = nullptr;
}

void simt_machine::lane_body() {
  simt_lane& lane = *running;
  fiber_entered(scheduler);
  try {
    if (!lane.group->launch->kernel(lane.context)) result.ok = false;
  } catch (const simt_unwind&) {
    // Stopped from outside: the outcome is already recorded.
  } catch (...) {
    if (thrown == nullptr) thrown = std::current_exception();
    stopping = true;
  }
  --runnable;
  candidate_remove(lane);
  lane.state = lane_state::returned;
  ++lane.group->returned;
  fiber_switch(lane.stack, scheduler, true);
}

void simt_machine::stop(simt_outcome outcome, std::string report) {
  stopping = true;
  result.outcome = outcome;
  result.report = std::move(report);
}

void simt_machine::point(simt_lane& lane) {
  if (stopping) return;  // a destructor that runs during the unwinding
  if (++points > schedule.point_limit) {
    stop(simt_outcome::runaway, "runaway: more than " + std::to_string(schedule.point_limit) + " points\n" + simt_describe(groups));
    throw simt_unwind{};
  }
  if (chance()) leave(lane);
}

void simt_machine::meet(simt_lane& lane, simt_meeting& meeting, meeting_kind kind, uint32_t expected) {
  if (meeting.arrived.empty()) {
    meeting.kind = kind;
    meeting.expected = expected;
  }
  if (meeting.kind != kind || meeting.expected != expected) {
    const simt_context& there = meeting.arrived.front()->context;
    stop(simt_outcome::diverged, "diverged: " + lane.group->launch->name + " block " + std::to_string(lane.context.block_index) + " lane " +
                                     std::to_string(lane.context.lane_index) + " came to " + meeting_name(kind) + " of " +
                                     std::to_string(expected) + " lanes, lane " + std::to_string(there.lane_index) + " waits at " +
                                     meeting_name(meeting.kind) + " of " + std::to_string(meeting.expected) + "\n" + simt_describe(groups));
    throw simt_unwind{};
  }
  meeting.arrived.push_back(&lane);
  if (meeting.arrived.size() < expected) {
    lane.state = lane_state::meeting;
    lane.meeting = &meeting;
    --runnable;
    candidate_remove(lane);
    leave(lane);
    return;
  }
  meeting.settled_all = meeting.all;
  meeting.all = true;
  meeting.settled = meeting.deposited;
  for (simt_lane* other : meeting.arrived) {
    if (other != &lane) set_ready(*other);
  }
  meeting.arrived.clear();
  point(lane);
}

bool simt_machine::wait(simt_lane& lane, const uint64_t* word, comparison cmp, uint64_t value, int32_t rank, uint32_t stage,
                        ep_kernel_status* status) {
  lane.word = word;
  lane.cmp = cmp;
  return wait_begin(lane, value, rank, stage, status);
}

bool simt_machine::wait_until(simt_lane& lane, const wait_look& until, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) {
  lane.word = nullptr;
  lane.until = until;
  return wait_begin(lane, expected, rank, stage, status);
}

bool simt_machine::wait_begin(simt_lane& lane, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) {
  point(lane);
  lane.value = value;
  lane.awaited = rank;
  lane.stage = stage;
  uint64_t found = 0;
  if (lane_looks(lane, &found)) return true;
  lane.state = lane_state::waiting;
  --runnable;
  leave(lane);
  if (lane.waited.status == EP_STATUS_OK) return true;
  kernel_status_fail(status, lane.waited, stage, value);
  return false;
}

bool simt_machine::look(simt_lane& lane) {
  uint64_t found = 0;
  if (!lane_looks(lane, &found)) return false;
  lane.waited = {EP_STATUS_OK, lane.awaited, found};
  set_ready(lane);
  return true;
}

bool simt_machine::look_all() {
  if (alone) {
    const wait_scope& scope = groups.front().launch->environment->waits;
    if (scope.progress != nullptr) scope.progress->run();
  }
  bool any = false;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i]->state == lane_state::waiting && look(*candidates[i])) any = true;
  }
  return any;
}

bool simt_machine::scopes_end_waits(bool with_deadline) {
  bool any = false;
  for (simt_lane* lane : candidates) {
    if (lane->state != lane_state::waiting) continue;
    wait_scope scope = lane->group->launch->environment->waits;
    if (!with_deadline) scope.deadline_ns = no_deadline;
    int32_t lost = lane->awaited;
    const uint32_t status = wait_scope_check(scope, lane->awaited, &lost);
    if (status == EP_STATUS_OK || look(*lane)) continue;
    uint64_t found = 0;
    lane_looks(*lane, &found);
    lane->waited = {status, lost, found};
    set_ready(*lane);
    any = true;
  }
  return any;
}

// Nobody can run: by a word that others write, by the scope's end of a wait, or never again.
void simt_machine::idle() {
  if (look_all()) return;
  const bool waits = !candidates.empty();
  if (waits && scopes_end_waits(alone)) return;
  if (!waits || !alone) {
    stop(simt_outcome::deadlock, "deadlock\n" + simt_describe(groups));
    return;
  }
  const wait_scope& scope = groups.front().launch->environment->waits;
  const int64_t start = clock_now_ns();
  for (int64_t elapsed = 0; elapsed < scope.policy.spin_ns + scope.policy.yield_ns; elapsed = clock_now_ns() - start) {
    if (elapsed < scope.policy.spin_ns) {
      cpu_relax();
    } else {
      sched_yield();
    }
    if (look_all()) return;
  }
  while (!scopes_end_waits(true)) {
    int64_t slice = scope.policy.slice_ns > 0 ? scope.policy.slice_ns : 1'000'000;
    if (scope.deadline_ns != no_deadline) slice = std::clamp<int64_t>(scope.deadline_ns - clock_now_ns(), 1, slice);
    if (scope.wake == nullptr) {
      timespec nap{slice / 1'000'000'000, slice % 1'000'000'000};
      nanosleep(&nap, nullptr);
      if (look_all()) return;
      continue;
    }
    const uint32_t epoch = wake_prepare(scope.wake);
    if (look_all()) {
      wake_cancel(scope.wake);
      return;
    }
    wake_commit(scope.wake, epoch, slice);
    if (look_all()) return;
  }
}

bool simt_machine::work_left() const {
  for (const simt_group& group : groups) {
    if (!group.launch->serves && group.returned < group.lanes.size()) return true;
  }
  return false;
}

void simt_machine::unwind_all() {
  stopping = true;
  for (simt_lane& lane : lanes) {
    if (lane.state == lane_state::returned || lane.state == lane_state::fresh) continue;
    if (lane.state != lane_state::ready) set_ready(lane);
    while (lane.state != lane_state::returned) resume(lane);
  }
}

simt_result simt_machine::run() {
  fiber_adopt_thread(scheduler);
  while (!stopping && work_left()) {
    if (runnable == 0) {
      idle();
      continue;
    }
    simt_lane& lane = *candidates[random() % candidates.size()];
    if (lane.state == lane_state::waiting && !look(lane)) continue;
    if (lane.state == lane_state::fresh) lane.state = lane_state::ready;
    resume(lane);
  }
  unwind_all();
  if (thrown != nullptr) std::rethrow_exception(thrown);
  if (result.outcome != simt_outcome::finished) result.ok = false;
  return std::move(result);
}

simt_result simt_run_together(const simt_schedule& schedule, const std::vector<simt_launch>& launches) {
  return simt_machine(schedule, launches.data(), launches.size(), false).run();
}

simt_result simt_run_launch(const simt_schedule& schedule, const simt_launch& launch) {
  return simt_machine(schedule, &launch, 1, true).run();
}

} // namespace ep
