// The classes of GPUs that JS holds. Nothing here knows CUDA: see cuda/table.h.
#pragma once

#include "gpu/calls.hpp"
#include "gpu/group.hpp"
#include "gpu/nccl.hpp"
#include "gpu/nvshmem.hpp"
#include "gpu/stream.hpp"
#include "wraps.hpp"

#include "ep/abi/compat.h"

namespace ep::binding {

struct gpu_library_wrap : Napi::ObjectWrap<gpu_library_wrap> {
  static constexpr napi_type_tag type_tag{0x65706770756c6962ull, 20};
  static constexpr const char* type_name = "GpuLibrary";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_library_wrap(const Napi::CallbackInfo& info);
  Napi::Value devices(const Napi::CallbackInfo& info);
  Napi::Value find(const Napi::CallbackInfo& info);
  Napi::Value held(const Napi::CallbackInfo& info);
  gpu::library_ref native;
};

struct gpu_memory_wrap : Napi::ObjectWrap<gpu_memory_wrap> {
  static constexpr napi_type_tag type_tag{0x657067707562756cull, 21};
  static constexpr const char* type_name = "GpuMemory";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_memory_wrap(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value byte_length(const Napi::CallbackInfo& info);
  Napi::Value mapped(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  std::shared_ptr<const gpu::device_block> native; // null after release()
  std::weak_ptr<const void> mapping;
};

struct gpu_pinned_wrap : Napi::ObjectWrap<gpu_pinned_wrap> {
  static constexpr napi_type_tag type_tag{0x657067707570696eull, 22};
  static constexpr const char* type_name = "GpuPinned";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_pinned_wrap(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value window(const Napi::CallbackInfo& info);
  std::shared_ptr<const gpu::pinned_block> native;
};

struct gpu_event_wrap : Napi::ObjectWrap<gpu_event_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075657674ull, 23};
  static constexpr const char* type_name = "GpuEvent";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_event_wrap(const Napi::CallbackInfo& info);
  Napi::Value reached(const Napi::CallbackInfo& info);
  Napi::Value elapsed_ms(const Napi::CallbackInfo& info);
  gpu::library_ref of;
  std::shared_ptr<gpu::event> native;
};

struct gpu_symmetric_wrap : Napi::ObjectWrap<gpu_symmetric_wrap> {
  static constexpr napi_type_tag type_tag{0x657067707573796dull, 24};
  static constexpr const char* type_name = "GpuSymmetricMemory";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_symmetric_wrap(const Napi::CallbackInfo& info);
  Napi::Value handle(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  Napi::Value device_handle(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value signal_address(const Napi::CallbackInfo& info);
  Napi::Value peek(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  gpu::symmetric_memory& open(Napi::Env env) const; // made, and connected
  std::shared_ptr<gpu::symmetric_memory> native;    // null after release()
};

struct gpu_calls_wrap : Napi::ObjectWrap<gpu_calls_wrap> {
  static constexpr napi_type_tag type_tag{0x657067707563616cull, 25};
  static constexpr const char* type_name = "GpuCalls";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_calls_wrap(const Napi::CallbackInfo& info);
  Napi::Value shape(const Napi::CallbackInfo& info);
  void rebase(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  gpu::calls& open(Napi::Env env) const;
  std::shared_ptr<gpu::calls> native; // null after release()
};

// A dispatch with everything but its sources, for every lease.
struct gpu_dispatch_wrap : Napi::ObjectWrap<gpu_dispatch_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075646973ull, 26};
  static constexpr const char* type_name = "GpuDispatch";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_dispatch_wrap(const Napi::CallbackInfo& info);
  struct contents;
  std::shared_ptr<const contents> native;
};

// What per-token calls of a rank share: the memory that they send through, and their part of the device.
struct gpu_compat_wrap : Napi::ObjectWrap<gpu_compat_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075636f6dull, 34};
  static constexpr const char* type_name = "GpuCompat";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_compat_wrap(const Napi::CallbackInfo& info);
  Napi::Value shape(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  struct contents {
    std::shared_ptr<gpu::symmetric_memory> memory;
    std::shared_ptr<gpu::share> share;
  };
  std::shared_ptr<const contents> native; // null after release()
};

// A per-token dispatch with everything but its tensors.
struct gpu_compat_dispatch_wrap : Napi::ObjectWrap<gpu_compat_dispatch_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075636f64ull, 35};
  static constexpr const char* type_name = "GpuCompatDispatch";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_compat_dispatch_wrap(const Napi::CallbackInfo& info);
  struct contents;
  std::shared_ptr<const contents> native;
};

struct gpu_group_arena_wrap : Napi::ObjectWrap<gpu_group_arena_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075676172ull, 32};
  static constexpr const char* type_name = "GpuGroupArena";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_group_arena_wrap(const Napi::CallbackInfo& info);
  Napi::Value beside(const Napi::CallbackInfo& info);
  Napi::Value shape(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  const std::shared_ptr<gpu::group_arena>& open(Napi::Env env) const;
  std::shared_ptr<gpu::group_arena> native; // null after release()
};

struct gpu_group_wrap : Napi::ObjectWrap<gpu_group_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075677270ull, 31};
  static constexpr const char* type_name = "GpuGroup";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_group_wrap(const Napi::CallbackInfo& info);
  Napi::Value lay_out(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  gpu::group& open(Napi::Env env) const;
  std::shared_ptr<gpu::group> native; // null after release()
};

struct nccl_library_wrap : Napi::ObjectWrap<nccl_library_wrap> {
  static constexpr napi_type_tag type_tag{0x65706e63636c6c69ull, 40};
  static constexpr const char* type_name = "NcclLibrary";
  static void define(Napi::Env env, Napi::Object exports);
  explicit nccl_library_wrap(const Napi::CallbackInfo& info);
  Napi::Value version(const Napi::CallbackInfo& info);
  Napi::Value unique_id(const Napi::CallbackInfo& info);
  std::shared_ptr<const dl::nccl_symbols> native;
};

struct nccl_communicator_wrap : Napi::ObjectWrap<nccl_communicator_wrap> {
  static constexpr napi_type_tag type_tag{0x65706e63636c636full, 41};
  static constexpr const char* type_name = "NcclCommunicator";
  static void define(Napi::Env env, Napi::Object exports);
  explicit nccl_communicator_wrap(const Napi::CallbackInfo& info);
  Napi::Value open(const Napi::CallbackInfo& info);
  Napi::Value failed(const Napi::CallbackInfo& info);
  Napi::Value end(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  gpu::nccl_communicator& opened(Napi::Env env) const;
  // Shared with the environment's end, which may come after this wrap's finalizer. `made` is null after release().
  struct holder {
    std::shared_ptr<gpu::nccl_communicator> made;
  };
  std::shared_ptr<holder> native;
  uint64_t end_key = 0;
};

struct nvshmem_library_wrap : Napi::ObjectWrap<nvshmem_library_wrap> {
  static constexpr napi_type_tag type_tag{0x65706e7673686d6cull, 42};
  static constexpr const char* type_name = "NvshmemLibrary";
  static void define(Napi::Env env, Napi::Object exports);
  explicit nvshmem_library_wrap(const Napi::CallbackInfo& info);
  Napi::Value version(const Napi::CallbackInfo& info);
  Napi::Value unique_id(const Napi::CallbackInfo& info);
  Napi::Value here(const Napi::CallbackInfo& info);
  std::shared_ptr<const dl::nvshmem_symbols> native;
};

// A place in the process's world of NVSHMEM, and what is put on streams by it.
struct nvshmem_world_wrap : Napi::ObjectWrap<nvshmem_world_wrap> {
  static constexpr napi_type_tag type_tag{0x65706e7673686d77ull, 43};
  static constexpr const char* type_name = "NvshmemWorld";
  static void define(Napi::Env env, Napi::Object exports);
  explicit nvshmem_world_wrap(const Napi::CallbackInfo& info);
  Napi::Value meet(const Napi::CallbackInfo& info);
  Napi::Value failed(const Napi::CallbackInfo& info);
  Napi::Value facts(const Napi::CallbackInfo& info);
  Napi::Value take(const Napi::CallbackInfo& info);
  Napi::Value memory(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  Napi::Value window(const Napi::CallbackInfo& info);
  Napi::Value put(const Napi::CallbackInfo& info);
  Napi::Value put_value(const Napi::CallbackInfo& info);
  Napi::Value signal(const Napi::CallbackInfo& info);
  Napi::Value get(const Napi::CallbackInfo& info);
  Napi::Value quiet(const Napi::CallbackInfo& info);
  Napi::Value barrier(const Napi::CallbackInfo& info);
  std::shared_ptr<gpu::nvshmem_world> native;
  // Shared with the environment's end. `opening` is null where nobody waits.
  struct holder {
    std::shared_ptr<gpu::nvshmem_opening> opening;
  };
  std::shared_ptr<holder> waits;

 private:
  struct place;
  gpu::stream& on(const Napi::CallbackInfo& info) const;
  place reached(const Napi::CallbackInfo& info, size_t memory) const;
  void raise_signal(const Napi::CallbackInfo& info, gpu::stream& stream, const place& at, size_t op) const;
  Napi::Value followed(const Napi::CallbackInfo& info, std::vector<std::shared_ptr<const void>> keep) const;
};

struct nvshmem_part_wrap : Napi::ObjectWrap<nvshmem_part_wrap> {
  static constexpr napi_type_tag type_tag{0x65706e7673686d70ull, 44};
  static constexpr const char* type_name = "NvshmemPart";
  static void define(Napi::Env env, Napi::Object exports);
  explicit nvshmem_part_wrap(const Napi::CallbackInfo& info);
  Napi::Value offset(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  std::shared_ptr<const gpu::nvshmem_world::part> native; // null after release()
};

// Core attention with everything but its tensors.
struct gpu_attention_wrap : Napi::ObjectWrap<gpu_attention_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075617474ull, 29};
  static constexpr const char* type_name = "GpuAttention";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_attention_wrap(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  struct contents;
  std::shared_ptr<const contents> native; // null after release()
};

struct gpu_graph_wrap : Napi::ObjectWrap<gpu_graph_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075677261ull, 27};
  static constexpr const char* type_name = "GpuGraph";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_graph_wrap(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);
  struct contents {
    gpu::library_ref of;
    void* graph = nullptr;
    std::vector<gpu::launched_kernel> kernels;       // of its calls, the same in every replay
    std::vector<std::shared_ptr<const void>> keep;   // what its nodes point into
    std::shared_ptr<rank_context> context;           // whose peers its calls wait for
    std::vector<std::shared_ptr<gpu::peer_losses>> losses; // of calls that go on without peers
    std::vector<ep_cuda_piece> reports;              // what the host looks at when a replay has ended, copied behind all of its calls
    mutable std::atomic<uint32_t> replays{0};        // that have not ended
    std::string failed;                              // why a call in it is not whole; empty: all are
    // A later call of what an earlier one has reported from reports in its place.
    void report(const ep_cuda_piece& piece);
    ~contents();
  };
  std::shared_ptr<const contents> native; // null after release()
};

struct gpu_stream_wrap : Napi::ObjectWrap<gpu_stream_wrap> {
  static constexpr napi_type_tag type_tag{0x6570677075737472ull, 28};
  static constexpr const char* type_name = "GpuStream";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gpu_stream_wrap(const Napi::CallbackInfo& info);
  void copy(const Napi::CallbackInfo& info);
  void fill(const Napi::CallbackInfo& info);
  void record(const Napi::CallbackInfo& info);
  void wait(const Napi::CallbackInfo& info);
  Napi::Value follow(const Napi::CallbackInfo& info);
  Napi::Value dispatch(const Napi::CallbackInfo& info);
  void grant(const Napi::CallbackInfo& info);
  void compat_check(const Napi::CallbackInfo& info);
  Napi::Value compat_dispatch(const Napi::CallbackInfo& info);
  ep_compat_args compat_call(const Napi::CallbackInfo& info, size_t at, std::vector<std::shared_ptr<const void>>& keep);
  Napi::Value group_call(const Napi::CallbackInfo& info);
  Napi::Value nccl_call(const Napi::CallbackInfo& info);
  Napi::Value attention_forward(const Napi::CallbackInfo& info);
  Napi::Value attention_backward(const Napi::CallbackInfo& info);
  Napi::Value attention(const Napi::CallbackInfo& info, bool backward);
  Napi::Value experts_forward(const Napi::CallbackInfo& info);
  void capture_begin(const Napi::CallbackInfo& info);
  Napi::Value capture_end(const Napi::CallbackInfo& info);
  Napi::Value launch_graph(const Napi::CallbackInfo& info);
  Napi::Value depth(const Napi::CallbackInfo& info);
  void abandon(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  gpu::stream& open(Napi::Env env) const;
  void check(Napi::Env env, int error, const char* what) const;
  // An operation that ends when the stream has come here.
  uint64_t begin(Napi::Env env, gpu::stream::watch how);
  // Shared with the environment's end, which may come after this wrap's finalizer. `stream` is null after close().
  struct holder {
    std::shared_ptr<gpu::stream> stream;
  };
  std::shared_ptr<holder> native;
  std::shared_ptr<gpu_graph_wrap::contents> capturing; // between capture_begin and capture_end
  uint64_t end_key = 0;
};

// Memory that a GPU reaches: a GpuMemory, a GpuSymmetricMemory (this rank's part), a GpuPinned if `host`, or the address of anybody's device memory, a BigInt,
// which its owner keeps alive.
std::vector<ep_gpu_memory_handle> gpu_handles_of(Napi::Value value); // one of each rank, concatenated
operand gpu_operand_of(Napi::Value value, const char* what, const gpu::stream& on, bool host);

} // namespace ep::binding
