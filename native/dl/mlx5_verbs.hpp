// The table of mlx5.hpp, filled from libibverbs and libmlx5 as they are installed.
#pragma once

#include <memory>
#include <string>

#include "mlx5.hpp"

namespace ep::dl {

struct verbs_libraries {
  std::string ibverbs = "libibverbs.so.1"; // names for the loader's search, or paths
  std::string mlx5 = "libmlx5.so.1";
};

// ELIBACC: a library is missing. ELIBBAD: it lacks symbols. list_devices() of the driver fails with ENOSYS where the kernel has no RDMA.
result<std::unique_ptr<mlx5_driver>> mlx5_verbs_driver(const verbs_libraries& libraries = {});

} // namespace ep::dl
