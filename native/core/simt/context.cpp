// What lanes can do to each other: every operation is a meeting of a scope's lanes (machine.hpp).
#include <stdexcept>

#include "machine.hpp"

namespace ep {

namespace {

simt_meeting& block_meeting(simt_lane& lane, uint32_t barrier) {
  return lane.group->blocks[lane.context.block() * simt_named_barriers + barrier];
}

simt_meeting& warp_meeting(simt_lane& lane) {
  const simt_context& ctx = lane.context;
  return lane.group->warps[ctx.block() * (ctx.lanes() / ctx.warp_lanes()) + ctx.lane() / ctx.warp_lanes()];
}

uint32_t in_warp(const simt_context& ctx) { return ctx.lane() % ctx.warp_lanes(); }

void deposit(simt_meeting& meeting, uint32_t lane, const void* value, size_t bytes) {
  meeting.deposited[lane].fill(0);
  std::memcpy(meeting.deposited[lane].data(), value, bytes);
}

uint64_t settled_word(const simt_meeting& meeting, uint32_t lane) {
  uint64_t word;
  std::memcpy(&word, meeting.settled[lane].data(), sizeof word);
  return word;
}

} // namespace

void simt_context::point() { machine->point(*self); }

void simt_context::sync_block() { machine->meet(*self, block_meeting(*self, 0), meeting_kind::block, lane_count); }

bool simt_context::sync_block_and(bool value) {
  simt_meeting& meeting = block_meeting(*self, 0);
  if (!value) meeting.all = false;
  machine->meet(*self, meeting, meeting_kind::block_and, lane_count);
  return meeting.settled_all;
}

void simt_context::sync_named(uint32_t barrier, uint32_t lanes) {
  if (barrier == 0 || barrier >= simt_named_barriers || lanes == 0 || lanes > lane_count || lanes % warp_lane_count != 0) {
    throw std::invalid_argument("sync_named: expected barrier 1 to 15 and whole warps of the block's " + std::to_string(lane_count) +
                                " lanes, found barrier " + std::to_string(barrier) + " and " + std::to_string(lanes) + " lanes");
  }
  machine->meet(*self, block_meeting(*self, barrier), meeting_kind::named, lanes);
}

void simt_context::sync_warp() { machine->meet(*self, warp_meeting(*self), meeting_kind::warp, warp_lane_count); }

void simt_context::sync_grid() { machine->meet(*self, self->group->grid, meeting_kind::grid, block_count * lane_count); }

const void* simt_context::exchange_shuffle(const void* value, uint32_t bytes, uint32_t from) {
  simt_meeting& meeting = warp_meeting(*self);
  deposit(meeting, in_warp(*this), value, bytes);
  machine->meet(*self, meeting, meeting_kind::shuffle, warp_lane_count);
  return meeting.settled[from % warp_lane_count].data();
}

uint32_t simt_context::ballot(bool value) {
  simt_meeting& meeting = warp_meeting(*self);
  const uint64_t word = value ? 1 : 0;
  deposit(meeting, in_warp(*this), &word, sizeof word);
  machine->meet(*self, meeting, meeting_kind::ballot, warp_lane_count);
  uint32_t mask = 0;
  for (uint32_t i = 0; i < warp_lane_count; ++i) mask |= static_cast<uint32_t>(settled_word(meeting, i)) << i;
  return mask;
}

uint32_t simt_context::exchange_match(uint64_t value) {
  simt_meeting& meeting = warp_meeting(*self);
  deposit(meeting, in_warp(*this), &value, sizeof value);
  machine->meet(*self, meeting, meeting_kind::match, warp_lane_count);
  uint32_t mask = 0;
  for (uint32_t i = 0; i < warp_lane_count; ++i) mask |= (settled_word(meeting, i) == value ? 1u : 0u) << i;
  return mask;
}

bool simt_context::wait(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) {
  return machine->wait(*self, word, comparison::ge, value, rank, stage, status);
}

bool simt_context::wait_until(const wait_look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) {
  return machine->wait_until(*self, look, expected, rank, stage, status);
}

bool simt_context::wait_equal(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) {
  return machine->wait(*self, word, comparison::eq, value, rank, stage, status);
}

void simt_context::fail(ep_kernel_status* status, uint32_t how, int32_t rank, uint32_t stage, uint64_t expected, uint64_t found) {
  kernel_status_fail(status, {how, rank, found}, stage, expected);
}

void simt_context::wake(uint64_t word) { wake_notify(reinterpret_cast<ep_wake_word*>(word)); }

bool simt_context::end_way(int32_t rank) const { return self->group->launch->environment->end_way(rank); }

bool simt_context::own_fault(uint64_t found) const { return self->group->launch->environment->own_fault(found); }

void simt_context::stop_waits() const { self->group->launch->environment->stop_waits(); }

} // namespace ep
