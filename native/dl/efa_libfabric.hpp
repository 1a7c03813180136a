// The table of efa.hpp, filled from libfabric as it is installed.
#pragma once

#include <memory>
#include <string>

#include "efa.hpp"

namespace ep::dl {

// `name` for the loader's search, or a path. ELIBACC: it is not there. ELIBBAD: it lacks symbols, or is older than 2.5, which first gives GPU-posted requests their counters; the
// message names the version found.
result<std::unique_ptr<efa_driver>> efa_libfabric_driver(const std::string& name = "libfabric.so.1");

} // namespace ep::dl
