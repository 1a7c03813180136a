// An asynchronous operation and how its end reaches whoever started it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "status.hpp"

namespace ep {

struct outcome {
  uint32_t status = EP_STATUS_OK;
  int32_t rank = -1;       // who was awaited or lost
  uint32_t stage = 0;      // EP_STAGE_* of a kernel
  uint64_t expected = 0;
  uint64_t found = 0;      // the value seen
  std::string message;     // only where the numbers above do not say it
};

// Receives outcomes on any thread. The addon's sink batches them into one wake-up of its environment.
class completion_sink {
 public:
  virtual ~completion_sink() = default;
  virtual void complete(uint64_t operation_id, const outcome& end) = 0;
};

// Shared by the thread that runs the operation and the one that may cancel it.
struct cancel_flag {
  std::atomic<uint32_t> value{0};
};
using cancel_ref = std::shared_ptr<cancel_flag>;

} // namespace ep
