#include "wraps.hpp"

#include <algorithm>

#include "ep/device/copy.h"

namespace ep::binding {

event_wrap::event_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info), native(std::make_shared<stream_event>()) {
  tag<event_wrap>(info.This().As<Napi::Object>());
}
Napi::Value event_wrap::done(const Napi::CallbackInfo& info) { return Napi::Boolean::New(info.Env(), native->done()); }
void event_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["StreamEvent"] = DefineClass(env, "StreamEvent", {InstanceMethod<&event_wrap::done>("done")});
}

// (spinNs)
stream_wrap::stream_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  native = std::make_shared<holder>();
  auto made = host_stream::create(state_of(info.Env()), static_cast<int64_t>(arg_size(info[0], "spinNs")));
  native->stream = std::move(value_or_throw(info.Env(), made));
  // A running kernel may read JS-visible memory: it must have ended before the environment does.
  end_key = state_of(info.Env()).at_end([held = native] { held->stream.reset(); });
  tag<stream_wrap>(info.This().As<Napi::Object>());
}

host_stream& stream_wrap::open(Napi::Env env) const {
  if (!native->stream) throw_failure(env, {EP_STATUS_CLOSED, 0, "the stream was closed"});
  return *native->stream;
}

uint64_t stream_wrap::launch(Napi::Env env, host_stream::task work) {
  host_stream& stream = open(env);
  auto cancel = std::make_shared<cancel_flag>();
  const uint64_t id = state_of(env).begin(env, cancel);
  stream.launch(id, std::move(cancel), std::move(work));
  return id;
}

// (event) -> operation that ends when the event is set
Napi::Value stream_wrap::record(const Napi::CallbackInfo& info) {
  auto event = unwrap<event_wrap>(info[0], "event").native;
  return Napi::Number::New(info.Env(), static_cast<double>(launch(info.Env(), [event](const std::atomic<uint32_t>&) {
                             event->set();
                             return outcome{};
                           })));
}

// (event) -> operation that ends when the stream has passed the event
Napi::Value stream_wrap::wait_event(const Napi::CallbackInfo& info) {
  auto event = unwrap<event_wrap>(info[0], "event").native;
  return Napi::Number::New(info.Env(), static_cast<double>(launch(info.Env(), [event](const std::atomic<uint32_t>& cancel) {
                             outcome end;
                             if (!event->wait(cancel)) end.status = EP_STATUS_ABORTED;
                             return end;
                           })));
}

// (source, srcOffset, target, dstOffset, byteLength, nonTemporal) -> operation
Napi::Value stream_wrap::copy(const Napi::CallbackInfo& info) {
  const operand from = operand_of(info[0], "source");
  const operand to = operand_of(info[2], "target");
  const uint64_t src = arg_size(info[1], "srcOffset");
  const uint64_t dst = arg_size(info[3], "dstOffset");
  const uint64_t size = arg_size(info[4], "byteLength");
  if (src > from.byte_length || size > from.byte_length - src || dst > to.byte_length || size > to.byte_length - dst) {
    throw_invalid(info.Env(), "a copy of " + std::to_string(size) + " bytes from " + std::to_string(src) + " of " + std::to_string(from.byte_length) + " to " +
                                  std::to_string(dst) + " of " + std::to_string(to.byte_length));
  }
  const int non_temporal = info[5].ToBoolean() ? 1 : 0;
  return Napi::Number::New(info.Env(), static_cast<double>(launch(info.Env(), [=](const std::atomic<uint32_t>& cancel) {
                             // In pieces, so that a cancelled copy ends soon.
                             constexpr uint64_t piece = uint64_t{4} << 20;
                             outcome end;
                             for (uint64_t at = 0; at < size; at += piece) {
                               if (cancel.load(std::memory_order_acquire) != 0) {
                                 end.status = EP_STATUS_ABORTED;
                                 break;
                               }
                               ep_copy(reinterpret_cast<void*>(to.address + dst + at), reinterpret_cast<const void*>(from.address + src + at),
                                       std::min(piece, size - at), non_temporal);
                             }
                             ep_copy_fence();
                             return end;
                           })));
}

Napi::Value stream_wrap::depth(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), static_cast<double>(open(info.Env()).depth())); }

// Cancels what still runs; JS awaits the operations first when it wants them to finish.
void stream_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->stream.reset();
}

void stream_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["HostStream"] = DefineClass(env, "HostStream",
                                      {InstanceMethod<&stream_wrap::record>("record"), InstanceMethod<&stream_wrap::wait_event>("waitEvent"),
                                       InstanceMethod<&stream_wrap::copy>("copy"),
                                       InstanceMethod<&stream_wrap::ping_pong>("pingPong"), InstanceMethod<&stream_wrap::put_stream>("putStream"),
                                       InstanceMethod<&stream_wrap::barriers>("barriers"),
                                       InstanceMethod<&stream_wrap::gin_putvalue>("ginPutvalue"),
                                       InstanceMethod<&stream_wrap::dispatch>("dispatch"),
                                       InstanceMethod<&stream_wrap::dispatch_steps>("dispatchSteps"),
                                       InstanceMethod<&stream_wrap::compat_dispatch>("compatDispatch"),
                                       InstanceMethod<&stream_wrap::attention_forward>("attentionForward"),
                                       InstanceMethod<&stream_wrap::attention_backward>("attentionBackward"), InstanceMethod<&stream_wrap::depth>("depth"),
                                       InstanceMethod<&stream_wrap::close>("close")});
}

void bind_stream(Napi::Env env, Napi::Object exports) {
  dispatch_program_wrap::define(env, exports);
  sum_program_wrap::define(env, exports);
  dispatch_wrap::define(env, exports);
  event_wrap::define(env, exports);
  stream_wrap::define(env, exports);
}

} // namespace ep::binding
