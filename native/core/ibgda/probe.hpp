// What stands between this machine and RDMA by kernels: asked before anything is opened for good, and answered with the one thing that is missing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "control_memory.hpp"
#include "device_choice.hpp"
#include "dl/mlx5_verbs.hpp"

namespace ep::ibgda {

// The first thing that is missing, in the order in which they are needed.
enum class missing : uint8_t {
  nothing = 0,
  library = 1,   // libibverbs or libmlx5 is not installed
  symbol = 2,    // it is, in a version without what is used
  kernel = 3,    // no RDMA in the kernel, or ib_uverbs is not loaded
  device = 4,    // no mlx5 device (of the verbs backing: no RDMA device), or none that the filter lets pass
  devx = 5,      // the kernel refuses DevX, or the device, to this user
  port = 6,      // no active port
  link = 7,      // an active port of the other link layer
  gid = 8,       // no usable GID
  gpudirect = 9, // the NIC cannot reach memory of the GPU
  other = 10,    // what the driver said
};
const char* missing_name(missing what);

struct probe_wish {
  device_wish device;
  bool gpu = false;                 // kernels run on a GPU: the NIC must reach its memory
  std::optional<bool> gpu_dmabuf;   // what CUDA says of DMA-BUF for that GPU; nullopt: unknown
};

// Whether control memory can lie there, and why not.
struct placement_finding {
  placement where;
  bool possible = false;
  std::string why;
};

struct probe_report {
  missing what = missing::nothing;
  std::string reason; // empty if nothing is missing
  std::string remedy;
  // Of what would be used; empty where nothing can be.
  std::string device;
  uint8_t port = 0;
  dl::mlx5_link link = dl::mlx5_link::unknown;
  chosen_gid gid;
  distance far = distance::unknown;
  std::vector<std::string> passed_over;
  std::vector<placement_finding> placements; // in the order of preference
};

// Through the libraries as they are installed.
probe_report probe_hardware(const dl::verbs_libraries& libraries, const probe_wish& wish);
// Where no driver could be had: what loading the libraries of a backing came to.
probe_report probe_without_driver(const char* backing, const failure& why);
// The same for any driver.
probe_report probe_driver(dl::mlx5_driver& driver, const probe_wish& wish);

} // namespace ep::ibgda
