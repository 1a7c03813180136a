// The pieces that a software EFA's work consists of. Which comes next is for a scheduler to say: a seed (stepper), a list of all orders (enumerator), or a test.
#pragma once

#include <cstdint>

namespace ep::nic::efa {

// What one request goes through, and what comes before it. Only this much is ordered: the requests of a queue pair are fetched in their order, after a doorbell told of
// them; a request is fetched, then each of its fragments (in any order) is read and then lands; after the last has landed come `tick` and `ack`, in either order; after `ack`
// come `cqe` and `count`, in either order. Nothing is ordered between requests.
enum class stage : uint8_t {
  line,     // stores of a poster leave its write-combining buffer: one 64-byte line of a send queue (only of a device that watches stores)
  doorbell, // a doorbell arrives
  fetch,    // the NIC reads a WQE
  payload,  // it reads one fragment: local memory for a write, the peer's for a read
  land,     // the fragment is stored: the peer's memory for a write, local memory for a read
  tick,     // FI_REMOTE_WRITE at the peer
  ack,      // the responder's answer
  cqe,      // the completion is written
  count,    // FI_WRITE or FI_READ, or the count of failures
};
inline constexpr uint32_t stages = 9;
const char* stage_name(stage what);

struct event {
  stage what = stage::fetch;
  uint32_t qpn = 0;
  uint64_t number = 0;   // of the WQE, counted from 0; of a line: of the slot's entry in the ring; of a doorbell: the value stored
  uint32_t fragment = 0; // of payload and land; of a line: which 64 bytes of the entry
  uint64_t writer = 0;   // of line and doorbell: who stored
  uint64_t key = 0;      // what the device finds it by
};

// Work that only changes what the NIC itself knows: an enumeration that runs it at once misses no order that a program could tell apart.
inline bool is_silent(stage what) { return what == stage::fetch || what == stage::ack; }

} // namespace ep::nic::efa
