// Where peers put their briefs: a write with data for the queue, which a provider delivers with less than a message takes (no buffer to match, none to post anew). Each source has as many slots as
// it may have requests under way so; the number of a request names its slot. The data says that the write is mail (wire.hpp).
//
// HAZARD: a slot is written anew only when the request that many before has been carried out, as its target says (`acked`): then it has been taken.
#pragma once

#include <memory>
#include <optional>

#include "dl/fabric.hpp"
#include "wire.hpp"

namespace ep::fabric {

// As peers are told of it.
struct mailbox_place {
  uint64_t base = 0;
  uint64_t key = 0;
};

class mailbox {
  struct alignas(64) slot {
    uint64_t words[sizeof(wire_brief) / sizeof(uint64_t)];
  };
  static_assert(brief_head_bytes % sizeof(uint64_t) == 0);
  static_assert(sizeof(slot) == sizeof(wire_brief));

 public:
  static constexpr uint64_t slots = 64; // of each source

  static constexpr uint64_t byte_length(int32_t ranks) { return static_cast<uint64_t>(ranks) * slots * sizeof(slot); }
  static result<std::unique_ptr<mailbox>> create(dl::fabric_port& port, int32_t ranks);
  const mailbox_place& place() const { return place_; }
  // From here on nobody may write.
  void give_back(dl::fabric_port& port) { port.give_back(region_); }

  // Where a source's request goes, in the memory of whoever has this place.
  static uint64_t address(const mailbox_place& at, int32_t source, uint64_t sequence) { return at.base + number(source, sequence) * sizeof(slot); }

  // What lies there for that request, once; nothing: no brief of it does. Whose it is, its tag says.
  std::optional<wire_brief> take(int32_t source, uint64_t sequence);

 private:
  explicit mailbox(int32_t ranks) : slots_(new slot[static_cast<size_t>(ranks) * slots]{}) {}
  static uint64_t number(int32_t source, uint64_t sequence) { return static_cast<uint64_t>(source) * slots + sequence % slots; }

  std::unique_ptr<slot[]> slots_;
  dl::fabric_region region_;
  mailbox_place place_;
};

} // namespace ep::fabric
