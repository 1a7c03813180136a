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
  std::array<uint64_t, std::size(slot{}.words)> words{};
  const auto read = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) words[i] = std::atomic_ref<uint64_t>(there.words[i]).load(std::memory_order_relaxed);
  };
  constexpr size_t head_words = brief_head_bytes / sizeof(uint64_t);
  read(0, head_words);
  std::atomic_ref<uint64_t>(there.words[0]).store(0, std::memory_order_relaxed);
  const auto head = std::bit_cast<wire_brief>(words);
  const bool fits = head.magic == brief_magic && head.kind == message_kind::request && head.source == source && head.sequence == static_cast<uint32_t>(sequence) && head.payload_bytes <= brief_payload_bytes;
  if (!fits) return std::nullopt;
  read(head_words, head_words + (head.payload_bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
  return std::bit_cast<wire_brief>(words);
}

} // namespace ep::fabric
