// The shim: one shared object that looks like libibverbs and libmlx5 to whoever opens it by name, and forwards every call to a driver of ours. So everything
// above runs through the very loading, symbols and structs that hardware is reached by. For tests; nothing is installed.
#pragma once

#include <string>

#include "dl/mlx5.hpp"

namespace ep::dl {

// Opens the shim at `path` and gives it the driver to forward to, which must outlive every device that is opened through the shim. nullptr: no driver,
// as on a kernel without RDMA. ELIBACC, ELIBBAD: it is not there, or something else.
result<nothing> verbs_shim_attach(const std::string& path, mlx5_driver* driver);

} // namespace ep::dl
