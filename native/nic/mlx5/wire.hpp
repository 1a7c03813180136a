// Between the requester's and the responder's half of a request. The shared-memory wire (wire_shm) runs the responder's half at once, on the thread
// of the requester's NIC, in the peer's port segment. The network wire (wire_net) asks the peer's NIC to do it, and its answer comes later.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "directory.hpp"
#include "nic/net/hub.hpp"
#include "port.hpp"
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
  std::optional<uint64_t> torn;      // what an atomic read of the word before, which it now writes over whatever is there
  std::array<uint64_t, 4> operand{}; // add, boundary; or swap, compare, swap mask, compare mask
  std::span<const wire_piece> pieces; // sources of a write, targets of a read; `length` bytes in all
};

enum class wire_answer : uint8_t {
  ack,
  pending, // asked; call again with the same ticket once it is answered, or to hear that it still is not
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
  bool broken = false;        // of lost: the way there broke, so nobody was silent; to be tried again later and later
};

// What is under way over a network; null: nothing. Local memory is read when it is asked and written when the answer is taken, by the one who calls.
using wire_ticket = std::shared_ptr<net::call>;

// The way to one port.
class wire_peer {
 public:
  virtual ~wire_peer() = default;
  // Lets bytes begin..end of a write or read arrive, after all checks of the responder. With `last` the message is complete: sequence numbers advance,
  // its atomic is executed, its immediate is delivered, sleepers are woken. Parts that are not last may come in any order. What has been
  // acknowledged before and comes again is acknowledged again, and not executed. Of an atomic a part that is not last only reads the word.
  // At most net::part_bytes at a time.
  virtual wire_reply deliver(const wire_message& message, uint64_t begin, uint64_t end, bool last, wire_ticket& ticket) = 0;
  // Whether the peer's process is known to be dead or to have closed its device.
  virtual bool gone() const = 0;
  // When anything last went there or came from there, for what is pending.
  virtual int64_t moved_ns() const { return 0; }
  // What is pending is not waited for any more; what of it is still on its way from this machine stays here.
  virtual void give_up() {}
};

class fabric {
 public:
  virtual ~fabric() = default;
  // `number`: of the directory. One object for all queue pairs that lead there.
  virtual result<std::shared_ptr<wire_peer>> connect(uint32_t number) = 0;
  // 0: not the address of a software NIC that this one may reach.
  virtual uint32_t number_of(const gid_bytes& gid) const = 0;
};

// Aligned words of 4 and 8 bytes, alone, arrive whole.
void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes);

// Through shared memory, on one machine.
std::unique_ptr<fabric> fabric_of_memory();
// The NICs that the hub was told of through it, oneself through memory. `own`: the hub's GID is of it. The hub outlives it.
std::unique_ptr<fabric> fabric_of_network(net::hub& hub, uint32_t own);
// The responder's half for what comes over a network to this port.
net::hub::answerer answerer_of(const port_view& port);
// A port as those see it who change it. `visitor`, if it is not 0, is who is announced as being inside, instead of a message's source.
std::unique_ptr<wire_peer> peer_of_port(port_view view, uint32_t visitor);

} // namespace ep::nic
