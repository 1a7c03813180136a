// The software EFA itself: takes doorbells, fetches work requests, lets them land at their peer in any order, counts and completes them. Rules: those of the hardware as far
// as they are known, and stricter where a poster could rely on luck.
//
// Not thread-safe: soft_efa locks around it. Time is given by the caller, so that tests have their own.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "combining.hpp"
#include "dl/efa.hpp"
#include "faults.hpp"
#include "hostile/random.hpp"
#include "keys.hpp"
#include "queues.hpp"
#include "trace.hpp"

namespace ep::nic::efa {

// How long a peer may stay inside of an access to something that is taken away, or that others wait to enter. It takes longer than a copy only where its process was stopped.
inline constexpr int64_t let_go_ns = 2'000'000'000;

struct engine_options {
  uint64_t seed = 1;
  // What the device says of itself, and holds its users to.
  uint32_t max_depth = 4096;     // WQEs of 64 bytes; half of it of 128
  uint32_t max_batch = 16;       // likewise
  bool inline_write = true;
  bool counters = true;
  bool wide_ids = false;
  uint32_t max_endpoints = port_max_qps;
  uint32_t max_counters = 1024;
  uint64_t max_message = uint64_t{1} << 30;

  uint32_t fragment_bytes = 4096;     // a multiple of 8; a message lands in pieces that end at multiples of 8 of the address where it lands
  bool payload_apart = true;          // reading a fragment and landing it are two events; false: one
  lint reserved = lint::error;
  // Stores to send queues and doorbells come by store() and fence() only, through a write-combining buffer for each writer. Otherwise the device looks into memory, and
  // doorbells that come between two looks are one: then it cannot tell how many WQEs were written before a doorbell.
  bool watch_stores = false;
  uint64_t first_count = 0;           // what a new counter stands at, as memory does not show until it first ticks
  int64_t unresponsive_ns = 20'000'000; // a peer that does not answer for that long is given up: in an emulator nothing is merely slow
  int64_t silent_ns = 5'000'000'000;    // over a network something may be: there it is silence on the way to the peer, while something is asked
  size_t trace_events = 0;            // kept at most; 0: no trace
  bool trace_stages = false;          // keep every event, not only requests and violations
};

struct engine_counts {
  uint64_t doorbells = 0;
  uint64_t requests = 0;
  uint64_t completions = 0;
  uint64_t bytes = 0;
  uint64_t violations = 0;
  uint64_t held = 0;   // requests that a fault has stopped at some stage, until release_held
  uint64_t stores = 0; // of 8 bytes to send queues, where they are watched
  uint64_t fences = 0;
};

class engine {
 public:
  engine(port_view port, net::hub* hub, const engine_options& options);
  ~engine();

  // ---- tables, for the control path
  keys memory;
  std::map<uint32_t, std::unique_ptr<completion_queue>> cqs;
  std::map<uint32_t, std::unique_ptr<counter>> counters;
  std::map<uint32_t, std::unique_ptr<queue_pair>> qps; // by qpn

  uint32_t take_qpn(); // 0: all are taken
  void publish(queue_pair& qp, uint32_t qkey);
  // Takes it out of service, and what is under way with it; what has landed whole is counted at its peer.
  void remove(queue_pair& qp);
  uint16_t handle_add(uint32_t port);
  bool handle_remove(uint16_t ah);
  uint32_t number_of(const gid_bytes& gid) const { return network_.number_of(gid); }
  size_t handles() const { return handles_.size(); }
  void counter_publish(counter& made, uint64_t* completed);
  result<nothing> counter_wake(counter& of, const ep_wake_word* wake);
  void counter_remove(counter& gone);
  // The verb that sets a counter; memory shows it at once.
  void counter_set(counter& of, uint64_t value);
  // Whether a peer's device is inside of an access to this key (0: to anything, through this queue pair, or any) right now.
  bool in_use(uint32_t lkey, const queue_pair* only) const;
  port_view& port() { return port_; }

  // ---- stores that are watched. False: the address belongs to no queue of this device.
  bool store64(uint64_t writer, uint64_t address, uint64_t value);
  bool store32(uint64_t writer, uint64_t address, uint32_t value);
  void fence(uint64_t writer);

  // ---- work
  // All that may happen next.
  void pending(std::vector<event>& out, int64_t now_ns);
  // False: it could not happen just now, because another device is inside of the same queue pair.
  bool run(const event& what, int64_t now_ns);
  // Whatever is due, as a device would do it. False: nothing was.
  bool work(int64_t now_ns);
  // When delayed work is due; INT64_MAX: none waits for the clock.
  int64_t next_due_ns() const;

  // ---- faults and what was seen
  void set_faults(fault_script script) { faults_ = std::move(script); }
  void release_held();
  void set_link(bool up);
  void report(violation what);
  const std::vector<violation>& violations() const { return violations_; }
  const trace_log& trace() const { return trace_; }
  const engine_counts& counts() const { return counts_; }
  bool take_event(dl::efa_event& event);
  const engine_options& options() const { return options_; }

 private:
  struct handle {
    uint32_t port;
    uint32_t users;
  };
  struct step {
    stage what;
    uint32_t fragment; // in `unread` or `unlanded`
  };

  queue_pair* ring_of(uint64_t address);
  queue_pair* bell_of(uint64_t address);
  void leave(size_t index);
  void arrive(const combined_line& line);
  bool look(queue_pair& qp); // at its doorbell in memory
  void doorbell(queue_pair& qp, uint32_t value, uint64_t writer, bool watched);
  bool may_fetch(queue_pair& qp);
  void fetch(queue_pair& qp);
  void begin(request& of);
  bool prepare(request& of);
  void plan(request& of);
  void cut(request& of, uint64_t fragment_bytes);
  // The stages that may come next; at most one of each kind of fragment stage if `one` is set, chosen at random.
  void next(const request& of, std::vector<step>& out, bool one);
  bool advance(size_t flight, const step& what);
  bool payload(request& of, uint32_t at);
  bool land(request& of, uint32_t at);
  // `fresh`: it was asked for just now, over a network.
  bool answered(request& of, stage during, const wire_reply& reply, bool fresh);
  bool later(fragment_list& parts, uint32_t at, bool asked, const wire_reply& reply);
  uint64_t oldest_serial() const;
  bool waits(const request& of, const wire_ticket& ticket) const;
  bool silent(request& of);
  void drop_tickets(request& of);
  bool tick(request& of);
  void leave_ticks(const queue_pair& qp);
  bool complete(request& of);
  bool count(request& of);
  void known_over(request& of);
  void end(request& of, uint8_t status, const char* why);
  void fail(queue_pair& qp);
  void over(size_t flight);
  void note(const request& of, const step& what);
  wire_target target_of(const request& of) const;
  wire_range range_of(const request& of, const fragment& part) const;

  port_view port_;
  fabric network_;
  std::shared_ptr<shm_peer> self_;
  port_visitor visitor_; // oneself, at peers
  engine_options options_;
  random_source random_;
  combining lines_;
  fault_script faults_;
  std::map<uint16_t, handle> handles_;
  std::vector<std::unique_ptr<request>> flights_;
  std::vector<step> steps_; // scratch of work()
  std::vector<violation> violations_;
  std::deque<dl::efa_event> events_;
  trace_log trace_;
  engine_counts counts_;
  uint64_t serials_ = 0;
  uint64_t counter_generations_ = 0;
  uint32_t next_qpn_ = port_first_qpn;
  uint16_t next_handle_ = 1;
  int64_t now_ns_ = 0;
  bool link_up_ = true;
};

} // namespace ep::nic::efa
