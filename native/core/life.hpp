// The word by which peers see that a rank lives: made and ended by the rank's own thread, whose death the kernel marks.
#pragma once

#include <memory>
#include <thread>

#include "ep/abi/rank.h"
#include "segment.hpp"
#include "status.hpp"

namespace ep {

class life_holder {
 public:
  // `word` lies in `mapping`. The calling thread is the one whose death peers shall see.
  result<nothing> begin(ep_life_word& word, std::shared_ptr<segment> mapping);
  // Once; later calls do nothing. Not `orderly`: peers see a death.
  void end(bool orderly);

 private:
  ep_life_word* word_ = nullptr;
  std::shared_ptr<segment> mapping_;
  std::thread::id owner_;
};

} // namespace ep
