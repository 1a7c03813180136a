// Errors of native code: a status, errno where a system call failed, and a text that names cause, expected and found.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "ep/abi/status.h"

namespace ep {

struct failure {
  uint32_t status = EP_STATUS_SYSTEM;
  int sys_errno = 0;
  std::string message;
};

template <class T> class result {
 public:
  result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  result(failure why) : state_(std::in_place_index<1>, std::move(why)) {}
  bool ok() const { return state_.index() == 0; }
  T& value() { return std::get<0>(state_); }
  const failure& why() const { return std::get<1>(state_); }

 private:
  std::variant<T, failure> state_;
};

struct nothing {};

failure failure_errno(const char* call, int error, const std::string& about);

} // namespace ep
