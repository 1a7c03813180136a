// Which NIC is near which GPU and which CPUs: read from sysfs, so that it needs no library and no right. The root is a parameter: tests use a tree of their own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sched.h>

#include "status.hpp"

namespace ep::ibgda {

// How far two PCI functions are from each other, nearest first. What lies between them:
enum class distance : uint8_t {
  same = 0,      // nothing: functions of one device
  switched = 1,  // one PCI switch: traffic does not leave it
  bridged = 2,   // several switches below one root port
  root = 3,      // the host bridge (root complex)
  node = 4,      // the interconnect between host bridges of one NUMA node
  system = 5,    // the interconnect between NUMA nodes
  unknown = 6,   // one of them is not on a PCI bus that sysfs tells of
};
const char* distance_name(distance value);

// Where something sits: the PCI functions from the host bridge down to it, and its NUMA node.
struct pci_place {
  std::vector<std::string> path; // {"pci0000:80", "0000:80:01.0", "0000:83:00.0"}; empty: not on a PCI bus
  int numa_node = -1;            // -1: sysfs does not say (one node, or firmware that is silent)
};
distance distance_between(const pci_place& a, const pci_place& b);

struct nic_place {
  std::string name; // "mlx5_0"
  pci_place place;
};

struct gpu_place {
  std::string address; // "0000:84:00.0", as CUDA's cudaDeviceGetPCIBusId tells it, in lower case
  pci_place place;
};

struct topology {
  std::vector<nic_place> nics; // by name: mlx5_2 before mlx5_10
  std::vector<gpu_place> gpus; // by address
  std::vector<int> numa_nodes; // ascending
};

// `root` is "/sys" but in tests. What cannot be read is absent from the result, or unknown: a container may hide any of it.
topology topology_read(const std::string& root);

// Of a memory: the NUMA node of host memory, or the place of a GPU.
distance distance_of_node(const pci_place& nic, int numa_node);

// Where posters run: that GPU, or, where `gpu` is "", the NUMA node that holds all of `cpus` (those that the caller may run on); {} if several do, or nobody
// says. EP_STATUS_INVALID: no such GPU.
result<pci_place> poster_place(const std::string& root, const std::string& gpu, const cpu_set_t& cpus);

// Names of NICs, nearest to the GPU first; those at the same distance keep their order.
std::vector<std::string> nics_by_distance(const topology& machine, const pci_place& to);

// A table for people: one row for each GPU and NUMA node, one column for each NIC.
std::string topology_text(const topology& machine);

} // namespace ep::ibgda
