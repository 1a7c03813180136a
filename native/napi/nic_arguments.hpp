// What the bindings of all NICs take from JS in the same way.
#pragma once

#include <map>
#include <sstream>
#include <vector>

#include "wraps.hpp"

namespace ep::binding {

inline const symmetric_memory& memory_argument(Napi::Value value) { return unwrap<memory_wrap>(value, "memory").open(value.Env()); }

inline uint64_t checked_range(Napi::Env env, Napi::Value offset, uint64_t bytes, uint64_t available, const char* what) {
  const uint64_t at = arg_size(offset, what);
  if (at > available || bytes > available - at) {
    throw_invalid(env, std::string(what) + " " + std::to_string(at) + " + " + std::to_string(bytes) + " exceed " + std::to_string(available) + " bytes");
  }
  return at;
}

inline std::vector<std::vector<uint8_t>> blobs_of(Napi::Value value, const char* what) {
  if (!value.IsArray()) throw_invalid(value.Env(), std::string(what) + " must be an array");
  const auto list = value.As<Napi::Array>();
  std::vector<std::vector<uint8_t>> blobs;
  for (uint32_t i = 0; i < list.Length(); ++i) {
    const byte_span bytes = arg_bytes(list.Get(i), what);
    blobs.emplace_back(bytes.data, bytes.data + bytes.size);
  }
  return blobs;
}

inline int32_t peer_argument(Napi::Value value, const rank_context& context) {
  const int32_t peer = arg_int(value, "peer");
  if (peer < 0 || peer >= context.world_size()) {
    throw_invalid(value.Env(), "peer " + std::to_string(peer) + " is not in a world of " + std::to_string(context.world_size()));
  }
  return peer;
}

// Bytes of a word that a request carries, and where it lies: 1, 2, 4 or 8, aligned.
inline uint64_t word_bytes(Napi::Value width) {
  const uint64_t bytes = arg_size(width, "width");
  if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) throw_invalid(width.Env(), "width must be 1, 2, 4 or 8, got " + std::to_string(bytes));
  return bytes;
}
inline uint64_t word_offset(Napi::Value value, uint64_t bytes, uint64_t available) {
  const uint64_t offset = checked_range(value.Env(), value, bytes, available, "byteOffset");
  if (offset % bytes != 0) throw_invalid(value.Env(), "a word of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " is not aligned");
  return offset;
}

// What a software NIC did, as `format` says: jsonl (unless given) or chrome.
template <class Device> Napi::Value trace_text(Napi::Value format, const Device& device) {
  const std::string asked = format.IsUndefined() ? "jsonl" : format.ToString().Utf8Value();
  if (asked != "jsonl" && asked != "chrome") throw_invalid(format.Env(), "a trace is written as jsonl or chrome, not as " + asked);
  std::ostringstream out;
  if (asked == "jsonl") device.write_trace_jsonl(out);
  else device.write_trace_chrome(out);
  return Napi::String::New(format.Env(), out.str());
}

// Memory of the caller that a NIC may read and write locally.
struct adopted_memory {
  uint64_t address;
  uint64_t byte_length;
  std::shared_ptr<const void> keep; // while it lives, the registration does
};
struct adopted_memories {
  std::map<uint64_t, adopted_memory> known;
  uint64_t next = 1;
};

// A HostMemory, a SymmetricMemory, or the number of an adopted memory.
inline operand local_operand(const adopted_memories& adopted, Napi::Value value, const char* what) {
  if (!value.IsNumber()) return operand_of(value, what);
  const auto at = adopted.known.find(arg_size(value, what));
  if (at == adopted.known.end()) throw_failure(value.Env(), {EP_STATUS_CLOSED, 0, std::string(what) + " is an adopted memory that was closed"});
  return {at->second.address, at->second.byte_length, at->second.keep};
}

} // namespace ep::binding
