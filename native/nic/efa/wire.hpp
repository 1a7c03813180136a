// Between the requester's and the responder's half of a request. The shared-memory wire runs the responder's half at once, on the thread of the requester's device, in the
// peer's port segment. The network wire (wire_net) asks the peer's device to do it, and its answer comes later.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "nic/net/hub.hpp"
#include "port.hpp"

namespace ep::nic::efa {

struct wire_reply {
  uint8_t status = EP_EFA_STATUS_OK;
  bool busy = false;         // another device is inside just now: try again
  const char* why = nullptr; // of every status but 0; static text
  bool pending = false;      // asked: call again with the same ticket once it is answered, or to hear that it still is not
};

// What is under way over a network; null: nothing. Local memory is read when it is asked and written when the answer is taken, by the one who calls.
using wire_ticket = std::shared_ptr<net::call>;

// Whom a request is for, and who sent it.
struct wire_target {
  port_visitor source; // who is inside meanwhile
  uint32_t sender = 0; // the number by which the peer knows who sent it
  uint32_t qpn = 0;
  uint32_t qkey = 0;
};

// The memory that a request names, whole, and which part of it is meant now.
struct wire_range {
  uint32_t rkey = 0;
  uint64_t address = 0;
  uint64_t length = 0;
  uint64_t begin = 0; // of the part, in the range
  uint64_t bytes = 0; // 0 of a request without bytes: its key is checked all the same
};

// Brings what memory shows of a counter up to `value`, whatever was stored there: whoever resets it by a store finds that out here. Others may do the same at any time; `between` is
// called where they could come in.
// HAZARD: what is shown is loaded before the value, and replaced if it still is that. Otherwise an older value could follow a newer one, and a count that goes back is read as 2^31
// more.
template <class Between> void count_show(uint64_t& value, uint64_t& memory, const Between& between) {
  const std::atomic_ref<uint64_t> shown(memory);
  uint64_t before = shown.load(std::memory_order_seq_cst);
  for (;;) {
    between();
    const uint64_t now = load_ordered(value) & EP_EFA_COUNTER_MASK;
    between();
    if (before == now || shown.compare_exchange_strong(before, now, std::memory_order_seq_cst)) return;
  }
}

// The way to a device. What is lost on the way is asked again by the caller, with a null ticket.
class wire_peer {
 public:
  virtual ~wire_peer() = default;
  // The peer's process is known to be dead or to have closed its device.
  virtual bool gone() const = 0;
  virtual wire_reply write(const wire_target& target, const wire_range& range, const uint8_t* from, wire_ticket& ticket) = 0;
  virtual wire_reply read(const wire_target& target, const wire_range& range, uint8_t* to, wire_ticket& ticket) = 0;
  // FI_REMOTE_WRITE. A queue pair that went since, or counts no arrivals, is none the worse for it. `serial`, another one for each tick of the caller's device, makes that one count,
  // however often it is asked for; none below `oldest` will be.
  virtual wire_reply tick(const wire_target& target, uint64_t serial, uint64_t oldest, wire_ticket& ticket) = 0;
  // A request of another kind: there is nobody who could take it.
  virtual wire_reply refuse_send(const wire_target& target, wire_ticket& ticket) = 0;
  // When anything last went there or came from there, for what is pending.
  virtual int64_t moved_ns() const { return 0; }
  // What is pending is not waited for any more; what of it is still on its way from this machine stays here.
  virtual void give_up() {}
};

// A port, as its peers on this machine and its owner change it.
class shm_peer final : public wire_peer {
 public:
  explicit shm_peer(port_view view);

  bool gone() const override;
  wire_reply write(const wire_target& target, const wire_range& range, const uint8_t* from, wire_ticket&) override { return write(target, range, from); }
  wire_reply read(const wire_target& target, const wire_range& range, uint8_t* to, wire_ticket&) override { return read(target, range, to); }
  wire_reply tick(const wire_target& target, uint64_t, uint64_t, wire_ticket&) override { return tick(target); }
  wire_reply refuse_send(const wire_target& target, wire_ticket&) override { return refuse_send(target); }

  wire_reply write(const wire_target& target, const wire_range& range, const uint8_t* from);
  wire_reply read(const wire_target& target, const wire_range& range, uint8_t* to);
  wire_reply tick(const wire_target& target);
  wire_reply refuse_send(const wire_target& target);
  // One more in a counter of the port.
  void count(uint32_t index);

 private:
  struct mapping {
    uint64_t generation = 0;
    uint32_t number = 0; // of a key
    uint8_t* base = nullptr;
    ep_wake_word* wake = nullptr;
    std::shared_ptr<segment> memory;
    std::shared_ptr<segment> wake_memory;
  };

  static bool enter(uint64_t& active, uint64_t mine);
  // Frees the word of a visitor whose device is gone, to be taken at the next try.
  static void free_if_gone(uint64_t& active);
  template <class Body> wire_reply inside(const wire_target& target, uint32_t key, const Body& body);
  const mapping& map(mapping& known, uint64_t generation, const port_place& place, bool has_wake, const port_place& wake);
  // What the peer has taken back is not held for as long as it lives.
  void forget_gone();
  wire_reply find(const wire_range& range, uint32_t right, mapping*& found);

  port_view view_;
  std::vector<mapping> keys_;
  std::vector<mapping> counters_;
  uint32_t full_ = 0; // tries that found all places of a queue pair taken
};

// The ways to all ports of this machine, or to those on a network that the hub was told of; one object for each.
class fabric {
 public:
  // `own`: this device's number. The hub, which may be null, outlives it.
  fabric(net::hub* hub, uint32_t own) : hub_(hub), own_(own) {}
  // Null: nobody has this number (any more), or nothing that a device could talk to.
  std::shared_ptr<wire_peer> connect(uint32_t number);
  // 0: not the address of a device that this one may reach.
  uint32_t number_of(const gid_bytes& gid) const;

 private:
  net::hub* hub_;
  uint32_t own_;
  std::map<uint32_t, std::shared_ptr<wire_peer>> peers_; // by number
};

std::shared_ptr<wire_peer> peer_of_network(net::hub& hub, uint32_t number);
// The responder's half for what comes over a network to this port.
net::hub::answerer answerer_of(const port_view& port);

// Aligned words of 8 bytes arrive whole.
void copy_words(uint8_t* to, const uint8_t* from, uint64_t bytes);

} // namespace ep::nic::efa
