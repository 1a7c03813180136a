#include "trace.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <ostream>
#include <set>
#include <string>

#include "ep/abi/mlx5_wqe.h"

namespace ep::nic {
namespace {

const char* opcode_name(uint8_t opcode) {
  switch (opcode) {
    case EP_MLX5_OPCODE_NOP: return "NOP";
    case EP_MLX5_OPCODE_RDMA_WRITE: return "RDMA_WRITE";
    case EP_MLX5_OPCODE_RDMA_WRITE_IMM: return "RDMA_WRITE_IMM";
    case EP_MLX5_OPCODE_RDMA_READ: return "RDMA_READ";
    case EP_MLX5_OPCODE_ATOMIC_CS: return "ATOMIC_CS";
    case EP_MLX5_OPCODE_ATOMIC_FA: return "ATOMIC_FA";
    case EP_MLX5_OPCODE_ATOMIC_MASKED_CS: return "ATOMIC_MASKED_CS";
    case EP_MLX5_OPCODE_ATOMIC_MASKED_FA: return "ATOMIC_MASKED_FA";
    default: return "UNKNOWN";
  }
}

const char* kind_name(trace_kind kind) {
  switch (kind) {
    case trace_kind::request: return "request";
    case trace_kind::doorbell: return "doorbell";
    case trace_kind::command: return "command";
    case trace_kind::violation: return "violation";
  }
  return "unknown";
}

std::string hex64(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "\"0x%" PRIx64 "\"", value);
  return text;
}

// Addresses and keys as text: JSON numbers are exact to 2^53 only. Notes are static texts of this folder, without quotes or backslashes.
void write_fields(std::ostream& out, const trace_event& event) {
  switch (event.kind) {
    case trace_kind::request:
      out << "\"qpn\":" << event.qpn << ",\"index\":" << event.index << ",\"opcode\":\"" << opcode_name(event.opcode) << "\",\"peer\":" << event.peer_port
          << ",\"raddr\":" << hex64(event.address) << ",\"rkey\":" << hex64(event.rkey) << ",\"length\":" << event.length << ",\"psn\":" << event.psn
          << ",\"tries\":" << +event.tries << ",\"syndrome\":" << +event.syndrome;
      break;
    case trace_kind::doorbell: out << "\"qpn\":" << event.qpn << ",\"producer\":" << event.index; break;
    case trace_kind::command: out << "\"command\":" << hex64(event.command) << ",\"object\":" << event.qpn << ",\"status\":" << +event.syndrome; break;
    case trace_kind::violation: out << "\"qpn\":" << event.qpn << ",\"index\":" << event.index << ",\"found\":" << hex64(event.address) << ",\"expected\":" << hex64(event.length); break;
  }
  if (event.note != nullptr) out << ",\"note\":\"" << event.note << '"';
  if (event.wqe_bytes == 0) return;
  out << ",\"wqe\":\"";
  for (uint32_t i = 0; i < std::min<size_t>(event.wqe_bytes, event.wqe.size()); ++i) {
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

void trace_log::add(const trace_event& event) {
  if (events_.size() < limit_) {
    events_.push_back(event);
  } else {
    ++dropped_;
  }
}

void trace_write_jsonl(std::ostream& out, uint32_t port, const std::vector<trace_event>& events) {
  for (const trace_event& event : events) {
    out << "{\"t\":" << event.begin_ns << ",\"end\":" << event.end_ns << ",\"port\":" << port << ",\"kind\":\"" << kind_name(event.kind) << "\",";
    write_fields(out, event);
    out << "}\n";
  }
}

void trace_write_chrome(std::ostream& out, uint32_t port, const std::vector<trace_event>& events) {
  out << "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  out << "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" << port << ",\"args\":{\"name\":\"mlx5 port " << port << "\"}}";
  std::set<uint32_t> named;
  for (const trace_event& event : events) {
    if (named.insert(event.qpn).second) {
      out << ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" << port << ",\"tid\":" << event.qpn << ",\"args\":{\"name\":\"qp " << event.qpn << "\"}}";
    }
    const bool request = event.kind == trace_kind::request;
    out << ",\n{\"name\":\"" << (request ? opcode_name(event.opcode) : kind_name(event.kind)) << "\",\"cat\":\"" << kind_name(event.kind) << "\",\"ph\":\""
        << (request ? "X" : "i") << "\",\"pid\":" << port << ",\"tid\":" << event.qpn << ",\"ts\":" << microseconds(event.begin_ns);
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

} // namespace ep::nic
