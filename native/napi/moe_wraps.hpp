// What JS holds of a buffer for experts: the buffer, and the routing of one call.
#pragma once

#include <vector>

#include "gpu/blocks.hpp"
#include "kernel_run.hpp"

#include "ep/abi/moe.h"

namespace ep::binding {

inline uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }
constexpr uint64_t rounded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Everything that is the same in every call. HAZARD: the memory is held weakly, as in `Dispatch`: memory that was closed must not stay mapped until JS objects are
// collected.
struct moe_contents {
  std::weak_ptr<symmetric_memory> memory;
  ep_moe_buffer buffer{};
  simt_options simt;
  int32_t rank = 0;
  uint32_t world_size = 0;
  uint32_t local_experts = 0;
  std::vector<int32_t> replica_rank;
  std::vector<int32_t> replica_expert;
  std::vector<uint32_t> rank_begin;
  std::vector<ep_moe_peer> peers;
};

// Replicas that this rank may take of each expert. Replaced as a whole when ranks come or go: a running call keeps the one that it began with.
struct moe_candidates {
  std::vector<uint32_t> begin;
  std::vector<uint32_t> replicas;
};

// Reads {mode, payload, resultPayload, hidden, maxTokens, topK, calls, alignment, recvRows, staged, parts, firstSignal, experts, replicaRank, replicaExpert, rankBegin},
// every bound checked. Throws.
void describe_moe(moe_contents& made, const Napi::Object& from, const ep_memory_handle& place);
std::shared_ptr<const moe_candidates> candidates_of(const ep_moe_buffer& buffer, Napi::Value begin, Napi::Value replicas);

struct moe_buffer_wrap : Napi::ObjectWrap<moe_buffer_wrap> {
  static constexpr napi_type_tag type_tag{0x65706d6f65627566ull, 21};
  static constexpr const char* type_name = "MoeBuffer";
  static void define(Napi::Env env, Napi::Object exports);
  explicit moe_buffer_wrap(const Napi::CallbackInfo& info);
  void set_candidates(const Napi::CallbackInfo& info);
  void forget(const Napi::CallbackInfo& info);
  Napi::Value dispatch(const Napi::CallbackInfo& info);
  Napi::Value combine(const Napi::CallbackInfo& info);
  Napi::Value release(const Napi::CallbackInfo& info);
  Napi::Value steps(const Napi::CallbackInfo& info);

  std::shared_ptr<moe_contents> native;
  std::shared_ptr<const moe_candidates> candidates;
};

// The arrays of ep_moe_routing, and what a call reports by rank, in memory that JS sees through a window.
struct moe_routing_wrap : Napi::ObjectWrap<moe_routing_wrap> {
  static constexpr napi_type_tag type_tag{0x65706d6f65726f75ull, 22};
  static constexpr const char* type_name = "MoeRouting";
  static void define(Napi::Env env, Napi::Object exports);
  explicit moe_routing_wrap(const Napi::CallbackInfo& info);
  Napi::Value window(const Napi::CallbackInfo& info);
  Napi::Value layout(const Napi::CallbackInfo& info);
  Napi::Value mirror(const Napi::CallbackInfo& info);

  struct contents {
    std::shared_ptr<const moe_contents> of;
    std::shared_ptr<const void> memory; // which the arrays lie in
    uint8_t* data = nullptr;
    uint64_t bytes = 0;
    ep_moe_routing routing{};
    uint64_t ranks = 0;   // address of uint64_t[world_size]
    uint64_t wait_ns = 0; // address of uint64_t[world_size]
    // Bytes of `data`: what JS fills in for a dispatch ends where `filled` says; what it looks at afterwards is from `report` on, of a combine to `filled`, of a dispatch to `seen`.
    uint64_t report = 0;
    uint64_t filled = 0;
    // In front of `report`: zeros of the host, where the device has the status of the call that runs. So what the host fills in wipes what an earlier call has left.
    uint64_t status = 0;
    uint64_t seen = 0;
    // Offset and elements of each array, in the order of NativeMoeRouting.layout() (js/moe.ts).
    std::vector<double> layout;
    // Over a GPU: the same bytes on the device, and weights behind them. Kernels know only these.
    std::shared_ptr<const gpu::device_block> mirror;
    uint64_t mirrored_weights() const { return mirror->address() + bytes; }
    uint64_t mirrored_status() const { return mirror->address() + status; }
  };
  std::shared_ptr<contents> native;
};

} // namespace ep::binding
