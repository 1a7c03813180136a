// For tests of what a machine may lack. A CTest is skipped as a whole or not at all: what may be skipped is one of its own, so that the totals of a lane show it.
#pragma once

#include <cstdio>
#include <string>

namespace ep::check {

/// What main() returns for CTest to count it as skipped (SKIP_RETURN_CODE in native/CMakeLists.txt).
inline int skip(const std::string& why) {
  std::printf("skipped: %s\n", why.c_str());
  std::fflush(stdout);  // also where _exit() follows
  return 77;
}

}  // namespace ep::check
