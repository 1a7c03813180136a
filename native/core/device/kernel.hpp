// What host code sees of a kernel: a function over a context, run by an executor.
#pragma once

#include <cstdint>
#include <memory>

#include "../waiting.hpp"
#include "ep/abi/dispatch.h"

namespace ep {

// Where the waits of a running kernel end. One per launch, shared by its blocks.
struct kernel_environment {
  wait_scope waits;
};

// A kernel's look, which is `bool operator()(uint64_t* found) const`.
template <class Look> wait_look wait_look_of(const Look& look) {
  return {[](const void* self, uint64_t* found) { return (*static_cast<const Look*>(self))(found); }, &look};
}

// Writes *status once: the first failure of a launch is the one that is reported.
void kernel_status_fail(ep_kernel_status* status, const wait_result& result, uint32_t stage, uint64_t expected);

} // namespace ep
