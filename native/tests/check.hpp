// The whole test framework of native/tests: a test is a main() that calls EP_CHECK and returns ep::check::finish().
// A failed check is counted and printed, and the program goes on. Checks may run on several threads at once.
#pragma once

#include <atomic>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>

namespace ep::check {

inline std::atomic<long> passed{0};
inline std::atomic<long> failed{0};

inline void report(bool ok, const char* file, int line, const std::string& text) {
  if (ok) {
    passed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  failed.fetch_add(1, std::memory_order_relaxed);
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, text.c_str());
}

template <typename Value>
std::string describe(const Value& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<Value>) {
    out << +static_cast<std::underlying_type_t<Value>>(value);
  } else if constexpr (std::is_same_v<Value, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_integral_v<Value>) {
    out << +value;
  } else {
    out << value;
  }
  return out.str();
}

template <typename Left, typename Right>
void equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
  const bool ok = left == right;
  report(ok, file, line, ok ? std::string() : std::string(text) + " (" + describe(left) + " vs " + describe(right) + ")");
}

/// Prints the closing line that CI looks for; the value is the exit code of the program.
inline int finish() {
  std::printf("%ld passed, %ld failed\n", passed.load(), failed.load());
  return failed.load() == 0 ? 0 : 1;
}

}  // namespace ep::check

#define EP_CHECK(condition) ::ep::check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define EP_CHECK_EQ(left, right) ::ep::check::equal((left), (right), #left " == " #right, __FILE__, __LINE__)
