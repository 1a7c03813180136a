// What goes wrong, by script. A script is text, one rule a line:
//
//   drop    [match] [count=N] [skip=N]          requests that never arrive; a queue pair that loses a request and all its retries fails (syndrome 0x15)
//   drop-ack ...                                 requests that are executed and whose answer is lost: the retry must not execute them again
//   delay   ... ns=N                             a request begins that much later
//   hold    ...                                  a request waits until release(): late atomics, for one
//   torn    ... [ns=N]                           an atomic reads its word in one turn of the NIC and writes it in a later one, as real ones do: what a processor stores
//                                                in between is undone. Through memory, not over a network
//   partial ... [pieces=N]                       a write or read lands in pieces, in any order, over several turns of the NIC
//   lose-doorbell   [qpn=N] [count=N] [skip=N]   a doorbell that the NIC never sees; the next one must catch up
//   repeat-doorbell [qpn=N] ...                  a doorbell that arrives twice
//   link-down ... [ns=N]                         the port's link goes down when a request is tried, in both directions, once unless count=N; for good, or for so long
//   reorder                                      queue pairs take turns at random instead of in order
//
// match: qpn=N, opcode=N or opcode=atomic. The first `skip` matches pass, then `count` are hit (default: all). Lines may be empty or begin with #.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "status.hpp"

namespace ep::nic {

enum class fault_kind : uint8_t { drop, drop_ack, delay, hold, torn, partial, lose_doorbell, repeat_doorbell, link_down, reorder };

struct fault_rule {
  fault_kind kind = fault_kind::drop;
  bool any_qpn = true;
  bool any_opcode = true;
  bool atomics = false;
  uint8_t opcode = 0;
  uint32_t qpn = 0;
  uint64_t skip = 0;
  uint64_t count = UINT64_MAX;
  uint64_t value = 0; // ns of delay, torn and link_down, pieces of partial
};

class fault_script {
 public:
  // EP_STATUS_INVALID names line and word.
  static result<fault_script> parse(std::string_view text);
  bool empty() const { return rules_.empty(); }
  bool has(fault_kind kind) const;
  // The first rule of this kind that matches and has not run out; counts the match.
  const fault_rule* hit(fault_kind kind, uint32_t qpn, uint8_t opcode);

 private:
  std::vector<fault_rule> rules_;
};

} // namespace ep::nic
