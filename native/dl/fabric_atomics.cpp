#include "fabric_atomics.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <utility>

#include <sched.h>

namespace ep::dl {
namespace {

constexpr uint64_t guard = 0x5a5a5a5aa5a5a5a5;
constexpr uint64_t begin = UINT64_MAX - 20; // so that additions wrap

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

uint64_t atomics_trial::word(size_t index) const { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(words_[index])).load(std::memory_order_acquire); }

std::string atomics_trial::run(fabric_port& port, int64_t within_ns) {
  end_ns_ = now_ns() + within_ns;
  words_ = {guard, begin, guard};
  auto own = port.address();
  if (!own.ok()) return own.why().message;
  auto to = port.insert(own.value());
  if (!to.ok()) return to.why().message;
  auto region = port.register_memory(words_.data(), sizeof words_);
  if (!region.ok()) return region.why().message;
  std::string why = add(port, to.value(), region.value());
  const uint64_t sum = begin + additions * (additions + 1) / 2;
  if (why.empty()) why = swap(port, to.value(), region.value(), sum + 1, 5, sum);
  if (why.empty()) why = swap(port, to.value(), region.value(), sum, 6, 6);
  if (why.empty() && (word(0) != guard || word(2) != guard)) why = "words beside the one that was named have changed";
  port.give_back(region.value());
  return why;
}

// All at once: each has to find what some of the others have left.
std::string atomics_trial::add(fabric_port& port, uint64_t to, const fabric_region& region) {
  const uint64_t at = region.base + sizeof(uint64_t);
  for (size_t i = 0; i < additions; ++i) {
    operation& one = operations_[i];
    one.operand = i + 1;
    if (auto why = post(port, one, [&] { return port.fetch_add(to, &one.operand, &one.old, at, region.key, &one.context); }); !why.empty()) return why;
  }
  if (auto why = end_all(port); !why.empty()) return why;
  uint64_t reached = begin;
  for (size_t left = additions; left > 0; --left) {
    const auto next = std::find_if(operations_.begin(), operations_.end(), [&](const operation& one) { return one.operand != 0 && one.old == reached; });
    if (next == operations_.end()) return "of additions at the same time, some are lost, or found what the word never was";
    reached += std::exchange(next->operand, 0);
  }
  if (word(1) != reached) return "additions have left " + std::to_string(word(1)) + " where " + std::to_string(reached) + " is their sum";
  return "";
}

std::string atomics_trial::swap(fabric_port& port, uint64_t to, const fabric_region& region, uint64_t compare, uint64_t wanted, uint64_t expected) {
  operation& one = operations_.front();
  const uint64_t before = word(1);
  one.operand = wanted;
  one.compare = compare;
  const auto attempt = [&] { return port.compare_swap(to, &one.compare, &one.operand, &one.old, region.base + sizeof(uint64_t), region.key, &one.context); };
  if (auto why = post(port, one, attempt); !why.empty()) return why;
  if (auto why = end_all(port); !why.empty()) return why;
  if (one.old == before && word(1) == expected) return "";
  return "a comparison of " + std::to_string(before) + " with " + std::to_string(compare) + " found " + std::to_string(one.old) + " and left " + std::to_string(word(1));
}

template <class Post> std::string atomics_trial::post(fabric_port& port, operation& one, Post&& attempt) {
  one.old = guard;
  for (;;) {
    const int code = attempt();
    if (code == 0) break;
    if (code != EAGAIN) return failure_errno("posting one", code, port.offer().provider).message;
    if (auto why = look(port); !why.empty()) return why;
  }
  one.under_way = true;
  return "";
}

std::string atomics_trial::end_all(fabric_port& port) {
  while (std::any_of(operations_.begin(), operations_.end(), [](const operation& one) { return one.under_way; })) {
    if (auto why = look(port); !why.empty()) return why;
  }
  return "";
}

std::string atomics_trial::look(fabric_port& port) {
  events_.clear();
  port.poll(events_);
  for (const fabric_event& event : events_) {
    if (event.what == fabric_event::kind::failed) return event.text;
    const auto ended = std::find_if(operations_.begin(), operations_.end(), [&](const operation& one) { return &one.context == event.context; });
    if (ended != operations_.end()) ended->under_way = false;
  }
  if (!events_.empty()) return "";
  if (now_ns() > end_ns_) return "one on a word of this process had not ended in time";
  sched_yield();
  return "";
}

} // namespace ep::dl
