// What a software EFA did, in order: for oracles of tests (no signal before its data) and for people (Perfetto, `ep wqe decode --nic efa`).
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <vector>

#include "events.hpp"
#include "ep/abi/efa_wqe.h"

namespace ep::nic::efa {

enum class trace_kind : uint8_t { event, request, violation };

struct trace_event {
  trace_kind kind = trace_kind::event;
  stage what = stage::fetch; // of an event
  uint8_t opcode = 0;
  uint8_t status = 0;        // of a request that is over
  uint32_t qpn = 0;
  uint32_t peer_port = 0;
  uint32_t peer_qpn = 0;
  uint32_t rkey = 0;
  uint64_t number = 0;   // of the WQE; of a doorbell: the value stored
  uint64_t begin = 0;    // of the fragment, in the request
  uint64_t writer = 0;   // who stored a line or a doorbell, or what a violation is about
  int64_t begin_ns = 0;  // the request was fetched, or the event happened
  int64_t end_ns = 0;
  uint64_t address = 0;  // remote; of a violation: what was found
  uint64_t length = 0;   // of the request or the fragment; of a violation: what was expected
  const char* note = nullptr; // static text: what went wrong
  uint32_t wqe_bytes = 0;
  std::array<uint8_t, EP_EFA_WIDE_WQE_BYTES> wqe{}; // of a request
};

class trace_log {
 public:
  // Keeps the first `limit` events and counts the rest.
  explicit trace_log(size_t limit) : limit_(limit) {}
  bool enabled() const { return limit_ != 0; }
  void add(const trace_event& event) {
    if (events_.size() < limit_) {
      events_.push_back(event);
    } else {
      ++dropped_;
    }
  }
  const std::vector<trace_event>& events() const { return events_; }
  uint64_t dropped() const { return dropped_; }

 private:
  size_t limit_;
  std::vector<trace_event> events_;
  uint64_t dropped_ = 0;
};

// One JSON object a line: {"t":ns,"port":…,"kind":"land",…}.
void trace_write_jsonl(std::ostream& out, uint32_t port, const std::vector<trace_event>& events);
// The Trace Event Format that Perfetto and chrome://tracing open: a process for the port, a thread for each queue pair.
void trace_write_chrome(std::ostream& out, uint32_t port, const std::vector<trace_event>& events);

} // namespace ep::nic::efa
