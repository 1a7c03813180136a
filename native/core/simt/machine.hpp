// Inside of the simt executor: lanes, the places where they meet, and the scheduler.
#pragma once

#include <array>
#include <deque>
#include <exception>
#include <memory>

#include "fiber.hpp"
#include "simt.hpp"

namespace ep {

enum class meeting_kind : uint32_t { none, block, block_and, named, warp, shuffle, ballot, match, grid };
const char* meeting_name(meeting_kind kind);

// Where a scope's lanes come together. `deposited` belongs to the round that is filling, `settled` to the last full one: a lane that is slow to
// read its result must not find values of the next round, and the next round cannot fill before that lane has read and come again.
struct simt_meeting {
  uint32_t scope_lanes = 0;
  meeting_kind kind = meeting_kind::none;  // of the round that is filling
  uint32_t expected = 0;
  bool all = true;
  bool settled_all = true;
  std::vector<simt_lane*> arrived;
  std::vector<std::array<uint8_t, simt_largest_value>> deposited;
  std::vector<std::array<uint8_t, simt_largest_value>> settled;
};

struct simt_group;

enum class lane_state : uint32_t { fresh, ready, waiting, meeting, returned };

struct simt_lane {
  fiber stack;
  simt_context context;
  simt_group* group = nullptr;
  uint64_t number = 0;  // among all lanes of the run
  lane_state state = lane_state::fresh;
  uint32_t place = 0;  // in simt_machine::candidates, while fresh, ready or waiting
  simt_meeting* meeting = nullptr;
  const uint64_t* word = nullptr;  // what it waits for: a word, or where that is null, `until`
  wait_look until{};
  comparison cmp = comparison::ge;
  uint64_t value = 0;
  int32_t awaited = any_rank;
  uint32_t stage = 0;
  wait_result waited{};
};

// A running launch.
struct simt_group {
  const simt_launch* launch = nullptr;
  std::vector<simt_lane*> lanes;
  uint32_t returned = 0;
  simt_meeting grid;
  std::deque<simt_meeting> blocks;  // simt_named_barriers of each block
  std::deque<simt_meeting> warps;
};

class simt_machine {
 public:
  simt_machine(const simt_schedule& schedule, const simt_launch* launches, size_t count, bool alone);
  ~simt_machine();
  simt_machine(const simt_machine&) = delete;
  simt_machine& operator=(const simt_machine&) = delete;
  simt_result run();

  void point(simt_lane& lane);
  void meet(simt_lane& lane, simt_meeting& meeting, meeting_kind kind, uint32_t expected);
  bool wait(simt_lane& lane, const uint64_t* word, comparison cmp, uint64_t value, int32_t rank, uint32_t stage,
            ep_kernel_status* status);
  bool wait_until(simt_lane& lane, const wait_look& until, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status);
  void lane_body();

 private:
  uint64_t random();
  bool chance();
  void candidate_add(simt_lane& lane);
  void candidate_remove(simt_lane& lane);
  void set_ready(simt_lane& lane);
  void leave(simt_lane& lane);  // back to the scheduler; throws simt_unwind when the run is being stopped
  void resume(simt_lane& lane);
  void stop(simt_outcome outcome, std::string report);
  bool wait_begin(simt_lane& lane, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status); // of what the lane has said it looks at
  bool look(simt_lane& lane);   // true when its wait has ended
  bool look_all();
  bool scopes_end_waits(bool with_deadline);
  void idle();
  void unwind_all();
  bool work_left() const;

  const simt_schedule& schedule;
  const bool alone;  // other threads write its words: may sleep
  fiber scheduler;
  std::unique_ptr<fiber_stacks> stacks;
  std::deque<simt_group> groups;
  std::deque<simt_lane> lanes;
  std::vector<simt_lane*> candidates;  // fresh, ready or waiting
  size_t runnable = 0;                 // of them: fresh or ready
  simt_lane* running = nullptr;
  bool stopping = false;
  std::exception_ptr thrown;
  uint64_t state;
  uint64_t threshold;
  uint64_t points = 0;
  simt_result result;
};

// Thrown through a lane that is being stopped, so that what it holds is destroyed. Not derived from std::exception: kernels do not catch it by
// accident.
struct simt_unwind {};

// Who stands where, equal lanes of a block joined into ranges.
std::string simt_describe(const std::deque<simt_group>& groups);

} // namespace ep
