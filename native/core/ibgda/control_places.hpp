// Where the control memory of kernels' queue pairs may lie, in the order that was asked for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "control_memory.hpp"
#include "dl/cuda_symbols.hpp"

namespace ep::ibgda {

struct control_places {
  std::vector<placement> order; // as asked
  std::vector<std::unique_ptr<control_memory>> sources; // those of them that could be opened, in that order
  std::vector<fallback> passed_over; // the others
  bool gpu = false; // posters run on a GPU
};

// Posters run on this process's processors.
control_places host_places();

// Kernels of a GPU post. `reader`: what in this process reads their rings, in words, where no NIC does ("a software NIC"): it reads memory of the host only. Empty: a NIC.
// EOPNOTSUPP where no place is left; the message has the reason of each.
result<control_places> gpu_places(const std::shared_ptr<const dl::cuda_symbols>& cuda, int ordinal, const std::vector<placement>& order, const std::string& reader);

// What was passed over, in the order in which it was asked for: here, then by the queues.
std::vector<fallback> all_fallbacks(const control_places& places, const std::vector<fallback>& later);

} // namespace ep::ibgda
