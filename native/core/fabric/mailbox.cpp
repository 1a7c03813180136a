#include "mailbox.hpp"

namespace ep::fabric {

result<std::unique_ptr<mailbox>> mailbox::create(dl::fabric_port& port, int32_t ranks) {
  std::unique_ptr<mailbox> made(new mailbox(ranks));
  auto region = port.register_memory(made->slots_.get(), byte_length(ranks));
  if (!region.ok()) return region.why();
  made->region_ = region.value();
  made->place_ = {made->region_.base, made->region_.key, most_slots};
  return made;
}

std::optional<wire_brief> mailbox::take(int32_t source, uint64_t sequence) {
  wire_brief& there = slots_[static_cast<uint64_t>(source) * most_slots + sequence % most_slots].brief;
  // HAZARD: looked at as a copy: whoever has the key may write there meanwhile.
  const wire_brief found = there;
  if (found.magic != brief_magic || found.kind != message_kind::request || found.source != source || found.sequence != static_cast<uint32_t>(sequence) || found.payload_bytes > brief_payload_bytes) return std::nullopt;
  there.magic = 0;
  return found;
}

} // namespace ep::fabric
