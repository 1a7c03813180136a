// A sleeper that awaits a wake word and a descriptor at the same time: notifiers of the word write to an eventfd, and it polls for both. No other thread has a part in it, so what wakes it costs one
// switch, not one for each thread in between.
#pragma once

#include <cstdint>
#include <memory>

#include "ep/abi/rank.h"
#include "status.hpp"

namespace ep {

// HAZARD: its only sleeper, of one thread at a time, and a word that this process alone notifies: a descriptor's number says nothing to another one.
// The word outlives it. Its end waits for those who are about to write to its eventfd, whose number would soon be another file's.
class wake_descriptor {
 public:
  static result<std::unique_ptr<wake_descriptor>> create(ep_wake_word* word);
  ~wake_descriptor();

  // As wake_prepare(): look once more at whatever is awaited, then sleep() or cancel().
  void prepare();
  void cancel();
  // Until the word is notified, the descriptor (-1: none) is readable, or the time is up. False: that was it. May end for nothing.
  bool sleep(int descriptor, int64_t at_most_ns);

 private:
  wake_descriptor(ep_wake_word* word, int event) : word_(word), event_(event) {}
  ep_wake_word* const word_;
  const int event_;
};

} // namespace ep
