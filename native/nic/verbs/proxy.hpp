// The `verbs` backing: mlx5 queue pairs for kernels, over plain RC queue pairs of any RDMA device. Kernels post the same WQEs into the same rings; a thread of this
// process reads them as an mlx5 NIC would, posts them by ibv_post_send, and writes the completions in mlx5's form. For NICs without DevX or GPUDirect.
//
// Keys, queue pair numbers and addresses are the device's own. What plain verbs lack is refused as a local error of the queue pair (syndrome 0x02): masked
// atomics with fields, and those of 4 bytes. The capabilities say so.
#pragma once

#include <memory>
#include <string>

#include "dl/mlx5.hpp"

namespace ep::nic {

// ELIBACC, ELIBBAD: libibverbs is missing or too old. Every device that it lists can be opened.
result<std::unique_ptr<dl::mlx5_driver>> verbs_proxy_driver(const std::string& ibverbs = "libibverbs.so.1");

} // namespace ep::nic
