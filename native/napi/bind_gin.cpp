#include "efa_wraps.hpp"
#include "kernel_run.hpp"

#include "device/fast.hpp"
#include "ep/device/gin_program.h"
#include "ep/device/gin_putvalue.h"

namespace ep::binding {

// (nic, {signals, counters, sharing})
gin_wrap::gin_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& nic = unwrap<efa_wrap>(info[0], "nic").native->nic;
  if (!nic) throw_failure(env, {EP_STATUS_CLOSED, 0, "the NIC was closed"});
  if (!info[1].IsObject()) throw_invalid(env, "a context is made from a description");
  const auto description = info[1].As<Napi::Object>();
  const auto number = [&](const char* name) { return static_cast<uint32_t>(std::min<uint64_t>(arg_size(description.Get(name), name), UINT32_MAX)); };
  auto made = efa::gin_context::create(nic, {number("signals"), number("counters"), number("sharing")});
  native = std::make_shared<holder>();
  native->context = value_or_throw(env, made);
  end_key = state_of(env).at_end([held = native] { held->context.reset(); });
  tag<gin_wrap>(info.This().As<Napi::Object>());
}

efa::gin_context& gin_wrap::open(Napi::Env env) const {
  if (!native->context) throw_failure(env, {EP_STATUS_CLOSED, 0, "the context was closed"});
  return *native->context;
}

Napi::Value gin_wrap::address(const Napi::CallbackInfo& info) {
  const std::vector<uint8_t> bytes = open(info.Env()).address();
  return bytes_copy(info.Env(), bytes.data(), bytes.size());
}

// (addresses: Uint8Array[] by rank)
void gin_wrap::connect(const Napi::CallbackInfo& info) {
  auto connected = open(info.Env()).connect(blobs_of(info[0], "addresses"));
  value_or_throw(info.Env(), connected);
}

// (memory) -> bytes of ep_efa_memory
Napi::Value gin_wrap::memory(const Napi::CallbackInfo& info) {
  auto found = open(info.Env()).memory_of(memory_argument(info[0]));
  const ep_efa_memory& bytes = value_or_throw(info.Env(), found);
  return bytes_copy(info.Env(), &bytes, sizeof bytes);
}

namespace {

// Ids are checked by the facade, which reads nothing for one that there is not.
template <class Read> Napi::Value count_of(const Napi::CallbackInfo& info, efa::gin_context& context, uint32_t limit, const char* what, const Read& read) {
  const uint64_t id = arg_size(info[0], what);
  if (id >= limit) throw_invalid(info.Env(), std::string(what) + " " + std::to_string(id) + " of a context with " + std::to_string(limit));
  const kernel_environment environment{};
  fast_context ctx{environment, 0, 1, nullptr};
  return Napi::BigInt::New(info.Env(), static_cast<uint64_t>(read(ctx, efa_gin<>{context.device()}, static_cast<uint32_t>(id))));
}

} // namespace

Napi::Value gin_wrap::read_signal(const Napi::CallbackInfo& info) {
  efa::gin_context& context = open(info.Env());
  return count_of(info, context, context.spec().signals, "signal", [](fast_context& ctx, const efa_gin<>& gin, uint32_t id) { return gin.read_signal(ctx, id); });
}

Napi::Value gin_wrap::read_counter(const Napi::CallbackInfo& info) {
  efa::gin_context& context = open(info.Env());
  return count_of(info, context, context.spec().counters, "counter", [](fast_context& ctx, const efa_gin<>& gin, uint32_t id) { return gin.read_counter(ctx, id); });
}

void gin_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->context.reset();
}

void gin_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["EfaGin"] = DefineClass(env, "EfaGin",
                                  {InstanceMethod<&gin_wrap::address>("address"), InstanceMethod<&gin_wrap::connect>("connect"), InstanceMethod<&gin_wrap::memory>("memory"),
                                   InstanceMethod<&gin_wrap::read_signal>("readSignal"), InstanceMethod<&gin_wrap::read_counter>("readCounter"),
                                   InstanceMethod<&gin_wrap::program>("program"), InstanceMethod<&gin_wrap::close>("close")});
}

namespace {

// By the way of sharing that the context was made for. `body(facade, coop)` on one block; by one lane where that is the way.
template <class Body>
outcome run_shared(const efa::gin_context& context, const symmetric_memory& memory, double timeout, const std::atomic<uint32_t>& cancel, ep_kernel_status& status, const Body& body) {
  const auto by = [&]<uint32_t Sharing, template <class> class Coop>() {
    return run_kernel(memory, {.blocks = 1, .lanes = 0}, timeout, cancel, status, [&](auto& running) {
      const efa_gin<Sharing> facade{context.device()};
      return facade.check(running, &status) && body(running, Coop<std::remove_reference_t<decltype(running)>>{running}, facade);
    });
  };
  switch (context.spec().sharing) {
    case EP_EFA_SHARE_THREAD: return by.template operator()<EP_EFA_SHARE_THREAD, thread_coop>();
    case EP_EFA_SHARE_BLOCK: return by.template operator()<EP_EFA_SHARE_BLOCK, block_coop>();
    default: return by.template operator()<EP_EFA_SHARE_DEVICE, block_coop>();
  }
}

} // namespace

// (stream, memory, steps: ep_gin_step[] in native memory, count, timeoutMs) -> operation
Napi::Value gin_wrap::program(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto& stream = unwrap<stream_wrap>(info[0], "stream");
  const std::shared_ptr<symmetric_memory> memory = unwrap<memory_wrap>(info[1], "memory").native;
  if (!memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the memory was closed"});
  auto routed = open(env).memory_of(*memory);
  const ep_efa_memory part = value_or_throw(env, routed);
  const operand steps = operand_of(info[2], "steps");
  const uint64_t count = arg_size(info[3], "count");
  const double timeout = arg_double(info[4], "timeoutMs");
  if (count > steps.byte_length / sizeof(ep_gin_step)) throw_invalid(env, std::to_string(count) + " steps do not fit " + std::to_string(steps.byte_length) + " bytes");
  return Napi::Number::New(env, static_cast<double>(stream.launch(env, [=, gin = native->context](const std::atomic<uint32_t>& cancel) {
                             ep_kernel_status status{};
                             return run_shared(*gin, *memory, timeout, cancel, status, [&](auto& running, const auto& coop, const auto& facade) {
                               return gin_program(running, coop, facade, part, reinterpret_cast<ep_gin_step*>(steps.address), count, &status);
                             });
                           })));
}

// ({gin, memory, rounds, timeoutMs}) -> operation; `found` is how often the burst's last value came before another one. Both ranks of a world of two run it.
Napi::Value stream_wrap::gin_putvalue(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto description = info[0].As<Napi::Object>();
  const auto& gin_holder = unwrap<gin_wrap>(description.Get("gin"), "gin");
  auto& context = gin_holder.open(env);
  const std::shared_ptr<symmetric_memory> memory = unwrap<memory_wrap>(description.Get("memory"), "memory").native;
  if (!memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the memory was closed"});
  const uint64_t rounds = arg_size(description.Get("rounds"), "rounds");
  const double timeout = arg_double(description.Get("timeoutMs"), "timeoutMs");
  auto routed = context.memory_of(*memory);
  const ep_efa_memory part = value_or_throw(env, routed);
  const int32_t world = memory->context().world_size();
  if (world != 2) throw_invalid(env, "the test of values is for two ranks, and there are " + std::to_string(world));
  if (rounds == 0 || rounds >= uint64_t{1} << 31) throw_invalid(env, "rounds " + std::to_string(rounds) + " is not in 1..2147483647");
  if (memory->byte_length() < gin_putvalue_words * 8) throw_invalid(env, "the test of values needs a memory of " + std::to_string(gin_putvalue_words * 8) + " bytes");
  if (context.spec().signals == 0) throw_invalid(env, "the test of values needs a context with a signal");
  return Napi::Number::New(env, static_cast<double>(launch(env, [=, gin = gin_holder.native->context](const std::atomic<uint32_t>& cancel) {
                             ep_kernel_status status{};
                             uint64_t behind = 0;
                             outcome end = run_shared(*gin, *memory, timeout, cancel, status, [&](auto& running, const auto& coop, const auto& facade) {
                               return ep::gin_putvalue(running, coop, facade, part, memory->context().rank(), rounds, &behind, &status);
                             });
                             if (end.status == EP_STATUS_OK) end.found = behind;
                             return end;
                           })));
}

} // namespace ep::binding
