// The single place that includes napi.h. Rules of this folder: POD in, POD out; a type tag on every handle; no mutable globals (worker threads have their own
// environments); no JS from foreign threads except the one batched wake-up of env_state.
#pragma once

#include <napi.h>

#include <cstdint>
#include <string>

#include "operation.hpp"
#include "status.hpp"

namespace ep::binding {

class env_state;
env_state& state_of(Napi::Env env);

// Throws the error that JS's factory makes of a native failure. Never returns.
[[noreturn]] void throw_failure(Napi::Env env, const failure& why);
[[noreturn]] void throw_invalid(Napi::Env env, const std::string& message);

template <class T> T& value_or_throw(Napi::Env env, result<T>& got) {
  if (!got.ok()) throw_failure(env, got.why());
  return got.value();
}

// Arguments. Each throws EP_STATUS_INVALID naming `what`.
uint64_t arg_size(Napi::Value value, const char* what);   // a safe, non-negative integer
uint64_t frame_size(Napi::Env env, double number, const char* what); // the same of a number in the frame (env_state.hpp)
int32_t arg_int(Napi::Value value, const char* what);
uint64_t arg_u64(Napi::Value value, const char* what);    // BigInt, or a safe non-negative integer; taken modulo 2^64
double arg_double(Napi::Value value, const char* what);
// Bytes of a typed array, DataView excluded; also refused where its buffer was detached, which would otherwise read as an array of no elements. Data may be
// null where the size is 0.
struct byte_span {
  uint8_t* data;
  size_t size;
};
byte_span arg_bytes(Napi::Value value, const char* what);

Napi::Uint8Array bytes_copy(Napi::Env env, const void* data, size_t size);

// Wrapped natives. The tag keeps one class's object from being taken for another's, which would corrupt memory.
template <class T> void tag(Napi::Object object) {
  if (napi_type_tag_object(object.Env(), object, &T::type_tag) != napi_ok) throw Napi::Error::New(object.Env());
}
template <class T> T& unwrap(Napi::Value value, const char* what) {
  if (value.IsObject()) {
    bool same = false;
    napi_check_object_type_tag(value.Env(), value, &T::type_tag, &same);
    if (same) return *Napi::ObjectWrap<T>::Unwrap(value.As<Napi::Object>());
  }
  throw_invalid(value.Env(), std::string(what) + " is not a " + T::type_name);
}

void bind_host(Napi::Env env, Napi::Object exports);
void bind_rank(Napi::Env env, Napi::Object exports);
void bind_hostile(Napi::Env env, Napi::Object exports);
void bind_efa(Napi::Env env, Napi::Object exports);
void bind_fabric(Napi::Env env, Napi::Object exports);
void bind_fabric_bench(Napi::Env env, Napi::Object exports);
void bind_carrier(Napi::Env env, Napi::Object exports);
void bind_rounds(Napi::Env env, Napi::Object exports);
void bind_ibgda(Napi::Env env, Napi::Object exports);
void bind_memory(Napi::Env env, Napi::Object exports);
void bind_stream(Napi::Env env, Napi::Object exports);
void bind_collective(Napi::Env env, Napi::Object exports);
void bind_reduce(Napi::Env env, Napi::Object exports);
void bind_gpu(Napi::Env env, Napi::Object exports);
void bind_moe(Napi::Env env, Napi::Object exports);

} // namespace ep::binding
