// A context whose stores to device registers and whose fences go through the write-combining model of the software EFA: what posters of a device that watches stores run on.
#pragma once

#include <utility>

#include "stepper.hpp"

namespace ep::nic::efa {

// A copy of a context of either executor. `writer` is whose write-combining buffer the stores go through: another one for each lane, as each thread of a GPU.
template <class Base> class watched_context : public Base {
 public:
  watched_context(const Base& base, stepper& steps, uint64_t writer) : Base(base), steps_(&steps), writer_(writer) {}

  void register_store64(uint64_t address, uint64_t value) {
    this->point();
    steps_->store64(writer_, address, value);
  }
  void register_store32(uint64_t address, uint32_t value) {
    this->point();
    steps_->store32(writer_, address, value);
  }
  void register_fence() {
    this->point();
    steps_->fence(writer_);
  }

 private:
  stepper* steps_;
  uint64_t writer_;
};

template <class Base> watched_context<Base> watched(const Base& base, stepper& steps, uint64_t writer) { return {base, steps, writer}; }

} // namespace ep::nic::efa
