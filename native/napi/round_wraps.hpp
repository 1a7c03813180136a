// What JS holds of a group's rounds over the backing `fabric`.
#pragma once

#include <cmath>
#include <cstring>

#include "host_fold.hpp"
#include "rounds.hpp"
#include "wraps.hpp"

namespace ep::binding {

// Of what a round says of a member: its length, then its bytes.
constexpr uint64_t round_entry_bytes = sizeof(uint64_t) + round_layout::most_bytes;

// Short exchanges of a group; for the rank's own thread.
struct rounds_wrap : Napi::ObjectWrap<rounds_wrap> {
  static constexpr napi_type_tag type_tag{0x6570726f756e6473ull, 45};
  static constexpr const char* type_name = "FabricRounds";
  explicit rounds_wrap(const Napi::CallbackInfo& info);
  Napi::Value enter(const Napi::CallbackInfo& info);
  Napi::Value exchange(const Napi::CallbackInfo& info);
  Napi::Value look(const Napi::CallbackInfo& info);
  void close(const Napi::CallbackInfo&) { native.reset(); }

  rounds& open(Napi::Env env) const {
    if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rounds were closed"});
    return *native;
  }
  // What all said in a round that is there. False where it is not after all.
  bool take(uint64_t round, uint8_t* into) const;
  // Whether all of what take() has put there begins with this head, and has so many bytes behind it; UINT64_MAX: any.
  bool are_alike(const uint8_t* into, byte_span head, uint64_t given_bytes) const;
  uint8_t* entries(Napi::Value into) const;

  std::unique_ptr<rounds> native;
  std::unique_ptr<host_fold> folds;
  std::vector<uint64_t> given; // by member: elements, aligned
};

// For how long a thread is held.
inline int64_t arg_hold_ns(Napi::Value value) {
  const double ms = arg_double(value, "mostMs");
  if (!(ms >= 0 && ms <= 10)) throw_invalid(value.Env(), "mostMs is not in 0..10");
  return std::llround(ms * 1e6);
}

template <class T> std::vector<T> arg_numbers(Napi::Value value, const char* what) {
  const byte_span bytes = arg_bytes(value, what);
  std::vector<T> numbers(bytes.size / sizeof(T));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data, numbers.size() * sizeof(T));
  return numbers;
}

} // namespace ep::binding
