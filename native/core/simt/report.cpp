// The text of a run that did not finish: who stands where, who is missing, what was expected and found.
#include "machine.hpp"

namespace ep {

const char* meeting_name(meeting_kind kind) {
  switch (kind) {
    case meeting_kind::none: return "nothing";
    case meeting_kind::block: return "the block barrier";
    case meeting_kind::block_and: return "the block barrier with and";
    case meeting_kind::named: return "a named barrier";
    case meeting_kind::warp: return "the warp barrier";
    case meeting_kind::shuffle: return "a shuffle";
    case meeting_kind::ballot: return "a ballot";
    case meeting_kind::match: return "a match_any";
    case meeting_kind::grid: return "the grid barrier";
  }
  return "nothing";
}

namespace {

const char* stage_name(uint32_t stage) {
  switch (stage) {
    case EP_STAGE_CREDIT: return "credit";
    case EP_STAGE_ARRIVAL: return "arrival";
    case EP_STAGE_ROOM: return "room";
    case EP_STAGE_TURN: return "turn";
    case EP_STAGE_COMPLETION: return "completion";
    case EP_STAGE_COUNT: return "count";
    case EP_STAGE_RESULT: return "result";
    case EP_STAGE_PLACE: return "place";
    default: return "other";
  }
}

std::string word_name(const simt_launch& launch, const uint64_t* word) {
  if (launch.memory != nullptr) {
    const ep_memory_handle& memory = *launch.memory;
    const uint64_t address = reinterpret_cast<uint64_t>(word);
    const auto* peers = reinterpret_cast<const ep_peer_view*>(memory.peers);
    const uint64_t first = peers[memory.rank].signals;
    if (address >= first && address - first < memory.signal_slots * 8) return "slot " + std::to_string((address - first) / 8);
    const bool rings = memory.header.kind == EP_MEMORY_PROXY || memory.header.kind == EP_MEMORY_MIXED_PROXY;
    if (rings && word == &reinterpret_cast<const ep_proxy_ring*>(memory.proxy)->head) return "the head of the proxy ring";
  }
  return "a word";
}

const char* comparison_sign(comparison cmp) {
  switch (cmp) {
    case comparison::eq: return "exactly ";
    case comparison::ge: return "at least ";
    default: return "another value than ";
  }
}

std::string lane_text(const simt_lane& lane) {
  switch (lane.state) {
    case lane_state::fresh: return "not started";
    case lane_state::ready: return "can run";
    case lane_state::returned: return "has returned";
    case lane_state::waiting: {
      const std::string place = " (stage " + std::string(stage_name(lane.stage)) + ", from rank " + std::to_string(lane.awaited) + "): expected ";
      if (lane.word == nullptr) {
        uint64_t seen = 0;
        lane.until.look(lane.until.self, &seen);
        return "waits" + place + std::to_string(lane.value) + ", found " + std::to_string(seen);
      }
      const uint64_t found = std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(lane.word)).load(std::memory_order_relaxed);
      return "waits for " + word_name(*lane.group->launch, lane.word) + place + comparison_sign(lane.cmp) + std::to_string(lane.value) + ", found " +
             std::to_string(found);
    }
    case lane_state::meeting:
      return std::string("waits at ") + meeting_name(lane.meeting->kind) + ": " + std::to_string(lane.meeting->arrived.size()) + " of " +
             std::to_string(lane.meeting->expected) + " lanes came";
  }
  return "";
}

} // namespace

std::string simt_describe(const std::deque<simt_group>& groups) {
  std::string text;
  for (const simt_group& group : groups) {
    const uint32_t block_lanes = group.launch->lanes;
    for (uint32_t block = 0; block < group.launch->blocks; ++block) {
      uint32_t first = 0;
      while (first < block_lanes) {
        const std::string what = lane_text(*group.lanes[block * block_lanes + first]);
        uint32_t last = first;
        while (last + 1 < block_lanes && lane_text(*group.lanes[block * block_lanes + last + 1]) == what) ++last;
        text.append(group.launch->name).append(" block ").append(std::to_string(block));
        text.append(first == last ? " lane " : " lanes ").append(std::to_string(first));
        if (first != last) text.append("-").append(std::to_string(last));
        text.append(" ").append(what).append("\n");
        first = last + 1;
      }
    }
  }
  return text;
}

} // namespace ep
