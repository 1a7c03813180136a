// Between the requester's and the responder's half of a request. The shared-memory wire (wire_shm) runs the responder's half at once, on the thread
// of the requester's NIC, in the peer's port segment.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "directory.hpp"
#include "status.hpp"

namespace ep::nic {

enum class wire_operation : uint8_t { write, read, add, swap };

// Local memory of the requester, checked by it.
struct wire_piece {
  uint8_t* base;
  uint64_t bytes;
};

struct wire_message {
  uint32_t source_port = 0;
  uint32_t source_qpn = 0;
  uint32_t target_qpn = 0;
  uint32_t psn = 0;
  uint32_t packets = 1; // sequence numbers that the whole message takes
  wire_operation operation = wire_operation::write;
  bool has_immediate = false;
  bool big_endian = false;   // order of the responder's word
  uint8_t atomic_bytes = 0;  // 4 or 8
  uint32_t immediate = 0;    // as in the request
  uint32_t rkey = 0;
  uint64_t address = 0;
  uint64_t length = 0;
  std::array<uint64_t, 4> operand{}; // add, boundary; or swap, compare, swap mask, compare mask
  std::span<const wire_piece> pieces; // sources of a write, targets of a read; `length` bytes in all
};

enum class wire_answer : uint8_t {
  ack,
  lost, // nobody answers: dead, unreachable, no such queue pair, not the expected sequence number
  not_ready, // no receive request for the immediate
  invalid_request,
  access_error,
};

struct wire_reply {
  wire_answer answer = wire_answer::lost;
  uint64_t old = 0;           // of an atomic
  const char* why = nullptr;  // of everything but ack; static text
  uint32_t rnr_timer = 0;     // of not_ready: how long to wait, as the specification encodes it
};

// The way to one port.
class wire_peer {
 public:
  virtual ~wire_peer() = default;
  // Lets bytes begin..end of a write or read arrive, after all checks of the responder. With `last` the message is complete: sequence numbers advance,
  // its atomic is executed, its immediate is delivered, sleepers are woken. Parts that are not last may come in any order. What has been
  // acknowledged before and comes again is acknowledged again, and not executed.
  virtual wire_reply deliver(const wire_message& message, uint64_t begin, uint64_t end, bool last) = 0;
  // Whether the peer's process is known to be dead or to have closed its device.
  virtual bool gone() const = 0;
};

class fabric {
 public:
  virtual ~fabric() = default;
  // `number`: of the directory. One object for all queue pairs that lead there.
  virtual result<std::shared_ptr<wire_peer>> connect(uint32_t number) = 0;
};

// Through shared memory, on one machine.
std::unique_ptr<fabric> fabric_of_memory();

} // namespace ep::nic
