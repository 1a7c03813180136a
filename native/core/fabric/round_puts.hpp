// What leaders of rounds say, and what carriers move, goes to other hosts through an engine.
#pragma once

#include <map>
#include <memory>

#include "engine.hpp"
#include "rounds.hpp"

namespace ep::fabric {

class round_puts final : public round_way {
 public:
  // The memory is routed by the engine.
  round_puts(std::shared_ptr<engine> carrier, std::shared_ptr<symmetric_memory> memory) : carrier_(std::move(carrier)), memory_(std::move(memory)) {}
  bool clear(int32_t peer, uint64_t slot) const override;
  result<nothing> put(int32_t peer, uint64_t local, uint64_t stride, uint64_t row_bytes, uint64_t rows, uint64_t offset, uint64_t slot, uint64_t value) override;

 private:
  std::shared_ptr<engine> carrier_;
  std::shared_ptr<symmetric_memory> memory_;
  std::map<std::pair<int32_t, uint64_t>, uint64_t> under_way_; // peer and slot: the last request
};

} // namespace ep::fabric
