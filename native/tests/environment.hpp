// What whoever runs a test may choose.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ep::test {

// A number out of the environment, in any base that C writes.
inline uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

} // namespace ep::test
