// A buffer for experts over the memory of a GPU.
#pragma once

#include "gpu/peer_losses.hpp"
#include "gpu/share.hpp"
#include "gpu_wraps.hpp"
#include "moe_wraps.hpp"

namespace ep::binding {

// What kernels read besides the rows lies on the device: a look across the bus takes longer than most rows do to copy. Pinned memory holds what the host fills in of it.
struct gpu_moe_contents : moe_contents {
  std::weak_ptr<gpu::symmetric_memory> device_memory;
  std::shared_ptr<gpu::share> share;
  std::shared_ptr<gpu::peer_losses> losses;
  std::shared_ptr<const gpu::device_block> tables; // experts; then the tables of candidates
  std::shared_ptr<const gpu::pinned_block> staged_candidates; // of each table
  // By table: what lies on the device. A slot has two: of calls of all that are left, replays of graphs among them, and of calls that leave out more.
  std::vector<std::shared_ptr<const moe_candidates>> placed;
  std::shared_ptr<const gpu::device_block> peers_block;
  uint64_t first_candidates = 0; // in bytes, from the beginning of `tables`
  uint64_t candidate_bytes = 0;  // of a table
};

struct gpu_moe_buffer_wrap : Napi::ObjectWrap<gpu_moe_buffer_wrap> {
  static constexpr napi_type_tag type_tag{0x65706770756d6f65ull, 30};
  static constexpr const char* type_name = "GpuMoeBuffer";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_moe_buffer_wrap(const Napi::CallbackInfo& info);
  Napi::Value shape(const Napi::CallbackInfo& info);
  void set_candidates(const Napi::CallbackInfo& info);
  void place_candidates_now(const Napi::CallbackInfo& info);
  Napi::Value dispatch(const Napi::CallbackInfo& info);
  Napi::Value combine(const Napi::CallbackInfo& info);
  Napi::Value release(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  std::shared_ptr<gpu_moe_contents> native; // null after close()
  std::shared_ptr<const moe_candidates> candidates;
};

// Buffers of ranks of one opening whose calls are launched together. They may be closed before it, which then takes no calls.
struct gpu_moe_union_wrap : Napi::ObjectWrap<gpu_moe_union_wrap> {
  static constexpr napi_type_tag type_tag{0x65706770756d6f65ull, 33};
  static constexpr const char* type_name = "GpuMoeUnion";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_moe_union_wrap(const Napi::CallbackInfo& info);
  Napi::Value dispatch(const Napi::CallbackInfo& info);
  Napi::Value combine(const Napi::CallbackInfo& info);

  std::vector<Napi::ObjectReference> buffers;
};

// Null, and `as` unchanged, unless the value is an open GpuMoeBuffer.
const gpu_moe_contents* gpu_moe_of(Napi::Value value, std::shared_ptr<const moe_contents>& as);
// Pinned memory for the host, and what mirrors it on the device.
void place_in_pinned(Napi::Env env, const gpu_moe_contents& of, moe_routing_wrap::contents& made);

} // namespace ep::binding
