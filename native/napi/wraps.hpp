// The classes that JS holds. Each owns one native object through a shared_ptr, so that finalizers only drop a reference, in whatever order they run.
#pragma once

#include "env_state.hpp"
#include "host_memory.hpp"
#include "memory.hpp"
#include "rank.hpp"
#include "stream.hpp"
#include "team.hpp"
#include "watcher.hpp"

#include "ep/abi/dispatch.h"

namespace ep::binding {

struct host_memory_wrap : Napi::ObjectWrap<host_memory_wrap> {
  static constexpr napi_type_tag type_tag{0x6570686f73746d65ull, 1};
  static constexpr const char* type_name = "HostMemory";
  static void define(Napi::Env env, Napi::Object exports);
  explicit host_memory_wrap(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value window(const Napi::CallbackInfo& info);
  std::shared_ptr<host_memory> native;
};

struct rank_wrap : Napi::ObjectWrap<rank_wrap> {
  static constexpr napi_type_tag type_tag{0x657072616e6b6374ull, 2};
  static constexpr const char* type_name = "RankContext";
  static void define(Napi::Env env, Napi::Object exports);
  explicit rank_wrap(const Napi::CallbackInfo& info);
  Napi::Value handle(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  void replace(const Napi::CallbackInfo& info);
  void vacate(const Napi::CallbackInfo& info);
  Napi::Value gone(const Napi::CallbackInfo& info);
  Napi::Value ended(const Napi::CallbackInfo& info);
  void inform(const Napi::CallbackInfo& info);
  Napi::Value life(const Napi::CallbackInfo& info);
  Napi::Value team_segment(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  // Shared with the environment's end, which may come after this wrap's finalizer.
  struct state {
    std::shared_ptr<rank_context> context; // null after close(): what still uses it holds its own reference
    std::unique_ptr<watcher> watches; // made at the first watch
    void stop(bool orderly);
  };
  std::shared_ptr<state> native;
  std::vector<std::shared_ptr<segment>> team_segments; // made for teams that have not been joined yet
  uint64_t end_key = 0;

  // Begins an operation that ends when `ready` says so, or as `watch` (watcher.hpp) tells.
  uint64_t watch_until(Napi::Env env, double timeout_ms, std::vector<int32_t> awaited, std::function<bool(outcome&)> ready);
  rank_context& open(Napi::Env env) const;
};

struct team_wrap : Napi::ObjectWrap<team_wrap> {
  static constexpr napi_type_tag type_tag{0x65707465616d3331ull, 3};
  static constexpr const char* type_name = "Team";
  static void define(Napi::Env env, Napi::Object exports);
  explicit team_wrap(const Napi::CallbackInfo& info);
  Napi::Value barrier_try(const Napi::CallbackInfo& info);
  Napi::Value barrier_watch(const Napi::CallbackInfo& info);
  void barrier_leave(const Napi::CallbackInfo& info);
  Napi::Value missing(const Napi::CallbackInfo& info);
  void exchange_put(const Napi::CallbackInfo& info);
  Napi::Value exchange_get(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);

  team& open(Napi::Env env) const;
  std::shared_ptr<team> native; // null after release()
  Napi::ObjectReference rank;
};

struct memory_wrap : Napi::ObjectWrap<memory_wrap> {
  static constexpr napi_type_tag type_tag{0x65706d656d6f7279ull, 4};
  static constexpr const char* type_name = "SymmetricMemory";
  static void define(Napi::Env env, Napi::Object exports);
  explicit memory_wrap(const Napi::CallbackInfo& info);
  Napi::Value handle(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  void replace(const Napi::CallbackInfo& info);
  Napi::Value device_handle(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value signal_address(const Napi::CallbackInfo& info);
  Napi::Value window(const Napi::CallbackInfo& info);
  Napi::Value peek(const Napi::CallbackInfo& info);
  void put(const Napi::CallbackInfo& info);
  void put_frame(const Napi::CallbackInfo& info);
  void signal_frame(const Napi::CallbackInfo& info);
  void put_bytes(const Napi::CallbackInfo& info);
  void put_value(const Napi::CallbackInfo& info);
  void put_signal(const Napi::CallbackInfo& info);
  void fence(const Napi::CallbackInfo& info);
  void get(const Napi::CallbackInfo& info);
  void get_bytes(const Napi::CallbackInfo& info);
  void signal(const Napi::CallbackInfo& info);
  Napi::Value atomic(const Napi::CallbackInfo& info);
  Napi::Value wait_try(const Napi::CallbackInfo& info);
  Napi::Value wait_watch(const Napi::CallbackInfo& info);
  Napi::Value changed_try(const Napi::CallbackInfo& info);
  Napi::Value words_try(const Napi::CallbackInfo& info);
  Napi::Value words_watch(const Napi::CallbackInfo& info);
  void release(const Napi::CallbackInfo& info);

  symmetric_memory& made(Napi::Env env) const;
  symmetric_memory& open(Napi::Env env) const; // made, and connected
  std::shared_ptr<symmetric_memory> native; // null after release()
  Napi::ObjectReference rank;
};

struct dispatch_program_wrap : Napi::ObjectWrap<dispatch_program_wrap> {
  static constexpr napi_type_tag type_tag{0x6570646973707072ull, 5};
  static constexpr const char* type_name = "DispatchProgram";
  static void define(Napi::Env env, Napi::Object exports);
  explicit dispatch_program_wrap(const Napi::CallbackInfo& info);
  struct contents {
    std::vector<ep_dispatch_entry> entries;
    uint32_t chunk_rows = 1;
    uint32_t chunk_count = 0;
  };
  std::shared_ptr<const contents> native;
};

struct sum_program_wrap : Napi::ObjectWrap<sum_program_wrap> {
  static constexpr napi_type_tag type_tag{0x657073756d707267ull, 6};
  static constexpr const char* type_name = "ReplicaSumProgram";
  static void define(Napi::Env env, Napi::Object exports);
  explicit sum_program_wrap(const Napi::CallbackInfo& info);
  struct contents {
    std::vector<uint64_t> shard_row;
    std::vector<uint64_t> shard_rows;
    std::vector<uint64_t> replica_begin;
    std::vector<uint64_t> replica_row;
  };
  std::shared_ptr<const contents> native;
};

// A dispatch with everything but its sources: one for each bound dispatch and lease.
struct dispatch_wrap : Napi::ObjectWrap<dispatch_wrap> {
  static constexpr napi_type_tag type_tag{0x6570646973706174ull, 10};
  static constexpr const char* type_name = "Dispatch";
  static void define(Napi::Env env, Napi::Object exports);
  explicit dispatch_wrap(const Napi::CallbackInfo& info);
  struct contents;
  std::shared_ptr<const contents> native;
};

struct stream_wrap : Napi::ObjectWrap<stream_wrap> {
  static constexpr napi_type_tag type_tag{0x657073747265616dull, 7};
  static constexpr const char* type_name = "HostStream";
  static void define(Napi::Env env, Napi::Object exports);
  explicit stream_wrap(const Napi::CallbackInfo& info);
  Napi::Value record(const Napi::CallbackInfo& info);
  Napi::Value wait_event(const Napi::CallbackInfo& info);
  Napi::Value copy(const Napi::CallbackInfo& info);
  Napi::Value dispatch(const Napi::CallbackInfo& info);
  Napi::Value dispatch_steps(const Napi::CallbackInfo& info);
  Napi::Value compat_dispatch(const Napi::CallbackInfo& info);
  Napi::Value attention_forward(const Napi::CallbackInfo& info);
  Napi::Value attention_backward(const Napi::CallbackInfo& info);
  Napi::Value ping_pong(const Napi::CallbackInfo& info);
  Napi::Value put_stream(const Napi::CallbackInfo& info);
  Napi::Value gin_putvalue(const Napi::CallbackInfo& info);
  Napi::Value barriers(const Napi::CallbackInfo& info);
  Napi::Value depth(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  host_stream& open(Napi::Env env) const;
  uint64_t launch(Napi::Env env, host_stream::task work);
  // Shared with the environment's end, which may come after this wrap's finalizer. `stream` is null after close().
  struct holder {
    std::unique_ptr<host_stream> stream;
  };
  std::shared_ptr<holder> native;
  uint64_t end_key = 0;
};

struct event_wrap : Napi::ObjectWrap<event_wrap> {
  static constexpr napi_type_tag type_tag{0x65706576656e7431ull, 8};
  static constexpr const char* type_name = "StreamEvent";
  static void define(Napi::Env env, Napi::Object exports);
  explicit event_wrap(const Napi::CallbackInfo& info);
  Napi::Value done(const Napi::CallbackInfo& info);
  std::shared_ptr<stream_event> native;
};

Napi::ArrayBuffer window_over(Napi::Env env, uint8_t* data, uint64_t size, std::shared_ptr<const void> keep);
std::vector<ep_segment_handle> segment_handles(Napi::Value value, const char* what);
std::vector<int32_t> ranks_of(Napi::Value value, const char* what); // of an Int32Array; empty where it is absent

// The memory behind ep_memory_handle bytes. Refuses what is not a handle, a handle of another version, and one whose memory was closed.
std::shared_ptr<symmetric_memory> memory_of_handle(Napi::Value value);

// Whether row `last` (from 0) and those before it lie within `available` bytes. Divided instead of multiplied: last * stride may pass 2^64.
inline bool rows_fit(uint64_t last, uint64_t stride, uint64_t row_bytes, uint64_t available) {
  return row_bytes <= available && (stride == 0 || last <= (available - row_bytes) / stride);
}

// Keeps what an operand points into alive while a kernel uses it: a HostMemory or a SymmetricMemory.
struct operand {
  uint64_t address;
  uint64_t byte_length;
  std::shared_ptr<const void> keep;
};
operand operand_of(Napi::Value value, const char* what);

} // namespace ep::binding
