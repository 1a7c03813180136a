#include "apart_words.hpp"

namespace ep::ibgda {

result<std::unique_ptr<apart_words>> apart_words::create(const symmetric_memory& memory) {
  auto words = segment::create(memory.signal_slots() * sizeof(uint64_t));
  if (!words.ok()) return words.why();
  return std::unique_ptr<apart_words>(new apart_words(words.value(), memory));
}

apart_words::apart_words(std::shared_ptr<segment> words, const symmetric_memory& memory)
    : words_(std::move(words)),
      bytes_(memory.signal_slots() * sizeof(uint64_t)),
      mapping_(memory.mapping(memory.context().rank())),
      waits_(memory.shared_context()),
      board_({memory.own_signals(), memory.signal_slots()}, {}, {reinterpret_cast<const uint64_t*>(words_->data()), memory.signal_slots()}) {
  waits_->progress().add(&board_, [this] {
    board_.fold();
    return false;
  });
}

apart_words::~apart_words() {
  waits_->progress().remove(&board_);
  board_.fold();
}

} // namespace ep::ibgda
