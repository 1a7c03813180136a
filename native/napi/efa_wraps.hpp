// What JS holds of an EFA NIC: native/js/efa.ts.
#pragma once

#include "nic_arguments.hpp"

#include "efa/gin_context.hpp"
#include "nic/efa/soft_device.hpp"

namespace ep::binding {

// The NIC of a rank and its endpoints, for packages/efa-gda.
struct efa_wrap : Napi::ObjectWrap<efa_wrap> {
  static constexpr napi_type_tag type_tag{0x6570656661676461ull, 12};
  static constexpr const char* type_name = "EfaNic";
  static void define(Napi::Env env, Napi::Object exports);
  explicit efa_wrap(const Napi::CallbackInfo& info);
  Napi::Value device(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  Napi::Value signal_slots_left(const Napi::CallbackInfo& info);
  Napi::Value part_bytes(const Napi::CallbackInfo& info);
  Napi::Value gin_address_bytes(const Napi::CallbackInfo& info);
  Napi::Value add_memory(const Napi::CallbackInfo& info);
  void route(const Napi::CallbackInfo& info);
  void renew(const Napi::CallbackInfo& info);
  Napi::Value own_part(const Napi::CallbackInfo& info);
  void replace_part(const Napi::CallbackInfo& info);
  void remove_memory(const Napi::CallbackInfo& info);
  Napi::Value adopt(const Napi::CallbackInfo& info);
  void disown(const Napi::CallbackInfo& info);
  Napi::Value put(const Napi::CallbackInfo& info);
  Napi::Value put_value(const Napi::CallbackInfo& info);
  Napi::Value signal(const Napi::CallbackInfo& info);
  Napi::Value get(const Napi::CallbackInfo& info);
  Napi::Value accepted(const Napi::CallbackInfo& info);
  Napi::Value watch(const Napi::CallbackInfo& info);
  Napi::Value failure_of(const Napi::CallbackInfo& info);
  Napi::Value kernel_failure(const Napi::CallbackInfo& info);
  Napi::Value counts(const Napi::CallbackInfo& info);
  Napi::Value violations(const Napi::CallbackInfo& info);
  Napi::Value trace(const Napi::CallbackInfo& info);
  void set_faults(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  // Shared with the environment's end, which may come after this wrap's finalizer. `nic` is null after close().
  struct holder {
    std::shared_ptr<efa::rank_nic> nic;
    nic::efa::soft_device* soft = nullptr; // null: hardware
    adopted_memories adopted;
    // Not orderly: the environment went away without close().
    void stop(bool orderly) {
      if (!orderly && nic && soft != nullptr && soft->hub() != nullptr) soft->hub()->die();
      adopted.known.clear();
      if (nic) nic->stop();
      nic.reset();
    }
  };

  efa::rank_nic& open(Napi::Env env) const;
  rank_context& context(Napi::Env env) const { return unwrap<rank_wrap>(rank.Value(), "rank").open(env); }
  nic::efa::soft_device& emulator(Napi::Env env) const;
  operand prepared_operand(Napi::Value value, const char* what) const;
  efa::host_request request_to(const symmetric_memory& memory, const Napi::CallbackInfo& info) const;
  static void add_signal(efa::host_request& request, const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first);
  Napi::Value post(Napi::Env env, const symmetric_memory& memory, const efa::host_request& request) const;

  std::shared_ptr<holder> native;
  Napi::ObjectReference rank;
  uint64_t end_key = 0;
};

// A context of the GIN facade on such a NIC.
struct gin_wrap : Napi::ObjectWrap<gin_wrap> {
  static constexpr napi_type_tag type_tag{0x657065666167696eull, 13};
  static constexpr const char* type_name = "EfaGin";
  static void define(Napi::Env env, Napi::Object exports);
  explicit gin_wrap(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  void connect(const Napi::CallbackInfo& info);
  Napi::Value memory(const Napi::CallbackInfo& info);
  Napi::Value read_signal(const Napi::CallbackInfo& info);
  Napi::Value read_counter(const Napi::CallbackInfo& info);
  Napi::Value program(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo& info);

  efa::gin_context& open(Napi::Env env) const;
  // Shared with the environment's end, which may come after this wrap's finalizer. `context` is null after close(): a kernel that runs holds its own reference.
  struct holder {
    std::shared_ptr<efa::gin_context> context;
  };
  std::shared_ptr<holder> native;
  uint64_t end_key = 0;
};

void bind_efa_bench(Napi::Env env, Napi::Object exports);

} // namespace ep::binding
