// What a NIC did, in order: for oracles of tests (a signal never before its data) and for people (Perfetto, `ep wqe decode`).
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <vector>

namespace ep::nic {

enum class trace_kind : uint8_t { request, doorbell, command, violation };

struct trace_event {
  trace_kind kind = trace_kind::request;
  uint8_t opcode = 0;   // of the WQE
  uint8_t syndrome = 0; // 0: done. Of a command: its status
  uint8_t tries = 1;
  uint16_t index = 0;   // of the WQE; of a doorbell: the producer
  uint16_t command = 0; // opcode of a command
  uint32_t qpn = 0;
  uint32_t peer_port = 0;
  uint32_t rkey = 0;
  uint32_t psn = 0;
  int64_t begin_ns = 0; // the request was fetched, or the event happened
  int64_t end_ns = 0;   // the request was over
  uint64_t address = 0; // remote
  uint64_t length = 0;
  const char* note = nullptr; // static text: what went wrong
  uint32_t wqe_bytes = 0;
  std::array<uint8_t, 256> wqe{}; // its first four WQEBBs, more than any of our post path has
};

class trace_log {
 public:
  // Keeps the first `limit` events and counts the rest.
  explicit trace_log(size_t limit) : limit_(limit) {}
  bool enabled() const { return limit_ != 0; }
  void add(const trace_event& event);
  const std::vector<trace_event>& events() const { return events_; }
  uint64_t dropped() const { return dropped_; }

 private:
  size_t limit_;
  std::vector<trace_event> events_;
  uint64_t dropped_ = 0;
};

// One JSON object a line: {"t":ns,"port":…,"kind":"request",…}.
void trace_write_jsonl(std::ostream& out, uint32_t port, const std::vector<trace_event>& events);
// The Trace Event Format that Perfetto and chrome://tracing open: a process for the port, a thread for each queue pair.
void trace_write_chrome(std::ostream& out, uint32_t port, const std::vector<trace_event>& events);

} // namespace ep::nic
