// The other shim: one shared object that looks like libfabric with its EFA provider to whoever opens it by name, and forwards to a driver of ours. For tests; nothing is installed.
#pragma once

#include <string>

#include "dl/efa.hpp"

namespace ep::dl {

// What the shim pretends besides.
struct fabric_shim_manner {
  uint32_t version = 2u << 16 | 6; // of the library
  bool gda = true;                 // it has operations for requests that a GPU posts
  uint32_t endpoints = 256;        // that a device has
  uint32_t counters = 64;
};

// Opens the shim at `path` and gives it the driver to forward to, which must outlive every device that is opened through the shim. nullptr: a machine without EFA.
// ELIBACC, ELIBBAD: it is not there, or something else.
result<nothing> fabric_shim_attach(const std::string& path, efa_driver* driver, const fabric_shim_manner& manner = {});

} // namespace ep::dl
