#include "mailbox.hpp"

#include <array>
#include <atomic>
#include <bit>

namespace ep::fabric {

result<std::unique_ptr<mailbox>> mailbox::create(dl::fabric_port& port, int32_t ranks) {
  std::unique_ptr<mailbox> made(new mailbox(ranks));
  auto region = port.register_memory(made->slots_.get(), byte_length(ranks));
  if (!region.ok()) return region.why();
  made->region_ = region.value();
  made->place_ = {made->region_.base, made->region_.key};
  return made;
}

std::optional<wire_brief> mailbox::take(int32_t source, uint64_t sequence) {
  slot& there = slots_[number(source, sequence)];
  // HAZARD: each word is read once. Whoever has the key may write there meanwhile: what has been checked must be what is used.
  std::array<uint64_t, std::size(slot{}.words)> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = std::atomic_ref<uint64_t>(there.words[i]).load(std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(there.words[0]).store(0, std::memory_order_relaxed);
  const auto found = std::bit_cast<wire_brief>(words);
  const bool fits = found.magic == brief_magic && found.kind == message_kind::request && found.source == source && found.sequence == static_cast<uint32_t>(sequence) && found.payload_bytes <= brief_payload_bytes;
  return fits ? std::optional(found) : std::nullopt;
}

} // namespace ep::fabric
