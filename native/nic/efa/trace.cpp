#include "trace.hpp"

#include <cinttypes>
#include <cstdio>
#include <ostream>
#include <set>
#include <string>

namespace ep::nic::efa {
namespace {

const char* opcode_name(uint8_t opcode) {
  switch (opcode) {
    case EP_EFA_OPCODE_SEND: return "SEND";
    case EP_EFA_OPCODE_RDMA_READ: return "RDMA_READ";
    case EP_EFA_OPCODE_RDMA_WRITE: return "RDMA_WRITE";
    default: return "UNKNOWN";
  }
}

const char* kind_name(const trace_event& event) {
  switch (event.kind) {
    case trace_kind::event: return stage_name(event.what);
    case trace_kind::request: return "request";
    case trace_kind::violation: return "violation";
  }
  return "unknown";
}

// Addresses and keys as text: JSON numbers are exact to 2^53 only.
std::string hex64(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "\"0x%" PRIx64 "\"", value);
  return text;
}

// Notes are static texts of this folder, without quotes or backslashes.
void write_fields(std::ostream& out, const trace_event& event) {
  out << "\"qpn\":" << event.qpn << ",\"number\":" << event.number;
  switch (event.kind) {
    case trace_kind::violation: out << ",\"writer\":" << event.writer << ",\"found\":" << hex64(event.address) << ",\"expected\":" << hex64(event.length); break;
    case trace_kind::event:
      if (event.what == stage::doorbell) {
        out << ",\"writer\":" << event.writer;
        break;
      }
      out << ",\"begin\":" << event.begin << ",\"status\":" << +event.status;
      [[fallthrough]];
    case trace_kind::request:
      out << ",\"opcode\":\"" << opcode_name(event.opcode) << "\",\"peer\":" << event.peer_port << ",\"peerQpn\":" << event.peer_qpn << ",\"raddr\":" << hex64(event.address)
          << ",\"rkey\":" << hex64(event.rkey) << ",\"length\":" << event.length;
      if (event.kind == trace_kind::request) out << ",\"status\":" << +event.status;
      break;
  }
  if (event.note != nullptr) out << ",\"note\":\"" << event.note << '"';
  if (event.wqe_bytes == 0) return;
  out << ",\"wqe\":\"";
  for (uint32_t i = 0; i < event.wqe_bytes; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", event.wqe[i]);
    out << digits;
  }
  out << '"';
}

std::string microseconds(int64_t ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03" PRId64, ns / 1000, ns % 1000);
  return text;
}

} // namespace

void trace_write_jsonl(std::ostream& out, uint32_t port, const std::vector<trace_event>& events) {
  for (const trace_event& event : events) {
    out << "{\"t\":" << event.begin_ns << ",\"end\":" << event.end_ns << ",\"port\":" << port << ",\"kind\":\"" << kind_name(event) << "\",";
    write_fields(out, event);
    out << "}\n";
  }
}

void trace_write_chrome(std::ostream& out, uint32_t port, const std::vector<trace_event>& events) {
  out << "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  out << "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" << port << ",\"args\":{\"name\":\"efa port " << port << "\"}}";
  std::set<uint32_t> named;
  for (const trace_event& event : events) {
    if (named.insert(event.qpn).second) {
      out << ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" << port << ",\"tid\":" << event.qpn << ",\"args\":{\"name\":\"qp " << event.qpn << "\"}}";
    }
    const bool request = event.kind == trace_kind::request;
    out << ",\n{\"name\":\"" << (request ? opcode_name(event.opcode) : kind_name(event)) << "\",\"cat\":\"" << kind_name(event) << "\",\"ph\":\"" << (request ? "X" : "i")
        << "\",\"pid\":" << port << ",\"tid\":" << event.qpn << ",\"ts\":" << microseconds(event.begin_ns);
    if (request) {
      out << ",\"dur\":" << microseconds(event.end_ns - event.begin_ns);
    } else {
      out << ",\"s\":\"t\"";
    }
    out << ",\"args\":{";
    write_fields(out, event);
    out << "}}";
  }
  out << "\n]}\n";
}

} // namespace ep::nic::efa
