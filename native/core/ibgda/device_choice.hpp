// Which device and port a rank uses: by name, by nearness, by what works.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gid.hpp"
#include "topology.hpp"

namespace ep::ibgda {

struct device_wish {
  // "": any. "mlx5_0,mlx5_3:2": these, with a port if one is named. "mlx5_*": by prefix. "^mlx5_bond_0,...": all but these.
  std::string filter;
  pci_place near;                    // of the GPU, or the NUMA node of host memory: {} takes no account of distance
  std::optional<uint32_t> gid_index; // overrides the rule of gid.hpp
  dl::mlx5_link link = dl::mlx5_link::unknown; // only ports of this one; unknown: either
  std::string sysfs = "/sys";        // what distances are read from
};

// Declared after `device`'s driver: it must go before it.
struct open_port {
  std::unique_ptr<dl::mlx5_device> device;
  uint8_t port = 1;
  dl::mlx5_port facts;
  chosen_gid gid;
  distance far = distance::unknown;
  // Nearer or earlier ones that were not taken: "mlx5_0: port 1 is down".
  std::vector<std::string> passed_over;
};

// Opens the nearest device that passes the filter and has an active port with a usable GID. EP_STATUS_INVALID: the filter cannot be read.
// Otherwise EP_STATUS_SYSTEM; sys_errno ENODEV where nothing is there or passes, else that of the last one tried: ENETDOWN (port not active), EPROTONOSUPPORT
// (link layer), ENODATA (no GID), EPERM (DevX) and others of the table. The message lists each device and why not.
result<open_port> device_open(dl::mlx5_driver& driver, const device_wish& wish);

// What a filter says about one device. Ports: empty: any; otherwise these.
struct filter_answer {
  bool passes = false;
  std::vector<uint8_t> ports;
};
result<filter_answer> filter_match(const std::string& filter, const std::string& device);

} // namespace ep::ibgda
