#include "host_fold.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

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

} // namespace

reduce_op within_host(reduce_op op) { return op == reduce_op::avg ? reduce_op::sum : op; }
reduce_op across_hosts(reduce_op op) { return op == reduce_op::avg || op == reduce_op::premul_sum ? reduce_op::sum : op; }

bool folds_by_host(element_type type, reduce_op op) {
  const bool half = type == element_type::f16 || type == element_type::bf16;
  const bool extreme = op == reduce_op::min || op == reduce_op::max;
  const bool mean = op == reduce_op::avg && type != element_type::f32 && type != element_type::f64;
  return reduces(op, type) && (!half || extreme) && !mean;
}

void divide_elements(void* at, uint64_t elements, element_type type, uint32_t members) {
  if (type == element_type::f32) divide<float>(at, elements, members);
  if (type == element_type::f64) divide<double>(at, elements, members);
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
  const uint64_t stride = (elements * element_bytes(type) + 7) / 8;
  partials_.resize(std::max<uint64_t>(partials_.size(), stride * hosts_.size()));
  std::vector<const void*> hosts(hosts_.size());
  for (size_t host = 0; host < hosts_.size(); ++host) {
    const uint32_t end = host + 1 < hosts_.size() ? hosts_[host + 1] : members;
    uint64_t* partial = partials_.data() + host * stride;
    reduce_elements(partial, ordered.data() + hosts_[host], static_cast<int>(end - hosts_[host]), elements, type, within_host(op), factor, false);
    hosts[host] = partial;
  }
  reduce_elements(into, hosts.data(), static_cast<int>(hosts.size()), elements, type, across_hosts(op), factor, false);
  if (op == reduce_op::avg) divide_elements(into, elements, type, members);
}

} // namespace ep
