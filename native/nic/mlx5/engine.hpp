// The software NIC itself: takes doorbells, fetches work requests, carries them out at their peer, writes completions. Rules: those of the hardware, as
// far as they are known, and stricter where a poster could rely on luck.
//
// Not thread-safe: mlx5_soft locks around it. Time is given by the caller, so that tests have their own.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dl/mlx5.hpp"
#include "faults.hpp"
#include "hostile/random.hpp"
#include "queues.hpp"
#include "registrations.hpp"
#include "trace.hpp"
#include "wire.hpp"

namespace ep::nic {

struct engine_options {
  uint64_t seed = 1;
  // A try waits for its answer as long as the queue pair says (4.3 s for an ack timeout of 20), but no longer than this: in an emulator nothing is
  // merely slow. Over a network something may be: what is under way there is waited for as long as the queue pair says.
  int64_t max_ack_timeout_ns = 20'000'000;
  size_t trace_events = 0; // kept at most; 0: no trace
  bool ethernet = false; // the link layer; InfiniBand otherwise
  bool host_order_atomics = true; // 8-byte ATOMIC_FA and ATOMIC_CS; false: their words are big-endian at the responder
};

struct engine_counts {
  uint64_t doorbells = 0;
  uint64_t requests = 0;
  uint64_t completions = 0;
  uint64_t retries = 0;
  uint64_t bytes = 0;
  uint64_t violations = 0;
};

class engine {
 public:
  engine(port_view port, std::unique_ptr<fabric> network, const engine_options& options);
  ~engine();

  // ---- tables, for commands and for the control path
  registrations memory;
  std::map<uint32_t, std::unique_ptr<doorbell_page>> pages;
  std::map<uint32_t, std::unique_ptr<completion_queue>> cqs;
  std::vector<std::unique_ptr<queue_pair>> qps; // by index

  queue_pair* find_qp(uint32_t qpn) const;
  queue_pair* add_qp(); // null: all are taken
  // Takes the queue pair out of service: state, port table, what is under way.
  void stop_qp(queue_pair& qp, uint8_t state);
  void remove_qp(queue_pair& qp);
  // What was rung for it, and not looked at yet, is over.
  void drop_doorbells(const queue_pair& qp);
  void add_receiver(queue_pair& qp) { receivers_.push_back(&qp); }
  void connect(queue_pair& qp);
  uint32_t number_of(const gid_bytes& gid) const { return network_->number_of(gid); }
  // Whether a peer's NIC is inside of an access to this key (0: to anything through this queue pair) right now.
  bool in_use(uint32_t key, const queue_pair* only) const;
  port_view& port() { return port_; }

  // ---- work. All return whether anything was done.
  bool poll_doorbells(int64_t now_ns);
  bool poll_receives(int64_t now_ns);
  // Lets every queue pair with work go on, by turns, for some requests each.
  bool work(int64_t now_ns);
  // One piece of work, chosen by `random`: one doorbell, or one stage of one request.
  bool step(random_source& random, int64_t now_ns);
  // When the next delayed piece of work is due; INT64_MAX: nothing waits for the clock.
  int64_t next_due_ns() const;

  // ---- faults and what was seen
  void set_faults(fault_script script) { faults_ = std::move(script); }
  void release_held();
  void set_link(bool up);
  bool link_up() const { return link_up_; }
  void report(violation what);
  const std::vector<violation>& violations() const { return violations_; }
  trace_log& trace() { return trace_; }
  const engine_counts& counts() const { return counts_; }
  void raise(const dl::mlx5_event& event) { events_.push_back(event); }
  bool take_event(dl::mlx5_event& event);
  const engine_options& options() const { return options_; }
  int64_t now_ns() const { return now_ns_; }
  // For what happens between two polls: commands come from the program's own threads, also before the first poll and while the NIC sleeps.
  void advance_clock(int64_t now_ns) { now_ns_ = std::max(now_ns_, now_ns); }

 private:
  void doorbell(doorbell_page& page, uint64_t value);
  void repeat(doorbell_page& page, uint64_t value);
  void ring(queue_pair& qp);
  void make_ready(queue_pair& qp);
  // One stage of the request at the head. False: nothing to do, or it waits for the clock or for release.
  bool advance(queue_pair& qp);
  bool fetch(queue_pair& qp);
  void load(const queue_pair& qp, uint16_t index, flight& into);
  uint8_t prepare(const queue_pair& qp, uint32_t psn, flight& now, const char*& why);
  bool look_ahead(queue_pair& qp);
  bool ask_behind(queue_pair& qp, flight& next);
  void attempt(queue_pair& qp);
  void move_link(const queue_pair& qp);
  void answered(queue_pair& qp, const wire_reply& reply);
  void pending(queue_pair& qp);
  void unanswered(queue_pair& qp, const char* why, bool broken = false);
  bool local_still(const queue_pair& qp) const;
  void drop_ticket(queue_pair& qp);
  void drop_behind(queue_pair& qp, bool cut);
  void store_old(queue_pair& qp, uint64_t old);
  void finish(queue_pair& qp, uint8_t syndrome, const char* note);
  void flush(queue_pair& qp);
  bool complete(queue_pair& qp, completion_queue& cq, const completion& what);
  void trace_request(const queue_pair& qp, uint8_t syndrome, const char* note);
  bool receive(queue_pair& qp);

  port_view port_;
  std::unique_ptr<fabric> network_;
  const engine_options options_;
  random_source random_;
  fault_script faults_;
  trace_log trace_;
  std::vector<violation> violations_;
  std::deque<dl::mlx5_event> events_;
  std::vector<queue_pair*> ready_;
  std::vector<queue_pair*> receivers_; // queue pairs with a receive queue
  engine_counts counts_;
  int64_t now_ns_ = 0;
  uint64_t turn_bytes_ = 0; // moved in this turn of a queue pair
  bool link_up_ = true;
  int64_t link_back_ns_ = INT64_MAX; // when a link that a fault took down comes up again
};

} // namespace ep::nic
