#include "env_state.hpp"

#include <cmath>

namespace ep::binding {

env_state& state_of(Napi::Env env) { return *env.GetInstanceData<env_state>(); }

env_state::env_state(Napi::Env env) {
  wake_ = Napi::ThreadSafeFunction::New(env, Napi::Function(), "ep completions", 0, 1);
  wake_.Unref(env);
  // Hooks run newest first: this one must come after the wake-up function's own, so that every native thread has stopped before that goes away.
  napi_add_env_cleanup_hook(env, end, this);
}

void env_state::end(void* self) {
  auto& state = *static_cast<env_state*>(self);
  for (const auto& [key, each] : state.ends_) {
    if (each.warn) each.warn();
  }
  while (!state.ends_.empty()) {
    const auto newest = std::prev(state.ends_.end());
    const std::function<void()> stop = std::move(newest->second.stop);
    state.ends_.erase(newest);
    stop();
  }
  const std::lock_guard lock(state.mutex_);
  state.ended_ = true;
}

Napi::ArrayBuffer env_state::make_frame(Napi::Env env) {
  auto buffer = Napi::ArrayBuffer::New(env, frame_words * sizeof(double));
  frame_ = static_cast<double*>(buffer.Data());
  frame_buffer_ = Napi::Persistent(buffer);
  return buffer;
}

void env_state::configure(Napi::Function complete, Napi::Function fail) {
  complete_ = Napi::Persistent(complete);
  fail_ = Napi::Persistent(fail);
}

Napi::Value env_state::make_error(Napi::Env env, const failure& why) {
  if (fail_.IsEmpty()) return Napi::Error::New(env, why.message).Value();
  return fail_.Call({Napi::Number::New(env, why.status), Napi::Number::New(env, why.sys_errno), Napi::String::New(env, why.message)});
}

uint64_t env_state::begin(Napi::Env env, cancel_ref cancel, std::function<void()> nudge) {
  const uint64_t id = next_operation_++;
  cancels_[id] = {std::move(cancel), std::move(nudge)};
  if (pending_++ == 0) wake_.Ref(env);
  return id;
}

void env_state::cancel(uint64_t operation_id) {
  const auto found = cancels_.find(operation_id);
  if (found == cancels_.end()) return;
  found->second.flag->value.store(1, std::memory_order_seq_cst);
  if (found->second.nudge) found->second.nudge();
}

void env_state::complete(uint64_t operation_id, const outcome& end) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  finished_.emplace_back(operation_id, end);
  if (scheduled_) return;
  scheduled_ = true;
  wake_.NonBlockingCall([this](Napi::Env env, Napi::Function) { drain(env); });
}

void env_state::drain(Napi::Env env) {
  std::vector<std::pair<uint64_t, outcome>> batch;
  {
    const std::lock_guard lock(mutex_);
    batch.swap(finished_);
    scheduled_ = false;
  }
  if (env == nullptr || batch.empty()) return; // a null environment: it is being torn down
  try {
    deliver(env, batch);
  } catch (const Napi::Error& error) {
    // A worker that is being terminated refuses every call into JS; there is nobody left to tell. Anything else is an error of a completion handler: it
    // must end the environment as any uncaught exception does, not this process.
    const Napi::Value reason = error.IsEmpty() ? Napi::Value() : error.Value();
    if (!reason.IsEmpty()) napi_fatal_exception(env, reason);
  }
}

void env_state::deliver(Napi::Env env, const std::vector<std::pair<uint64_t, outcome>>& batch) {
  Napi::HandleScope scope(env);
  constexpr size_t fields = 4;
  auto ids = Napi::Float64Array::New(env, batch.size() * fields);
  auto words = Napi::BigUint64Array::New(env, batch.size() * 2);
  auto messages = Napi::Array::New(env);
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto& [id, end] = batch[i];
    ids[i * fields] = static_cast<double>(id);
    ids[i * fields + 1] = end.status;
    ids[i * fields + 2] = end.rank;
    ids[i * fields + 3] = end.stage;
    words[i * 2] = end.expected;
    words[i * 2 + 1] = end.found;
    if (!end.message.empty()) messages.Set(static_cast<uint32_t>(i), end.message);
    cancels_.erase(id);
  }
  pending_ -= batch.size();
  if (pending_ == 0) wake_.Unref(env);
  if (!complete_.IsEmpty()) complete_.Call({ids, words, messages});
}

uint64_t env_state::at_end(std::function<void()> stop, std::function<void()> warn) {
  const uint64_t key = next_end_++;
  ends_[key] = {std::move(stop), std::move(warn)};
  return key;
}

void env_state::forget(uint64_t key) { ends_.erase(key); }

void throw_failure(Napi::Env env, const failure& why) {
  throw Napi::Error(env, state_of(env).make_error(env, why));
}

void throw_invalid(Napi::Env env, const std::string& message) { throw_failure(env, {EP_STATUS_INVALID, 0, message}); }

namespace {

std::string shown(Napi::Value value) {
  if (value.IsNumber() || value.IsString() || value.IsBoolean()) return value.ToString().Utf8Value();
  if (value.IsUndefined()) return "undefined";
  if (value.IsNull()) return "null";
  return "a value of another type";
}

} // namespace

uint64_t arg_size(Napi::Value value, const char* what) {
  double number = -1;
  napi_get_value_double(value.Env(), value, &number); // leaves it alone when the value is no number
  if (!(number >= 0) || number > 9007199254740991.0 || number != std::floor(number)) {
    throw_invalid(value.Env(), std::string(what) + " must be a non-negative safe integer, got " + shown(value));
  }
  return static_cast<uint64_t>(number);
}

uint64_t frame_size(Napi::Env env, double number, const char* what) {
  if (!(number >= 0) || number > 9007199254740991.0 || number != std::floor(number)) {
    throw_invalid(env, std::string(what) + " must be a non-negative safe integer, got " + std::to_string(number));
  }
  return static_cast<uint64_t>(number);
}

int32_t arg_int(Napi::Value value, const char* what) {
  double number = 0.5;
  napi_get_value_double(value.Env(), value, &number); // leaves it alone when the value is no number
  if (number != std::floor(number) || number < -2147483648.0 || number > 2147483647.0) {
    throw_invalid(value.Env(), std::string(what) + " must be a 32-bit integer, got " + shown(value));
  }
  return static_cast<int32_t>(number);
}

uint64_t arg_u64(Napi::Value value, const char* what) {
  if (value.IsBigInt()) {
    bool lossless = false;
    const auto big = value.As<Napi::BigInt>();
    const uint64_t number = big.Uint64Value(&lossless);
    if (lossless) return number;
    const int64_t negative = big.Int64Value(&lossless);
    if (lossless) return static_cast<uint64_t>(negative);
    throw_invalid(value.Env(), std::string(what) + " does not fit 64 bits");
  }
  return arg_size(value, what);
}

double arg_double(Napi::Value value, const char* what) {
  if (!value.IsNumber()) throw_invalid(value.Env(), std::string(what) + " must be a number, got " + shown(value));
  return value.As<Napi::Number>().DoubleValue();
}

namespace {

size_t element_bytes_of(napi_typedarray_type type) {
  switch (type) {
    case napi_int8_array:
    case napi_uint8_array:
    case napi_uint8_clamped_array: return 1;
    case napi_int16_array:
    case napi_uint16_array:
    case napi_float16_array: return 2;
    case napi_int32_array:
    case napi_uint32_array:
    case napi_float32_array: return 4;
    case napi_float64_array:
    case napi_bigint64_array:
    case napi_biguint64_array: return 8;
  }
  return 0; // of a kind that this Node-API does not know: nothing of it is read
}

} // namespace

byte_span arg_bytes(Napi::Value value, const char* what) {
  if (!value.IsTypedArray()) throw_invalid(value.Env(), std::string(what) + " must be a typed array");
  // HAZARD: not by Napi::ArrayBuffer: there is none of a SharedArrayBuffer, whose arrays are as good.
  void* data = nullptr;
  napi_value buffer = nullptr;
  napi_typedarray_type type{};
  size_t length = 0;
  bool detached = false;
  const napi_env env = value.Env();
  if (napi_get_typedarray_info(env, value, &type, &length, &data, &buffer, nullptr) != napi_ok || napi_is_detached_arraybuffer(env, buffer, &detached) != napi_ok) {
    throw_invalid(value.Env(), std::string(what) + " is a typed array that cannot be read");
  }
  if (detached) throw_invalid(value.Env(), std::string(what) + " is a typed array whose buffer was detached");
  return {static_cast<uint8_t*>(data), length * element_bytes_of(type)};
}

Napi::Uint8Array bytes_copy(Napi::Env env, const void* data, size_t size) {
  auto copy = Napi::Uint8Array::New(env, size);
  if (size != 0) memcpy(copy.Data(), data, size);
  return copy;
}

} // namespace ep::binding
