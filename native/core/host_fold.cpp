#include "host_fold.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ep/device/number.h"

namespace ep {
namespace {

template <class T> void divide(void* at, uint64_t elements, uint32_t by) {
  auto* values = static_cast<T*>(at);
  for (uint64_t i = 0; i < elements; ++i) {
    T value;
    std::memcpy(&value, values + i, sizeof value);
    // A NaN stays the canonical one that the sum has given; of no number divided here a new one comes.
    if (!std::isnan(value)) value /= static_cast<T>(by);
    std::memcpy(values + i, &value, sizeof value);
  }
}

// Behind the sum of all members.
void divide_elements(void* at, uint64_t elements, element_type type, uint32_t members) {
  if (type == element_type::f32) divide<float>(at, elements, members);
  if (type == element_type::f64) divide<double>(at, elements, members);
}

reduce_op within_host(reduce_op op) { return op == reduce_op::avg ? reduce_op::sum : op; }
reduce_op across_hosts(reduce_op op) { return op == reduce_op::avg || op == reduce_op::premul_sum ? reduce_op::sum : op; }

// So many halves at a time, in single precision: little enough for the first-level cache, of a few members.
constexpr uint64_t most_wide = 1024;

template <class Number> void widen(float* to, const void* from, uint64_t elements) {
  const auto* halves = static_cast<const uint16_t*>(from);
  for (uint64_t i = 0; i < elements; ++i) to[i] = Number::load(halves[i]);
}

template <class Number> void round_to(void* to, const float* from, uint64_t elements) {
  auto* halves = static_cast<uint16_t*>(to);
  for (uint64_t i = 0; i < elements; ++i) halves[i] = Number::store(from[i]);
}

template <class T> T* at(void* begin, uint64_t elements) { return static_cast<T*>(begin) + elements; }
template <class T> const T* at(const void* begin, uint64_t elements) { return static_cast<const T*>(begin) + elements; }

} // namespace

element_type partial_type(element_type type, reduce_op op) {
  const bool half = type == element_type::f16 || type == element_type::bf16;
  return half && op != reduce_op::min && op != reduce_op::max ? element_type::f32 : type;
}

void fold_members(void* partial, const void* const* sources, int count, uint64_t elements, element_type type, reduce_op op, double factor) {
  if (partial_type(type, op) == type) return reduce_elements(partial, sources, count, elements, type, within_host(op), factor, false);
  thread_local std::vector<float> wide;
  wide.resize(std::max<size_t>(wide.size(), static_cast<size_t>(count) * most_wide));
  std::vector<const void*> widened(static_cast<size_t>(count));
  for (uint64_t done = 0; done < elements; done += most_wide) {
    const uint64_t some = std::min(most_wide, elements - done);
    for (int i = 0; i < count; ++i) {
      float* to = wide.data() + static_cast<size_t>(i) * most_wide;
      if (type == element_type::f16) widen<number_f16>(to, at<uint16_t>(sources[i], done), some);
      else widen<number_bf16>(to, at<uint16_t>(sources[i], done), some);
      widened[static_cast<size_t>(i)] = to;
    }
    reduce_elements(at<float>(partial, done), widened.data(), count, some, element_type::f32, within_host(op), factor, false);
  }
}

void fold_partials(void* const* targets, int target_count, const void* const* partials, int hosts, uint64_t elements, element_type type, reduce_op op, double factor, uint32_t members) {
  if (partial_type(type, op) == type) {
    reduce_push(targets, target_count, partials, hosts, elements, type, across_hosts(op), factor, false);
    for (int i = 0; op == reduce_op::avg && i < target_count; ++i) divide_elements(targets[i], elements, type, members);
    return;
  }
  float folded[most_wide];
  std::vector<const void*> some_of(static_cast<size_t>(hosts));
  // HAZARD: ascending: a target that begins where a partial does is half as long, and so never ahead of what is read.
  for (uint64_t done = 0; done < elements; done += most_wide) {
    const uint64_t some = std::min(most_wide, elements - done);
    for (int host = 0; host < hosts; ++host) some_of[static_cast<size_t>(host)] = at<float>(partials[host], done);
    reduce_elements(folded, some_of.data(), hosts, some, element_type::f32, across_hosts(op), factor, false);
    if (op == reduce_op::avg) divide_elements(folded, some, element_type::f32, members);
    for (int i = 0; i < target_count; ++i) {
      if (type == element_type::f16) round_to<number_f16>(at<uint16_t>(targets[i], done), folded, some);
      else round_to<number_bf16>(at<uint16_t>(targets[i], done), folded, some);
    }
  }
}

bool host_fold::sound(uint32_t members) const {
  std::vector<uint32_t> sorted = order_;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.size() != members || hosts_.empty() || hosts_[0] != 0) return false;
  for (uint32_t i = 0; i < members; ++i) if (sorted[i] != i) return false;
  for (size_t host = 1; host < hosts_.size(); ++host) if (hosts_[host] <= hosts_[host - 1] || hosts_[host] >= members) return false;
  return true;
}

void host_fold::run(void* into, std::span<const void* const> sources, uint64_t elements, element_type type, reduce_op op, double factor) {
  std::vector<const void*> ordered(order_.size());
  for (size_t i = 0; i < order_.size(); ++i) ordered[i] = sources[order_[i]];
  const auto members = static_cast<uint32_t>(order_.size());
  if (hosts_.size() == 1) {
    reduce_elements(into, ordered.data(), static_cast<int>(members), elements, type, op, factor, false);
    return;
  }
  const uint64_t stride = (elements * element_bytes(partial_type(type, op)) + 7) / 8;
  partials_.resize(std::max<uint64_t>(partials_.size(), stride * hosts_.size()));
  std::vector<const void*> hosts(hosts_.size());
  for (size_t host = 0; host < hosts_.size(); ++host) {
    const uint32_t end = host + 1 < hosts_.size() ? hosts_[host + 1] : members;
    uint64_t* partial = partials_.data() + host * stride;
    fold_members(partial, ordered.data() + hosts_[host], static_cast<int>(end - hosts_[host]), elements, type, op, factor);
    hosts[host] = partial;
  }
  fold_partials(&into, 1, hosts.data(), static_cast<int>(hosts.size()), elements, type, op, factor, members);
}

} // namespace ep
